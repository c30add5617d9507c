"""Attention over the paged KV cache: by compiled operators where there are any, else in plain PyTorch.

They do everything from the rotation of queries and keys on, for decoding sequences and prompts in one call.

The part that depends only on the step (which slots a sequence reads, which of them count) is an `AttentionPlan`, built
once per step and window and used by every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from multilora_engine.batch.forward_batch import ForwardBatch
from multilora_engine.models.rotary import Rotation
from multilora_kernels import (
    AttentionOptions,
    PagedSequences,
    has_paged_attention,
    kv_head_dim,
    load_rows,
    rotary_attention,
    store_rows,
)


@dataclass(frozen=True)
class DecodePlan:
    """The decoding sequences, one query each, padded to the longest of their contexts.

    slots: [num_decodes * max_keys] int64; padding repeats a sequence's own newest
        slot, which is never a foreign or an unwritten one.
    mask: [num_decodes, 1, 1, max_keys], added to the scores: 0 or -inf.
    """

    slots: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True)
class PrefillPlan:
    """One sequence with several queries, the rows start .. end - 1 of the batch.

    slots: [num_keys] int64, None when the keys are exactly those of this step (then the mask is plain causal).
    mask: [num_queries, num_keys], added to the scores: 0 or -inf; None for plain causal.
    """

    start: int
    end: int
    slots: torch.Tensor | None
    mask: torch.Tensor | None


@dataclass(frozen=True)
class AttentionPlan:
    """The sequences of this step for every layer of one window size: all sequences, for one call that attends to all of
    them; or all decodes and each prefill, for a call of plain PyTorch each.
    """

    slot_mapping: torch.Tensor
    all_sequences: PagedSequences | None = None
    decode: DecodePlan | None = None
    prefills: Sequence[PrefillPlan] = ()


def attention_plan(batch: ForwardBatch, window: int | None, dtype: torch.dtype) -> AttentionPlan:
    """`window`: how many newest keys a query attends to, its own included; None is all. `dtype` is the queries'."""
    if has_paged_attention(batch.block_tables.device):
        sequences = PagedSequences(
            batch.block_tables, batch.query_starts, batch.num_keys, batch.num_decodes, batch.block_size, window
        )
        return AttentionPlan(batch.slot_mapping, all_sequences=sequences)
    decode = _decode_plan(batch, window, dtype) if batch.num_decodes else None
    return AttentionPlan(batch.slot_mapping, decode=decode, prefills=_prefill_plans(batch, window, dtype))


def attend(
    qkv: torch.Tensor,
    rotation: Rotation,
    cached_keys: torch.Tensor,
    cached_values: torch.Tensor,
    plan: AttentionPlan,
    options: AttentionOptions,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Turn queries and keys, store keys and values, then softmax(scale q K^T + mask) V over each sequence's own keys.

    qkv: [num_tokens, (num_heads + 2 num_kv_heads) * head_dim], this step's queries, keys and values side by side.
    cached_keys, cached_values: this layer's cache, as `KVCache` has it, written in place. Keys and values are attended
        to as they are stored, this step's own, too: whether a prompt comes in chunks changes none of them.
    options: the scale, and a soft cap or sinks of the layer. out: takes the result, and is returned.
    Returns [num_tokens, num_heads * head_dim].
    """
    if plan.all_sequences is not None:
        cos, sin = rotation.cos, rotation.sin
        return rotary_attention(
            qkv,
            cos,
            sin,
            cached_keys,
            cached_values,
            plan.slot_mapping,
            plan.all_sequences,
            options,
            rotation.is_interleaved,
            out,
        )
    q, k, v = _rotated(qkv, rotation, cached_keys.shape[1], kv_head_dim(cached_keys))
    k = _stored(k, cached_keys, plan.slot_mapping)
    v = _stored(v, cached_values, plan.slot_mapping)
    outputs = [_prefill(q, k, v, cached_keys, cached_values, prefill, options) for prefill in plan.prefills]
    if plan.decode is not None:
        outputs.insert(0, _decode(q, cached_keys, cached_values, plan.decode, options))
    result = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
    return result if out is None else out.copy_(result)


def _stored(x: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """x: [num_tokens, num_kv_heads, head_dim]. Returns it as the cache has it."""
    store_rows(x, cache, slots)
    return x if x.dtype == cache.dtype else load_rows(cache, slots, x.dtype)


def _rotated(
    qkv: torch.Tensor, rotation: Rotation, num_kv_heads: int, head_dim: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k, v: [num_tokens, heads, head_dim], q and k turned to their positions."""
    heads = qkv.view(qkv.shape[0], -1, head_dim)
    num_heads = heads.shape[1] - 2 * num_kv_heads
    qk, v = heads.split_with_sizes((num_heads + num_kv_heads, num_kv_heads), dim=1)
    q, k = rotation.apply(qk).split_with_sizes((num_heads, num_kv_heads), dim=1)
    return q, k, v


def _decode(
    q: torch.Tensor,
    cached_keys: torch.Tensor,
    cached_values: torch.Tensor,
    plan: DecodePlan,
    options: AttentionOptions,
) -> torch.Tensor:
    num_decodes = len(plan.mask)
    keys, values = (
        load_rows(cache, plan.slots, q.dtype).unflatten(0, (num_decodes, -1)).transpose(1, 2)
        for cache in (cached_keys, cached_values)
    )
    return _attention(q[:num_decodes, :, None], keys, values, plan.mask, options).reshape(num_decodes, -1)


def _prefill(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cached_keys: torch.Tensor,
    cached_values: torch.Tensor,
    plan: PrefillPlan,
    options: AttentionOptions,
) -> torch.Tensor:
    rows = slice(plan.start, plan.end)
    keys = k[rows] if plan.slots is None else load_rows(cached_keys, plan.slots, q.dtype)
    values = v[rows] if plan.slots is None else load_rows(cached_values, plan.slots, q.dtype)
    queries, keys, values = (x.transpose(0, 1)[None] for x in (q[rows], keys, values))
    out = _attention(queries, keys, values, plan.mask, options)
    return out[0].transpose(0, 1).reshape(plan.end - plan.start, -1)


def _attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, options: AttentionOptions
) -> torch.Tensor:
    """softmax(scale q K^T + mask) V. q: [batch, heads, queries, head_dim]; mask None is plain causal."""
    if options.softcap or options.sinks is not None:
        return _attention_with_options(q, k, v, mask, options)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, scale=options.scale, enable_gqa=True
    )


def _attention_with_options(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None, options: AttentionOptions
) -> torch.Tensor:
    """`_attention` with a soft cap or sinks, which PyTorch's lacks; scores in float32."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scale = q.shape[-1] ** -0.5 if options.scale is None else options.scale
    scores = (q @ k.mT).float() * scale
    if options.softcap:
        scores = options.softcap * (scores / options.softcap).tanh()
    if mask is None:
        mask = _additive_mask(torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril(), scores.dtype)
    scores = scores + mask
    if options.sinks is not None:
        sinks = options.sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(dim=-1)[..., : k.shape[-2]]
    return weights.to(v.dtype) @ v


def _decode_plan(batch: ForwardBatch, window: int | None, dtype: torch.dtype) -> DecodePlan:
    n, device = batch.num_decodes, batch.block_tables.device
    context = batch.context_lens[:n]
    num_keys = [length if window is None else min(length, window) for length in context]
    end = torch.tensor(context, device=device)[:, None]
    start = end - torch.tensor(num_keys, device=device)[:, None]
    positions = start + torch.arange(max(num_keys), device=device)
    is_key = positions < end
    # Padding reads the newest token, which is this sequence's own and written in this step: a masked key must still be
    # finite, and unwritten slots need not be.
    slots = _slots(batch.block_tables[:n], torch.minimum(positions, end - 1), batch.block_size)
    return DecodePlan(slots=slots.reshape(-1), mask=_additive_mask(is_key, dtype)[:, None, None])


def _prefill_plans(batch: ForwardBatch, window: int | None, dtype: torch.dtype) -> list[PrefillPlan]:
    plans, start = [], batch.num_decodes
    for i in range(batch.num_decodes, len(batch.query_lens)):
        plans.append(_prefill_plan(batch, i, start, window, dtype))
        start += batch.query_lens[i]
    return plans


def _prefill_plan(batch: ForwardBatch, i: int, start: int, window: int | None, dtype: torch.dtype) -> PrefillPlan:
    num_queries, context = batch.query_lens[i], batch.context_lens[i]
    end = start + num_queries
    if num_queries == context and (window is None or context <= window):
        return PrefillPlan(start, end, slots=None, mask=None)
    device = batch.block_tables.device
    first_key = 0 if window is None else max(0, context - num_queries - window + 1)
    keys = torch.arange(first_key, context, device=device)
    queries = torch.arange(context - num_queries, context, device=device)[:, None]
    is_seen = keys <= queries
    if window is not None:
        is_seen &= keys > queries - window
    slots = _slots(batch.block_tables[i], keys, batch.block_size)
    return PrefillPlan(start, end, slots, _additive_mask(is_seen, dtype))


def _slots(block_tables: torch.Tensor, positions: torch.Tensor, block_size: int) -> torch.Tensor:
    """The KV cache's slots of the given positions. block_tables: [..., max blocks]; positions: [..., n], all valid."""
    return block_tables.gather(-1, positions // block_size) * block_size + positions % block_size


def _additive_mask(is_seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """0 where a key is seen, -inf elsewhere. A boolean mask would be converted to this again in every layer."""
    return torch.zeros_like(is_seen, dtype=dtype).masked_fill_(~is_seen, float("-inf"))
