"""The products of a tile, which the kernels share."""

from __future__ import annotations

import triton
import triton.language as tl

# The interpreter keeps bfloat16 values as their bits and would multiply those, or take integers for them.
IS_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)

LOG2_OF_E = tl.constexpr(1.4426950408889634)


@triton.jit
def exact_dot(left, right, total):
    """total + left @ right in float32, whatever the two dtypes, with no or next to no rounding of the inputs.

    left: activations or v. right: weights, or codes of 8 bits, which are exact in 16-bit dtypes: int8, or uint8 as the
    bytes of float8_e4m3fn. Equal 16-bit dtypes go to the tensor cores as they are. A float32 left beside bfloat16
    weights goes as a sum of three bfloat16 tiles, which holds all of its 24 bits. Anything else goes as three TF32
    products: 16-bit weights are exact in TF32.
    """
    if right.dtype.primitive_bitwidth == 8:
        if right.dtype == tl.uint8:
            right = float8_values(right)
        if IS_INTERPRETED:
            right = right.to(tl.float32)
        elif left.dtype == tl.float16:
            right = right.to(tl.float16)
        else:
            right = right.to(tl.bfloat16)
    if left.dtype == right.dtype and left.dtype != tl.float32:
        total = _dot_16_bit(left, right, total)
    elif left.dtype == tl.float32 and right.dtype == tl.bfloat16:
        high = left.to(tl.bfloat16)
        rest = left - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        total = _dot_16_bit(low, right, total)
        total = _dot_16_bit(middle, right, total)
        total = _dot_16_bit(high, right, total)
    else:
        total = tl.dot(left.to(tl.float32), right.to(tl.float32), total, input_precision="tf32x3")
    return total


@triton.jit
def float8_values(codes):
    """The values of float8_e4m3fn's bytes, float16; without the conversion that chips before sm_89 lack.

    Moved to where a float16 has them, the bits are a number that is less by a power of two: the biases are 7 and 15.
    """
    bits = codes.to(tl.int16)
    return ((bits & 0x7F) << 7 | (bits & 0x80) << 8).to(tl.float16, bitcast=True) * 256.0


@triton.jit
def _dot_16_bit(left, right, total):
    if IS_INTERPRETED:
        return tl.dot(left.to(tl.float32), right.to(tl.float32), total)
    return tl.dot(left, right, total)
