"""`sample_tokens` in OpenAI Triton: one launch for a batch of greedy and drawn rows; see `multilora_kernels.sampling`.

A program chooses the token of one row, so it sees nothing of the others. Where the cut of top_k or top_p lies is found
by quartering the range of weights, as integers with the bits of the float32 weights, which have the same order. As soon
as one block holds all tokens that are in question, they are copied there: each further look at them takes one load, and
not one for each block of the vocabulary. Sums of weights are integers, so reductions may add in any order. Compiled
without the fusion of products and sums: those that the definition has are written out, and others would round
differently.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from multilora_kernels import sampling_rule
from multilora_kernels.cuda.integers import cdiv, next_power_of_2
from multilora_kernels.cuda.tiles import IS_INTERPRETED

_LARGEST_BLOCK = 2048
_NUM_PARAMETERS = tl.constexpr(len(sampling_rule.SamplingRule._fields))
_HALF_UNITS = tl.constexpr(17)
"""A weight in units has 35 bits: so many lower ones, which fit an int32 even as a sum over a block, and the others."""

_HALF = tl.constexpr(float(1 << 17))
_UNIT = tl.constexpr(sampling_rule.WEIGHT_UNIT)
_ROUND_TO_UNIT = tl.constexpr(1.5 * 2**23 * sampling_rule.WEIGHT_UNIT)
_ROUNDED = tl.constexpr(2**23 * sampling_rule.WEIGHT_UNIT)
_FIRST, _SECOND = tl.constexpr(2.0**-14), tl.constexpr(2.0**-7)
"""Few tokens have most of the weight, mostly."""

_SHIFT = tl.constexpr(12582912.0 + 127.0)
_ONE_BITS = tl.constexpr(0x3F800000)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY_KEY = tl.constexpr(0x7F800000)
_LEAST_KEY = tl.constexpr(-0x80000000)


def sample_tokens(logits: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
    """The tokens of all rows, int64 [rows].

    logits: float32 [rows, vocab], contiguous along a row. parameters: float64 [rows, 5], the `SamplingRule`s, on the
    same device. RuntimeError for others.
    """
    sampling_rule.check_arguments(logits, parameters)
    rows, vocab = logits.shape
    token_ids = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        constants = sample_constants(vocab)
        size = cdiv(vocab, constants["BLOCK"]) * constants["BLOCK"]
        weights = torch.empty(rows, size + 2 * constants["BLOCK"], dtype=torch.float32, device=logits.device)
        sample_kernel[(rows,)](logits, parameters, weights, token_ids, vocab, size, logits.stride(0), **constants)
    return token_ids


def sample_constants(vocab: int) -> dict[str, Any]:
    """The constants of the kernel."""
    block = min(_LARGEST_BLOCK, max(128, next_power_of_2(vocab)))
    num_blocks = next_power_of_2(cdiv(vocab, block))
    return {"BLOCK": block, "NUM_BLOCKS": num_blocks, "num_warps": max(1, block // 128), "enable_fp_fusion": False}


@triton.jit
def sample_kernel(
    logits_ptr,
    parameters_ptr,
    weights_ptr,
    token_ptr,
    vocab,
    size,
    stride_lm,
    BLOCK: tl.constexpr,
    NUM_BLOCKS: tl.constexpr,
):
    """One program: one row.

    weights_ptr: to work in, a row's `size` weights, `vocab` rounded up to blocks; then a block of the weights of the
    tokens in question, and a block of their ids.
    """
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_lm
    weights_ptr += row * (size + 2 * BLOCK)
    parameters_ptr += row * _NUM_PARAMETERS
    key, token = _largest(logits_ptr, vocab, BLOCK)
    top_k = tl.load(parameters_ptr + 1).to(tl.int64)
    is_finite = (key < _INFINITY_KEY) & (key > -1 - _INFINITY_KEY)
    if is_finite & (top_k != 1):
        largest = tl.where(key < 0, key ^ _MAGNITUDE, key).to(tl.float32, bitcast=True)
        factor = (1.0 / tl.load(parameters_ptr)).to(tl.float32)
        sums = _weigh(logits_ptr, weights_ptr, largest, factor, vocab, size, BLOCK)
        top_p, min_p = tl.load(parameters_ptr + 2), tl.load(parameters_ptr + 3)
        cut, last = _cut(weights_ptr, sums, top_k, top_p, min_p, vocab, size, BLOCK)
        token = _draw(weights_ptr, cut, last, tl.load(parameters_ptr + 4), size, BLOCK, NUM_BLOCKS)
    tl.store(token_ptr + row, token.to(tl.int64))


@triton.jit
def _largest(logits_ptr, vocab, BLOCK: tl.constexpr):
    """A key of the largest logit, and the first token that has it.

    A key is an int32 in the order of the numbers: -1 - _INFINITY_KEY for minus infinity, above _INFINITY_KEY for NaN.
    """
    best = tl.full((BLOCK,), _LEAST_KEY, tl.int32)
    first = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, vocab, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + columns, mask=columns < vocab, other=0.0)
        bits = x.to(tl.int32, bitcast=True)
        key = tl.where(bits < 0, bits ^ _MAGNITUDE, bits)
        key = tl.where(x == 0, 0, tl.where(x != x, _MAGNITUDE, key))
        is_better = (key > best) & (columns < vocab)
        best = tl.where(is_better, key, best)
        first = tl.where(is_better, columns, first)
    largest = tl.max(best, 0)
    return largest, tl.min(tl.where(best == largest, first, _MAGNITUDE), 0)


@triton.jit
def _weigh(logits_ptr, weights_ptr, largest, factor, vocab, size, BLOCK: tl.constexpr):
    """Write the weights. Their units and number: all, and those from 2^-14 and 2^-7 on."""
    zeros = tl.zeros((BLOCK // 4,), tl.int32)
    upper0, lower0, count0 = zeros, zeros, zeros
    upper1, lower1, count1 = zeros, zeros, zeros
    upper2, lower2, count2 = zeros, zeros, zeros
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + columns, mask=columns < vocab, other=-float("inf"))
        weight = _exponential((x - largest) * factor)
        rounded = (weight + _ROUND_TO_UNIT) - _ROUND_TO_UNIT
        weight = tl.where(weight < _ROUNDED, rounded, weight)
        tl.store(weights_ptr + columns, weight)
        upper, lower = _halves(weight)
        upper0, lower0, count0 = _add(upper0, lower0, count0, upper, lower, weight >= _UNIT)
        upper1, lower1, count1 = _add(upper1, lower1, count1, upper, lower, weight >= _FIRST)
        upper2, lower2, count2 = _add(upper2, lower2, count2, upper, lower, weight >= _SECOND)
    # The weights are read by other threads than those that wrote them.
    tl.debug_barrier()
    units = _whole(upper0, lower0), _whole(upper1, lower1), _whole(upper2, lower2)
    return units[0], units[1], units[2], _number(count0), _number(count1), _number(count2)


@triton.jit
def _exponential(x):
    """e^x for x <= 0 by the steps of cpu/exponential.h, bit for bit."""
    x = tl.maximum(x, -100.0)
    shifted = _fma(x, 1.44269504, _SHIFT)
    n = shifted - _SHIFT
    r = _fma(n, -0.693359375, x)
    r = _fma(n, 2.12194440e-4, r)
    p = tl.full(x.shape, 1.9875691500e-4, tl.float32)
    p = _fma(p, r, 1.3981999507e-3)
    p = _fma(p, r, 8.3334519073e-3)
    p = _fma(p, r, 4.1665795894e-2)
    p = _fma(p, r, 1.6666665459e-1)
    p = _fma(p, r, 5.0000001201e-1)
    power = (shifted.to(tl.int32, bitcast=True) << 23).to(tl.float32, bitcast=True)
    return tl.where(x < -87.0, 0.0, _fma(p, r * r, r + 1.0) * power)


@triton.jit
def _fma(a, b, c):
    """a * b + c, rounded once. The interpreter would round twice, so there it is computed in float64."""
    b = tl.full(a.shape, b, tl.float32) if isinstance(b, tl.constexpr) else b
    c = tl.full(a.shape, c, tl.float32) if isinstance(c, tl.constexpr) else c
    if IS_INTERPRETED:
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    return tl.fma(a, b, c)


@triton.jit
def _cut(weights_ptr, sums, top_k, top_p, min_p, vocab, size, BLOCK: tl.constexpr):
    """The last token that is left: the bits of its weight, and of those with this weight its id, or vocab for all.

    sums: as of `_weigh`.
    """
    cut = tl.maximum(min_p.to(tl.float32), _UNIT).to(tl.int32, bitcast=True)
    # Triton takes a number that is 1 for a constant, which has no method `to`.
    last = tl.full((), vocab, tl.int64)
    has_top_k = (top_k > 0) & (top_k < vocab)
    if has_top_k | (top_p < 1.0):
        enough_units = sums[0]
        if has_top_k & (top_k < sums[3]):
            place, place_token, enough_units = _first_place(weights_ptr, sums, top_k, vocab, size, True, BLOCK)
            cut, last = _earlier(cut, last, place, place_token)
        if top_p < 1.0:
            wanted = tl.ceil(top_p * enough_units.to(tl.float64)).to(tl.int64)
            wanted = tl.minimum(tl.maximum(wanted, 1), enough_units)
            place, place_token, _ = _first_place(weights_ptr, sums, wanted, vocab, size, False, BLOCK)
            cut, last = _earlier(cut, last, place, place_token)
    return cut, last


@triton.jit
def _earlier(cut, last, place, place_token):
    """Of two cuts, the one that leaves less."""
    is_earlier = (place > cut) | ((place == cut) & (place_token < last))
    return tl.where(is_earlier, place, cut), tl.where(is_earlier, place_token, last)


@triton.jit
def _first_place(weights_ptr, sums, wanted, vocab, size, BY_COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """The first cut up to which there are `wanted` tokens or units, and the units up to it.

    sums: as of `_weigh`; all tokens are enough.
    """
    # Those from `low` on are enough, those from `high` on are not.
    low, high = _bits(_UNIT), tl.full((), _ONE_BITS + 1, tl.int32)
    low_units, low_count, high_units, high_count = sums[0], sums[3], sums[0] * 0, sums[3] * 0
    first, second, third = _bits(_FIRST), _bits(_SECOND), _bits(_SECOND)
    units1, units2, units3 = sums[1], sums[2], sums[2]
    count1, count2, count3 = sums[4], sums[5], sums[5]
    # The weights that are looked at, and the units of those that are ahead of them, which no sum and not `wanted` has.
    begin, length, ahead_units = size * 0, size * 1, sums[0] * 0
    is_narrow = low_count <= 1
    while is_narrow == 0:
        for i in tl.static_range(3):
            bits = first if i == 0 else (second if i == 1 else third)
            of_units = units1 if i == 0 else (units2 if i == 1 else units3)
            of_count = count1 if i == 0 else (count2 if i == 1 else count3)
            is_enough = (of_count if BY_COUNT else of_units) >= wanted
            is_low, is_high = is_enough & (bits > low), (is_enough == 0) & (bits < high)
            low, high = tl.where(is_low, bits, low), tl.where(is_high, bits, high)
            low_units, low_count = tl.where(is_low, of_units, low_units), tl.where(is_low, of_count, low_count)
            high_units, high_count = tl.where(is_high, of_units, high_units), tl.where(is_high, of_count, high_count)
        is_narrow = (low_count - high_count <= 1) | (high - low <= 1)
        if is_narrow == 0:
            if (length > BLOCK) & (low_count - high_count <= BLOCK):
                _copy_between(weights_ptr, low, high, size, BLOCK)
                begin, length, ahead_units = size * 1, size * 0 + BLOCK, high_units
                wanted -= high_count if BY_COUNT else high_units
                low_units, low_count = low_units - high_units, low_count - high_count
                high_units, high_count = high_units * 0, high_count * 0
            first, second, third = low + (high - low) // 4, low + (high - low) // 2, low + (high - low) * 3 // 4
            units1, count1, units2, count2, units3, count3 = _from_each(
                weights_ptr + begin, first, second, third, length, BLOCK
            )
    last, up_to = tl.full((), vocab, tl.int64), low_units
    if low_count - high_count > 1:
        # All have the weight `low`: the first of them by id are enough.
        each = _units(low.to(tl.float32, bitcast=True))
        ties = wanted - high_count if BY_COUNT else (wanted - high_units + each - 1) // each
        if ties < low_count - high_count:
            last = _tie(weights_ptr + begin, low, ties, length, BLOCK)
            if begin > 0:
                last = tl.load(weights_ptr + begin + BLOCK + last).to(tl.int32, bitcast=True).to(tl.int64)
            up_to = high_units + ties * each
    return low, last, up_to + ahead_units


@triton.jit
def _copy_between(weights_ptr, low, high, size, BLOCK: tl.constexpr):
    """Copy the weights from `low` on and below `high`, a block at most, and their ids, after all weights, by id."""
    tl.store(weights_ptr + size + tl.arange(0, BLOCK), tl.zeros((BLOCK,), tl.float32))
    tl.debug_barrier()
    before = size * 0
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        weight = tl.load(weights_ptr + columns)
        bits = weight.to(tl.int32, bitcast=True)
        is_between = (bits >= low) & (bits < high)
        places = size + before + tl.cumsum(is_between.to(tl.int32), 0) - 1
        tl.store(weights_ptr + places, weight, mask=is_between)
        tl.store(weights_ptr + places + BLOCK, columns.to(tl.float32, bitcast=True), mask=is_between)
        before += tl.sum(is_between.to(tl.int32), 0)
    tl.debug_barrier()


@triton.jit
def _bits(weight: tl.constexpr):
    return tl.full((), weight, tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _from_each(weights_ptr, first, second, third, size, BLOCK: tl.constexpr):
    """The units and the number of tokens from each of three weights on, which are given by their bits."""
    zeros = tl.zeros((BLOCK // 4,), tl.int32)
    upper1, lower1, count1 = zeros, zeros, zeros
    upper2, lower2, count2 = zeros, zeros, zeros
    upper3, lower3, count3 = zeros, zeros, zeros
    for start in range(0, size, BLOCK):
        weight = tl.load(weights_ptr + start + tl.arange(0, BLOCK))
        bits = weight.to(tl.int32, bitcast=True)
        upper, lower = _halves(weight)
        upper1, lower1, count1 = _add(upper1, lower1, count1, upper, lower, bits >= first)
        upper2, lower2, count2 = _add(upper2, lower2, count2, upper, lower, bits >= second)
        upper3, lower3, count3 = _add(upper3, lower3, count3, upper, lower, bits >= third)
    units1, units2, units3 = _whole(upper1, lower1), _whole(upper2, lower2), _whole(upper3, lower3)
    return units1, _number(count1), units2, _number(count2), units3, _number(count3)


@triton.jit
def _add(uppers, lowers, count, upper, lower, is_left):
    return (
        uppers + _of_four(tl.where(is_left, upper, 0)),
        lowers + _of_four(tl.where(is_left, lower, 0)),
        count + _of_four(is_left.to(tl.int32)),
    )


@triton.jit
def _of_four(x):
    """The sum of each four neighbours, which one thread has: so it needs a quarter of the registers for sums."""
    return tl.sum(tl.reshape(x, (x.shape[0] // 4, 4)), 1)


@triton.jit
def _number(count):
    return tl.sum(count, 0)


@triton.jit
def _halves(weight):
    """A weight in units: the upper bits and the lower _HALF_UNITS, each int32."""
    scaled = weight * _HALF
    upper = scaled.to(tl.int32)
    return upper, ((scaled - upper.to(tl.float32)) * _HALF).to(tl.int32)


@triton.jit
def _units(weight):
    upper, lower = _halves(weight)
    return (upper.to(tl.int64) << _HALF_UNITS) + lower


@triton.jit
def _whole(upper, lower):
    return (tl.sum(upper.to(tl.int64), 0) << _HALF_UNITS) + tl.sum(lower.to(tl.int64), 0)


@triton.jit
def _tie(weights_ptr, tied, place, size, BLOCK: tl.constexpr):
    """The token that is the `place`-th by id, from 1 on, of those whose weights have the bits `tied`."""
    before = place * 0
    token = place * 0
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        is_tied = tl.load(weights_ptr + columns).to(tl.int32, bitcast=True) == tied
        places = before + tl.cumsum(is_tied.to(tl.int32), 0)
        token += tl.sum(tl.where(is_tied & (places == place), columns, 0), 0)
        before += tl.sum(is_tied.to(tl.int32), 0)
    return token


@triton.jit
def _draw(weights_ptr, cut, last, uniform, size, BLOCK: tl.constexpr, NUM_BLOCKS: tl.constexpr):
    """The token where the weights that the cut leaves, added by id, exceed `uniform` of their sum."""
    blocks = tl.arange(0, NUM_BLOCKS)
    of_blocks = tl.zeros((NUM_BLOCKS,), tl.int64)
    for start in range(0, size, BLOCK):
        upper, lower = _left(weights_ptr, start, cut, last, BLOCK)
        of_blocks = tl.where(blocks == start // BLOCK, _whole(upper, lower), of_blocks)
    whole = tl.sum(of_blocks, 0)
    wanted = tl.minimum((uniform * whole.to(tl.float64)).to(tl.int64), whole - 1)
    block = tl.sum((tl.cumsum(of_blocks, 0) <= wanted).to(tl.int32), 0)
    wanted -= tl.sum(tl.where(blocks < block, of_blocks, 0), 0)
    upper, lower = _left(weights_ptr, block * BLOCK, cut, last, BLOCK)
    sums = tl.cumsum((upper.to(tl.int64) << _HALF_UNITS) + lower, 0)
    return block * BLOCK + tl.sum((sums <= wanted).to(tl.int32), 0)


@triton.jit
def _left(weights_ptr, start, cut, last, BLOCK: tl.constexpr):
    """The weights of a block in units, as `_halves`, zero for the tokens after the cut."""
    columns = start + tl.arange(0, BLOCK)
    weight = tl.load(weights_ptr + columns)
    bits = weight.to(tl.int32, bitcast=True)
    return _halves(tl.where((bits > cut) | ((bits == cut) & (columns <= last)), weight, 0.0))
