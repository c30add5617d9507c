"""Synthetic sequences over a paged cache; whatever attention must not read is NaN."""

from __future__ import annotations

import dataclasses
from itertools import takewhile

import torch

from multilora_kernels import AttentionOptions, PagedSequences
from multilora_kernels.kv_rows import LARGEST_CODES, KVCodes, KVRows, num_kv_heads, quantize_rows, store_rows

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
"""By the type of the queries and of the result; the values are of order one."""

# (heads, key-value heads, head_dim, block_size)
SHAPES = {
    "default model": (9, 3, 64, 16),
    "llama": (8, 2, 128, 16),
    "odd blocks": (6, 2, 96, 5),
    "one head": (1, 1, 16, 4),
    "wide group": (71, 1, 8, 5),
    "odd head_dim": (6, 2, 10, 7),
    "no vector's multiple": (5, 5, 90, 1),
    "odd heads in large blocks": (6, 2, 80, 64),
}
# (tokens of the step, keys); single tokens at the beginning are answers', others are of prompts
SEQUENCES = {
    "decode": [(1, 1), (1, 64), (1, 65), (1, 3), (1, 130)],
    "long decode": [(1, 600), (1, 256), (1, 257)],
    "longest decode": [(1, 4100), (1, 7)],
    "prefill": [(70, 70), (1, 5), (2, 2)],
    "chunks behind a prefix": [(1, 40), (9, 140), (130, 200), (3, 300)],
}
# Of scores of order two; sinks are as large as they, and one hides all keys.
OPTIONS = ("none", "scale", "softcap", "sinks", "all", "distances")
# Some keys of most sequences are farther away.
NUM_DISTANCES = 50


def make_options(name: str, num_heads: int) -> AttentionOptions:
    sinks = torch.randn(num_heads, generator=torch.Generator().manual_seed(2)) * 3
    sinks[-1] = 90.0
    bias = torch.randn(num_heads, NUM_DISTANCES, generator=torch.Generator().manual_seed(3)) * 2
    return {
        "none": AttentionOptions(),
        "scale": AttentionOptions(scale=0.3),
        "softcap": AttentionOptions(softcap=1.5),
        "sinks": AttentionOptions(sinks=sinks),
        "all": AttentionOptions(scale=0.2, softcap=3.0, sinks=sinks),
        "distances": AttentionOptions(sinks=sinks, distance_bias=bias),
    }[name]


@dataclasses.dataclass(frozen=True)
class Case:
    """One call: queries of all sequences one after another, one cache."""

    q: torch.Tensor
    keys: KVRows
    values: KVRows
    sequences: PagedSequences
    options: AttentionOptions

    def as_on_a_gpu(self) -> Case:
        """With the scales of codes apart."""
        keys, values = (KVCodes.of_rows(x) if x.dtype in LARGEST_CODES else x for x in (self.keys, self.values))
        return dataclasses.replace(self, keys=keys, values=values)

    def to(self, device: str) -> Case:
        """The same case on another device."""
        s = self.sequences
        tables, starts, contexts = (tensor.to(device) for tensor in (s.block_tables, s.query_starts, s.context_lens))
        sequences = s._replace(block_tables=tables, query_starts=starts, context_lens=contexts)
        of_heads = {name: getattr(self.options, name) for name in ("sinks", "distance_bias")}
        options = self.options._replace(**{k: None if v is None else v.to(device) for k, v in of_heads.items()})
        return Case(self.q.to(device), moved(self.keys, device), moved(self.values, device), sequences, options)


def moved(cache: KVRows, device: str) -> KVRows:
    """The same cache on another device."""
    if isinstance(cache, KVCodes):
        return KVCodes(cache.codes.to(device), cache.scales.to(device))
    return cache.to(device)


def make_case(
    shape="default model", sequences="decode", dtype=torch.float32, kv_dtype=None, window=None, options="none"
) -> Case:
    """Slots that no token may read are NaN, and blocks behind a sequence's last one are far outside the cache.

    kv_dtype: of keys and values; int8 and float8_e4m3fn are their codes.
    """
    num_heads, num_kv_heads, head_dim, block_size = SHAPES[shape]
    lengths = SEQUENCES[sequences]
    generator = torch.Generator().manual_seed(0)
    num_blocks = [-(-context // block_size) for _, context in lengths]
    free = (torch.randperm(sum(num_blocks) + 2, generator=generator)).tolist()
    tables = torch.full((len(lengths), max(num_blocks) + 1), 1 << 40)
    cache = torch.full((2, len(free) * block_size, num_kv_heads, head_dim), torch.nan)
    for row, (num_tokens, context) in enumerate(lengths):
        tables[row, : num_blocks[row]] = torch.tensor([free.pop() for _ in range(num_blocks[row])])
        seen = torch.arange(max(0, context - num_tokens - window + 1) if window else 0, context)
        slots = tables[row, seen // block_size] * block_size + seen % block_size
        cache[:, slots] = torch.randn(2, len(seen), num_kv_heads, head_dim, generator=generator)
    starts = torch.tensor([0, *(num_tokens for num_tokens, _ in lengths)]).cumsum(0)
    q = torch.randn(int(starts[-1]), num_heads, head_dim, generator=generator) * 2
    contexts = torch.tensor([context for _, context in lengths])
    keys, values = quantize_rows(cache, kv_dtype) if kv_dtype in LARGEST_CODES else cache.to(kv_dtype or dtype)
    num_decodes = len(list(takewhile(lambda lengths: lengths[0] == 1, lengths)))
    paged = PagedSequences(tables, starts, contexts, num_decodes, block_size, window)
    return Case(q.to(dtype), keys, values, paged, make_options(options, num_heads))


def fields(case: Case, dtype: torch.dtype | None = None) -> tuple[object, ...]:
    """The operator's arguments, with queries and cache as `dtype` if given; codes stay."""
    tensors = (case.q, case.keys, case.values)
    has_codes = case.keys.dtype in LARGEST_CODES
    converted = (
        tensor if has_codes and tensor is not case.q else tensor.to(dtype or tensor.dtype) for tensor in tensors
    )
    return *converted, *sequence_fields(case)


def sequence_fields(case: Case) -> tuple[object, ...]:
    """The operator's arguments behind the cache."""
    s, (scale, softcap, sinks, distance_bias, _) = case.sequences, case.options
    scale = case.q.shape[2] ** -0.5 if scale is None else scale
    sequences = (s.block_tables, s.query_starts, s.context_lens, s.num_decodes, s.block_size, s.window or 0)
    return *sequences, scale, softcap, sinks, distance_bias


@dataclasses.dataclass(frozen=True)
class RotaryStep:
    """The arguments of `rotary_attention` up to the sequences; the slots of the step's own tokens are NaN at first."""

    qkv: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    keys: KVRows
    values: KVRows
    slots: torch.Tensor

    def copied(self, dtype: torch.dtype | None = None) -> list[KVRows]:
        """With caches of their own, the floating ones as `dtype` if given."""
        copies = [getattr(self, field.name).clone() for field in dataclasses.fields(self)]
        return [x.to(dtype) if dtype and x.dtype in TOLERANCE else x for x in copies]


def make_rotary_step(case: Case, dtype: torch.dtype = torch.float32, rotary_dim: int | None = None) -> RotaryStep:
    """rotary_dim: all elements of a head if it is None."""
    s, generator = case.sequences, torch.Generator().manual_seed(1)
    slots = []
    for row, context in enumerate(s.context_lens.tolist()):
        num_tokens = int(s.query_starts[row + 1] - s.query_starts[row])
        positions = torch.arange(context - num_tokens, context)
        slots.append(s.block_tables[row, positions // s.block_size] * s.block_size + positions % s.block_size)
    num_tokens, num_heads, head_dim = case.q.shape
    for cache in (case.keys, case.values):
        store_rows(torch.full((num_tokens, num_kv_heads(cache), head_dim), torch.nan), cache, torch.cat(slots))
    heads = num_heads + 2 * num_kv_heads(case.keys)
    qkv = torch.randn(num_tokens, heads * head_dim, generator=generator).to(dtype)
    num_angles = (head_dim if rotary_dim is None else rotary_dim) // 2
    angles = torch.randn(num_tokens, 1, num_angles, generator=generator) * 3
    cos, sin = angles.cos(), angles.sin()
    cos, sin = torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)
    return RotaryStep(qkv, cos, sin, case.keys, case.values, torch.cat(slots))
