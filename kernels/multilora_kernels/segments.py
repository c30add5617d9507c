"""Which tokens belong to which adapter: computed once per step, used by every layer."""

from __future__ import annotations

from typing import NamedTuple

import torch

CHUNK_SIZE = 16
"""Tokens of a chunk in decode batches: the rows of one tensor-core tile."""

PREFILL_CHUNK_SIZE = 64
"""Tokens of a chunk in prefill batches, where a larger tile reads an adapter fewer times."""

ROWS = 0
"""In the place of the tokens of a chunk: the batch is not cut, each row is taken by itself."""

MAX_DECODE_TOKENS = 512
"""Batches of more tokens are cut for prefill. The number of tokens decides, never their adapters:
a captured CUDA graph replays for any mix."""


class LoRASegments(NamedTuple):
    """Tokens sorted by adapter and cut into chunks of at most `chunk_size` tokens of one adapter.

    Worked example with chunks of 2: seven tokens, two adapters, -1 is the base model.

        token_lora_mapping  [ 1, -1, 0, 1, 1, -1, 0]
        permutation         [ 2, 6, 0, 3, 4 ]           tokens of adapter 0, then of adapter 1; base tokens are left out
        chunk_start         [ 0, 2, 4 ]                 into permutation
        chunk_length        [ 2, 2, 1 ]
        chunk_lora_index    [ 0, 1, 1 ]

    permutation: [num_tokens] int32, the tail after the last chunk has the base tokens on a GPU, else it is undefined.
    chunk_start, chunk_length, chunk_lora_index: [capacity] int32; capacity depends only on the number of tokens and of
        adapters, so a captured CUDA graph replays for any mix. Chunks past the last have length 0 and lora_index -1.
    num_tokens: rows of the batch.
    chunk_size: no chunk is longer. Where it is `ROWS`, the tokens are neither sorted nor cut: `chunk_lora_index` is
        token_lora_mapping itself, and the other three are empty.
    """

    permutation: torch.Tensor
    chunk_start: torch.Tensor
    chunk_length: torch.Tensor
    chunk_lora_index: torch.Tensor
    num_tokens: int
    chunk_size: int = CHUNK_SIZE

    @property
    def of_kernels(self) -> tuple[torch.Tensor, ...]:
        """What a kernel of chunks takes, in its order, or a kernel of rows."""
        return self[3:4] if self.chunk_size == ROWS else self[:4]


def chunk_size_of(num_tokens: int) -> int:
    """The chunks of a batch of so many tokens."""
    return CHUNK_SIZE if num_tokens <= MAX_DECODE_TOKENS else PREFILL_CHUNK_SIZE


def rows_of(token_lora_mapping: torch.Tensor) -> LoRASegments:
    """Each row by itself, for a GPU: no work, and what is captured reads the values that the mapping then has."""
    empty = token_lora_mapping[:0]
    return LoRASegments(empty, empty, empty, token_lora_mapping, len(token_lora_mapping), ROWS)


def capacity_of(num_tokens: int, max_loras: int, chunk_size: int) -> int:
    """The most chunks that so many tokens of so many adapters may have."""
    return min(num_tokens, max_loras + num_tokens // chunk_size)


def reference_segments(
    token_lora_mapping: torch.Tensor, max_loras: int, chunk_size: int, capacity: int
) -> LoRASegments:
    """See `lora_segments.lora_segments`. capacity: the number of chunks for which the result has room."""
    num_tokens = token_lora_mapping.numel()
    mapping = token_lora_mapping.long()
    # Base tokens get the key max_loras, so the stable sort puts them after all adapters' tokens.
    keys, order = torch.sort(torch.where(mapping < 0, max_loras, mapping), stable=True)
    # Keys are compared, and index nothing: where kernels are only noted, a mapping that they write holds any numbers.
    bounds = torch.searchsorted(keys, torch.arange(max_loras + 1, device=mapping.device))
    run_start, counts = bounds[:-1], bounds.diff()
    num_chunks = (counts + chunk_size - 1) // chunk_size
    chunk_end = torch.cumsum(num_chunks, 0)
    chunk = torch.arange(capacity, device=mapping.device)
    lora_index = torch.searchsorted(chunk_end, chunk, right=True)
    is_real = lora_index < max_loras
    run = torch.where(is_real, lora_index, 0)
    offset = (chunk - (chunk_end[run] - num_chunks[run])) * chunk_size
    start = run_start[run] + offset
    length = torch.clamp(counts[run] - offset, max=chunk_size)
    return LoRASegments(
        permutation=order.int(),
        chunk_start=torch.where(is_real, start, 0).int(),
        chunk_length=torch.where(is_real, length, 0).int(),
        chunk_lora_index=torch.where(is_real, lora_index, -1).int(),
        num_tokens=num_tokens,
        chunk_size=chunk_size,
    )
