"""Linears of weights in codes of 4 or 8 bits on a GPU, in OpenAI Triton: see `multilora_kernels.quantized`.

Few rows: codes are multiplied as they lie. A code is exact in the 16-bit dtypes, one of 4 bits less its zero too, so it
goes to the tensor cores beside the activations, and the float32 sum of a group of inputs takes the group's scale.
Neither weights nor activations are rounded. The inputs are cut into splits until there are programs enough to keep the
memory busy; the program that ends last of a tile adds them, in their order. How they are cut depends on the class of
the number of rows, and so do the last bits, as those of cuBLAS. Many rows: the weight is written once in the dtype of
the activations, for cuBLAS.

Weights of FP8 take the same way. `torch._scaled_mm` would round the activations to FP8, too.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from multilora_kernels.cuda.code_values import int4_values, int8_values
from multilora_kernels.cuda.integers import cdiv
from multilora_kernels.cuda.tiles import exact_dot, float8_values

MAX_ROWS = 128
"""More rows take so long to multiply that writing the weight as floats first pays."""

MAX_WIDE_ROWS = 64
"""The same of float32, three products each."""

ROW_BOUNDS = (16, 64)
"""Numbers of rows up to which a product is cut in its own way; up to `MAX_ROWS` there is one more."""

_LARGEST_BLOCK_K, _LEAST_BLOCK_K = 128, 32

_FEW = {"IS_TURNED": False, "BLOCK_M": 16, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 4}
_MORE = {"IS_TURNED": True, "BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 128, "num_warps": 4, "num_stages": 3}
_SIZES: dict[int, dict[str, Any]] = dict(zip((*ROW_BOUNDS, MAX_ROWS), (_FEW, _MORE, _MORE), strict=True))
"""Of a program, by the most rows that it serves: the best of some on an H200, over the linears of 8B."""

_WIDE = {"IS_TURNED": False, "BLOCK_M": 16, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3}
"""Where x is float32."""

_PROGRAMS, _LEAST_TILES = 264, 2
"""Programs that a product is split into, two for each processor of an H200; tiles of inputs of the smallest split."""

_MAX_TILES = 1 << 16
"""Of y, in one product."""


class Codes(NamedTuple):
    """W[o, i] = scales[o, i // group_size] * (codes[o, i] - zeros[o, i // group_size]), one output behind another.

    codes: int8 [outputs, in_features], or uint8 as float8_e4m3fn's bytes, or uint8 [outputs, bytes] with the code of an
    even input below that of the next, in two's complement. scales: floating [outputs, groups]. zeros: int8
    [outputs, groups] or None.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_size: int
    in_features: int

    @property
    def kind(self) -> str:
        """int4, int8 or fp8."""
        if self.codes.dtype == torch.int8:
            return "int8"
        return "fp8" if self.codes.shape[1] == self.in_features else "int4"


class UnpackedWeight(Protocol):
    """A `multilora_kernels.quantized.QuantizedWeight` that is not packed."""

    @property
    def plain(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int, int]: ...


def quantized_linear(x: torch.Tensor, weight: UnpackedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    """See `multilora_kernels.quantized.quantized_linear`."""
    return linear_of_codes(x, Codes(*weight.plain), bias)


def linear_of_codes(x: torch.Tensor, weight: Codes, bias: torch.Tensor | None) -> torch.Tensor:
    """x W^T + bias, [rows, outputs] in the dtype of x: float32, bfloat16 or float16."""
    most_rows = MAX_WIDE_ROWS if x.dtype == torch.float32 else MAX_ROWS
    if len(x) <= most_rows and _has_tiles(weight):
        return _multiply(x, weight, bias, plan_of(weight, len(x), x.dtype == torch.float32))
    return F.linear(x, dequantized(weight, x.dtype), bias)


def _has_tiles(weight: Codes) -> bool:
    """Whether no tile of the least inputs spans two groups."""
    return weight.scales.shape[1] == 1 or weight.group_size % _LEAST_BLOCK_K == 0


class Plan(NamedTuple):
    """How the kernel cuts a product. tiles_per_split: of inputs, that one program multiplies."""

    constants: dict[str, Any]
    num_splits: int
    tiles_per_split: int


def plan_of(weight: Codes, num_rows: int, is_wide: bool) -> Plan:
    """The plan for a number of rows. is_wide: x is float32."""
    most_rows = MAX_WIDE_ROWS if is_wide else next(most for most in (*ROW_BOUNDS, MAX_ROWS) if num_rows <= most)
    shape = (len(weight.codes), weight.in_features, _most_inputs(weight))
    return _plan(weight.kind, *shape, most_rows, is_wide, weight.scales.shape[1] > 1)


@functools.cache
def _plan(
    kind: str, num_outputs: int, in_features: int, most_inputs: int, most_rows: int, is_wide: bool, has_groups: bool
) -> Plan:
    constants = multiply_constants(kind, most_rows, most_inputs, is_wide, has_groups)
    num_tiles = cdiv(in_features, constants["BLOCK_K"])
    num_blocks = cdiv(num_outputs, constants["BLOCK_N"]) * cdiv(most_rows, constants["BLOCK_M"])
    most_splits = max(1, min(_PROGRAMS // num_blocks, num_tiles // _LEAST_TILES))
    num_splits = 1 << (most_splits.bit_length() - 1)
    tiles_per_split = cdiv(num_tiles, num_splits)
    return Plan(constants, cdiv(num_tiles, tiles_per_split), tiles_per_split)


def _most_inputs(weight: Codes) -> int:
    """Of a tile, none of which spans two groups."""
    if weight.scales.shape[1] == 1:
        return _LARGEST_BLOCK_K
    return min(_LARGEST_BLOCK_K, weight.group_size & -weight.group_size)


def _multiply(x: torch.Tensor, weight: Codes, bias: torch.Tensor | None, plan: Plan) -> torch.Tensor:
    """`linear_of_codes` of few rows, by a plan."""
    assert x.stride(1) == 1
    num_rows, num_outputs = len(x), len(weight.codes)
    constants, num_splits, tiles_per_split = plan
    y = x.new_empty(num_rows, num_outputs)
    sums = x.new_empty(num_splits, num_rows, num_outputs, dtype=torch.float32) if num_splits > 1 else None
    grid = (cdiv(num_outputs, constants["BLOCK_N"]), cdiv(num_rows, constants["BLOCK_M"]), num_splits)
    assert grid[0] * grid[1] <= _MAX_TILES
    multiply_codes_kernel[grid](
        x,
        weight.codes,
        weight.scales,
        weight.zeros,
        bias,
        y,
        sums,
        _arrivals(x.device),
        num_rows,
        num_outputs,
        weight.in_features,
        weight.group_size,
        tiles_per_split,
        x.stride(0),
        weight.codes.stride(0),
        weight.scales.stride(0),
        **constants,
    )
    return y


@functools.cache
def _arrivals(device: torch.device) -> torch.Tensor:
    """How many programs of a tile of y have ended: zeros before and behind each launch, as of `decode_attention`."""
    return torch.zeros(_MAX_TILES, dtype=torch.int32, device=device)


def dequantized(weight: Codes, dtype: torch.dtype) -> torch.Tensor:
    """The weight as floats, [outputs, in_features]: computed in float32, and rounded once."""
    num_outputs = len(weight.codes)
    result = torch.empty(num_outputs, weight.in_features, dtype=dtype, device=weight.codes.device)
    constants = dequantize_constants(weight.kind, _most_inputs(weight) if _has_tiles(weight) else 0)
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


def multiply_constants(kind: str, most_rows: int, most_inputs: int, is_wide: bool, has_groups: bool) -> dict[str, Any]:
    """The constants of the kernel.

    most_rows: one of `ROW_BOUNDS`, or `MAX_ROWS`. most_inputs: of a tile. is_wide: x is float32. has_groups: several in
    a row of codes.
    """
    sizes = _WIDE if is_wide else _SIZES[most_rows]
    if sizes is _FEW and kind == "int8":
        # By itself the assembler stops at 128 registers on sm_100, and spills two.
        sizes = sizes | {"maxnreg": 168}
    return sizes | {"KIND": kind, "HAS_GROUPS": has_groups, "BLOCK_K": min(most_inputs, sizes["BLOCK_K"])}


def dequantize_constants(kind: str, most_inputs: int) -> dict[str, Any]:
    """The constants of the kernel. most_inputs: of a tile within one group; 0 where groups are too short or odd."""
    sizes = {"BLOCK_N": 32, "BLOCK_K": most_inputs} if most_inputs else {"BLOCK_N": 16, "BLOCK_K": 256}
    return sizes | {"KIND": kind, "HAS_TILES": most_inputs > 0, "num_warps": 4}


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
    group_size,
    tiles_per_split,
    stride_xm,
    stride_cn,
    stride_sn,
    KIND: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    IS_TURNED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: BLOCK_M rows, BLOCK_N outputs, one split of the inputs.

    IS_TURNED: it computes the tile of y^T = W x^T. The instructions for many rows take their left side from registers,
    where codes become floats, and their right one from memory.
    """
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    output_mask, row_mask = outputs < num_outputs, rows < num_rows
    x_rows = x_ptr + rows.to(tl.int64) * stride_xm
    code_rows = codes_ptr + outputs.to(tl.int64) * stride_cn
    first = tl.program_id(2) * tiles_per_split * BLOCK_K
    end = tl.minimum(first + tiles_per_split * BLOCK_K, in_features)
    group_rows = outputs.to(tl.int64) * stride_sn
    last_group = (in_features - 1) // group_size
    scales = tl.load(scales_ptr + group_rows + first // group_size, mask=output_mask, other=0.0).to(tl.float32)
    zeros = _load_zeros(zeros_ptr, group_rows + first // group_size, output_mask)
    has_zeros: tl.constexpr = zeros_ptr is not None
    total = tl.zeros((BLOCK_N, BLOCK_M) if IS_TURNED else (BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(first, end, BLOCK_K):
        if HAS_GROUPS:
            # A tile ahead: a scale takes as long as the codes, which the compiler requests ahead itself.
            group = group_rows + tl.minimum((start + BLOCK_K) // group_size, last_group)
            next_scales = tl.load(scales_ptr + group, mask=output_mask, other=0.0).to(tl.float32)
            if zeros_ptr is not None:
                next_zeros = _load_zeros(zeros_ptr, group, output_mask)
        if IS_TURNED:
            product = _turned_product(
                x_rows, code_rows, zeros, start, in_features, stride_cn, row_mask, output_mask,
                KIND, has_zeros, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            total += product * scales[:, None]
        else:
            product = _product(
                x_rows, code_rows, zeros, start, in_features, stride_cn, row_mask, output_mask,
                KIND, has_zeros, BLOCK_M, BLOCK_N, BLOCK_K,
            )  # fmt: skip
            total += product * scales[None, :]
        if HAS_GROUPS:
            # Loops that hand on what they got themselves are not pipelined.
            scales = next_scales
            if zeros_ptr is not None:
                zeros = next_zeros
    if IS_TURNED:
        places = rows[None, :] * num_outputs + outputs[:, None]
        mask = row_mask[None, :] & output_mask[:, None]
    else:
        places = rows[:, None] * num_outputs + outputs[None, :]
        mask = row_mask[:, None] & output_mask[None, :]
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
            bias = tl.load(bias_ptr + outputs, mask=output_mask, other=0.0).to(tl.float32)
            total += bias[:, None] if IS_TURNED else bias[None, :]
        tl.store(y_ptr + places, total.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _load_zeros(zeros_ptr, places, mask):
    """The zeros of outputs in a group, int32."""
    if zeros_ptr is None:
        zeros = tl.zeros(places.shape, dtype=tl.int32)
    else:
        zeros = tl.load(zeros_ptr + places, mask=mask, other=0).to(tl.int32)
    return zeros


@triton.jit
def _product(
    x_rows,
    code_rows,
    zeros,
    start,
    in_features,
    stride_cn,
    row_mask,
    output_mask,
    KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """x (codes - zeros)^T over a tile of inputs, [BLOCK_M, BLOCK_N] float32."""
    inputs = start + tl.arange(0, BLOCK_K)
    x = tl.load(x_rows[:, None] + inputs[None, :], mask=row_mask[:, None] & (inputs < in_features)[None, :], other=0.0)
    product = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    dtype: tl.constexpr = tl.float16 if x.dtype == tl.float16 else tl.bfloat16
    if KIND == "int4":
        # A row of codes is filled up to words: x is zero there.
        pairs = start // 2 + tl.arange(0, BLOCK_K // 2)
        mask = (pairs < stride_cn)[:, None] & output_mask[None, :]
        even_codes, odd_codes = int4_values(
            tl.load(code_rows[None, :] + pairs[:, None], mask=mask, other=0), zeros[None, :], dtype
        )
        even, odd = tl.split(tl.reshape(x, (BLOCK_M, BLOCK_K // 2, 2)))
        product = exact_dot(even, even_codes, product)
        product = exact_dot(odd, odd_codes, product)
    else:
        mask = (inputs < in_features)[:, None] & output_mask[None, :]
        codes = tl.load(code_rows[None, :] + inputs[:, None], mask=mask, other=0)
        product = exact_dot(x, int8_values(codes, dtype), product)
        # A code of 8 bits less its zero has one bit more than a bfloat16 has.
        if HAS_ZEROS:
            product -= tl.sum(x.to(tl.float32), 1)[:, None] * zeros.to(tl.float32)[None, :]
    return product


@triton.jit
def _turned_product(
    x_rows,
    code_rows,
    zeros,
    start,
    in_features,
    stride_cn,
    row_mask,
    output_mask,
    KIND: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """(codes - zeros) x^T over a tile of inputs, [BLOCK_N, BLOCK_M] float32; x of 16 bits."""
    inputs = start + tl.arange(0, BLOCK_K)
    x = tl.load(x_rows[None, :] + inputs[:, None], mask=row_mask[None, :] & (inputs < in_features)[:, None], other=0.0)
    if KIND == "int4":
        pairs = start // 2 + tl.arange(0, BLOCK_K // 2)
        mask = output_mask[:, None] & (pairs < stride_cn)[None, :]
        codes = tl.load(code_rows[:, None] + pairs[None, :], mask=mask, other=0)
        even_codes, odd_codes = int4_values(codes, zeros[:, None], x.dtype)
        values = tl.reshape(tl.join(even_codes, odd_codes), (BLOCK_N, BLOCK_K))
    else:
        mask = output_mask[:, None] & (inputs < in_features)[None, :]
        values = int8_values(tl.load(code_rows[:, None] + inputs[None, :], mask=mask, other=0), x.dtype)
    product = exact_dot(values, x.to(values.dtype), tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32))
    if HAS_ZEROS and KIND == "int8":
        product -= zeros.to(tl.float32)[:, None] * tl.sum(x.to(tl.float32), 0)[None, :]
    return product


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
    """One program: BLOCK_K inputs of BLOCK_N outputs. HAS_TILES: all of one group."""
    places = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    outputs = places[:, None]
    start = tl.program_id(1) * BLOCK_K
    inputs = (start + tl.arange(0, BLOCK_K))[None, :]
    output_mask = outputs < num_outputs
    mask = output_mask & (inputs < in_features)
    if HAS_TILES:
        group = places * stride_sn + start // group_size
        zeros = _load_zeros(zeros_ptr, group, places < num_outputs)[:, None]
        if KIND == "int4":
            pairs = (start // 2 + tl.arange(0, BLOCK_K // 2))[None, :]
            codes = tl.load(codes_ptr + outputs * stride_cn + pairs, mask=output_mask & (pairs < stride_cn), other=0)
            even, odd = int4_values(codes, zeros, tl.bfloat16)
            values = tl.reshape(tl.join(even, odd), (BLOCK_N, BLOCK_K)).to(tl.float32)
        else:
            codes = tl.load(codes_ptr + outputs * stride_cn + inputs, mask=mask, other=0)
            values = int8_values(codes, tl.bfloat16).to(tl.float32) - zeros.to(tl.float32)
        values *= tl.load(scales_ptr + group, mask=places < num_outputs, other=0.0).to(tl.float32)[:, None]
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
