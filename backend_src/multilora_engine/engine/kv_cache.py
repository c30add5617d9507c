"""`BlockAllocator`: which block of the KV cache belongs to which sequences, and which holds a prefix worth keeping."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable

import numpy as np

from multilora_engine.engine.block_events import BlockEvents, BlockRemoved, BlockStored
from multilora_engine.engine.engine_stats import PrefixCacheStats
from multilora_engine.sequences.sequence import BlockCopy, Sequence


class BlockAllocator:
    """Hands KV cache blocks to sequences. The only writer of `Sequence.block_table`.

    A full block whose keys and values have been computed (`commit`) is known by its *key*: the SHA-256 of the key of
    the block before it and of its own tokens. The first block's is that of the tenant, the adapter's digest and its
    tokens. Equal keys thus mean equal keys and values, and neither another version of an adapter nor another tenant
    ever shares a block with this one. A sequence that starts takes the known blocks of its tokens as they are; a block
    may have several users, and nobody writes a known one.

    Where an adapter computes only from a later position on (`Sequence.lora_start`), the blocks that end before that are
    the base model's, with its keys: the base model and all such adapters share them. The key of the block with the
    position is also that of the adapter's digest and of the position, which all later blocks follow from.

    A block without users stays known until its place is wanted. Unknown ones go first, then the least recently used;
    of one sequence the later blocks go before the earlier ones, without which they could not be found.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        events: BlockEvents | None = None,
    ) -> None:
        """events: is told which blocks become known and are forgotten."""
        self.block_size = block_size
        self._enable_prefix_caching = enable_prefix_caching
        self._events = events or BlockEvents()
        self._num_users = [0] * num_blocks
        self._idle: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self._block_of_key: dict[bytes, int] = {}
        self._key_of_block: dict[int, bytes] = {}
        self._weights_version = 0
        self._queried_tokens = 0
        self._hit_tokens = 0
        self._base_hit_tokens = 0

    @property
    def num_blocks(self) -> int:
        return len(self._num_users)

    @property
    def num_free(self) -> int:
        """Blocks without users, known ones among them."""
        return len(self._idle)

    @property
    def prefix_cache(self) -> PrefixCacheStats:
        return PrefixCacheStats(self._queried_tokens, self._hit_tokens, self._base_hit_tokens)

    def can_start(self, *sequences: Sequence) -> bool:
        """Whether there are blocks for all tokens of sequences that have none."""
        num_blocks = sum(self._num_blocks(sequence.num_tokens) for sequence in sequences)
        if num_blocks <= self.num_free:
            return True
        known = [block for sequence in sequences for block in self._known_prefix(sequence)]
        return num_blocks - sum(self._num_users[block] > 0 for block in known) <= self.num_free

    def part_of(self, *sequences: Sequence) -> float:
        """The part of all blocks that the tokens of sequences take."""
        return sum(self._num_blocks(sequence.num_tokens) for sequence in sequences) / max(1, self.num_blocks)

    def start(self, sequence: Sequence) -> int:
        """Give a sequence that `can_start` blocks for all its tokens.

        Returns how many of its first tokens have keys and values already: never all, since the last token's logits are
        wanted.
        """
        assert not sequence.block_table.length
        sequence.block_table.weights_version = self._weights_version
        known = self._known_prefix(sequence)
        num_hit_tokens = len(known) * self.block_size
        table = sequence.block_table
        if not table.num_allocated:
            table.num_cached_tokens = num_hit_tokens
        for block in known:
            self._share(block)
        table.extend(known)
        table.num_allocated += len(known)
        table.num_reused += len(known)
        has_grown = self.grow(sequence, sequence.num_tokens)
        assert has_grown
        self._queried_tokens += sequence.num_tokens
        self._hit_tokens += num_hit_tokens
        if sequence.adapter is not None:
            num_base_blocks = min(len(known), self._num_base_blocks(sequence))
            self._base_hit_tokens += num_base_blocks * self.block_size
        return num_hit_tokens

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give a sequence the blocks for its first `num_tokens` tokens. False, and no change, if too few are free."""
        table = sequence.block_table
        missing = self._num_blocks(num_tokens) - table.length
        if missing <= 0:
            return True
        if missing > self.num_free:
            return False
        table.extend([self._claim() for _ in range(missing)])
        table.num_allocated += missing
        return True

    def branch(self, before: list[Sequence], after: list[Sequence], parents: list[int]) -> list[BlockCopy] | None:
        """Let sequence i of `after` go on where `before[parents[i]]` is. All of both belong to one beam search.

        Full blocks are shared. A last one that is not full goes to one child, and the others get copies of it: the
        caller copies the keys and values. Sequences without a child lose their blocks. None if too few blocks are free
        for the copies; then all these sequences must be freed.
        """
        for index, sequence in enumerate(before):
            if index not in parents:
                self.free(sequence)
        states = [(sequence.block_table.ids.copy(), sequence.block_table.keys) for sequence in before]
        weights_version = min(sequence.block_table.weights_version for sequence in before)
        num_full = before[parents[0]].num_computed_tokens // self.block_size
        has_last = len(states[parents[0]][0]) > num_full
        if has_last and len(parents) - len(set(parents)) > self.num_free:
            return None
        copies: list[BlockCopy] = []
        heirs: set[int] = set()
        for sequence, parent in zip(after, parents, strict=True):
            table, keys = states[parent]
            if parent in heirs:
                for block in table[:num_full].tolist():
                    self._share(block)
                if has_last:
                    copies.append(BlockCopy(int(table[num_full]), self._claim()))
                    table = np.append(table[:num_full], copies[-1].target)
                    sequence.block_table.num_allocated += 1
            heirs.add(parent)
            sequence.block_table.replace(table, keys)
            sequence.block_table.weights_version = weights_version
        return copies

    def commit(self, sequence: Sequence, start: int, end: int) -> None:
        """The keys and values of the tokens start .. end - 1 have been computed, as those of all tokens before them had
        been.

        From now on other sequences find the blocks that are full, unless `forget_known` came after this one's start.
        """
        if not self._enable_prefix_caching or sequence.block_table.weights_version != self._weights_version:
            return
        for index in range(start // self.block_size, end // self.block_size):
            key, block = self._key(sequence, index), sequence.block_table[index]
            if key not in self._block_of_key:
                assert block not in self._key_of_block
                self._block_of_key[key] = block
                self._key_of_block[block] = key
                if self._events.is_wanted:
                    self._tell_stored(sequence, index)

    def free(self, sequence: Sequence) -> None:
        """Take all blocks of a sequence back."""
        for block in reversed(list(sequence.block_table)):
            self._num_users[block] -= 1
            if self._num_users[block] == 0:
                self._idle[block] = None
                if block not in self._key_of_block:
                    self._idle.move_to_end(block, last=False)
        sequence.block_table.clear()

    def forget_known(self) -> None:
        """The model's weights were switched: nobody finds the keys and values of any block computed so far, nor those
        that running sequences add to theirs.
        """
        self._weights_version += 1
        for key in self._block_of_key:
            self._events.append(BlockRemoved(key))
        self._block_of_key.clear()
        self._key_of_block.clear()

    def check_integrity(self, sequences: Iterable[Sequence]) -> None:
        """No block is lost, and the users of each are counted. `sequences`: all unfinished ones."""
        users = Counter(block for sequence in sequences for block in sequence.block_table)
        assert [users[block] for block in range(self.num_blocks)] == self._num_users, "users of a block are miscounted"
        assert self._idle.keys() == {block for block in range(self.num_blocks) if not users[block]}, "a block is lost"
        assert self._key_of_block == {block: key for key, block in self._block_of_key.items()}, "a key has two blocks"

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _known_prefix(self, sequence: Sequence) -> list[int]:
        """The blocks of the longest known prefix that leaves a token to compute; none if all are to be computed."""
        blocks: list[int] = []
        if self._enable_prefix_caching and not sequence.request.sampling.reads_whole_prompt:
            for index in range((sequence.num_tokens - 1) // self.block_size):
                block = self._block_of_key.get(self._key(sequence, index))
                if block is None:
                    break
                blocks.append(block)
        return blocks

    def _num_base_blocks(self, sequence: Sequence) -> int:
        """How many blocks of a sequence with an adapter, the first ones, have the base's keys and values.

        None where the adapter turns all keys by angles of its own.
        """
        has_own_rope = sequence.adapter is not None and bool(sequence.adapter.traits.rope)
        return 0 if has_own_rope else sequence.lora_start // self.block_size

    def _key(self, sequence: Sequence, index: int) -> bytes:
        """The key of a sequence's full block. A sequence keeps its keys: its tokens never change."""
        keys = sequence.block_table.keys
        while len(keys) <= index:
            start = len(keys) * self.block_size
            tokens = array("q", sequence.token_ids(start, start + self.block_size))
            parent = keys[-1] if keys else _root_key(sequence)
            if sequence.lora_start and len(keys) == self._num_base_blocks(sequence):
                parent = _key_of_start(parent, sequence)
            keys.append(hashlib.sha256(parent + tokens.tobytes()).digest())
        return keys[index]

    def _tell_stored(self, sequence: Sequence, index: int) -> None:
        """Tell of a full block, unless the adapter that computed it has a later version: no prompt finds it then."""
        request = sequence.request
        adapter = None if index < self._num_base_blocks(sequence) else sequence.adapter
        if adapter is not None and adapter.state.is_retired:
            return
        start = index * self.block_size
        event = BlockStored(
            key=self._key(sequence, index),
            parent_key=self._key(sequence, index - 1) if index else b"",
            token_ids=list(sequence.token_ids(start, start + self.block_size)),
            lora_name="" if adapter is None else request.lora_name or str(request.task_id),
            digest="" if adapter is None else adapter.digest,
            tenant=request.sender.tenant,
        )
        self._events.append(event)

    def _claim(self) -> int:
        """A block for one new user, whose content is forgotten."""
        block, _ = self._idle.popitem(last=False)
        key = self._key_of_block.pop(block, None)
        if key is not None:
            del self._block_of_key[key]
            self._events.append(BlockRemoved(key))
        self._num_users[block] = 1
        return block

    def _share(self, block: int) -> None:
        """One more user of a block as it is."""
        if self._num_users[block] == 0:
            del self._idle[block]
        self._num_users[block] += 1


def _root_key(sequence: Sequence) -> bytes:
    """The key before the first block: of the weights that keys and values depend on, and the tenant that may find them.

    A tenant that found another's would learn the other's prompts from the time and the counts.
    """
    digest = "" if sequence.adapter is None or sequence.lora_start else sequence.adapter.digest
    return hashlib.sha256(f"{sequence.request.sender.tenant}@{digest}".encode()).digest()


def _key_of_start(parent: bytes, sequence: Sequence) -> bytes:
    """The key from which an adapter goes on. parent: of the last block that the base alone computes, or the root.

    With the position: of two blocks of the same tokens each has its own where the adapter starts at another token.
    """
    assert sequence.adapter is not None
    return hashlib.sha256(parent + f"{sequence.adapter.digest}@{sequence.lora_start}".encode()).digest()
