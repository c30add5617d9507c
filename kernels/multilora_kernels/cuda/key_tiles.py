"""A tile of keys and values in a sum of softmax attention that is kept as it grows (arXiv:2112.05682): the work of
`decode_attention` and `prompt_attention` alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

from multilora_kernels.cuda.kv_rows import load_row_scales
from multilora_kernels.cuda.tanh import tanh
from multilora_kernels.cuda.tiles import IS_INTERPRETED, LOG2_OF_E, exact_dot


@triton.jit
def add_keys(
    total,
    top,
    weight_sum,
    q,
    keys_ptr,
    values_ptr,
    table,
    positions,
    is_key,
    newest,
    window,
    distance_bias_ptr,
    bias_rows,
    num_distances,
    queries,
    dims,
    kv_head,
    stride_ks,
    stride_kh,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr,
):
    """The sums of queries with a tile of keys more: sum of weighted values, largest score, and sum of weights.

    top: of scores in base 2, as the hardware has exponentials. q: [queries, dims]. table: pointer to the sequence's
    first block. positions, is_key: [keys]; only keys are loaded. newest: position of the last key that each query sees,
    None if all see all of the tile. distance_bias_ptr: of `AttentionOptions.distance_bias`, or None; a query's row of
    it begins at element bias_rows. queries: their positions. WEIGHT_DTYPE: that weights are rounded to; float32 keeps
    them exact.
    """
    block = tl.load(table + positions // BLOCK_SIZE, mask=is_key, other=0)
    slots = block * BLOCK_SIZE + positions % BLOCK_SIZE
    places = slots * stride_ks + kv_head * stride_kh
    k_mask = (dims < HEAD_DIM)[:, None] & is_key[None, :]
    k = tl.load(keys_ptr + places[None, :] + dims[:, None], mask=k_mask, other=0.0)
    scores = exact_dot(q, k, tl.zeros((q.shape[0], k.shape[1]), dtype=tl.float32))
    if keys_ptr.dtype.element_ty == tl.int8:
        scores *= load_row_scales(keys_ptr + places, is_key, HEAD_DIM)[None, :]
    if HAS_SOFTCAP:
        scores = tanh(scores * (scale / softcap)) * (softcap * LOG2_OF_E)
    else:
        scores *= scale * LOG2_OF_E
    if distance_bias_ptr is not None:
        distances = tl.minimum(tl.maximum(queries[:, None] - positions[None, :], 0), num_distances - 1)
        scores += tl.load(distance_bias_ptr + bias_rows[:, None] + distances) * LOG2_OF_E
    if newest is None:
        scores = tl.where(is_key[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        base = new_top
    else:
        is_seen = positions[None, :] <= newest[:, None]
        is_seen &= (window == 0) | (positions[None, :] > newest[:, None] - window)
        scores = tl.where(is_seen & is_key[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1))
        # A row may have seen no key so far.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(top - base)
    weight_sum = weight_sum * shrink + tl.sum(weights, 1)
    # Masked, because zero times the content of an unwritten slot may not be zero.
    v_mask = is_key[:, None] & (dims < HEAD_DIM)[None, :]
    v = tl.load(values_ptr + places[:, None] + dims[None, :], mask=v_mask, other=0.0)
    if values_ptr.dtype.element_ty == tl.int8:
        weights *= load_row_scales(values_ptr + places, is_key, HEAD_DIM)[None, :]
    return _add_weighted(weights, v, total * shrink[:, None], WEIGHT_DTYPE), new_top, weight_sum


@triton.jit
def _add_weighted(weights, values, total, DTYPE: tl.constexpr):
    """total + weights @ values. Beside float16 values two tiles of float16 hold 22 bits of weights up to one."""
    if tl.float32 != DTYPE:
        weights = weights.to(DTYPE)
        if IS_INTERPRETED:
            return tl.dot(weights.to(tl.float32), values.to(tl.float32), total)
        return tl.dot(weights, values.to(DTYPE), total)
    if values.dtype == tl.float16:
        high = weights.to(tl.float16)
        low = (weights - high.to(tl.float32)).to(tl.float16)
        return exact_dot(high, values, exact_dot(low, values, total))
    return exact_dot(weights, values, total)
