"""Linears of weights in codes of 4 or 8 bits on a GPU, in OpenAI Triton: see `multilora_kernels.quantized`.

Few rows: codes are multiplied as they lie. A code is exact in the 16-bit dtypes, so it goes to the tensor cores beside
the activations, and the float32 sum of a group of inputs takes the group's scale and zero. Neither weights nor
activations are rounded. Many rows: the weight is written once in the dtype of the activations, for cuBLAS.

Weights of FP8 take the same way. `torch._scaled_mm` would round the activations to FP8, too.

Compiled ahead of time and run in Triton's interpreter; not timed on a device.
"""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
import triton
import triton.language as tl

from multilora_kernels.cuda.tiles import exact_dot, float8_values

MAX_ROWS = 256
"""More rows take so long to multiply that writing the weight as floats first pays."""

FEW_ROWS = 16
"""Of one program. Steps of more rows have programs of 64."""

_LARGEST_BLOCK_K = 64
_LEAST_BLOCK_K = 32
_DEQUANTIZED_OUTPUTS, _DEQUANTIZED_INPUTS = 16, 256


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
    if len(x) <= MAX_ROWS and (block_k := _block_k(weight)) is not None:
        return _multiply(x, weight, bias, block_k)
    return F.linear(x, dequantized(weight, x.dtype), bias)


def _block_k(weight: Codes) -> int | None:
    """Inputs of a tile, none of which spans two groups; None where groups are too short or odd for that."""
    if weight.scales.shape[1] == 1:
        return _LARGEST_BLOCK_K
    block_k = min(_LARGEST_BLOCK_K, weight.group_size & -weight.group_size)
    return block_k if block_k >= _LEAST_BLOCK_K else None


def _multiply(x: torch.Tensor, weight: Codes, bias: torch.Tensor | None, block_k: int) -> torch.Tensor:
    assert x.stride(1) == 1
    num_rows, num_outputs = len(x), len(weight.codes)
    y = x.new_empty(num_rows, num_outputs)
    constants = multiply_constants(weight.kind, num_rows, block_k, x.dtype == torch.float32)
    grid = (triton.cdiv(num_outputs, constants["BLOCK_N"]), triton.cdiv(num_rows, constants["BLOCK_M"]))
    multiply_codes_kernel[grid](
        x,
        weight.codes,
        weight.scales,
        weight.zeros,
        bias,
        y,
        num_rows,
        num_outputs,
        weight.in_features,
        weight.group_size,
        x.stride(0),
        weight.codes.stride(0),
        weight.scales.stride(0),
        **constants,
    )
    return y


def dequantized(weight: Codes, dtype: torch.dtype) -> torch.Tensor:
    """The weight as floats, [outputs, in_features]: computed in float32, and rounded once."""
    num_outputs = len(weight.codes)
    result = torch.empty(num_outputs, weight.in_features, dtype=dtype, device=weight.codes.device)
    constants = dequantize_constants(weight.kind)
    grid = (
        triton.cdiv(num_outputs, constants["BLOCK_N"]),
        triton.cdiv(weight.in_features, constants["BLOCK_K"]),
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


def multiply_constants(kind: str, num_rows: int, block_k: int, is_wide: bool) -> dict[str, Any]:
    """The constants of the kernel. is_wide: x is float32."""
    block_m = FEW_ROWS if num_rows <= FEW_ROWS else 64
    # By itself the assembler stops at 64 registers on sm_100, and spills two.
    return ({"maxnreg": 96} if block_m == FEW_ROWS else {}) | {
        "KIND": kind,
        "BLOCK_M": block_m,
        "BLOCK_N": 32 if block_m == FEW_ROWS else 64,
        "BLOCK_K": min(block_k, 32) if is_wide else block_k,
        "num_warps": 4,
        "num_stages": 3,
    }


def dequantize_constants(kind: str) -> dict[str, Any]:
    """The constants of the kernel."""
    return {"KIND": kind, "BLOCK_N": _DEQUANTIZED_OUTPUTS, "BLOCK_K": _DEQUANTIZED_INPUTS, "num_warps": 4}


@triton.jit(do_not_specialize=["num_rows"])
def multiply_codes_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    num_outputs,
    in_features,
    group_size,
    stride_xm,
    stride_cn,
    stride_sn,
    KIND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: BLOCK_M rows, BLOCK_N outputs, all inputs."""
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    output_mask, row_mask = outputs < num_outputs, rows < num_rows
    x_rows = x_ptr + rows.to(tl.int64)[:, None] * stride_xm
    code_rows = codes_ptr + outputs.to(tl.int64)[None, :] * stride_cn
    group_rows = outputs.to(tl.int64) * stride_sn
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, in_features, BLOCK_K):
        product = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        inputs = start + tl.arange(0, BLOCK_K)
        x = tl.load(x_rows + inputs[None, :], mask=row_mask[:, None] & (inputs < in_features)[None, :], other=0.0)
        if KIND == "int4":
            # A row of codes is filled up to words: x is zero there.
            pairs = start // 2 + tl.arange(0, BLOCK_K // 2)
            codes = tl.load(
                code_rows + pairs[:, None], mask=(pairs < stride_cn)[:, None] & output_mask[None, :], other=0
            )
            even, odd = tl.split(tl.reshape(x, (BLOCK_M, BLOCK_K // 2, 2)))
            product = exact_dot(even, _lower(codes), product)
            product = exact_dot(odd, _upper(codes), product)
        else:
            code_mask = (inputs < in_features)[:, None] & output_mask[None, :]
            codes = tl.load(code_rows + inputs[:, None], mask=code_mask, other=0)
            product = exact_dot(x, codes, product)
        group = group_rows + start // group_size
        scales = tl.load(scales_ptr + group, mask=output_mask, other=0.0).to(tl.float32)
        if zeros_ptr is not None:
            zeros = tl.load(zeros_ptr + group, mask=output_mask, other=0).to(tl.float32)
            sums = tl.sum(x.to(tl.float32), 1)
            product -= sums[:, None] * zeros[None, :]
        total += product * scales[None, :]
    if bias_ptr is not None:
        total += tl.load(bias_ptr + outputs, mask=output_mask, other=0.0).to(tl.float32)[None, :]
    y_tile = y_ptr + rows.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(y_tile, total.to(y_ptr.dtype.element_ty), mask=row_mask[:, None] & output_mask[None, :])


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
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: BLOCK_K inputs of BLOCK_N outputs."""
    outputs = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)[:, None]
    inputs = (tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K))[None, :]
    mask = (outputs < num_outputs) & (inputs < in_features)
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
