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

    def encode(self, sequence: Sequence) -> None:
        """Compute the sequence's source."""
        assert sequence.source is not None
        for position, content in enumerate(_source_contents(sequence)):
            slot = self._source_slot(sequence, position)
            assert self.slots[slot] is None, "a source is written once"
            self.slots[slot] = content

    def check_source(self, sequence: Sequence) -> None:
        """The whole source is where the sequence looks for it."""
        found = [self.slots[self._source_slot(sequence, position)] for position in range(len(_source_of(sequence)))]
        assert found == _source_contents(sequence), f"{sequence.request.request_id} reads another source"

    def check_read(self, sequence: Sequence, end: int) -> None:
        """The tokens 0 .. end - 1 are where the sequence looks for them."""
        found = [self.slots[self._slot(sequence, position)] for position in range(end)]
        assert found == _contents(sequence, end), f"{sequence.request.request_id} reads what is not its own"

    def copy(self, source: int, target: int) -> None:
        size = self.block_size
        self.slots[target * size : (target + 1) * size] = self.slots[source * size : (source + 1) * size]

    def _slot(self, sequence: Sequence, position: int) -> int:
        return sequence.block_table[position // self.block_size] * self.block_size + position % self.block_size

    def _source_slot(self, sequence: Sequence, position: int) -> int:
        assert sequence.source is not None
        return sequence.source.block_table.slot(position, self.block_size)


def _source_of(sequence: Sequence) -> list[int]:
    return sequence.request.source_token_ids


def _source_contents(sequence: Sequence) -> list[Content | None]:
    """Of a source each token depends on all."""
    digest = "" if sequence.adapter is None else sequence.adapter.digest
    whole = hash((sequence.request.sender.tenant, digest, tuple(_source_of(sequence))))
    return [(digest, hash((whole, position)), token) for position, token in enumerate(_source_of(sequence))]


def _contents(sequence: Sequence, end: int) -> list[Content | None]:
    contents: list[Content | None] = []
    past = hash((sequence.request.sender.tenant, *_source_contents(sequence)))
    known = sequence.token_ids(0, end)
    for position, token in enumerate([*known, *[NEXT_TOKEN] * (end - len(known))]):
        is_base = sequence.adapter is None or position < sequence.lora_start
        rope = "" if sequence.adapter is None else sequence.adapter.traits.rope
        digest = rope if is_base or sequence.adapter is None else sequence.adapter.digest
        past = hash((past, digest, token))
        contents.append((digest, past, token))
    return contents
