"""A tile of keys and values in a sum of softmax attention that is kept as it grows (arXiv:2112.05682): the work of
`decode_attention` and `prompt_attention` alike.
"""

from __future__ import annotations

import triton
import triton.language as tl

from multilora_kernels.cuda.tanh import tanh
from multilora_kernels.cuda.tiles import IS_INTERPRETED, LOG2_OF_E, exact_dot, float8_values

RAISED = tl.constexpr(64.0)
"""Sums of values in codes are so many times too large beside weights of float16.

Weights take in the scales of values. Scales of values of order one are about 2^-6, and below 2^-14 a float16 loses
bits. Those of the largest float16, 65,504, are 516 for int8: so many times larger they are still below it.
"""


@triton.jit
def load_slots(table, position, end, first_key, BLOCK_N: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Where the tile of keys from `position` on, a multiple of BLOCK_N, lies: the slot of the first where a block holds
    whole tiles, else the slots of all. table: pointer to the sequence's first block. Keys before first_key and from end
    on are not looked up.

    Kernels load it a tile ahead, so that no load of keys waits for it.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        block = tl.load(table + position // BLOCK_SIZE, mask=position < end, other=0)
        slots = block * BLOCK_SIZE + position % BLOCK_SIZE
    else:
        positions = position + tl.arange(0, BLOCK_N)
        is_key = (positions >= first_key) & (positions < end)
        blocks = tl.load(table + positions // BLOCK_SIZE, mask=is_key, other=0)
        slots = blocks * BLOCK_SIZE + positions % BLOCK_SIZE
    return slots


@triton.jit
def no_values(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, TILES: tl.constexpr):
    """A sum of weighted values before the first: a tuple of TILES tiles [queries, BLOCK_D // TILES].

    Tile t has each TILES-th dim from t on. Values of codes have two tiles. Tensor cores take values transposed, and
    shared memory transposes elements of 16 bits and none of 8: two codes at a time are loaded as one, and come apart in
    registers.
    """
    tile = tl.zeros((BLOCK_M, BLOCK_D // TILES), dtype=tl.float32)
    return (tile,) if TILES == 1 else (tile, tile)


@triton.jit
def dims_of_tile(tile: tl.constexpr, BLOCK_D: tl.constexpr, TILES: tl.constexpr):
    """The dims of a tile of `no_values`."""
    return tl.arange(0, BLOCK_D // TILES) * TILES + tile


@triton.jit
def add_keys(
    totals,
    top,
    weight_sum,
    q,
    keys_ptr,
    values_ptr,
    key_scales_ptr,
    value_scales_ptr,
    slots,
    positions,
    is_key,
    newest,
    window,
    distance_bias_ptr,
    bias_rows,
    num_distances,
    queries,
    dims,
    stride_ks,
    scale,
    softcap,
    HAS_SOFTCAP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WEIGHT_DTYPE: tl.constexpr,
):
    """The sums of queries with a tile of keys more: sum of weighted values, largest score, and sum of weights.

    totals: tiles of `no_values`, see `RAISED`. top: of scores in base 2, as the hardware has exponentials. q: [queries,
    dims]. keys_ptr, values_ptr, and for codes key_scales_ptr, value_scales_ptr: of the head, in slot 0. slots: of
    `load_slots`. positions: [keys]. is_key: [keys], only keys are loaded; None if all are. newest: position of the last
    key that each query sees, None if all see all keys of the tile. distance_bias_ptr: of
    `AttentionOptions.distance_bias`, or None; a query's row of it begins at element bias_rows. queries: their
    positions. scale: positive. WEIGHT_DTYPE: that weights are rounded to; float32 keeps them exact.
    """
    if BLOCK_SIZE % BLOCK_N == 0:
        # One address and small numbers for the rest of the tile.
        keys_ptr += slots * stride_ks
        values_ptr += slots * stride_ks
        if key_scales_ptr is not None:
            key_scales_ptr += slots
            value_scales_ptr += slots
        rows = tl.arange(0, BLOCK_N)
    else:
        rows = slots
    places = rows * stride_ks
    # Masked, because zero times the content of an unwritten slot may not be zero.
    is_dim = None if q.shape[1] == HEAD_DIM else dims < HEAD_DIM
    k = _load_tile(keys_ptr + places[None, :] + dims[:, None], is_dim, is_key, 1)
    scores = exact_dot(q, k, tl.zeros((q.shape[0], BLOCK_N), dtype=tl.float32))
    if key_scales_ptr is not None:
        scores *= _load_scales(key_scales_ptr + rows, is_key)[None, :]
    # Scores are scaled in the exponent, by one instruction that is spelt out: with masks and without, a token's bits
    # are the same.
    factor = scale * LOG2_OF_E
    if HAS_SOFTCAP:
        scores = tanh(scores * (scale / softcap)) * (softcap * LOG2_OF_E)
        factor = 1.0
    if distance_bias_ptr is not None:
        distances = tl.minimum(tl.maximum(queries[:, None] - positions[None, :], 0), num_distances - 1)
        scores = scores * factor + tl.load(distance_bias_ptr + bias_rows[:, None] + distances) * LOG2_OF_E
        factor = 1.0
    if newest is None:
        if is_key is not None:
            scores = tl.where(is_key[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * factor)
        base = new_top
    else:
        is_seen = positions[None, :] <= newest[:, None]
        is_seen &= (window == 0) | (positions[None, :] > newest[:, None] - window)
        scores = tl.where(is_seen & is_key[None, :], scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * factor)
        # A row may have seen no key so far.
        base = tl.where(new_top == float("-inf"), 0.0, new_top)
    weights = tl.exp2(tl.fma(scores, factor, -base[:, None]))
    shrink = tl.exp2(top - base)
    weight_sum = weight_sum * shrink + tl.sum(weights, 1)
    shrink = shrink[:, None]
    # The compiler takes what follows a return, so both branches end with one.
    if value_scales_ptr is None:
        v = _load_tile(values_ptr + places[:, None] + dims[None, :], is_dim, is_key, 0)
        return (_add_weighted(weights, v, totals[0] * shrink, WEIGHT_DTYPE),), new_top, weight_sum
    else:
        scales = _load_scales(value_scales_ptr + rows, is_key)
        if tl.float16 == WEIGHT_DTYPE:
            scales *= RAISED
        weights *= scales[None, :]
        pairs = tl.arange(0, q.shape[1] // 2)
        is_pair = None if q.shape[1] == HEAD_DIM else pairs * 2 < HEAD_DIM
        ptrs = (values_ptr + places[:, None]).to(tl.pointer_type(tl.int16))
        codes = _load_tile(ptrs + pairs[None, :], is_pair, is_key, 0)
        dtype: tl.constexpr = values_ptr.dtype.element_ty
        even = _add_weighted(weights, codes.to(dtype), totals[0] * shrink, WEIGHT_DTYPE)
        odd = _add_weighted(weights, (codes >> 8).to(dtype), totals[1] * shrink, WEIGHT_DTYPE)
        return (even, odd), new_top, weight_sum


@triton.jit
def _load_tile(ptrs, is_dim, is_key, KEY_AXIS: tl.constexpr):
    """Zeros where a mask is not set; one that is None is set everywhere."""
    if is_dim is None and is_key is None:
        tile = tl.load(ptrs)
    elif is_key is None:
        tile = tl.load(ptrs, mask=tl.expand_dims(is_dim, KEY_AXIS), other=0.0)
    elif is_dim is None:
        tile = tl.load(ptrs, mask=tl.expand_dims(is_key, 1 - KEY_AXIS), other=0.0)
    else:
        mask = tl.expand_dims(is_dim, KEY_AXIS) & tl.expand_dims(is_key, 1 - KEY_AXIS)
        tile = tl.load(ptrs, mask=mask, other=0.0)
    return tile


@triton.jit
def _load_scales(ptrs, is_key):
    return tl.load(ptrs) if is_key is None else tl.load(ptrs, mask=is_key, other=0.0)


@triton.jit
def _add_weighted(weights, values, total, DTYPE: tl.constexpr):
    """total + weights @ values. Beside float16 values two tiles of float16 hold 22 bits of weights up to one."""
    if tl.float32 != DTYPE:
        if values.dtype == tl.uint8:
            values = float8_values(values)
        weights = weights.to(DTYPE)
        if IS_INTERPRETED:
            return tl.dot(weights.to(tl.float32), values.to(tl.float32), total)
        return tl.dot(weights, values.to(DTYPE), total)
    if values.dtype == tl.float16:
        high = weights.to(tl.float16)
        low = (weights - high.to(tl.float32)).to(tl.float16)
        return exact_dot(high, values, exact_dot(low, values, total))
    return exact_dot(weights, values, total)
