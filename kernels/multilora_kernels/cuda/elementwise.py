"""The operators between a layer's matrix products, on a GPU in OpenAI Triton: one launch each."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from multilora_kernels.cuda.dependent_launch import dependent_constants, launches_dependently
from multilora_kernels.cuda.integers import cdiv, next_power_of_2


def add_rms_norm(
    x: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `multilora_kernels.elementwise.add_rms_norm`."""
    num_rows, size = x.shape
    assert x.stride() == update.stride() == (size, 1)
    normed, total = torch.empty_like(x), torch.empty_like(x)
    constants = norm_constants(size) | dependent_constants(launches_dependently(x.device))
    add_rms_norm_kernel[(num_rows,)](x, update, weight, normed, total, eps, **constants)
    return normed, total


def add_layer_norm(
    x: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `multilora_kernels.elementwise.add_layer_norm`."""
    num_rows, size = x.shape
    assert x.stride() == update.stride() == (size, 1)
    normed, total = torch.empty_like(x), torch.empty_like(x)
    constants = norm_constants(size) | dependent_constants(launches_dependently(x.device))
    add_layer_norm_kernel[(num_rows,)](x, update, weight, bias, normed, total, eps, **constants)
    return normed, total


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `multilora_kernels.elementwise.silu_mul`."""
    return _activated(gate_up, "silu", is_gated=True)


def gelu_tanh_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `multilora_kernels.elementwise.gelu_tanh_mul`."""
    return _activated(gate_up, "gelu_tanh", is_gated=True)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """See `multilora_kernels.elementwise.gelu_tanh`."""
    return _activated(x, "gelu_tanh", is_gated=False)


def gelu(x: torch.Tensor) -> torch.Tensor:
    """See `multilora_kernels.elementwise.gelu`."""
    return _activated(x, "gelu", is_gated=False)


def _activated(x: torch.Tensor, function: str, *, is_gated: bool) -> torch.Tensor:
    num_rows, size = x.shape[0], x.shape[1] // (2 if is_gated else 1)
    assert x.is_contiguous()
    out = x.new_empty(num_rows, size)
    constants = activation_constants(function, is_gated) | dependent_constants(launches_dependently(x.device))
    activation_kernel[num_rows, cdiv(size, constants["BLOCK"])](x, out, size, **constants)
    return out


def norm_constants(size: int) -> dict[str, Any]:
    """The constants of a norm's kernel."""
    block = next_power_of_2(size)
    return {"SIZE": size, "BLOCK": block, "num_warps": max(1, min(16, block // 512))}


def activation_constants(function: str, is_gated: bool) -> dict[str, Any]:
    """The constants of the kernel. function: silu, gelu_tanh or gelu."""
    return {"FUNCTION": function, "IS_GATED": is_gated, "BLOCK": 1024, "num_warps": 4}


@triton.jit
def add_rms_norm_kernel(
    x_ptr,
    update_ptr,
    weight_ptr,
    normed_ptr,
    total_ptr,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One program: one row."""
    if IS_DEPENDENT:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * SIZE
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    x = tl.load(x_ptr + row + columns, mask=mask, other=0.0).to(tl.float32)
    update = tl.load(update_ptr + row + columns, mask=mask, other=0.0).to(tl.float32)
    # The norm is that of the sum as it is stored, as if the two were computed one after the other.
    total = (x + update).to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + row + columns, total, mask=mask)
    total = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(total * total, 0) / SIZE + eps)
    weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed_ptr + row + columns, (total * scale * weight).to(normed_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_layer_norm_kernel(
    x_ptr,
    update_ptr,
    weight_ptr,
    bias_ptr,
    normed_ptr,
    total_ptr,
    eps,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One program: one row. bias_ptr: None for none."""
    if IS_DEPENDENT:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64) * SIZE
    columns = tl.arange(0, BLOCK)
    mask = columns < SIZE
    x = tl.load(x_ptr + row + columns, mask=mask, other=0.0).to(tl.float32)
    update = tl.load(update_ptr + row + columns, mask=mask, other=0.0).to(tl.float32)
    # As in `add_rms_norm_kernel`.
    total = (x + update).to(total_ptr.dtype.element_ty)
    tl.store(total_ptr + row + columns, total, mask=mask)
    total = total.to(tl.float32)
    centred = tl.where(mask, total - tl.sum(total, 0) / SIZE, 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 0) / SIZE + eps)
    normed = centred * scale * tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        normed += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(normed_ptr + row + columns, normed.to(normed_ptr.dtype.element_ty), mask=mask)


@triton.jit
def activation_kernel(
    x_ptr,
    out_ptr,
    size,
    FUNCTION: tl.constexpr,
    IS_GATED: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_DEPENDENT: tl.constexpr,
):
    """One program: BLOCK outputs of one row; where IS_GATED, x is a row's gates and then its ups."""
    if IS_DEPENDENT:
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    first = x_ptr + row * size * (2 if IS_GATED else 1)
    x = tl.load(first + columns, mask=mask, other=0.0).to(tl.float32)
    y = activation_of(x, FUNCTION)
    if IS_GATED:
        y *= tl.load(first + size + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + columns, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def activation_of(x, FUNCTION: tl.constexpr):
    """The function of x, float32. FUNCTION: of `activation_constants`."""
    if FUNCTION == "gelu":
        y = x * (0.5 + 0.5 * tl.erf(x * 0.7071067811865476))
    elif FUNCTION == "gelu_tanh":
        # (1 + tanh(u)) / 2 = sigmoid(2 u)
        y = x * tl.sigmoid(x * (1.5957691216 + 0.0713548163 * x * x))
    else:
        y = x * tl.sigmoid(x)
    return y
