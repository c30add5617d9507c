"""`route` and `expert_mlp` on a GPU, in OpenAI Triton: see `multilora_kernels.experts`.

A pair is a token and one of its experts. Pairs are sorted by expert and cut into chunks of one expert each, as tokens
are by adapter (`lora_segments`), on the device alone, so that a captured graph replays for any choice. A program
multiplies the pairs of one chunk with a tile of the expert's weights, floats or codes.

Adapters of experts take the kernels of all adapters. A pair is a row there, and the table has one column a row: the
adapter, the column of the part and the expert make one index.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import triton
import triton.language as tl

from multilora_kernels.cuda.apply import lora_apply
from multilora_kernels.cuda.block_sizes import capability, takes_rows
from multilora_kernels.cuda.integers import cdiv, next_power_of_2
from multilora_kernels.cuda.quantized import (
    Codes,
    UnpackedWeight,
    dequantized,
    products_of_codes,
    sums_of_inputs,
    tile_values,
)
from multilora_kernels.cuda.segments import MAX_TOKENS, lora_segments
from multilora_kernels.cuda.tiles import exact_dot
from multilora_kernels.linear import PackedWeight
from multilora_kernels.segments import (
    CHUNK_SIZE,
    LoRASegments,
    capacity_of,
    chunk_size_of,
    reference_segments,
    rows_of,
)
from multilora_kernels.tables import ExpertLoRA

_BLOCK = 1024
"""Elements of a row that one program of the work between products takes."""


class UnpackedExperts(Protocol):
    """A `multilora_kernels.packed_experts.PackedExperts` that is not packed."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def weight(self) -> PackedWeight | UnpackedWeight: ...


def route(logits: torch.Tensor, top_k: int, is_normalised: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """See `multilora_kernels.experts.route`."""
    num_tokens, num_experts = logits.shape
    assert logits.stride(1) == 1
    expert_ids = torch.empty(num_tokens, top_k, dtype=torch.int32, device=logits.device)
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=logits.device)
    if num_tokens:
        constants = route_constants(num_experts, top_k, is_normalised)
        route_kernel[(num_tokens,)](logits, expert_ids, weights, num_experts, logits.stride(0), **constants)
    return expert_ids, weights


def expert_mlp(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: UnpackedExperts,
    down: UnpackedExperts,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    clamp_limit: float,
    lora: ExpertLoRA | None,
) -> torch.Tensor:
    """See `multilora_kernels.experts.expert_mlp`."""
    (num_tokens, top_k), (num_experts, hidden, inner) = expert_ids.shape, down.shape
    y = x.new_empty(num_tokens, hidden)
    if not num_tokens:
        return y
    of_pairs = expert_ids.flatten()
    # Longer chunks of float32, three products each, would not stay in registers beside codes.
    chunks = _segments(of_pairs, num_experts, CHUNK_SIZE if x.dtype == torch.float32 else chunk_size_of(len(of_pairs)))
    inner_rows = _expert_linear(x, gate_up, chunks, top_k)
    if lora is not None:
        segments, tables = _pair_segments(of_pairs, top_k, lora), _one_column_a_row(lora)
        rows = x.unsqueeze(1).expand(-1, top_k, -1).reshape(len(of_pairs), -1)
        up = lora.up_column - lora.gate_column
        lora_apply(rows, inner_rows[:, :inner], tables, 0, (inner,), segments)
        lora_apply(rows, inner_rows[:, inner:], tables, up, (inner,), segments)
    h = x.new_empty(len(of_pairs), inner)
    constants = activation_constants(clamp_limit > 0)
    gate_activation_kernel[len(of_pairs), cdiv(inner, _BLOCK)](
        inner_rows, gate_up_bias, of_pairs, h, inner, clamp_limit, **constants
    )
    rows = _expert_linear(h, down, chunks, 1)
    if lora is not None:
        lora_apply(h, rows, tables, lora.down_column - lora.gate_column, (hidden,), segments)
    add_up_kernel[num_tokens, cdiv(hidden, _BLOCK)](
        rows, down_bias, of_pairs, weights, y, hidden, **add_up_constants(top_k)
    )
    return y


def _expert_linear(x: torch.Tensor, experts: UnpackedExperts, chunks: LoRASegments, top_k: int) -> torch.Tensor:
    """The products of pairs with their experts, [num_pairs, out_features]. top_k: neighbouring pairs of a row of x."""
    num_outputs = experts.shape[1]
    y = x.new_empty(chunks.num_tokens, num_outputs)
    assert x.stride(1) == 1
    is_wide = x.dtype == torch.float32
    if isinstance(experts.weight, PackedWeight):
        weight: torch.Tensor | Codes = experts.weight.data
    else:
        codes = Codes(*experts.weight.plain)
        # Codes without tiles become floats, all of them: no known checkpoint has such groups.
        weight = codes if codes.tile else dequantized(codes, x.dtype)
    stored: tuple[torch.Tensor | None, ...]
    if isinstance(weight, Codes):
        kernel, stored = expert_codes_kernel, (weight.codes, weight.scales, weight.zeros)
        strides = [weight.codes.stride(0), weight.scales.stride(0)]
        shape = (weight.kind, weight.in_features, weight.group_size, weight.tile)
        constants = codes_constants(*shape, chunks.chunk_size, is_wide)
    else:
        kernel, stored, strides = expert_floats_kernel, (weight,), []
        constants = floats_constants(chunks.chunk_size, is_wide)
    kernel[chunks.chunk_start.numel(), cdiv(num_outputs, constants["BLOCK_N"])](
        x,
        *stored,
        y,
        *chunks.of_kernels,
        num_outputs,
        x.shape[1],
        top_k,
        x.stride(0),
        *strides,
        **constants,
    )
    return y


def _pair_segments(expert_ids: torch.Tensor, top_k: int, lora: ExpertLoRA) -> LoRASegments:
    """Pairs sorted by the rows of `_one_column_a_row`, or those of few tokens by themselves."""
    max_loras, num_columns = lora.tables.rank.shape
    rows = torch.empty(len(expert_ids), dtype=torch.int64, device=expert_ids.device)
    constants = rows_constants(top_k)
    pair_rows_kernel[(cdiv(len(expert_ids), constants["BLOCK"]),)](
        expert_ids, lora.mapping, rows, len(expert_ids), num_columns, lora.gate_column, **constants
    )
    if takes_rows(len(lora.mapping), lora.tables.max_rank, capability(rows.device)):
        return rows_of(rows)
    return _segments(rows, max_loras * num_columns, chunk_size_of(len(rows)))


def _segments(mapping: torch.Tensor, num_rows: int, chunk_size: int) -> LoRASegments:
    """Pairs sorted by rows of a table, as `multilora_kernels.lora_segments`."""
    num_pairs = len(mapping)
    capacity = capacity_of(num_pairs, num_rows, chunk_size)
    if num_pairs > MAX_TOKENS:
        return reference_segments(mapping, num_rows, chunk_size, capacity)
    return LoRASegments(*lora_segments(mapping, num_rows, chunk_size, capacity), num_pairs, chunk_size)


def _one_column_a_row(lora: ExpertLoRA) -> Any:
    """The tables with the row l * C + c for column c of adapter l, of C columns.

    A slice that follows so many others in a row of them is the column that lies so far from that one.
    """
    tables = lora.tables
    return tables._replace(
        rank=tables.rank.view(-1, 1),
        a_offset=tables.a_offset.view(-1, 1),
        b_offset=tables.b_offset.view(-1, 1),
        magnitude_offset=tables.magnitude_offset.view(-1, 1),
    )


def route_constants(num_experts: int, top_k: int, is_normalised: bool) -> dict[str, Any]:
    """The constants of the kernel."""
    block = next_power_of_2(num_experts)
    return {
        "TOP_K": top_k,
        "IS_NORMALISED": is_normalised,
        "BLOCK": block,
        "BLOCK_K": next_power_of_2(top_k),
        "num_warps": max(1, min(4, block // 128)),
    }


def floats_constants(chunk_size: int, is_wide: bool) -> dict[str, Any]:
    """The constants of the kernel. is_wide: x is float32, three products each."""
    is_decode = chunk_size <= CHUNK_SIZE
    if is_wide:
        return {"BLOCK_M": chunk_size, "BLOCK_N": 32, "BLOCK_K": 32, "num_warps": 4, "num_stages": 3}
    block_k, stages = (128, 4) if is_decode else (64, 3)
    return {"BLOCK_M": chunk_size, "BLOCK_N": 64, "BLOCK_K": block_k, "num_warps": 4, "num_stages": stages}


def codes_constants(
    kind: str, in_features: int, group_size: int, tile: int, chunk_size: int, is_wide: bool
) -> dict[str, Any]:
    """The constants of the kernel. kind: int4, int8 or fp8. tile: of inputs. is_wide: x is float32."""
    return {
        "KIND": kind,
        "GROUP_TILES": 0 if group_size >= in_features else group_size // tile,
        "BLOCK_M": chunk_size,
        "BLOCK_N": 32 if is_wide else 64,
        "BLOCK_K": tile,
        # With four warps, chunks of prompts spill on sm_80; so do those of decodes where the assembler stops at 168.
        "num_warps": 4 if chunk_size <= CHUNK_SIZE else 8,
        "num_stages": 3,
        "maxnreg": 255,
    }


def activation_constants(has_limit: bool) -> dict[str, Any]:
    """The constants of the kernel."""
    return {"HAS_LIMIT": has_limit, "BLOCK": _BLOCK, "num_warps": 4}


def add_up_constants(top_k: int) -> dict[str, Any]:
    """The constants of the kernel."""
    return {"TOP_K": top_k, "BLOCK": _BLOCK, "num_warps": 4}


def rows_constants(top_k: int) -> dict[str, Any]:
    """The constants of the kernel."""
    return {"TOP_K": top_k, "BLOCK": 256, "num_warps": 4}


@triton.jit
def route_kernel(
    logits_ptr,
    expert_ptr,
    weights_ptr,
    num_experts,
    stride_lm,
    TOP_K: tl.constexpr,
    IS_NORMALISED: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: one token. BLOCK: all experts. BLOCK_K: all choices."""
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK)
    is_free = experts < num_experts
    logits = tl.load(logits_ptr + token * stride_lm + experts, mask=is_free, other=-float("inf"))
    largest = tl.max(logits, 0)
    shares = tl.where(is_free, tl.exp(logits - largest), 0.0)
    total = tl.sum(shares, 0)
    places = tl.arange(0, BLOCK_K)
    chosen = tl.zeros((BLOCK_K,), tl.int32)
    weights = tl.zeros((BLOCK_K,), tl.float32)
    for k in range(TOP_K):
        best = tl.max(tl.where(is_free, logits, -float("inf")), 0)
        expert = tl.min(tl.where(is_free & (logits == best), experts, BLOCK), 0)
        # Where a logit is no number, none may be equal to the largest.
        expert = tl.where(expert < BLOCK, expert, tl.min(tl.where(is_free, experts, BLOCK), 0))
        is_free = is_free & (experts != expert)
        chosen = tl.where(places == k, expert, chosen)
        weights = tl.where(places == k, tl.sum(tl.where(experts == expert, shares, 0.0), 0), weights)
    divisor = total
    if IS_NORMALISED:
        divisor = tl.where(total == total, tl.sum(weights, 0), total)
    mask = places < TOP_K
    tl.store(expert_ptr + token * TOP_K + places, chosen, mask=mask)
    tl.store(weights_ptr + token * TOP_K + places, weights / divisor, mask=mask)


@triton.jit(do_not_specialize=["num_pairs", "first_column"])
def pair_rows_kernel(
    expert_ptr, mapping_ptr, row_ptr, num_pairs, num_columns, first_column, TOP_K: tl.constexpr, BLOCK: tl.constexpr
):
    """One program: BLOCK pairs. A row is that of the adapter's column `first_column` + expert; -1 for none."""
    pairs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = pairs < num_pairs
    expert = tl.load(expert_ptr + pairs, mask=mask, other=0)
    lora_index = tl.load(mapping_ptr + pairs // TOP_K, mask=mask, other=-1).to(tl.int64)
    row = lora_index * num_columns + first_column + expert
    tl.store(row_ptr + pairs, tl.where(lora_index < 0, -1, row), mask=mask)


@triton.jit(do_not_specialize=["top_k"])
def expert_floats_kernel(
    x_ptr,
    weight_ptr,
    y_ptr,
    permutation_ptr,
    chunk_start_ptr,
    chunk_length_ptr,
    chunk_lora_index_ptr,
    num_outputs,
    in_features,
    top_k,
    stride_xm,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One program: the pairs of one chunk, BLOCK_N outputs of their expert. Programs side by side share weights."""
    chunk = tl.program_id(0)
    length = tl.load(chunk_length_ptr + chunk)
    start = tl.load(chunk_start_ptr + chunk)
    expert = tl.load(chunk_lora_index_ptr + chunk).to(tl.int64)
    if length == 0:
        return
    rows = tl.arange(0, BLOCK_M)
    row_mask = (rows < length)[:, None]
    pairs = tl.load(permutation_ptr + start + rows, mask=rows < length, other=0).to(tl.int64)[:, None]
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    output_mask = (outputs < num_outputs)[None, :]
    x_rows = x_ptr + pairs // top_k * stride_xm
    weight_rows = weight_ptr + (expert * num_outputs + outputs)[None, :] * in_features
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for first in range(0, in_features, BLOCK_K):
        inputs = first + tl.arange(0, BLOCK_K)
        is_input = inputs < in_features
        x = tl.load(x_rows + inputs[None, :], mask=row_mask & is_input[None, :], other=0.0)
        weight = tl.load(weight_rows + inputs[:, None], mask=is_input[:, None] & output_mask, other=0.0)
        total = exact_dot(x, weight, total)
    places = y_ptr + pairs * num_outputs + outputs[None, :]
    tl.store(places, total.to(y_ptr.dtype.element_ty), mask=row_mask & output_mask)


@triton.jit(do_not_specialize=["top_k"])
def expert_codes_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    zeros_ptr,
    y_ptr,
    permutation_ptr,
    chunk_start_ptr,
    chunk_length_ptr,
    chunk_lora_index_ptr,
    num_outputs,
    in_features,
    top_k,
    stride_xm,
    stride_cn,
    stride_sn,
    KIND: tl.constexpr,
    GROUP_TILES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """As `expert_floats_kernel`; y is computed as its transpose, and scales are taken as in `multiply_codes_kernel`."""
    chunk = tl.program_id(0)
    length = tl.load(chunk_length_ptr + chunk)
    start = tl.load(chunk_start_ptr + chunk)
    expert = tl.load(chunk_lora_index_ptr + chunk).to(tl.int64)
    if length == 0:
        return
    rows = tl.arange(0, BLOCK_M)
    row_mask = (rows < length)[None, :]
    pairs = tl.load(permutation_ptr + start + rows, mask=rows < length, other=0).to(tl.int64)[None, :]
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    output_mask = outputs < num_outputs
    dtype: tl.constexpr = tl.float16 if x_ptr.dtype.element_ty == tl.float16 else tl.bfloat16
    x_rows = x_ptr + pairs // top_k * stride_xm
    stored = expert * num_outputs + outputs
    code_rows = codes_ptr + stored * stride_cn
    group_rows = stored * stride_sn
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for tile in range(tl.cdiv(in_features, BLOCK_K)):
        inputs = tile * BLOCK_K + tl.arange(0, BLOCK_K)
        x = tl.load(x_rows + inputs[:, None], mask=row_mask & (inputs < in_features)[:, None], other=0.0)
        values = tile_values(code_rows, tile, output_mask, dtype, KIND, BLOCK_N, BLOCK_K)
        group = tile // GROUP_TILES if GROUP_TILES > 0 else 0
        if zeros_ptr is not None:
            zeros = tl.load(zeros_ptr + group_rows + group, mask=output_mask, other=0)
        if zeros_ptr is not None and KIND == "int4":
            values -= zeros.to(values.dtype)[:, None]
        product = products_of_codes(values, x)
        if zeros_ptr is not None and KIND == "int8":
            product -= zeros.to(tl.float32)[:, None] * sums_of_inputs(x, values)
        if GROUP_TILES > 0:
            product *= tl.load(scales_ptr + group_rows + group, mask=output_mask, other=0.0).to(tl.float32)[:, None]
        total += product
    if GROUP_TILES == 0:
        total *= tl.load(scales_ptr + group_rows, mask=output_mask, other=0.0).to(tl.float32)[:, None]
    places = y_ptr + pairs * num_outputs + outputs[:, None]
    tl.store(places, total.to(y_ptr.dtype.element_ty), mask=row_mask & output_mask[:, None])


@triton.jit
def gate_activation_kernel(
    gate_up_ptr, bias_ptr, expert_ptr, out_ptr, size, limit, HAS_LIMIT: tl.constexpr, BLOCK: tl.constexpr
):
    """One program: BLOCK activations of one pair. bias_ptr: of all experts, or None."""
    pair = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    first = gate_up_ptr + pair * 2 * size
    gate = tl.load(first + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(first + size + columns, mask=mask, other=0.0).to(tl.float32)
    if bias_ptr is not None:
        bias = bias_ptr + tl.load(expert_ptr + pair).to(tl.int64) * 2 * size
        gate += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
        up += tl.load(bias + size + columns, mask=mask, other=0.0).to(tl.float32)
    if HAS_LIMIT:
        # Comparisons, in place of the least of two, leave what is no number as it is.
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        y = (up + 1.0) * gate * tl.sigmoid(1.702 * gate)
    else:
        y = gate * tl.sigmoid(gate) * up
    tl.store(out_ptr + pair * size + columns, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def add_up_kernel(rows_ptr, bias_ptr, expert_ptr, weights_ptr, y_ptr, size, TOP_K: tl.constexpr, BLOCK: tl.constexpr):
    """One program: BLOCK outputs of one token."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < size
    total = tl.zeros((BLOCK,), tl.float32)
    for k in range(TOP_K):
        pair = token * TOP_K + k
        row = tl.load(rows_ptr + pair * size + columns, mask=mask, other=0.0).to(tl.float32)
        if bias_ptr is not None:
            bias = bias_ptr + tl.load(expert_ptr + pair).to(tl.int64) * size
            row += tl.load(bias + columns, mask=mask, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + pair) * row
    tl.store(y_ptr + token * size + columns, total.to(y_ptr.dtype.element_ty), mask=mask)
