"""The parts of the GPU's report that measure operators, each beside its limit."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator

import torch

from benchmarks.lora_workloads import (
    EIGHT_BILLION,
    OLMOE,
    ONE_BILLION,
    QWEN3_MOE,
    Batch,
    ExpertBatch,
    LinearShape,
    Mixture,
    Model,
    Step,
    Workload,
    fill_with_codes,
)
from benchmarks.machine_limits import Limits, void
from gpu.machine import Machine, Row
from multilora_kernels import (
    CodeType,
    LoRASegments,
    QuantizedWeight,
    SamplingRule,
    lora_segments,
    quantized_linear,
    sample_tokens,
)
from multilora_kernels.cuda import lora_expand, lora_expand_activated, lora_shrink, silu_mul
from multilora_kernels.cuda.block_sizes import BlockSizes
from multilora_kernels.segments import ROWS, rows_of

TINY_MIXTURE = Mixture("tiny", num_experts=5, top_k=2, hidden=48, inner=32)
TINY_MODEL = Model("tiny", (LinearShape(48, (32, 16, 16)), LinearShape(64, (48,))), 1)
CODE_TYPES = ((CodeType.INT4, 128), (CodeType.INT8, 128), (CodeType.INT8, 1 << 30), (CodeType.FP8, 1 << 30))
"""With group sizes; the largest is a row."""

_CACHE_BYTES = 128 << 20
"""More than the second cache of any GPU."""


def shrink_all(
    batch: Batch, sizes: BlockSizes | None = None, segments: LoRASegments | None = None
) -> list[torch.Tensor]:
    """The v of every linear. sizes, segments: to try in place of the table's and the batch's."""
    return [
        lora_shrink(batch.x[i], batch.tables, column, shape.num_slices, segments or batch.segments, sizes)
        for column, i, shape in batch.linears
    ]


def expand_all(
    batch: Batch, v: list[torch.Tensor], sizes: BlockSizes | None = None, segments: LoRASegments | None = None
) -> None:
    """The update of every linear. sizes, segments: as of `shrink_all`."""
    for (column, i, shape), v_of_linear in zip(batch.linears, v, strict=True):
        lora_expand(v_of_linear, batch.y[i], batch.tables, column, shape.slice_sizes, segments or batch.segments, sizes)


def activate_all(batch: Batch, v: list[torch.Tensor], in_one: bool) -> None:
    """The update of every gate and up, and its activation: in one launch, or in two."""
    for (column, i, shape), v_of_linear in zip(batch.linears, v, strict=True):
        if shape.num_slices == 2:
            size, _ = shape.slice_sizes
            if in_one:
                arguments = (batch.tables, column, size, batch.segments, "silu")
                lora_expand_activated(v_of_linear, batch.y[i], *arguments)
            else:
                lora_expand(v_of_linear, batch.y[i], batch.tables, column, (size, size), batch.segments)
                silu_mul(batch.y[i])


def rows_and_tiles(batch: Batch) -> tuple[LoRASegments, LoRASegments]:
    """The tokens of a batch each by itself, and cut into chunks of one adapter."""
    workload, device = batch.workload, batch.x[0].device
    mapping = torch.arange(workload.num_tokens, device=device) % workload.num_adapters
    return rows_of(mapping), lora_segments(mapping, workload.num_adapters)


def measure_kernels(machine: Machine) -> Iterator[Row]:
    limits = machine.limits()
    for workload in _workloads(machine):
        yield from _measure_workload(machine, workload, limits)


def measure_quantized(machine: Machine) -> Iterator[Row]:
    """The linears of a layer of 8B as codes, beside the same as floats."""
    limits = machine.limits()
    linears = TINY_MODEL.linears if machine.is_dry else EIGHT_BILLION.linears
    shapes = [(linear.out_features, linear.in_features) for linear in linears]
    floats = [torch.randn(shape, device=machine.device).to(machine.dtype) for shape in shapes]
    for code_type, group_size in CODE_TYPES:
        weights = []
        for out_features, in_features in shapes:
            group = (code_type, min(group_size, in_features), machine.dtype)
            weight = QuantizedWeight(out_features, in_features, *group, machine.device, compute_dtype=machine.dtype)
            fill_with_codes(weight, machine.device)
            weights.append(weight)
        for num_rows in (2,) if machine.is_dry else (1, 16, 64, 128, 2048):
            xs = [torch.randn(num_rows, shape[1], device=machine.device).to(machine.dtype) for shape in shapes]
            steps: dict[str, Step] = {
                "codes": functools.partial(_each, quantized_linear, xs, weights),
                "floats": functools.partial(_each, torch.nn.functional.linear, xs, floats),
            }
            seconds = machine.measure(steps)
            flops = 2.0 * num_rows * sum(out_features * in_features for out_features, in_features in shapes)
            share = limits.seconds(sum(weight.nbytes for weight in weights), flops) / seconds["codes"]
            name = f"8B layer in {code_type.value}, groups of {weights[0].group_size}, {num_rows} rows"
            note = f"floats {seconds['floats'] * 1e6:.1f} us"
            yield Row(name, seconds["codes"] * 1e6, "us", share, note)


def measure_experts(machine: Machine) -> Iterator[Row]:
    """The experts of mixtures as floats and as codes, without adapters and with one of all experts a row."""
    limits = machine.limits()
    mixtures = (TINY_MIXTURE,) if machine.is_dry else (OLMOE, QWEN3_MOE)
    for mixture, has_codes, num_rows in itertools.product(
        mixtures, (False, True), (2,) if machine.is_dry else (1, 16, 1024)
    ):
        batch = ExpertBatch(mixture, num_rows, has_codes, machine.device.type, num_adapters=16)
        seconds = machine.measure({"experts": batch.base, "with adapters": batch.with_adapters})
        num_bytes, num_flops = batch.base_bytes, batch.base_flops
        base = limits.seconds(num_bytes, num_flops)
        update = limits.seconds(num_bytes + batch.adapter_bytes, num_flops + batch.adapter_flops)
        name = f"{mixture.name} {'w4a16' if has_codes else 'bfloat16'}, {mixture.num_layers} layers, {num_rows} rows"
        yield Row(f"{name}: experts", seconds["experts"] * 1e6, "us", base / seconds["experts"])
        yield Row(f"{name}: with adapters", seconds["with adapters"] * 1e6, "us", update / seconds["with adapters"])


def _each(function: Callable[..., object], *arguments: Iterable[object]) -> None:
    for each in zip(*arguments, strict=True):
        function(*each)


def _workloads(machine: Machine) -> list[Workload]:
    if machine.is_dry:
        return [Workload(TINY_MODEL, 3, 2, (4,))]
    decode = [
        Workload(EIGHT_BILLION, rows, adapters, (16,))
        for rows, adapters in [(64, 64), (1, 1), (8, 8), (64, 1), (256, 1)]
    ]
    decode += [Workload(EIGHT_BILLION, 128, 128, (16,)), Workload(EIGHT_BILLION, 64, 64, (8, 16, 32, 64))]
    prefill = [Workload(EIGHT_BILLION, rows, 4, (16,)) for rows in (1024, 2048, 8192)]
    return [*decode, *prefill, Workload(ONE_BILLION, 64, 64, (16,))]


def _measure_workload(machine: Machine, workload: Workload, limits: Limits) -> Iterator[Row]:
    batch = Batch(workload, machine.dtype, machine.dtype, machine.device.type)
    linears, lora_linears = batch.base_linears()
    v = shrink_all(batch)
    steps: dict[str, Step] = {
        "shrink": lambda: void(shrink_all(batch)),
        "expand": lambda: expand_all(batch, v),
        "update": batch.update,
        "linears": linears,
        "linears with update": lora_linears,
    }
    if batch.segments.chunk_size == ROWS:
        _, tiles = rows_and_tiles(batch)
        steps["shrink by tiles"] = lambda: void(shrink_all(batch, segments=tiles))
        steps["expand by tiles"] = lambda: expand_all(batch, v, segments=tiles)
        steps["expand and activation of gate and up"] = lambda: activate_all(batch, v, in_one=True)
        steps["the same in two launches"] = lambda: activate_all(batch, v, in_one=False)
    seconds = machine.measure(steps)
    update = limits.seconds(workload.num_bytes(machine.dtype, machine.dtype), workload.num_flops())
    base = limits.seconds(workload.weight_bytes(machine.dtype), workload.weight_flops())
    shares = {"update": update, "linears": base, "linears with update": base + update}
    # A model's other layers would have driven them out.
    note = "adapters may lie in the cache" if workload.adapter_bytes(machine.dtype) < _CACHE_BYTES else ""
    for name, taken in seconds.items():
        share = shares[name] / taken if name in shares else None
        yield Row(f"{workload.name}: {name}", taken * 1e6, "us", share, note)


def measure_sampling(machine: Machine) -> Iterator[Row]:
    """The choice of tokens, by rules of every kind, beside operators of torch that read the logits."""
    limits = machine.limits()
    for rows, vocab in [(2, 100)] if machine.is_dry else [(1, 131072), (64, 131072), (256, 131072)]:
        logits = torch.randn(rows, vocab, device=machine.device)
        operators: dict[str, Callable[[], object]] = {
            "argmax": functools.partial(logits.argmax, dim=-1),
            "softmax": functools.partial(logits.softmax, dim=-1),
            "stable sort": functools.partial(logits.sort, dim=-1, descending=True, stable=True),
        }
        for kind, (top_k, top_p) in _RULES.items():
            rule = SamplingRule(0.8, top_k, top_p, 0.0, 0.5)
            operators[f"sample_tokens, {kind},"] = functools.partial(sample_tokens, logits, [rule] * rows)
        steps: dict[str, Step] = {name: functools.partial(_called, call) for name, call in operators.items()}
        for name, seconds in machine.measure(steps, is_eager=True).items():
            share = limits.seconds(logits.nbytes, 0) / seconds
            yield Row(f"{name} of {rows} rows of {vocab}", seconds * 1e6, "us", share)


_RULES = {"greedy": (1, 1.0), "temperature": (0, 1.0), "top_k": (50, 1.0), "top_p": (0, 0.9)}
"""top_k and top_p."""


def _called(call: Callable[[], object]) -> None:
    call()
