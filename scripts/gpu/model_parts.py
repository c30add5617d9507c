"""The parts of the GPU's report that measure steps of whole models. They import the engine, and so msgspec."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from unittest.mock import patch

import torch

from benchmarks.lora_workloads import Step
from benchmarks.machine_limits import Clock
from gpu.machine import Machine, Row
from gpu.model_steps import EIGHT_BILLION, ONE_BILLION, RANK, Sizes, Storage, Workbench, llama_config
from gpu.step_kernels import kernels_of_a_step
from multilora_engine.lora.page_copies import copies_to
from multilora_engine.models.model_config import ModelConfig
from multilora_kernels import CodeType, cuda

_BFLOAT16 = Storage(torch.bfloat16, torch.bfloat16)
_W4A16 = Storage(torch.bfloat16, torch.int8, CodeType.INT4)

_DRY_MODEL = llama_config(1, hidden=32, num_heads=2, num_kv_heads=1, ffn=48, vocab_size=300)
"""The interpreter takes most of a second for a layer."""

_CODED_BATCHES = (64, 128)
"""Sequences of the steps whose kernels are measured with adapters in codes, too."""

_BATCHES_OF_LAUNCHES = (1, 64)
"""Sequences of the steps that are measured with and without dependent launches."""

_SHARE_OF_MEMORY = 0.85
_PAGE_BYTES = 4 << 20


def measure_steps(config: ModelConfig, storage: Storage, most_rows: int, machine: Machine) -> Iterator[Row]:
    limits = machine.limits()
    bench = _workbench(config, machine, context=1024, prompt=1024, most_rows=most_rows, storage=storage)
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


def measure_kernels_of_steps(machine: Machine) -> Iterator[Row]:
    """Steps of an 8B without adapters, and with as many as sequences or memory allow; some with adapters in codes."""
    limits = machine.limits()
    bench = _workbench(EIGHT_BILLION, machine, context=1024, prompt=1024, most_rows=256)
    # Those of the goal first.
    batches = sorted(bench.sizes.batches, key=lambda batch: abs(batch - 64))
    for batch in batches:
        for num_adapters in (0, max(bench.sizes.adapters(batch))):
            yield from kernels_of_a_step(bench, batch, num_adapters, machine, limits)
    for batch in [batch for batch in _BATCHES_OF_LAUNCHES if batch in batches]:
        yield _row_of_dependent_launches(bench, batch, machine)
    bench.set_adapters(torch.int8)
    for batch in batches[:1] if machine.is_dry else [batch for batch in batches if batch in _CODED_BATCHES]:
        yield from kernels_of_a_step(bench, batch, max(bench.sizes.adapters(batch)), machine, limits)


def _row_of_dependent_launches(bench: Workbench, batch: int, machine: Machine) -> Row:
    """What they take from a step with as many adapters as there are, beside the same step launched plainly."""
    num_adapters = max(bench.sizes.adapters(batch))
    step = bench.decode(batch, num_adapters)
    seconds = machine.measure({"dependent": step, "plain": launched_plainly(step)})
    gain = seconds["plain"] - seconds["dependent"]
    note = f"of {seconds['plain'] * 1e6:,.0f} us, {gain / seconds['plain']:.1%}"
    return Row(f"{batch} rows, {num_adapters} adapters: dependent launches save", gain * 1e6, "us", note=note)


def launched_plainly(step: Step) -> Step:
    """A step whose kernels all wait, before they begin, for the end of the one before."""

    def run() -> None:
        with ExitStack() as stack:
            for name, module in list(sys.modules.items()):
                if name.startswith(cuda.__name__) and hasattr(module, "launches_dependently"):
                    stack.enter_context(patch.object(module, "launches_dependently", lambda device: False))
            step()

    return run


def _workbench(
    config: ModelConfig, machine: Machine, context: int, prompt: int, most_rows: int, storage: Storage = _BFLOAT16
) -> Workbench:
    """The largest that fits, with steps of up to `most_rows` sequences."""
    if machine.is_dry:
        return Workbench(_DRY_MODEL, Sizes((1, 2), 9, 5), storage, machine.device)
    free, _ = torch.cuda.mem_get_info()
    for batches in ((1, 8, 64, 128, 256), (1, 8, 64, 128), (1, 8, 64), (1, 8)):
        sizes = Sizes(batches, context, prompt)
        if max(batches) <= most_rows and _workbench_bytes(config, sizes) < _SHARE_OF_MEMORY * free:
            return Workbench(config, sizes, storage, machine.device)
    raise SystemExit(f"{free / (1 << 30):.1f} GiB are too few for a model of {config.num_layers} layers")


def _workbench_bytes(config: ModelConfig, sizes: Sizes) -> int:
    """Weights, keys and values, and adapters of rank 16, two bytes a number; codes take less."""
    batch, num_tokens = max(sizes.batches), max(sizes.context, sizes.prompt)
    layer = config.hidden_size * (2 * config.q_size + 2 * config.kv_size + 3 * config.intermediate_size)
    weights = config.num_layers * layer + 2 * config.vocab_size * config.hidden_size
    cache = 2 * batch * num_tokens * config.num_layers * config.kv_size
    widths = 7 * config.hidden_size + 2 * config.q_size + 2 * config.kv_size + 3 * config.intermediate_size
    return 2 * (weights + cache + max(sizes.adapters(batch)) * RANK * config.num_layers * widths)


def measure_prefill(machine: Machine) -> Iterator[Row]:
    limits = machine.limits()
    bench = _workbench(EIGHT_BILLION, machine, context=2048, prompt=2048, most_rows=8)
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
    bench = _workbench(EIGHT_BILLION, machine, context=512, prompt=512, most_rows=64)
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


PARTS: dict[str, Callable[[Machine], Iterator[Row]]] = {
    "kernels_of_a_step": measure_kernels_of_steps,
    "steps_8b": functools.partial(measure_steps, EIGHT_BILLION, _BFLOAT16, 256),
    "steps_w4a16": functools.partial(measure_steps, EIGHT_BILLION, _W4A16, 128),
    "steps_1b": functools.partial(measure_steps, ONE_BILLION, _BFLOAT16, 256),
    "overlap": measure_overlap,
    "prefill": measure_prefill,
}
