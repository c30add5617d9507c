"""Linears of weights in codes of 4 or 8 bits on a GPU, in OpenAI Triton: see `multilora_kernels.quantized`.

Few rows: codes are multiplied as they lie. A code is exact in the 16-bit dtypes, and so is a 4-bit code less its zero.
So codes go to the tensor cores beside the activations, and the float32 sum of a group of inputs takes the group's
scale. Neither weights nor activations are rounded. The product is y^T = W x^T: the instructions take their left side
from registers, where codes become floats, and their right side from memory. The codes lie in the order in which a
thread reads them (`code_order`). The inputs are cut into splits, enough to keep the memory busy. The last program of a
tile to end adds the splits, in their order. The cuts depend on the class of the number of rows, and so do the last
bits, as with cuBLAS.

Many rows: the weight is written once in the dtype of the activations, and cuBLAS multiplies.

Weights of FP8 take the same way. `torch._scaled_mm` would round the activations to FP8, too.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from multilora_kernels.code_order import tile_inputs
from multilora_kernels.cuda.code_values import int4_values, int8_values
from multilora_kernels.cuda.dependent_launch import launches_dependently
from multilora_kernels.cuda.integers import cdiv
from multilora_kernels.cuda.tiles import exact_dot, float8_values
from multilora_kernels.streams import MAX_COUNTERS, counters

MAX_ROWS = 128
"""More rows take so long to multiply that writing the weight as floats first pays."""

MAX_WIDE_ROWS = 64
"""The same of float32, three products each."""

ROW_BOUNDS = (16, 32, 64)
"""Numbers of rows up to which a product is cut in its own way; up to `MAX_ROWS` there is one more."""

_SIZES: dict[int, dict[str, Any]] = {
    16: {"BLOCK_M": 16, "BLOCK_N": 64, "num_warps": 4, "num_stages": 4},
    32: {"BLOCK_M": 32, "BLOCK_N": 64, "num_warps": 4, "num_stages": 4},
    64: {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3},
    MAX_ROWS: {"BLOCK_M": 64, "BLOCK_N": 64, "num_warps": 4, "num_stages": 3},
}
"""Of a program, by the most rows that it serves: the best of some on an H200, over the linears of 8B."""

_WIDE = {"BLOCK_M": 16, "BLOCK_N": 32, "num_warps": 4, "num_stages": 3}
"""Where x is float32."""

_FEW_ROWS, _FEW_PROGRAMS, _MORE_PROGRAMS, _LEAST_TILES = 32, 528, 264, 2
"""Programs that a product is split into: four for each processor of an H200 up to `_FEW_ROWS` rows, two beyond; tiles
of inputs of the smallest split."""


class Codes(NamedTuple):
    """W[o, i] = scales[o, i // group_size] * (codes[o, i] - zeros[o, i // group_size]), one output after another.

    codes: int8 [outputs, codes of a row], or uint8 as float8_e4m3fn's bytes, or uint8 as the bytes of two codes of 4
    bits in two's complement; as `code_order` has them where there are tiles, else in the order of the inputs. scales:
    floating [outputs, groups]. zeros: int8 [outputs, groups] or None. bits: of a code.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_size: int
    in_features: int
    bits: int

    @property
    def kind(self) -> str:
        """int4, int8 or fp8."""
        if self.bits == 4:
            return "int4"
        return "int8" if self.codes.dtype == torch.int8 else "fp8"

    @property
    def tile(self) -> int:
        """As `tile_inputs`."""
        return tile_inputs(self.group_size, self.in_features)


class UnpackedWeight(Protocol):
    """A `multilora_kernels.quantized.QuantizedWeight` that is not packed."""

    @property
    def plain(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int, int, int]: ...


def quantized_linear(x: torch.Tensor, weight: UnpackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """See `multilora_kernels.quantized.quantized_linear`."""
    return linear_of_codes(x, Codes(*weight.plain), bias)


def linear_of_codes(x: torch.Tensor, weight: Codes, bias: torch.Tensor | None) -> torch.Tensor:
    """x W^T + bias, [rows, outputs] in the dtype of x: float32, bfloat16 or float16."""
    is_wide = x.dtype == torch.float32
    if len(x) <= (MAX_WIDE_ROWS if is_wide else MAX_ROWS) and weight.tile:
        return _multiply(x, weight, bias, plan_of(weight, len(x), is_wide))
    return F.linear(x, dequantized(weight, x.dtype), bias)


class Plan(NamedTuple):
    """How the kernel cuts a product. tiles_per_split: of inputs, that one program multiplies."""

    constants: dict[str, Any]
    num_splits: int
    tiles_per_split: int


def plan_of(weight: Codes, num_rows: int, is_wide: bool) -> Plan:
    """The plan for a number of rows. is_wide: x is float32. The weight has tiles."""
    most_rows = MAX_WIDE_ROWS if is_wide else next(most for most in _SIZES if num_rows <= most)
    return _plan(weight.kind, len(weight.codes), weight.in_features, weight.group_size, most_rows, is_wide)


@functools.cache
def _plan(kind: str, num_outputs: int, in_features: int, group_size: int, most_rows: int, is_wide: bool) -> Plan:
    constants = multiply_constants(kind, in_features, group_size, most_rows, is_wide)
    num_tiles = cdiv(in_features, constants["BLOCK_K"])
    num_blocks = cdiv(num_outputs, constants["BLOCK_N"]) * cdiv(most_rows, constants["BLOCK_M"])
    num_programs = _FEW_PROGRAMS if most_rows <= _FEW_ROWS else _MORE_PROGRAMS
    most_splits = max(1, min(num_programs // num_blocks, num_tiles // _LEAST_TILES))
    num_splits = 1 << (most_splits.bit_length() - 1)
    tiles_per_split = cdiv(num_tiles, num_splits)
    return Plan(constants, cdiv(num_tiles, tiles_per_split), tiles_per_split)


def _multiply(x: torch.Tensor, weight: Codes, bias: torch.Tensor | None, plan: Plan) -> torch.Tensor:
    """`linear_of_codes` of few rows, by a plan."""
    assert x.stride(1) == 1
    # The kernel computes the places of x in 32 bits: registers are short.
    assert x.stride(0) * MAX_ROWS < 1 << 31
    num_rows, num_outputs = len(x), len(weight.codes)
    constants, num_splits, tiles_per_split = plan
    y = x.new_empty(num_rows, num_outputs)
    sums = x.new_empty(num_splits, num_rows, num_outputs, dtype=torch.float32) if num_splits > 1 else None
    grid = (cdiv(num_outputs, constants["BLOCK_N"]), cdiv(num_rows, constants["BLOCK_M"]), num_splits)
    assert grid[0] * grid[1] <= MAX_COUNTERS
    multiply_codes_kernel[grid](
        x,
        weight.codes,
        weight.scales,
        weight.zeros,
        bias,
        y,
        sums,
        counters(x.device),
        num_rows,
        num_outputs,
        weight.in_features,
        tiles_per_split,
        x.stride(0),
        weight.codes.stride(0),
        weight.scales.stride(0),
        **constants,
        LAUNCHES_DEPENDENTS=launches_dependently(x.device),
    )
    return y


def dequantized(weight: Codes, dtype: torch.dtype) -> torch.Tensor:
    """The weight as floats, [outputs, in_features]: computed in float32, and rounded once."""
    num_outputs = len(weight.codes)
    result = torch.empty(num_outputs, weight.in_features, dtype=dtype, device=weight.codes.device)
    constants = dequantize_constants(weight.kind, weight.tile)
    grid = (
        cdiv(num_outputs, constants["BLOCK_N"]),
        cdiv(weight.in_features, constants["BLOCK_K"]),
    )
    dequantize_kernel[grid](
        weight.codes,
        weight.scales,
        weight.zeros,
        result,
        num_outputs,
        weight.in_features,
        weight.group_size,
        weight.codes.stride(0),
        weight.scales.stride(0),
        **constants,
    )
    return result


def multiply_constants(kind: str, in_features: int, group_size: int, most_rows: int, is_wide: bool) -> dict[str, Any]:
    """The constants of the kernel.

    most_rows: one of `ROW_BOUNDS`, or `MAX_ROWS`. is_wide: x is float32.
    """
    tile = tile_inputs(group_size, in_features)
    sizes = _WIDE if is_wide else _SIZES[most_rows]
    if sizes["BLOCK_M"] == 64 and kind == "fp8":
        # By itself the assembler stops at 168 registers on sm_120, and spills two.
        sizes = sizes | {"maxnreg": 255}
    return sizes | {
        "KIND": kind,
        "GROUP_TILES": 0 if group_size >= in_features else group_size // tile,
        "HAS_REST": in_features % tile > 0,
        "BLOCK_K": tile,
    }


def dequantize_constants(kind: str, tile: int) -> dict[str, Any]:
    """The constants of the kernel. tile: as `tile_inputs`."""
    sizes = {"BLOCK_N": 32, "BLOCK_K": tile} if tile else {"BLOCK_N": 16, "BLOCK_K": 256}
    return sizes | {"KIND": kind, "HAS_TILES": tile > 0, "num_warps": 4}


@triton.jit(do_not_specialize=["num_rows", "tiles_per_split"])
def multiply_codes_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    y_ptr,
    sums_ptr,
    arrival_ptr,
    num_rows,
    num_outputs,
    in_features,
    tiles_per_split,
    stride_xm,
    stride_cn,
    stride_sn,
    KIND: tl.constexpr,
    GROUP_TILES: tl.constexpr,
    HAS_REST: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    LAUNCHES_DEPENDENTS: tl.constexpr,
):
    """One program: BLOCK_M rows, BLOCK_N outputs, one split of the inputs. y is computed as its transpose.

    GROUP_TILES: tiles of inputs in a group, 0 where all of them are one. HAS_REST: the last tile is not whole.
    """
    if LAUNCHES_DEPENDENTS:
        gdc_launch_dependents()
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    output_mask, row_mask = outputs < num_outputs, rows < num_rows
    dtype: tl.constexpr = tl.float16 if x_ptr.dtype.element_ty == tl.float16 else tl.bfloat16
    x_places = rows * stride_xm
    code_rows = codes_ptr + outputs.to(tl.int64) * stride_cn
    group_rows = outputs.to(tl.int64) * stride_sn
    num_tiles = tl.cdiv(in_features, BLOCK_K)
    first = tl.program_id(2) * tiles_per_split
    end = tl.minimum(first + tiles_per_split, num_tiles)
    group = first // GROUP_TILES if GROUP_TILES > 0 else 0
    scales = tl.load(scales_ptr + group_rows + group, mask=output_mask, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for tile in range(first, end):
        if GROUP_TILES > 0:
            # A tile ahead: a scale takes as long as the codes, which the compiler requests ahead itself.
            group = tl.minimum(tile + 1, num_tiles - 1) // GROUP_TILES
            next_scales = tl.load(scales_ptr + group_rows + group, mask=output_mask, other=0.0).to(tl.float32)
        inputs = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        mask = row_mask[None, :] & (inputs < in_features)[:, None] if HAS_REST else row_mask[None, :]
        x = tl.load(x_ptr + (x_places[None, :] + inputs[:, None]), mask=mask, other=0.0)
        values = tile_values(code_rows, tile, output_mask, dtype, KIND, BLOCK_N, BLOCK_K)
        if zeros_ptr is not None:
            group = tile // GROUP_TILES if GROUP_TILES > 0 else 0
            zeros = tl.load(zeros_ptr + group_rows + group, mask=output_mask, other=0)
        if zeros_ptr is not None and KIND == "int4":
            values -= zeros.to(values.dtype)[:, None]
        product = products_of_codes(values, x)
        if zeros_ptr is not None and KIND == "int8":
            # A code of 8 bits less its zero has one bit more than a bfloat16 has.
            product -= zeros.to(tl.float32)[:, None] * sums_of_inputs(x, values)
        if GROUP_TILES > 0:
            total += product * scales[:, None]
            # Loops that hand on what they got themselves are not pipelined.
            scales = next_scales
        else:
            total += product
    if GROUP_TILES == 0:
        total *= scales[:, None]
    places = rows[None, :] * num_outputs + outputs[:, None]
    mask = row_mask[None, :] & output_mask[:, None]
    is_last = True
    if sums_ptr is not None:
        num_splits = tl.num_programs(2)
        of_split = num_rows.to(tl.int64) * num_outputs
        tl.store(sums_ptr + tl.program_id(2) * of_split + places, total, mask=mask)
        # What all threads have written is there for the program that sees the last number.
        tl.debug_barrier()
        arrival = arrival_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        is_last = tl.atomic_add(arrival, 1, sem="acq_rel") == num_splits - 1
        if is_last:
            tl.store(arrival, 0)
            total = tl.zeros_like(total)
            for split in range(num_splits):
                # Past the first cache, which knows nothing of what other programs write.
                total += tl.load(sums_ptr + split * of_split + places, mask=mask, other=0.0, cache_modifier=".cg")
    if is_last:
        if bias_ptr is not None:
            total += tl.load(bias_ptr + outputs, mask=output_mask, other=0.0).to(tl.float32)[:, None]
        tl.store(y_ptr + places, total.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def tile_values(
    code_rows,
    tile,
    output_mask,
    DTYPE: tl.constexpr,
    KIND: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The codes of a tile, in the order of the inputs, [BLOCK_N, BLOCK_K]."""
    WIDTH: tl.constexpr = BLOCK_K // 2 if KIND == "int4" else BLOCK_K
    places = tile * WIDTH + tl.arange(0, WIDTH)
    codes = tl.load(code_rows[:, None] + places[None, :], mask=output_mask[:, None], other=0)
    if KIND == "int4":
        lower, upper = int4_values(codes, DTYPE)
        stored = tl.reshape(tl.join(lower, upper), (BLOCK_N, 4, BLOCK_K // 16, 2, 2))
        values = tl.permute(stored, (0, 2, 4, 1, 3))
    else:
        stored = tl.reshape(int8_values(codes, DTYPE), (BLOCK_N, 4, BLOCK_K // 16, 2, 2))
        values = tl.permute(stored, (0, 2, 3, 1, 4))
    return tl.reshape(values, (BLOCK_N, BLOCK_K))


@triton.jit
def products_of_codes(values, x):
    """values x in float32. values: [outputs, inputs], exact in 16 bits; x: [inputs, rows]."""
    if x.dtype == tl.float32:
        turned = tl.zeros((x.shape[1], values.shape[0]), dtype=tl.float32)
        product = tl.trans(exact_dot(tl.trans(x), tl.trans(values), turned))
    else:
        total = tl.zeros((values.shape[0], x.shape[1]), dtype=tl.float32)
        product = exact_dot(values, x.to(values.dtype), total)
    return product


@triton.jit
def sums_of_inputs(x, values):
    """The sum of the inputs of each row, float32, to be broadcast over the product of the two."""
    ones = tl.full(values.shape, 1.0, values.dtype)
    # Numbers of 16 bits lie where tensor cores read them, and these idle: threads would have to fetch them all.
    return tl.sum(x, 0)[None, :] if x.dtype == tl.float32 else products_of_codes(ones, x)


@triton.jit
def dequantize_kernel(
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    weight_ptr,
    num_outputs,
    in_features,
    group_size,
    stride_cn,
    stride_sn,
    KIND: tl.constexpr,
    HAS_TILES: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: BLOCK_K inputs of BLOCK_N outputs. HAS_TILES: they are a tile."""
    places = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    outputs = places[:, None]
    start = tl.program_id(1) * BLOCK_K
    inputs = (start + tl.arange(0, BLOCK_K))[None, :]
    output_mask = places < num_outputs
    mask = output_mask[:, None] & (inputs < in_features)
    if HAS_TILES:
        group = places * stride_sn + start // group_size
        code_rows = codes_ptr + places * stride_cn
        codes = tile_values(code_rows, tl.program_id(1), output_mask, tl.bfloat16, KIND, BLOCK_N, BLOCK_K)
        values = codes.to(tl.float32)
        if zeros_ptr is not None:
            values -= tl.load(zeros_ptr + group, mask=output_mask, other=0).to(tl.float32)[:, None]
        values *= tl.load(scales_ptr + group, mask=output_mask, other=0.0).to(tl.float32)[:, None]
    else:
        if KIND == "int4":
            pairs = tl.load(codes_ptr + outputs * stride_cn + inputs // 2, mask=mask, other=0)
            values = tl.where(inputs % 2 == 0, _lower(pairs), _upper(pairs)).to(tl.float32)
        else:
            codes = tl.load(codes_ptr + outputs * stride_cn + inputs, mask=mask, other=0)
            values = (float8_values(codes) if KIND == "fp8" else codes).to(tl.float32)
        group = outputs * stride_sn + inputs // group_size
        if zeros_ptr is not None:
            values -= tl.load(zeros_ptr + group, mask=mask, other=0).to(tl.float32)
        values *= tl.load(scales_ptr + group, mask=mask, other=0.0).to(tl.float32)
    tl.store(weight_ptr + outputs * in_features + inputs, values.to(weight_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _lower(pairs):
    """The codes of even inputs, int8: the lower four bits in two's complement."""
    return (((pairs & 15) ^ 8).to(tl.int32) - 8).to(tl.int8)


@triton.jit
def _upper(pairs):
    """The codes of odd inputs."""
    return (((pairs >> 4) ^ 8).to(tl.int32) - 8).to(tl.int8)
