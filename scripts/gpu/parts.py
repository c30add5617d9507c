"""The parts of the GPU's report.

`python -m gpu.parts NAME ROWS [--dry-run]` runs one and appends its rows to a file as JSON lines.
Each figure stands beside its limit, which is measured in the same part: bytes that must move over this device's own
copy bandwidth, or flops over its own rate of a matrix product.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import triton

from benchmarks.gpu_operators import expand_all, shrink_all, update_all
from benchmarks.lora_workloads import Batch, Step, Workload
from benchmarks.machine_limits import Clock, void
from benchmarks.model_shapes import EIGHT_BILLION
from benchmarks.model_steps import BLOCK_SIZE, Sizes, Workbench, llama_config
from benchmarks.model_steps import EIGHT_BILLION as EIGHT_BILLION_CONFIG
from benchmarks.model_steps import ONE_BILLION as ONE_BILLION_CONFIG
from gpu.kernel_parts import CODE_TYPES, TINY_MODEL, measure_kernels, measure_quantized, measure_sampling
from gpu.machine import Machine, Row
from gpu.report import ERROR_UNIT
from multilora_engine.lora.page_copies import copies_to
from multilora_engine.models.model_config import ModelConfig
from multilora_kernels import (
    CodeType,
)
from multilora_kernels.cuda.block_sizes import BlockSizes, Operator, architecture, block_sizes, capability
from multilora_kernels.self_test import OperatorShapes, checked_operators
from repository import REPOSITORY

_DRY_MODEL = llama_config(1, hidden=32, num_heads=2, num_kv_heads=1, ffn=48, vocab_size=300)
"""The interpreter takes most of a second for a layer."""

_SHARE_OF_MEMORY = 0.85
_TESTS = (
    *(f"kernels/test_{name}" for name in ("shrink", "expand", "elementwise")),
    *(f"kernels/test_{name}" for name in ("cuda", "cuda_graph", "cuda_quantized", "cuda_sampling", "self_test")),
    "engine/test_gpu",
)
_PAGE_BYTES = 4 << 20


def describe_machine(machine: Machine) -> Iterator[Row]:
    yield Row("python", note=platform.python_version())
    yield Row("torch", note=f"{torch.__version__}, CUDA {torch.version.cuda}; triton {triton.__version__}")
    for tool in ("nvidia-smi", "compute-sanitizer", "ncu", "gcc", "g++"):
        yield Row(tool, note=shutil.which(tool) or "absent")
    if machine.is_dry:
        return
    properties = torch.cuda.get_device_properties(0)
    yield Row(properties.name, note=f"sm_{properties.major}{properties.minor}")
    yield Row("memory", properties.total_memory / (1 << 30), "GiB")
    yield Row("multiprocessors", properties.multi_processor_count)
    yield Row("L2 cache", properties.L2_cache_size / (1 << 20), "MiB")
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.mem,power.draw", "--format=csv,noheader"]
    yield Row("driver, clocks, power", note=subprocess.run(query, stdout=subprocess.PIPE, text=True).stdout.strip())


def self_test(machine: Machine) -> Iterator[Row]:
    yield from _self_test(machine, _small_shapes if machine.is_dry else _eight_billion_shapes)


def small_self_test(machine: Machine) -> Iterator[Row]:
    """The same in shapes that even a sanitizer gets through."""
    yield from _self_test(machine, _small_shapes)


def _self_test(machine: Machine, shapes_of: Callable[[Machine], Iterator[OperatorShapes]]) -> Iterator[Row]:
    wrong = 0
    for shapes in shapes_of(machine):
        for checked in checked_operators(shapes, machine.device):
            wrong += not checked.is_right
            note = checked.shapes if checked.is_right else f"WRONG {checked.failure} {checked.shapes}"
            yield Row(checked.operator, checked.error, ERROR_UNIT, note=f"{checked.seconds:.1f} s; {note}")
    if wrong:
        raise SystemExit(f"{wrong} comparisons are wrong")


def _small_shapes(machine: Machine) -> Iterator[OperatorShapes]:
    linears = ((48, (32, 16)),)
    shapes = OperatorShapes(48, 40, linears, 4, 2, 16, 4, 9, machine.dtype, machine.dtype, (1, 9), 5, 300)
    yield dataclasses.replace(shapes, code_types=((CodeType.INT4, 32), (CodeType.INT8, 48), (CodeType.FP8, 48)))


def _eight_billion_shapes(machine: Machine) -> Iterator[OperatorShapes]:
    pairs = [(machine.dtype, machine.dtype), (torch.float32, torch.float32), (machine.dtype, torch.int8)]
    for dtype, lora_dtype in [*pairs, (machine.dtype, torch.uint8), (torch.float16, torch.float16)]:
        linears = tuple((linear.in_features, linear.slice_sizes) for linear in EIGHT_BILLION.linears)
        shapes = OperatorShapes(4096, 14336, linears, 32, 8, 128, BLOCK_SIZE, 64, dtype, lora_dtype)
        yield dataclasses.replace(shapes, vocab_size=EIGHT_BILLION_CONFIG.vocab_size, code_types=CODE_TYPES)


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


def measure_steps(config: ModelConfig, machine: Machine) -> Iterator[Row]:
    limits = machine.limits()
    bench = _workbench(config, machine, context=1024, prompt=1024, most_rows=256)
    sizes = bench.sizes
    # Those of the goal first.
    order = sorted(sizes.batches, key=lambda batch: abs(batch - 64))
    for batch in order:
        base = None
        for adapters in sizes.adapters(batch):
            step = bench.decode(batch, adapters)
            seconds = machine.measure({"step": step})["step"]
            eager = machine.measure({"step": step}, is_eager=True)["step"]
            base = base or seconds
            share = limits.seconds(*bench.decode_work(batch, adapters)) / seconds
            note = f"{batch / seconds:,.0f} tokens/s; {seconds / base - 1:+.0%} to the base; eager {eager * 1e3:.2f} ms"
            yield Row(f"{batch} rows, {adapters} adapters", seconds * 1e3, "ms", share, note)


def _workbench(config: ModelConfig, machine: Machine, context: int, prompt: int, most_rows: int) -> Workbench:
    """The largest that fits, with steps of up to `most_rows` sequences."""
    if machine.is_dry:
        return Workbench(_DRY_MODEL, Sizes((1, 2), 9, 5), machine.dtype, machine.device)
    free, _ = torch.cuda.mem_get_info()
    for batches in ((1, 8, 64, 128, 256), (1, 8, 64, 128), (1, 8, 64), (1, 8)):
        num_bytes = _workbench_bytes(config, max(batches), max(context, prompt))
        if max(batches) <= most_rows and num_bytes < _SHARE_OF_MEMORY * free:
            return Workbench(config, Sizes(batches, context, prompt), machine.dtype, machine.device)
    raise SystemExit(f"{free / (1 << 30):.1f} GiB are too few for a model of {config.num_layers} layers")


def _workbench_bytes(config: ModelConfig, batch: int, num_tokens: int) -> int:
    """Weights, keys and values, and adapters of rank 16, two bytes a number."""
    layer = config.hidden_size * (2 * config.q_size + 2 * config.kv_size + 3 * config.intermediate_size)
    weights = config.num_layers * layer + 2 * config.vocab_size * config.hidden_size
    cache = 2 * batch * num_tokens * config.num_layers * config.kv_size
    widths = 7 * config.hidden_size + 2 * config.q_size + 2 * config.kv_size + 3 * config.intermediate_size
    return 2 * (weights + cache + batch * 16 * config.num_layers * widths)


def measure_prefill(machine: Machine) -> Iterator[Row]:
    limits = machine.limits()
    bench = _workbench(EIGHT_BILLION_CONFIG, machine, context=2048, prompt=2048, most_rows=8)
    for num_prompts, has_adapters in itertools.product((1, 4), (False, True)):
        if num_prompts > max(bench.sizes.batches):
            continue
        seconds = machine.measure({"step": bench.prefill(num_prompts, has_adapters)}, is_eager=True)["step"]
        num_tokens = num_prompts * bench.sizes.prompt
        share = 2.0 * bench.num_layer_weights * num_tokens / limits.peak / seconds
        adapters = f"{num_prompts} adapters" if has_adapters else "no adapters"
        name = f"8B, {num_prompts} prompts of {bench.sizes.prompt}, {adapters}"
        yield Row(name, num_tokens / seconds, "tokens/s", share, f"{seconds * 1e3:.1f} ms")


def measure_overlap(machine: Machine) -> Iterator[Row]:
    """What decode steps lose while an adapter of 8B is copied beside them."""
    bench = _workbench(EIGHT_BILLION_CONFIG, machine, context=512, prompt=512, most_rows=64)
    num_steps = 2 if machine.is_dry else 20
    page_bytes, num_pages = (1 << 10, 2) if machine.is_dry else (_PAGE_BYTES, 240)
    on_host = torch.zeros(num_pages, page_bytes, dtype=torch.uint8, pin_memory=not machine.is_dry)
    on_device = torch.zeros(num_pages, page_bytes, dtype=torch.uint8, device=machine.device)
    copy_pages, seconds_of_copy = copies_to(machine.device), []
    step = Clock(machine.device.type).prepare(bench.decode(min(64, max(bench.sizes.batches)), 0))

    def steps() -> None:
        for _ in range(num_steps):
            step()

    def copies() -> None:
        seconds_of_copy.append(copy_pages(list(on_host), list(on_device)).wait())

    def both() -> None:
        copy = copy_pages(list(on_host), list(on_device))
        steps()
        copy.wait()

    seconds = machine.measure({"steps": steps, "copies": copies, "both": both}, is_eager=True)
    rate = on_host.nbytes / min(seconds_of_copy)
    yield Row(f"{num_pages} pages of {page_bytes >> 10} KiB alone", rate / 1e9, "GB/s", note="by the stream's events")
    yield Row(f"{num_steps} steps alone", seconds["steps"] * 1e3, "ms")
    yield Row("both", seconds["both"] * 1e3, "ms", note=f"copies alone {seconds['copies'] * 1e3:.2f} ms")


def run_tests(machine: Machine) -> Iterator[Row]:
    """The tests of a GPU; eight processes, since compilation takes most of their time."""
    names = ["test_tree"] if machine.is_dry else _TESTS
    files = [str(REPOSITORY / "tests" / f"{name}.py") for name in names]
    options = ["-k", "path_of_some_machine"] if machine.is_dry else ["-n", "8", "-k", "not [cpu"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *options, *files]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    for line in re.findall(r"^(?:FAILED|ERROR) .*", done.stdout, re.MULTILINE):
        yield Row("failed", note=line[:300])
    yield Row("pytest", done.returncode, "exit status", note=done.stdout.strip().splitlines()[-1])


def tune(machine: Machine) -> Iterator[Row]:
    """Tile sizes around the table's. Behind each operator the entry for block_sizes.json, as far as it is known."""
    model = TINY_MODEL if machine.is_dry else EIGHT_BILLION
    rows = 2 if machine.is_dry else 64
    batch = Batch(Workload(model, rows, rows, (16,)), machine.dtype, machine.dtype, machine.device.type)
    v, plan, name = shrink_all(batch), {}, architecture(capability(machine.device))
    for operator, choices in _CHOICES.items():
        # As of the largest rank: the table serves other ranks, too.
        table = block_sizes(operator, batch.segments.chunk_size, 256, capability(machine.device), 1 << 20, rows)
        # A limit of registers that was found for other tiles.
        table.pop("maxnreg", None)
        tried = list(itertools.product(*choices.values()))[: 1 if machine.is_dry else None]
        times = []
        for values in tried:
            sizes = table | dict(zip(choices, values, strict=True))
            step: Step = functools.partial(_tuned, operator, batch, v, sizes | {"BLOCK_R": 16})
            try:
                seconds = machine.measure({"step": step})["step"]
            except triton.runtime.errors.OutOfResources:
                continue
            times.append((seconds, sizes))
            yield Row(f"{operator} decode", seconds * 1e6, "us", note=json.dumps(sizes))
        plan[operator] = {"decode": min(times, key=lambda entry: entry[0])[1]}
        yield Row("plan", note=json.dumps({name: plan}))


_CHOICES: dict[Operator, dict[str, list[int]]] = {
    "update": {"BLOCK_K": [256, 512], "BLOCK_N": [128, 256], "num_warps": [4, 8], "num_stages": [3]},
    "expand": {"BLOCK_N": [128, 256, 512, 1024], "num_warps": [2, 4, 8], "num_stages": [2]},
    "shrink": {"BLOCK_K": [128, 256, 512], "num_warps": [4, 8], "num_stages": [2, 4]},
}


def _tuned(operator: Operator, batch: Batch, v: list[torch.Tensor], sizes: BlockSizes) -> None:
    if operator == "shrink":
        shrink_all(batch, sizes)
    elif operator == "update":
        update_all(batch, sizes)
    else:
        expand_all(batch, v, sizes)


def sanitize(machine: Machine) -> Iterator[Row]:
    """The self-test of small shapes under compute-sanitizer, where there is one."""
    tool = shutil.which("compute-sanitizer")
    if machine.is_dry or tool is None:
        yield Row("compute-sanitizer", note="absent")
        return
    for check in ("memcheck", "racecheck"):
        command = [
            tool,
            "--tool",
            check,
            "--error-exitcode",
            "9",
            sys.executable,
            "-m",
            "gpu.parts",
            "small_self_test",
            os.devnull,
        ]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        yield Row(check, done.returncode, "exit status", note=" / ".join(done.stdout.strip().splitlines()[-3:])[:500])


PARTS: dict[str, Callable[[Machine], Iterator[Row]]] = {
    "machine": describe_machine,
    "self_test": self_test,
    "small_self_test": small_self_test,
    "limits": measure_limits,
    "steps_8b": functools.partial(measure_steps, EIGHT_BILLION_CONFIG),
    "steps_1b": functools.partial(measure_steps, ONE_BILLION_CONFIG),
    "kernels": measure_kernels,
    "overlap": measure_overlap,
    "prefill": measure_prefill,
    "sampling": measure_sampling,
    "quantized": measure_quantized,
    "tests": run_tests,
    "tuning": tune,
    "sanitizer": sanitize,
}


@torch.inference_mode()
def run(name: str, rows: Path, is_dry: bool) -> None:
    """Append the rows of a part to a file, each as soon as it is known."""
    with rows.open("a") as file:
        for row in PARTS[name](Machine(is_dry)):
            file.write(json.dumps(dataclasses.asdict(row)) + "\n")
            file.flush()


if __name__ == "__main__":
    run(sys.argv[1], Path(sys.argv[2]), "--dry-run" in sys.argv)
