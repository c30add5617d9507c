"""Every operator in plain PyTorch under the same name and signature: for tests, and for machines without a compiler.

Each operator loops over chunks and slices, with one small matrix product for each. It reads the work list on the host,
which waits for the device. So on a GPU it is slow, and it cannot be part of a CUDA graph. With float64 activations,
all arithmetic is float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from multilora_kernels.adapter_codes import CODE_BITS, dequantize_a, dequantize_b
from multilora_kernels.kv_rows import KVRows, kv_head_dim, load_rows, num_kv_heads, store_rows
from multilora_kernels.penalties_reference import forbid_tokens, penalise_tokens
from multilora_kernels.sampling_reference import sample_tokens
from multilora_kernels.segments import ROWS, LoRASegments, reference_segments
from multilora_kernels.step_inputs_reference import fill_step_inputs
from multilora_kernels.tables import ExpertLoRA, LoRATables

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "expert_mlp",
    "fill_step_inputs",
    "forbid_tokens",
    "gelu",
    "gelu_tanh",
    "gelu_tanh_mul",
    "lora_apply",
    "lora_expand",
    "lora_expand_activated",
    "lora_shrink",
    "magnitude_of",
    "matrix_a",
    "matrix_b",
    "paged_attention",
    "penalise_tokens",
    "rotary_attention",
    "rotate_and_store",
    "route",
    "sample_tokens",
    "silu_mul",
]


def lora_shrink(
    x: torch.Tensor, tables: LoRATables, first_slice: int, num_slices: int, segments: LoRASegments
) -> torch.Tensor:
    """v[:, s, t, :r].sum(0) = x[t] @ A(l(t), first_slice + s)^T; see `shrink.lora_shrink`."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    v = x.new_zeros(1, num_slices, x.shape[0], tables.max_rank, dtype=dtype)
    for tokens, lora_index in _chunks(segments):
        rows = x[tokens].to(dtype)
        for s in range(num_slices):
            rank = int(tables.rank[lora_index, first_slice + s])
            if rank:
                a = matrix_a(tables, lora_index, first_slice + s, x.shape[1])
                v[0, s, tokens, :rank] = rows @ a.to(dtype).T
    return v


def lora_expand(
    v: torch.Tensor,
    y: torch.Tensor,
    tables: LoRATables,
    first_slice: int,
    slice_sizes: Sequence[int],
    segments: LoRASegments,
) -> None:
    """y[t, slice s] += v[:, s, t, :r].sum(0) @ B(l(t), first_slice + s)^T; see `expand.lora_expand`."""
    for tokens, lora_index in _chunks(segments):
        start = 0
        for s, size in enumerate(slice_sizes):
            column = first_slice + s
            rank = int(tables.rank[lora_index, column])
            if rank:
                b = matrix_b(tables, lora_index, column, size).to(v.dtype)
                out = y[tokens, start : start + size].to(v.dtype) + v[:, s, tokens, :rank].sum(0) @ b.T
                magnitude = magnitude_of(tables, lora_index, column, size)
                if magnitude is not None:
                    out *= magnitude.to(v.dtype)
                y[tokens, start : start + size] = out.to(y.dtype)
            start += size


def lora_expand_activated(
    v: torch.Tensor,
    gate_up: torch.Tensor,
    tables: LoRATables,
    first_slice: int,
    size: int,
    segments: LoRASegments,
    activation: str,
) -> torch.Tensor:
    """`lora_expand`, then `silu_mul` or `gelu_tanh_mul`; see `expand.lora_expand_activated`."""
    lora_expand(v, gate_up, tables, first_slice, (size, size), segments)
    return {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}[activation](gate_up)


def lora_apply(
    x: torch.Tensor,
    y: torch.Tensor,
    tables: LoRATables,
    first_slice: int,
    slice_sizes: Sequence[int],
    segments: LoRASegments,
) -> None:
    """`lora_shrink`, then `lora_expand`; see `apply.lora_apply`."""
    lora_expand(
        lora_shrink(x, tables, first_slice, len(slice_sizes), segments), y, tables, first_slice, slice_sizes, segments
    )


class _Weight(Protocol):
    def rows(self, first: int, count: int) -> torch.Tensor: ...


class _Experts(Protocol):
    @property
    def shape(self) -> torch.Size: ...

    def expert(self, index: int) -> _Weight: ...


def route(logits: torch.Tensor, top_k: int, is_normalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """See `experts.route`."""
    # A stable sort leaves equal logits in the order of the experts.
    expert_ids = logits.sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = logits.softmax(dim=-1).gather(1, expert_ids)
    if is_normalised:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return expert_ids.int(), weights


def expert_mlp(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: _Experts,
    down: _Experts,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    clamp_limit: float,
    lora: ExpertLoRA | None,
) -> torch.Tensor:
    """One expert after the other; see `experts.expert_mlp`."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    outputs = x.new_zeros(*expert_ids.shape, down.shape[1], dtype=dtype)
    inner_columns, outer_columns = ((lora.gate_column, lora.up_column), (lora.down_column,)) if lora else ((), ())
    for expert in expert_ids.unique().tolist():
        tokens, places = (expert_ids == expert).nonzero(as_tuple=True)
        inner = _expert_linear(x[tokens].to(dtype), gate_up, expert, gate_up_bias, tokens, inner_columns, lora)
        activated = _expert_activation(inner, clamp_limit)
        outputs[tokens, places] = _expert_linear(activated, down, expert, down_bias, tokens, outer_columns, lora)
    y = x.new_zeros(len(x), down.shape[1], dtype=dtype)
    for place in range(expert_ids.shape[1]):
        y += weights[:, place, None] * outputs[:, place]
    return y.to(x.dtype)


def _expert_linear(
    rows: torch.Tensor,
    experts: _Experts,
    expert: int,
    bias: torch.Tensor | None,
    tokens: torch.Tensor,
    columns: Sequence[int],
    lora: ExpertLoRA | None,
) -> torch.Tensor:
    """The linear of one expert, with the adapters of its tokens. columns: of its slices, which are equally wide."""
    out_features = experts.shape[1]
    y = rows @ experts.expert(expert).rows(0, out_features).to(rows.dtype).T
    if lora is not None:
        segments = reference_segments(lora.mapping[tokens], lora.tables.rank.shape[0], len(tokens), len(tokens))
        size = out_features // len(columns)
        for part, column in zip(y.split(size, dim=1), columns, strict=True):
            lora_apply(rows, part, lora.tables, column + expert, (size,), segments)
    return y if bias is None else y + bias[expert].to(y.dtype)


def _expert_activation(gate_up: torch.Tensor, clamp_limit: float) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if not clamp_limit:
        return F.silu(gate) * up
    gate, up = gate.clamp(max=clamp_limit), up.clamp(-clamp_limit, clamp_limit)
    return (up + 1) * gate * (1.702 * gate).sigmoid()


def paged_attention(
    q: torch.Tensor,
    keys: KVRows,
    values: KVRows,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    num_decodes: int,
    block_size: int,
    window: int,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
    distance_bias: torch.Tensor | None,
) -> torch.Tensor:
    """The decodes together, then one sequence after the other.

    The arguments are the fields of `attention.PagedSequences` (window 0 is none) and of `attention.AttentionOptions`.
    """
    lens, starts = context_lens.tolist(), query_starts.tolist()
    num_sequences = min(len(block_tables), len(starts) - 1)
    pieces = [(0, num_decodes), *((i, i + 1) for i in range(num_decodes, num_sequences))]
    out = []
    for first, last in pieces if num_decodes else pieces[1:]:
        queries = q[starts[first] : starts[last]].unflatten(0, (last - first, -1))
        slots, is_seen, distances = _seen_keys(
            block_tables[first:last],
            context_lens[first:last],
            max(lens[first:last]),
            queries.shape[1],
            block_size,
            window,
        )
        bias = None
        if distance_bias is not None:
            bias = distance_bias[:, distances.clamp(0, distance_bias.shape[1] - 1)].transpose(0, 1)
        out.append(_attended(queries, keys, values, slots, is_seen, scale, softcap, sinks, bias))
    return torch.cat(out)


def _seen_keys(
    block_tables: torch.Tensor, ends: torch.Tensor, longest: int, num_queries: int, block_size: int, window: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The keys of sequences that have `num_queries` queries each, their last tokens.

    ends: [num_sequences], keys of each sequence; longest: the most of them. Returns the slots [num_sequences, num_keys]
    of the newest keys, oldest first; and for each query [num_sequences, num_queries, num_keys], which of the keys it
    sees, and how many positions before it they lie. A short sequence has its newest slot in place of the keys before
    its first: a slot that is not seen must hold finite numbers, too.
    """
    num_keys = min(longest, window + num_queries - 1) if window else longest
    device = ends.device
    positions = ends[:, None] - torch.arange(num_keys, 0, -1, device=device)
    queries = (ends[:, None] - torch.arange(num_queries, 0, -1, device=device))[:, :, None]
    distances = queries - positions[:, None]
    is_seen = (positions >= 0)[:, None] & (distances >= 0)
    if window:
        is_seen &= distances < window
    positions = torch.where(positions >= 0, positions, ends[:, None] - 1)
    slots = block_tables.gather(1, positions // block_size) * block_size + positions % block_size
    return slots, is_seen, distances


def _attended(
    q: torch.Tensor,
    keys: KVRows,
    values: KVRows,
    slots: torch.Tensor,
    is_seen: torch.Tensor,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """q: [num_sequences, num_queries, num_heads, head_dim]; bias: [num_sequences, num_heads, num_queries, num_keys].

    Returns [num_tokens, num_heads * head_dim].
    """
    dtype = torch.promote_types(q.dtype, torch.float32)
    k, v = (
        load_rows(cache, slots.flatten(), dtype).unflatten(0, slots.shape).transpose(1, 2) for cache in (keys, values)
    )
    queries, is_seen = q.to(dtype).transpose(1, 2), is_seen[:, None]
    if softcap or sinks is not None or bias is not None:
        heads = _attended_with_options(queries, k, v, is_seen, scale, softcap, sinks, bias)
    else:
        heads = F.scaled_dot_product_attention(queries, k, v, is_seen, scale=scale, enable_gqa=True)
    return heads.transpose(1, 2).flatten(2).flatten(0, 1).to(q.dtype)


def _attended_with_options(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_seen: torch.Tensor,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """PyTorch's own attention takes neither a soft cap nor sinks. A sink is one more key, whose value is zero."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
    scores = q @ k.mT * scale
    if softcap:
        scores = softcap * (scores / softcap).tanh()
    if bias is not None:
        scores = scores + bias.to(q.dtype)
    scores = scores.masked_fill(~is_seen, -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(q.dtype)[:, None, None].expand(*scores.shape[:-1], 1)), dim=-1)
    weights: torch.Tensor = scores.softmax(dim=-1)[..., : k.shape[2]]
    return weights @ v


def rotary_attention(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: KVRows,
    values: KVRows,
    slots: torch.Tensor,
    *fields: Any,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute `attention.rotary_attention`. fields: the fields of `paged_attention`, then is_interleaved."""
    *sequences_and_options, is_interleaved = fields
    q = rotate_and_store(qkv, cos, sin, keys, values, slots, is_interleaved)
    result = paged_attention(q, keys, values, *sequences_and_options)
    return result if out is None else out.copy_(result)


def rotate_and_store(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: KVRows,
    values: KVRows,
    slots: torch.Tensor,
    is_interleaved: bool,
) -> torch.Tensor:
    """The first step of `rotary_attention`. Returns the queries, [num_tokens, num_heads, head_dim]."""
    num_kv, head_dim = num_kv_heads(keys), kv_head_dim(keys)
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    qk, v = heads[:, :-num_kv], heads[:, -num_kv:]
    turned = torch.cat((_turned(qk[..., : cos.shape[-1]], cos, sin, is_interleaved), qk[..., cos.shape[-1] :]), dim=-1)
    store_rows(turned[:, -num_kv:], keys, slots)
    store_rows(v, values, slots)
    return turned[:, :-num_kv]


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, is_interleaved: bool) -> torch.Tensor:
    """The rotated heads, computed in float32 or float64 and rounded once."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    exact, cos, sin = x.to(dtype), cos.to(dtype), sin.to(dtype)
    others = exact.unflatten(-1, (-1, 2)).flip(-1).flatten(-2) if is_interleaved else exact.roll(x.shape[-1] // 2, -1)
    return torch.addcmul(exact * cos, others, sin).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `elementwise.add_rms_norm`."""
    total = x + update
    return F.rms_norm(total, weight.shape, weight, eps), total


def add_layer_norm(
    x: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `elementwise.add_layer_norm`."""
    total = x + update
    return F.layer_norm(total, weight.shape, weight, bias, eps), total


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `elementwise.silu_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `elementwise.gelu_tanh_mul`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu_tanh(gate).mul_(up)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """See `elementwise.gelu_tanh`."""
    return F.gelu(x, approximate="tanh")


def gelu(x: torch.Tensor) -> torch.Tensor:
    """See `elementwise.gelu`."""
    return F.gelu(x)


def _chunks(segments: LoRASegments) -> list[tuple[torch.Tensor, int]]:
    if segments.chunk_size == ROWS:
        rows = enumerate(segments.chunk_lora_index.tolist())
        return [(torch.tensor([row]), lora_index) for row, lora_index in rows if lora_index >= 0]
    starts, lengths = segments.chunk_start.tolist(), segments.chunk_length.tolist()
    return [
        (segments.permutation[start : start + length].long(), lora_index)
        for start, length, lora_index in zip(starts, lengths, segments.chunk_lora_index.tolist(), strict=True)
        if length
    ]


def matrix_a(tables: LoRATables, lora_index: int, column: int, in_features: int) -> torch.Tensor:
    """A of one slice of one adapter, [rank, in_features]. For codes: their values, in float32."""
    stored, rank = _from(tables, tables.a_offset, lora_index, column), int(tables.rank[lora_index, column])
    if stored.dtype in CODE_BITS:
        return dequantize_a(stored.view(torch.uint8), rank, in_features, stored.dtype)
    return stored[: rank * in_features].view(rank, in_features)


def matrix_b(tables: LoRATables, lora_index: int, column: int, out_features: int) -> torch.Tensor:
    """B of one slice of one adapter, [out_features, rank], read as in `matrix_a`."""
    stored, rank = _from(tables, tables.b_offset, lora_index, column), int(tables.rank[lora_index, column])
    if stored.dtype in CODE_BITS:
        return dequantize_b(stored.view(torch.uint8), out_features, rank, stored.dtype)
    return stored[: out_features * rank].view(out_features, rank)


def magnitude_of(tables: LoRATables, lora_index: int, column: int, out_features: int) -> torch.Tensor | None:
    """DoRA's magnitude of the slice, [out_features]; None if the slice has none."""
    if int(tables.magnitude_offset[lora_index, column]) < 0:
        return None
    stored = _from(tables, tables.magnitude_offset, lora_index, column)
    if stored.dtype in CODE_BITS:
        return stored[: 4 * out_features].clone().view(torch.float32)
    return stored[:out_features]


def _from(tables: LoRATables, offsets: torch.Tensor, lora_index: int, column: int) -> torch.Tensor:
    return tables.arena[int(offsets[lora_index, column]) :]
