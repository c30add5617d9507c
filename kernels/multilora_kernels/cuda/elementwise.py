"""What lies between a layer's matrix products, on a GPU in OpenAI Triton: one launch each.

Compiled ahead of time and run in Triton's interpreter; not timed on a device.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


def add_rms_norm(
    x: torch.Tensor, update: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `multilora_kernels.elementwise.add_rms_norm`."""
    num_rows, size = x.shape
    assert x.stride() == update.stride() == (size, 1)
    normed, total = torch.empty_like(x), torch.empty_like(x)
    add_rms_norm_kernel[(num_rows,)](x, update, weight, normed, total, eps, **add_rms_norm_constants(size))
    return normed, total


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `multilora_kernels.elementwise.silu_mul`."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    assert gate_up.is_contiguous()
    out = gate_up.new_empty(num_rows, size)
    constants = silu_mul_constants()
    silu_mul_kernel[num_rows, triton.cdiv(size, constants["BLOCK"])](gate_up, out, size, **constants)
    return out


def add_rms_norm_constants(size: int) -> dict[str, Any]:
    """What the kernel is compiled for."""
    block = triton.next_power_of_2(size)
    return {"SIZE": size, "BLOCK": block, "num_warps": max(1, min(16, block // 512))}


def silu_mul_constants() -> dict[str, Any]:
    """What the kernel is compiled for."""
    return {"BLOCK": 1024, "num_warps": 4}


@triton.jit
def add_rms_norm_kernel(
    x_ptr, update_ptr, weight_ptr, normed_ptr, total_ptr, eps, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """One program: one row."""
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
def silu_mul_kernel(gate_up_ptr, out_ptr, size, BLOCK: tl.constexpr):
    """One program: BLOCK outputs of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    gate = tl.load(gate_up_ptr + row * 2 * size + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up_ptr + (row * 2 + 1) * size + columns, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * size + columns, (gate * tl.sigmoid(gate) * up).to(out_ptr.dtype.element_ty), mask=mask)
