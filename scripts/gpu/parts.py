"""The parts of the GPU's report.

`python -m gpu.parts NAME ROWS PROCESS PROCESSES [--dry-run]` runs one, or a process's share of it, and appends its rows
to a file as JSON lines. Parts need nothing but torch, triton and NumPy, but for `model_parts`, which are imported for
themselves alone.

Each figure stands beside its limit, which is measured in the same part: bytes that must move over this device's own
copy bandwidth, or flops over its own rate of a matrix product.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
import triton

from benchmarks.lora_workloads import BLOCK_SIZE, EIGHT_BILLION, VOCAB_SIZE, Step
from benchmarks.machine_limits import void
from gpu.attention_parts import measure_attention
from gpu.kernel_parts import CODE_TYPES, measure_experts, measure_kernels, measure_quantized, measure_sampling
from gpu.machine import Machine, Row
from gpu.report import ERROR_UNIT
from gpu.tuning_parts import compile_candidates, tune
from multilora_kernels import CodeType, add_rms_norm, reference
from multilora_kernels.control_groups import usable_processors
from multilora_kernels.self_test import CheckedOperator, ExpertShapes, OperatorShapes, checked_operators
from repository import REPOSITORY

_TESTS = (
    *(f"kernels/test_{name}" for name in ("shrink", "expand", "elementwise")),
    *(
        f"kernels/test_{name}"
        for name in ("cuda", "cuda_graph", "cuda_quantized", "cuda_sampling", "experts", "self_test")
    ),
    "engine/test_gpu",
)
_TESTS_A_ROW = 25
_NUM_WORKERS = str(min(16, usable_processors()))


def describe_machine(machine: Machine) -> Iterator[Row]:
    yield Row("python", note=platform.python_version())
    yield Row("torch", note=f"{torch.__version__}, CUDA {torch.version.cuda}; triton {triton.__version__}")
    for tool in ("nvidia-smi", "compute-sanitizer", "ncu", "gcc", "g++"):
        yield Row(tool, note=shutil.which(tool) or "absent")
    yield _first_kernel(machine)
    if machine.is_dry:
        return
    properties = torch.cuda.get_device_properties(0)
    yield Row(properties.name, note=f"sm_{properties.major}{properties.minor}")
    yield Row("memory", properties.total_memory / (1 << 30), "GiB")
    yield Row("multiprocessors", properties.multi_processor_count)
    yield Row("L2 cache", properties.L2_cache_size / (1 << 20), "MiB")
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.draw", "--format=csv,noheader"]
    if shutil.which(query[0]):
        yield Row("driver, clocks, power", note=subprocess.run(query, stdout=subprocess.PIPE, text=True).stdout.strip())


def _first_kernel(machine: Machine) -> Row:
    """A small kernel: where it does not run, nothing else of the report does."""
    started = time.perf_counter()
    x, weight = torch.randn(3, 64, device=machine.device), torch.ones(64, device=machine.device)
    (normed, _), (expected, _) = (norm(x, x, weight, 1e-5) for norm in (add_rms_norm, reference.add_rms_norm))
    torch.testing.assert_close(normed, expected, rtol=1e-4, atol=1e-4)
    return Row("a first kernel", time.perf_counter() - started, "s", note="compiled, launched, and right")


def self_test(machine: Machine) -> Iterator[Row]:
    yield from _self_test(machine, _small_shapes if machine.is_dry else _eight_billion_shapes)


def small_self_test(machine: Machine) -> Iterator[Row]:
    """The same in shapes that even a sanitizer gets through."""
    yield from _self_test(machine, _small_shapes)


def _self_test(machine: Machine, shapes_of: Callable[[Machine], Iterator[OperatorShapes]]) -> Iterator[Row]:
    num_wrong = 0
    for shapes in shapes_of(machine):
        for checked in checked_operators(shapes, machine.device, machine.process, machine.num_processes):
            num_wrong += not checked.is_right
            yield _row_of(checked, checked.operator)
    if num_wrong:
        raise SystemExit(f"{num_wrong} comparisons are wrong")


def _row_of(checked: CheckedOperator, name: str) -> Row:
    note = checked.shapes if checked.is_right else f"WRONG {checked.failure} {checked.shapes}"
    return Row(name, checked.error, ERROR_UNIT, note=f"{checked.seconds:.1f} s; {note}")


def _small_shapes(machine: Machine) -> Iterator[OperatorShapes]:
    linears = ((48, (32, 16)),)
    shapes = OperatorShapes(48, 40, linears, 4, 2, 16, 4, 9, machine.dtype, machine.dtype, (1, 9), 5, 300)
    code_types = ((CodeType.INT4, 32), (CodeType.INT8, 48), (CodeType.FP8, 48))
    experts = ExpertShapes(7, 3, 24, 0.9, has_biases=True)
    yield dataclasses.replace(shapes, code_types=code_types, rotations=((16, False), (6, True)), experts=experts)


def _eight_billion_shapes(machine: Machine) -> Iterator[OperatorShapes]:
    pairs = [(machine.dtype, machine.dtype), (torch.float32, torch.float32), (machine.dtype, torch.int8)]
    pairs += [(machine.dtype, torch.float8_e4m3fn), (machine.dtype, torch.uint8), (torch.float16, torch.float16)]
    for dtype, lora_dtype in pairs:
        linears = tuple((linear.in_features, linear.slice_sizes) for linear in EIGHT_BILLION.linears)
        shapes = OperatorShapes(4096, 14336, linears, 32, 8, 128, BLOCK_SIZE, 64, dtype, lora_dtype)
        experts = ExpertShapes(128, 8, 768)
        shapes = dataclasses.replace(shapes, vocab_size=VOCAB_SIZE, code_types=CODE_TYPES, experts=experts)
        if lora_dtype == torch.int8:
            shapes = dataclasses.replace(shapes, kv_dtype=torch.int8, rotations=((128, False), (64, True), (0, False)))
        yield shapes


def measure_limits(machine: Machine) -> Iterator[Row]:
    limits = machine.limits()
    yield Row("memory bandwidth", limits.bandwidth / 1e9, "GB/s")
    yield Row(f"matrix product, {machine.dtype}", limits.peak / 1e12, "TFLOP/s")
    num_bytes = 1 << (16 if machine.is_dry else 28)
    on_host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=not machine.is_dry)
    on_device = torch.zeros(num_bytes, dtype=torch.uint8, device=machine.device)
    copies: dict[str, Step] = {
        "host to device": lambda: void(on_device.copy_(on_host, non_blocking=True)),
        "device to host": lambda: void(on_host.copy_(on_device, non_blocking=True)),
    }
    for name, seconds in machine.measure(copies, is_eager=True).items():
        yield Row(name, num_bytes / seconds / 1e9, "GB/s", note="pinned")


def run_tests(machine: Machine) -> Iterator[Row]:
    """The tests of a GPU; a process for each processor, since compilation takes most of their time."""
    names = ["test_tree"] if machine.is_dry else _TESTS
    files = [str(REPOSITORY / "tests" / f"{name}.py") for name in names]
    options = (
        ["-k", "path_of_some_machine"]
        if machine.is_dry
        else ["-n", _NUM_WORKERS, "--dist", "worksteal", "-k", "not [cpu"]
    )
    # A file that cannot be imported for want of a package is an error, and the others run.
    options += ["-v", "--continue-on-collection-errors", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *options, *files]
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        yield from _test_rows(process.stdout)
    yield Row("pytest", process.returncode, "exit status")


def _test_rows(lines: Iterable[str]) -> Iterator[Row]:
    """Of pytest's lines, as they come: what fails, how many have passed so far, and the last line."""
    num_passed, line = 0, ""
    for line in lines:
        sys.stdout.write(line)
        if re.match(r"(FAILED|ERROR) ", line):
            yield Row("failed", note=line.strip()[:300])
        num_passed += " PASSED" in line
        if " PASSED" in line and num_passed % _TESTS_A_ROW == 0:
            yield Row("passed so far", num_passed)
        elif found := re.search(r" (FAILED|ERROR) +(?:\[.*?%\] )?(tests/\S+)", line):
            yield Row("failed", note=found[2])
    yield Row("passed", num_passed, note=line.strip())


def sanitize(machine: Machine) -> Iterator[Row]:
    """The self-test of small shapes under compute-sanitizer, where there is one."""
    tool = shutil.which("compute-sanitizer")
    if machine.is_dry or tool is None:
        yield Row("compute-sanitizer", note="absent")
        return
    part = [sys.executable, "-m", "gpu.parts", "small_self_test", os.devnull, "0", "1"]
    # Once without it: the compiler keeps the kernels, and the tool's time goes into them alone.
    for name, prefix in (("alone", []), *((check, [tool, "--tool", check, *_OF_TOOL]) for check in _CHECKS)):
        done = subprocess.run([*prefix, *part], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        yield Row(name, done.returncode, "exit status", note=" / ".join(done.stdout.strip().splitlines()[-3:])[:500])


_CHECKS, _OF_TOOL = ("racecheck", "memcheck"), ("--error-exitcode", "9")


PARTS: dict[str, Callable[[Machine], Iterator[Row]]] = {
    "machine": describe_machine,
    "self_test": self_test,
    "small_self_test": small_self_test,
    "limits": measure_limits,
    "kernels": measure_kernels,
    "attention": measure_attention,
    "sampling": measure_sampling,
    "quantized": measure_quantized,
    "experts": measure_experts,
    "tests": run_tests,
    "candidates": compile_candidates,
    "tuning": tune,
    "sanitizer": sanitize,
}


@torch.inference_mode()
def run(name: str, rows: Path, machine: Machine) -> None:
    """Append the rows of a part to a file, each as soon as it is known."""
    if name in PARTS:
        part = PARTS[name]
    else:
        from gpu import model_parts

        part = model_parts.PARTS[name]
    with rows.open("a") as file:
        for row in part(machine):
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")
            file.flush()


if __name__ == "__main__":
    is_dry = sys.argv[-1] == "--dry-run"
    run(sys.argv[1], Path(sys.argv[2]), Machine(is_dry, int(sys.argv[3]), int(sys.argv[4])))
