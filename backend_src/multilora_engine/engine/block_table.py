"""`BlockTable`: the KV cache blocks of one sequence."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

BlockIds = list[int] | NDArray[np.int64]

_MIN_ROOM = 16
"""Blocks that a table has room for at first."""


class BlockTable:
    """The blocks of a sequence's tokens, in order: token t is in block t // block_size. Written by `BlockAllocator`.

    The ids lie in an array that grows by doubling, so that a step copies them whole, at a price that hardly depends on
    how many there are.

    keys: of the first full blocks, as far as the allocator has needed them.
    num_allocated, num_reused: blocks that the sequence was ever given, and those of them that came with the keys and
        values of its tokens. num_cached_tokens: its tokens that had them when it first started.
    """

    __slots__ = ("_ids", "keys", "length", "num_allocated", "num_cached_tokens", "num_reused")

    def __init__(self) -> None:
        self._ids: NDArray[np.int64] = np.empty(_MIN_ROOM, np.int64)
        self.length = 0
        self.keys: list[bytes] = []
        self.num_allocated = 0
        self.num_reused = 0
        self.num_cached_tokens = 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return int(self.ids[index])

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids.tolist())

    @property
    def ids(self) -> NDArray[np.int64]:
        """[length] int64; valid until the table changes."""
        return self._ids[: self.length]

    def slot(self, position: int, block_size: int) -> int:
        """The place of a token's keys and values in the KV cache."""
        assert position < self.length * block_size
        return self._ids.item(position // block_size) * block_size + position % block_size

    def extend(self, blocks: BlockIds) -> None:
        """Append blocks."""
        length = self.length + len(blocks)
        if length > len(self._ids):
            self._ids = np.concatenate([self.ids, np.empty(length, np.int64)])
        self._ids[self.length : length] = blocks
        self.length = length

    def replace(self, blocks: BlockIds, keys: list[bytes]) -> None:
        """Have these blocks with these keys, and no others."""
        self.clear()
        self.extend(blocks)
        self.keys = list(keys)

    def clear(self) -> None:
        """Have no blocks. The keys stay: tokens never change."""
        self.length = 0
