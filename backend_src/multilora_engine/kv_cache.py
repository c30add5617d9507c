"""`BlockAllocator`: which block of the KV cache belongs to which sequence."""

from __future__ import annotations

from collections.abc import Iterable

from multilora_engine.free_list import FreeList
from multilora_engine.request import Sequence


class BlockAllocator:
    """Hands KV cache blocks to sequences. The only writer of `Sequence.block_table` and
    `num_allocated_blocks`.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.block_size = block_size
        self._blocks = FreeList(num_blocks)

    @property
    def num_blocks(self) -> int:
        return self._blocks.count

    @property
    def num_free(self) -> int:
        return self._blocks.num_free

    def num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that `sequence` still needs to hold its first `num_tokens` tokens."""
        return max(0, -(-num_tokens // self.block_size) - len(sequence.block_table))

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give a sequence the blocks for its first `num_tokens` tokens. False, and no change, if too few are free."""
        missing = self.num_missing(sequence, num_tokens)
        if missing > self._blocks.num_free:
            return False
        sequence.block_table.extend(self._blocks.allocate(missing))
        sequence.num_allocated_blocks += missing
        return True

    def free(self, sequence: Sequence) -> None:
        """Take all blocks of a sequence back."""
        self._blocks.free(sequence.block_table)
        sequence.block_table.clear()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """No block is lost or shared. `sequences`: all that are not finished."""
        self._blocks.check_integrity(sequence.block_table for sequence in sequences)
