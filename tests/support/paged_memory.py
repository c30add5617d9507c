"""A KV cache without a model: a slot holds what its keys and values depend on, nothing in a block newly claimed."""

from __future__ import annotations

from multilora_engine.engine.kv_cache import BlockAllocator
from multilora_engine.sequences.sequence import Sequence

NEXT_TOKEN = 2
"""What every sequence goes on with, and what its pending tokens are therefore."""

Content = tuple[str, int, int]
"""Digest of the adapter that computed it, or its rope if the base did; hash of what was computed up to this token and
of the tenant; this token."""


class PoisonedBlocks(BlockAllocator):
    """Forgets what is in a block when it gets a new user, so that reading what was there before shows."""

    def __init__(self, num_blocks: int, block_size: int, enable_prefix_caching: bool = True) -> None:
        super().__init__(num_blocks, block_size, enable_prefix_caching)
        self.slots: list[Content | None] = [None] * (num_blocks * block_size)

    def _claim(self) -> int:
        block = super()._claim()
        self.slots[block * self.block_size : (block + 1) * self.block_size] = [None] * self.block_size
        return block

    def write(self, sequence: Sequence, start: int, end: int) -> None:
        """Compute the tokens start .. end - 1."""
        for position, content in enumerate(_contents(sequence, end)):
            if position >= start:
                self.slots[self._slot(sequence, position)] = content

    def check_read(self, sequence: Sequence, end: int) -> None:
        """The tokens 0 .. end - 1 are where the sequence looks for them."""
        found = [self.slots[self._slot(sequence, position)] for position in range(end)]
        assert found == _contents(sequence, end), f"{sequence.request.request_id} reads what is not its own"

    def copy(self, source: int, target: int) -> None:
        size = self.block_size
        self.slots[target * size : (target + 1) * size] = self.slots[source * size : (source + 1) * size]

    def _slot(self, sequence: Sequence, position: int) -> int:
        return sequence.block_table[position // self.block_size] * self.block_size + position % self.block_size


def _contents(sequence: Sequence, end: int) -> list[Content | None]:
    contents: list[Content | None] = []
    past = hash(sequence.request.sender.tenant)
    known = sequence.token_ids(0, end)
    for position, token in enumerate([*known, *[NEXT_TOKEN] * (end - len(known))]):
        is_base = sequence.adapter is None or position < sequence.lora_start
        rope = "" if sequence.adapter is None else sequence.adapter.traits.rope
        digest = rope if is_base or sequence.adapter is None else sequence.adapter.digest
        past = hash((past, digest, token))
        contents.append((digest, past, token))
    return contents
