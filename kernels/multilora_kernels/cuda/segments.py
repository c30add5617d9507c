"""`lora_segments` in OpenAI Triton: one launch in place of some forty.

One program counts, for each token, the tokens that come before it: those of smaller adapters, and earlier ones of its
own. A step has some hundred tokens, or with prompts some thousand, and counting them all is quicker than sorting.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from multilora_kernels.cuda.integers import cdiv, next_power_of_2

MAX_TOKENS = 8192
"""Of a batch: the work grows with the square."""

_ALIGNMENT = 16
"""In numbers of 32 bits."""


def lora_segments(
    token_lora_mapping: torch.Tensor, max_loras: int, chunk_size: int, capacity: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """permutation, chunk_start, chunk_length and chunk_lora_index of `LoRASegments`, for 1 to MAX_TOKENS tokens."""
    num_tokens = token_lora_mapping.numel()
    assert 0 < num_tokens <= MAX_TOKENS
    sizes = (num_tokens, capacity, capacity, capacity, 2 * num_tokens)
    # Memory that does not begin at a multiple of sixteen bytes has kernels of its own, those of each linear, too.
    rooms = [cdiv(size, _ALIGNMENT) * _ALIGNMENT for size in sizes]
    memory = torch.empty(sum(rooms), dtype=torch.int32, device=token_lora_mapping.device)
    permutation, starts, lengths, lora_indices, work = (
        room[:size] for room, size in zip(memory.split(rooms), sizes, strict=True)
    )
    constants = segment_constants(num_tokens, chunk_size)
    segment_kernel[(1,)](
        token_lora_mapping,
        permutation,
        starts,
        lengths,
        lora_indices,
        work,
        num_tokens,
        max_loras,
        capacity,
        **constants,
    )
    return permutation, starts, lengths, lora_indices


def segment_constants(num_tokens: int, chunk_size: int) -> dict[str, Any]:
    """The constants of the kernel."""
    block = max(128, next_power_of_2(num_tokens))
    is_largest = block == MAX_TOKENS
    return {
        "CHUNK_SIZE": chunk_size,
        "BLOCK": block,
        "BLOCK_I": 32,
        "BLOCK_J": min(block, 256),
        # One program runs at all, and may have all registers: by itself the assembler leaves room for others, and
        # spills. Those of sixteen warps are too few for the largest block.
        "num_warps": 8 if is_largest else min(16, max(4, block // 128)),
        "maxnreg": 255 if is_largest else 128,
    }


@triton.jit(do_not_specialize=["num_tokens", "max_loras", "capacity"])
def segment_kernel(
    mapping_ptr,
    permutation_ptr,
    chunk_start_ptr,
    chunk_length_ptr,
    chunk_lora_index_ptr,
    work_ptr,
    num_tokens,
    max_loras,
    capacity,
    CHUNK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_J: tl.constexpr,
):
    """One program: the batch. work_ptr: for each place in the permutation its adapter, and the place in the run."""
    for first in range(0, num_tokens, BLOCK_I):
        i = first + tl.arange(0, BLOCK_I)
        key = _keys(mapping_ptr, i, num_tokens, max_loras)
        before = tl.zeros((BLOCK_I,), tl.int32)
        place = tl.zeros((BLOCK_I,), tl.int32)
        for other in range(0, num_tokens, BLOCK_J):
            j = other + tl.arange(0, BLOCK_J)
            others = _keys(mapping_ptr, j, num_tokens, max_loras)[None, :]
            before += tl.sum((others < key[:, None]).to(tl.int32), 1)
            is_earlier = (others == key[:, None]) & (j[None, :] < i[:, None])
            place += tl.sum(is_earlier.to(tl.int32), 1)
        target = before + place
        tl.store(permutation_ptr + target, i, mask=i < num_tokens)
        tl.store(work_ptr + target, key, mask=i < num_tokens)
        tl.store(work_ptr + num_tokens + target, place, mask=i < num_tokens)
    for first in range(0, capacity, BLOCK):
        chunks = first + tl.arange(0, BLOCK)
        tl.store(chunk_start_ptr + chunks, 0, mask=chunks < capacity)
        tl.store(chunk_length_ptr + chunks, 0, mask=chunks < capacity)
        tl.store(chunk_lora_index_ptr + chunks, -1, mask=chunks < capacity)
    # Other threads read and write the same below.
    tl.debug_barrier()
    places = tl.arange(0, BLOCK)
    key = tl.load(work_ptr + places, mask=places < num_tokens, other=max_loras)
    place = tl.load(work_ptr + num_tokens + places, mask=places < num_tokens, other=0)
    has_next = places + 1 < num_tokens
    next_key = tl.load(work_ptr + places + 1, mask=has_next, other=max_loras)
    next_place = tl.load(work_ptr + num_tokens + places + 1, mask=has_next, other=0)
    is_token = key < max_loras
    chunk = tl.cumsum((is_token & (place % CHUNK_SIZE == 0)).to(tl.int32), 0) - 1
    is_end = is_token & ((next_key != key) | (next_place % CHUNK_SIZE == 0))
    tl.store(chunk_start_ptr + chunk, places - place % CHUNK_SIZE, mask=is_end)
    tl.store(chunk_length_ptr + chunk, place % CHUNK_SIZE + 1, mask=is_end)
    tl.store(chunk_lora_index_ptr + chunk, key, mask=is_end)


@triton.jit
def _keys(mapping_ptr, tokens, num_tokens, max_loras):
    """The adapters of tokens. The base model sorts after all adapters, and what is no token after that."""
    lora_index = tl.load(mapping_ptr + tokens, mask=tokens < num_tokens, other=0).to(tl.int32)
    key = tl.where(lora_index < 0, max_loras, lora_index)
    return tl.where(tokens < num_tokens, key, max_loras + 1)
