"""The tiles of attention that the GPU's report tries, by heads and the type of a cache."""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from triton.errors import TritonError

from benchmarks.lora_workloads import BLOCK_SIZE
from benchmarks.machine_limits import void
from gpu.attention_parts import DRY_HEADS, HEADS, Heads, PagedStep, paged_step
from gpu.machine import Machine, Row
from gpu.report import PLAN
from multilora_kernels.cuda import decode_attention, prompt_attention
from multilora_kernels.cuda.block_sizes import (
    AttentionOperator,
    BlockSizes,
    KeyKind,
    attention_sizes,
    capability,
    entry_with_plans,
)

_MODELS = (HEADS, Heads(32, 8, 64))
"""Those of an 8B and of a 1B."""

_CACHES: dict[KeyKind, torch.dtype | None] = {"16 bits": None, "8 bits": torch.int8}

_STEPS: dict[AttentionOperator, tuple[tuple[int, int], ...]] = {
    "decode_attention": ((64, 1024), (256, 1024), (8, 32768)),
    "prompt_attention": ((1, 2048), (4, 2048)),
}
_DRY_STEPS: dict[AttentionOperator, tuple[tuple[int, int], ...]] = {
    "decode_attention": ((2, 9),),
    "prompt_attention": ((2, 5),),
}
"""Sequences and the keys of each; a prompt has as many queries. Larger steps run the same compiled kernels."""

_ROUNDS: dict[AttentionOperator, tuple[dict[str, list[int]], ...]] = {
    "decode_attention": (
        {"BLOCK_N": [32, 64], "num_warps": [4, 8], "num_stages": [2, 3, 4, 5]},
        {"SPLIT_KEYS": [128, 512, 1024]},
    ),
    "prompt_attention": ({"BLOCK_M": [64, 128], "BLOCK_N": [32, 64, 128], "num_warps": [4, 8], "num_stages": [2, 3]},),
}
"""Sizes that are tried with each other, from the best of the round before on. The first round compiles all kernels: the
size of a split is a number that a kernel gets.
"""

_TILE_ROWS = 16
"""Query heads of a key-value head, up to which a tile has as many rows."""

_Launch = Callable[[BlockSizes], Any]
"""Computes a step with some sizes, and gives the compiled kernel."""

_Times = Mapping[str, Mapping[str, float]]
"""Seconds of each step, by the candidate's sizes as JSON."""


@dataclass(frozen=True)
class _Kernel:
    operator: AttentionOperator
    kind: KeyKind
    heads: Heads

    @property
    def name(self) -> str:
        num_heads, num_kv_heads, head_dim = self.heads
        return f"{self.operator}, {self.kind}, {num_heads} heads by {num_kv_heads} of {head_dim}"

    def table_sizes(self, machine: Machine) -> BlockSizes:
        num_heads, num_kv_heads, head_dim = self.heads
        return attention_sizes(
            self.operator, self.kind, num_heads // num_kv_heads, head_dim, capability(machine.device)
        )


def launches(machine: Machine) -> Iterator[Callable[[], Any]]:
    """Each candidate whose kernel `tune_attention` needs, with a small step."""
    for kernel in _kernels(machine):
        (launch,) = steps_of(machine, kernel, _DRY_STEPS[kernel.operator]).values()
        for sizes in tried(kernel.table_sizes(machine), {} if machine.is_dry else _ROUNDS[kernel.operator][0]):
            yield functools.partial(launch, sizes)


def tune_attention(machine: Machine) -> Iterator[Row]:
    """The times of each candidate, and after those of a kernel its entry for block_sizes.json."""
    plans: dict[tuple[AttentionOperator, KeyKind], list[dict[str, Any]]] = {}
    for kernel in _kernels(machine):
        sizes = yield from _quickest_sizes(machine, kernel)
        if sizes is not None:
            of_entry = plans.setdefault((kernel.operator, kernel.kind), [])
            of_entry.append(_plan(kernel.heads, sizes))
            # The first plan that serves a head's size is taken.
            of_entry.sort(key=lambda plan: int(plan["max_head_dim"]))
            entry = entry_with_plans(kernel.operator, kernel.kind, capability(machine.device), of_entry)
            yield Row(PLAN, note=json.dumps(entry))


def _quickest_sizes(machine: Machine, kernel: _Kernel) -> Generator[Row, None, BlockSizes | None]:
    """The best of the table's sizes and of all candidates; None where none can be used."""
    steps = steps_of(machine, kernel, (_DRY_STEPS if machine.is_dry else _STEPS)[kernel.operator])
    sizes, times = kernel.table_sizes(machine), dict[str, dict[str, float]]()
    for choices in ({}, *(() if machine.is_dry else _ROUNDS[kernel.operator])):
        for candidate in tried(sizes, choices):
            note = json.dumps(candidate)
            calls = {name: functools.partial(launch, candidate) for name, launch in steps.items()}
            if note in times:
                continue
            if refusal := next(filter(None, map(why_refused, calls.values())), ""):
                yield Row(kernel.name, note=f"refused: {refusal}; {note}")
                continue
            times[note] = machine.measure({name: functools.partial(_called, call) for name, call in calls.items()})
            for name, seconds in times[note].items():
                yield Row(f"{kernel.name}, {name}", seconds * 1e6, "us", note=note)
        if times:
            sizes = json.loads(quickest(times))
    return sizes if times else None


def tried(sizes: BlockSizes, choices: Mapping[str, list[int]]) -> Iterator[BlockSizes]:
    """These sizes with each combination of choices."""
    for each in itertools.product(*choices.values()):
        yield sizes | dict(zip(choices, each, strict=True))


def why_refused(launch: Callable[[], Any]) -> str:
    """Why a candidate is not timed: its kernel does not compile, wants more than there is, or spills. Else empty."""
    try:
        kernel = launch()
    except TritonError as error:
        return f"{type(error).__name__}: {error}"
    except RuntimeError as error:
        # Passes of the compiler that fail have no class of their own.
        if "PassManager" not in str(error):
            raise
        return str(error)
    # The interpreter compiles nothing.
    return f"{kernel.n_spills} registers spill" if kernel is not None and kernel.n_spills else ""


def quickest(times: _Times) -> str:
    """The candidate with the least sum over steps of its time over the least time of the step."""
    names = next(iter(times.values()))
    least = {name: min(of_steps[name] for of_steps in times.values()) for name in names}
    return min(times, key=lambda sizes: math.fsum(times[sizes][name] / least[name] for name in names))


def _plan(heads: Heads, sizes: BlockSizes) -> dict[str, Any]:
    """For heads of at most this size: whether larger ones fit beside such tiles, nobody has tried."""
    num_heads, num_kv_heads, head_dim = heads
    group = max(_TILE_ROWS, num_heads // num_kv_heads)
    return {"max_head_dim": head_dim, "max_group": group, "sizes": sizes}


def _kernels(machine: Machine) -> Iterator[_Kernel]:
    for heads, kind, operator in itertools.product((DRY_HEADS,) if machine.is_dry else _MODELS, _CACHES, _ROUNDS):
        yield _Kernel(operator, kind, heads)


def steps_of(machine: Machine, kernel: _Kernel, steps: tuple[tuple[int, int], ...]) -> dict[str, _Launch]:
    """By their names, steps of so many sequences and keys."""
    is_decode = kernel.operator == "decode_attention"
    launch = _decode if is_decode else _attend
    return {
        f"{rows} of {num_keys} keys": functools.partial(
            launch,
            paged_step(
                machine,
                kernel.heads,
                rows,
                num_keys,
                1 if is_decode else num_keys,
                BLOCK_SIZE,
                _CACHES[kernel.kind],
            ),
            kernel.heads,
        )
        for rows, num_keys in steps
    }


def _decode(step: PagedStep, heads: Heads, sizes: BlockSizes) -> Any:
    inputs = (step.qkv, step.cos, step.sin, step.keys, step.values, step.slots)
    out = step.qkv.new_empty(len(step.qkv), heads.num_heads * heads.head_dim)
    options = (0, heads.head_dim**-0.5, 0.0, None, None)
    return decode_attention.decode(*inputs, out, *step.sequences[:5], *options, False, sizes)


def _attend(step: PagedStep, heads: Heads, sizes: BlockSizes) -> Any:
    num_heads, _, head_dim = heads
    q = step.qkv[:, : num_heads * head_dim].unflatten(1, (num_heads, head_dim))
    out = step.qkv.new_empty(len(q), num_heads * head_dim)
    options = (0, head_dim**-0.5, 0.0, None, None)
    return prompt_attention.attend(q, step.keys, step.values, out, 0, *step.sequences[:5], *options, sizes)


def _called(call: Callable[[], Any]) -> None:
    void(call())
