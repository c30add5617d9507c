"""Codes of 4 and 8 bits as the 16-bit floats that they mean, four at a time.

The compiler takes a dozen instructions for a code of 4 bits. Those here move the bits of four codes to where a float of
a known power of two has its last ones, and take that power away: two for a code, with which a product of codes took 113
us in place of 198 on an H200. FP8's bytes become bfloat16 alike (109 us in place of 157); for integers of 8 bits the
compiler's own instructions are as quick. All values are exact: bfloat16 has 8 significant bits, float16 has 11. The
trick is that of Kim et al., arXiv:2211.10017.

The interpreter knows no instructions of a GPU; there codes become float32, by plain arithmetic.
"""

from __future__ import annotations

import triton
import triton.language as tl

from multilora_kernels.cuda.tiles import IS_INTERPRETED, float8_values

_HALVES = """
    prmt.b32 $0, t, {high}, 0x5140;
    prmt.b32 $1, t, {high}, 0x5342;
    prmt.b32 $2, h, {high}, 0x5140;
    prmt.b32 $3, h, {high}, 0x5342;
"""
"""Byte t of four becomes the lower byte of a 16-bit float whose upper one is known: 128 + t, or 1024 + t."""

_INT4 = """{{
    .reg .b32 t, h, one, minus;
    mov.b32 one, {one};
    mov.b32 minus, {minus};
    lop3.b32 t, $4, 0x0F0F0F0F, 0x08080808, 0x6A;
    shr.u32 h, $4, 4;
    lop3.b32 h, h, 0x0F0F0F0F, 0x08080808, 0x6A;
    {halves}
    fma.rn.{type}x2 $0, $0, one, minus;
    fma.rn.{type}x2 $1, $1, one, minus;
    fma.rn.{type}x2 $2, $2, one, minus;
    fma.rn.{type}x2 $3, $3, one, minus;
}}"""
"""$4: pairs of codes in two's complement, so 8 more with the highest bit turned. minus: 128 + 8, or 1024 + 8."""

_BFLOAT16 = {"high": "0x43434343", "minus": "0xC308C308", "one": "0x3F803F80", "type": "bf16"}
_FLOAT16 = {"high": "0x64646464", "minus": "0xE408E408", "one": "0x3C003C00", "type": "f16"}
_INT4_AS_BFLOAT16 = tl.constexpr(_INT4.format(halves=_HALVES.format(**_BFLOAT16), **_BFLOAT16))
_INT4_AS_FLOAT16 = tl.constexpr(_INT4.format(halves=_HALVES.format(**_FLOAT16), **_FLOAT16))
_FP8_AS_BFLOAT16 = tl.constexpr("""{
    .reg .b32 a, sign, rest, power, none;
    mov.b32 power, 0x7B807B80;
    mov.b32 none, 0x80008000;
    prmt.b32 a, $2, 0, 0x1404;
    and.b32 sign, a, 0x80008000;
    and.b32 rest, a, 0x7F007F00;
    shr.u32 rest, rest, 4;
    or.b32 a, sign, rest;
    fma.rn.bf16x2 $0, a, power, none;
    prmt.b32 a, $2, 0, 0x3424;
    and.b32 sign, a, 0x80008000;
    and.b32 rest, a, 0x7F007F00;
    shr.u32 rest, rest, 4;
    or.b32 a, sign, rest;
    fma.rn.bf16x2 $1, a, power, none;
}""")
"""Moved to where a bfloat16 has them, the bits are a number that is less by 2**120: the biases are 7 and 127."""


@triton.jit
def int4_values(pairs, DTYPE: tl.constexpr):
    """Of bytes of two codes: (those of the lower bits, those of the upper bits). DTYPE: bfloat16 or float16."""
    if IS_INTERPRETED:
        lower = ((pairs & 15) ^ 8).to(tl.int32) - 8
        upper = ((pairs >> 4) ^ 8).to(tl.int32) - 8
        return lower.to(tl.float32), upper.to(tl.float32)
    if DTYPE.is_bf16():
        lower, upper = tl.inline_asm_elementwise(
            _INT4_AS_BFLOAT16, "=&r,=&r,=&r,=&r,r", [pairs], (tl.bfloat16, tl.bfloat16), True, 4
        )
    else:
        lower, upper = tl.inline_asm_elementwise(
            _INT4_AS_FLOAT16, "=&r,=&r,=&r,=&r,r", [pairs], (tl.float16, tl.float16), True, 4
        )
    return lower, upper


@triton.jit
def int8_values(codes, DTYPE: tl.constexpr):
    """Of int8, or of the bytes of float8_e4m3fn as uint8. DTYPE: bfloat16 or float16."""
    if codes.dtype == tl.uint8 and DTYPE.is_bf16() and not IS_INTERPRETED:
        values = tl.inline_asm_elementwise(_FP8_AS_BFLOAT16, "=&r,=&r,r", [codes], tl.bfloat16, True, 4)
    else:
        exact = float8_values(codes) if codes.dtype == tl.uint8 else codes
        values = exact.to(tl.float32) if IS_INTERPRETED else exact.to(DTYPE)
    return values
