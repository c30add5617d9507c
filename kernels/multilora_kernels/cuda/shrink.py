"""`lora_shrink` on a GPU, in OpenAI Triton.

The hidden size is cut into parts (`parts.py`). A part is summed in one order, and the parts are added in order: by
the program itself when there are chunks enough to fill the GPU, else by `lora_expand` as it reads v. So there are no
atomics, a batch gives the same bits every time, and how many adapters share it changes nothing.

Chunks of one row go through the tensor cores like all others. Vector code would sum them in another order, so a token's
bits would depend on whether another token of its adapter is in the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from multilora_kernels.adapter_codes import CODE_BITS
from multilora_kernels.cuda.block_sizes import BlockSizes, block_sizes, capability
from multilora_kernels.cuda.codes import arena_of_kernels, header_bytes, load_int4
from multilora_kernels.cuda.integers import cdiv
from multilora_kernels.cuda.shrink_rows import shrink_rows_constants, shrink_rows_kernel
from multilora_kernels.cuda.tiles import exact_dot
from multilora_kernels.parts import PART_SIZE, empty_v
from multilora_kernels.segments import CHUNK_SIZE, ROWS, LoRASegments
from multilora_kernels.tables import LoRATables


def lora_shrink(
    x: torch.Tensor,
    tables: LoRATables,
    first_slice: int,
    num_slices: int,
    segments: LoRASegments,
    sizes: BlockSizes | None = None,
) -> torch.Tensor:
    """See `multilora_kernels.shrink.lora_shrink`. sizes: to try others than the table's."""
    in_features = x.shape[1]
    assert x.stride(1) == 1
    v = empty_v(x, num_slices, tables.max_rank)
    shape = (segments.chunk_size, tables.max_rank, capability(x.device), in_features, len(x))
    sizes = sizes or block_sizes("shrink", *shape)
    code_bits = CODE_BITS.get(tables.arena.dtype, 0)
    if segments.chunk_size == ROWS:
        kernel = shrink_rows_kernel
        constants = shrink_rows_constants(in_features, tables.arena.dtype == torch.float32, sizes, code_bits)
        num_programs = cdiv(in_features, PART_SIZE) * constants["RANK_SPLITS"]
    else:
        kernel = shrink_kernel
        is_wide = torch.float32 in (x.dtype, tables.arena.dtype)
        of_chunks = (v.shape[0], segments.chunk_size, is_wide, sizes, capability(x.device), code_bits)
        constants = shrink_constants(in_features, *of_chunks)
        num_programs = cdiv(tables.max_rank, constants["BLOCK_R"]) * v.shape[0]
    kernel[segments.chunk_lora_index.numel(), num_programs, num_slices](
        x,
        arena_of_kernels(tables.arena),
        tables.rank,
        tables.a_offset,
        *segments.of_kernels,
        v,
        in_features,
        tables.rank.shape[1],
        first_slice,
        x.stride(0),
        v.stride(0),
        v.stride(1),
        v.stride(2),
        **constants,
    )
    return v


def shrink_constants(
    in_features: int,
    parts: int,
    chunk_size: int,
    is_wide: bool,
    sizes: BlockSizes,
    capability: int,
    code_bits: int = 0,
) -> dict[str, int]:
    """The constants and options of the kernel.

    parts: of the sum, as `num_parts`. is_wide: x or the adapters are float32. capability: of the GPU, 90 for sm_90.
    code_bits: of adapters that are codes, else 0.
    """
    if capability // 10 == 12 and is_wide and chunk_size > CHUNK_SIZE:
        # Four warps spill there; eight, of half the tile each, do not, and as many run on a processor.
        sizes = sizes | {"num_warps": 2 * sizes["num_warps"]}
    return sizes | {
        "NUM_PARTS": parts,
        "PARTS_PER_PROGRAM": cdiv(in_features, PART_SIZE) // parts,
        "PART_SIZE": PART_SIZE,
        "BLOCK_M": chunk_size,
        # Twice the bytes, and three products of each: a quarter of the tile stays within the registers.
        "BLOCK_K": sizes["BLOCK_K"] // (4 if is_wide or code_bits == 4 else 1),
        "CODE_BITS": code_bits,
    }


# A column that is 1 or a multiple of 16 would be a kernel of its own, compiled within a step.
@triton.jit(do_not_specialize=["first_slice"])
def shrink_kernel(
    x_ptr,
    arena_ptr,
    rank_ptr,
    a_offset_ptr,
    permutation_ptr,
    chunk_start_ptr,
    chunk_length_ptr,
    chunk_lora_index_ptr,
    v_ptr,
    in_features,
    num_columns,
    first_slice,
    stride_xm,
    stride_vp,
    stride_vs,
    stride_vm,
    NUM_PARTS: tl.constexpr,
    PARTS_PER_PROGRAM: tl.constexpr,
    PART_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CODE_BITS: tl.constexpr,
):
    """One program: a chunk's tokens, BLOCK_R ranks of one slice, one part of the hidden size or all of them."""
    chunk = tl.program_id(0)
    # All at once, before anything is decided: loads one after another would take as long as the work.
    length = tl.load(chunk_length_ptr + chunk)
    start = tl.load(chunk_start_ptr + chunk)
    lora_index = tl.load(chunk_lora_index_ptr + chunk)
    if length == 0:
        return
    slice_index = tl.program_id(2)
    column = lora_index.to(tl.int64) * num_columns + first_slice + slice_index
    rank = tl.load(rank_ptr + column)
    offset = tl.load(a_offset_ptr + column)
    rows = tl.arange(0, BLOCK_M)
    tokens = tl.load(permutation_ptr + start + rows, mask=rows < length, other=0)
    first_rank = tl.program_id(1) // NUM_PARTS * BLOCK_R
    if first_rank >= rank:
        return
    part = tl.program_id(1) % NUM_PARTS

    x_rows = x_ptr + tokens.to(tl.int64)[:, None] * stride_xm
    ranks = first_rank + tl.arange(0, BLOCK_R)
    first_k = part * PART_SIZE
    if CODE_BITS == 8:
        scales = tl.load((arena_ptr + offset).to(tl.pointer_type(tl.float32)) + ranks, mask=ranks < rank, other=0.0)
        offset += header_bytes(rank)
    # Adapters of the engine start at 64-byte boundaries: saying so, as `lora_expand` does, gives 16-byte loads.
    if offset % 16 == 0:
        a_ptr = arena_ptr + offset // 16 * 16
        total = sum_parts(
            x_rows, a_ptr, rank, first_rank, length, first_k, in_features,
            PARTS_PER_PROGRAM, PART_SIZE, BLOCK_M, BLOCK_R, BLOCK_K, CODE_BITS,
        )  # fmt: skip
    else:
        total = sum_parts(
            x_rows, arena_ptr + offset, rank, first_rank, length, first_k, in_features,
            PARTS_PER_PROGRAM, PART_SIZE, BLOCK_M, BLOCK_R, BLOCK_K, CODE_BITS,
        )  # fmt: skip

    if CODE_BITS == 8:
        total *= scales[None, :]
    v_rows = v_ptr + part * stride_vp + slice_index * stride_vs + tokens.to(tl.int64)[:, None] * stride_vm
    tl.store(v_rows + ranks[None, :], total, mask=(rows < length)[:, None] & (ranks < rank)[None, :])


@triton.jit
def sum_parts(
    x_rows,
    a_ptr,
    rank,
    first_rank,
    length,
    first_k,
    in_features,
    PARTS_PER_PROGRAM: tl.constexpr,
    PART_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CODE_BITS: tl.constexpr,
):
    """x @ A^T over PARTS_PER_PROGRAM parts from `first_k`: [BLOCK_M, BLOCK_R] float32; without the scales of 8 bits."""
    row_mask = (tl.arange(0, BLOCK_M) < length)[:, None]
    ranks = first_rank + tl.arange(0, BLOCK_R)
    a_rows = a_ptr + ranks.to(tl.int64)[None, :] * in_features
    rank_mask = (ranks < rank)[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
    for part in range(PARTS_PER_PROGRAM):
        start = first_k + part * PART_SIZE
        part_sum = tl.zeros((BLOCK_M, BLOCK_R), dtype=tl.float32)
        for k in range(0, tl.minimum(PART_SIZE, in_features - start), BLOCK_K):
            ks = start + k + tl.arange(0, BLOCK_K)
            k_mask = ks < in_features
            x = tl.load(x_rows + ks[None, :], mask=row_mask & k_mask[None, :], other=0.0)
            mask = k_mask[:, None] & rank_mask
            if CODE_BITS == 4:
                columns = (in_features + 15) // 16
                a = load_int4(a_ptr, ranks[None, :], ks[:, None] // 16, ks[:, None] % 16, columns, mask, False)
            else:
                a = tl.load(a_rows + ks[:, None], mask=mask, other=0)
            part_sum = exact_dot(x, a, part_sum)
        total += part_sum
    return total
