"""The part of the GPU's report that measures attention by keys and pages, beside that of torch on dense keys."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.lora_workloads import Step
from benchmarks.machine_limits import void
from gpu.machine import Machine, Row
from multilora_kernels import PagedSequences, rotary_attention
from multilora_kernels.kv_rows import LARGEST_CODES, KVCodes, KVRows, kv_row_size


class Heads(NamedTuple):
    """Query heads, key-value heads, and numbers of a head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


HEADS, DRY_HEADS = Heads(32, 8, 128), Heads(4, 2, 16)
"""Those of an 8B."""

_DECODES, _DRY_DECODES = ((64, 1024), (256, 1024), (8, 32768), (1, 1024), (64, 8192), (1, 32768)), ((2, 9),)
_PROMPTS, _DRY_PROMPTS = ((1, 2048), (4, 2048)), ((2, 5),)
"""Sequences and the keys of each; a prompt has as many queries."""

_PAGES, _DRY_PAGES = (16, 64), (4,)
_YARDSTICKS = {"torch, cuDNN": SDPBackend.CUDNN_ATTENTION, "torch, FA2": SDPBackend.FLASH_ATTENTION}
_DRY_YARDSTICKS = {"torch, plain": SDPBackend.MATH}


def measure_attention(machine: Machine) -> Iterator[Row]:
    """Of all kernels of a size at once: the limit of decodes is the bytes of keys and values, of prompts the flops."""
    limits = machine.limits()
    heads = DRY_HEADS if machine.is_dry else HEADS
    decodes = [(rows, keys, 1) for rows, keys in (_DRY_DECODES if machine.is_dry else _DECODES)]
    prompts = [(rows, keys, keys) for rows, keys in (_DRY_PROMPTS if machine.is_dry else _PROMPTS)]
    for rows, num_keys, num_queries in decodes + prompts:
        what = f"attention, 8B heads, {rows} {'decodes' if num_queries == 1 else 'prompts'} of {num_keys} keys"
        num_bytes = 2 * rows * num_keys * heads.num_kv_heads * heads.head_dim * machine.dtype.itemsize
        # A prompt's query sees half of the keys on average, in two products.
        pairs = rows * num_keys * (1 if num_queries == 1 else (num_keys + 1) / 2)
        least = limits.seconds(num_bytes, 4.0 * heads.num_heads * heads.head_dim * pairs)
        steps: dict[str, Step] = {}
        for page in _DRY_PAGES if machine.is_dry else _PAGES:
            step = paged_step(machine, heads, rows, num_keys, num_queries, page)
            steps[f"ours, pages of {page}"] = functools.partial(_attend, step)
        for name, backend in (_DRY_YARDSTICKS if machine.is_dry else _YARDSTICKS).items():
            dense = _dense_step(machine, heads, rows, num_keys, num_queries, backend)
            try:
                dense()
                steps[name] = dense
            except RuntimeError as error:
                yield Row(f"{what}: {name}", note=f"refused: {str(error).splitlines()[0]}")
        for name, seconds in machine.measure(steps).items():
            yield Row(f"{what}: {name}", seconds * 1e6, "us", least / seconds)


class PagedStep(NamedTuple):
    """The arguments of `rotary_attention`."""

    qkv: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    keys: KVRows
    values: KVRows
    slots: torch.Tensor
    sequences: PagedSequences


def paged_step(
    machine: Machine,
    heads: Heads,
    rows: int,
    num_keys: int,
    num_queries: int,
    page: int,
    kv_dtype: torch.dtype | None = None,
) -> PagedStep:
    """A step of decodes for one query, else of whole prompts. kv_dtype: of a cache in codes, else as queries."""
    num_heads, num_kv_heads, head_dim = heads
    device, num_blocks = machine.device, -(-num_keys // page)
    qkv = _random(machine, rows * num_queries, (num_heads + 2 * num_kv_heads) * head_dim)
    cos, sin = (_random(machine, len(qkv), 1, head_dim) for _ in range(2))
    keys, values = (_cache(machine, rows * num_blocks * page, heads, kv_dtype) for _ in range(2))
    tables = torch.randperm(rows * num_blocks, device=device).view(rows, num_blocks)
    positions = torch.arange(num_keys - num_queries, num_keys, device=device)
    slots = (tables[:, positions // page] * page + positions % page).flatten()
    starts = torch.arange(rows + 1, device=device) * num_queries
    contexts = torch.full((rows,), num_keys, device=device)
    sequences = PagedSequences(tables, starts, contexts, rows if num_queries == 1 else 0, page)
    return PagedStep(qkv, cos, sin, keys, values, slots, sequences)


def _attend(step: PagedStep) -> None:
    void(rotary_attention(*step))


def _cache(machine: Machine, num_slots: int, heads: Heads, kv_dtype: torch.dtype | None) -> KVRows:
    if kv_dtype is None:
        return _random(machine, num_slots, heads.num_kv_heads, heads.head_dim)
    assert kv_dtype in LARGEST_CODES
    shape = (num_slots, heads.num_kv_heads, kv_row_size(heads.head_dim, kv_dtype))
    cache = KVCodes.zeros(shape, kv_dtype, machine.device)
    cache.codes.view(torch.uint8).random_(0, 127)
    cache.scales.fill_(0.01)
    return cache


def _dense_step(
    machine: Machine, heads: Heads, rows: int, num_keys: int, num_queries: int, backend: SDPBackend
) -> Step:
    num_heads, num_kv_heads, head_dim = heads
    q = _random(machine, rows, num_heads, num_queries, head_dim)
    k, v = (_random(machine, rows, num_kv_heads, num_keys, head_dim) for _ in range(2))
    call: Callable[[], torch.Tensor] = functools.partial(
        scaled_dot_product_attention, q, k, v, is_causal=num_queries > 1, enable_gqa=True
    )

    def step() -> None:
        with sdpa_kernel(backend):
            call()

    return step


def _random(machine: Machine, *shape: int) -> torch.Tensor:
    return torch.randn(shape, device=machine.device, dtype=machine.dtype)
