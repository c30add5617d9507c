"""`BlockAllocator`: which block of the KV cache belongs to which sequences, and which holds a prefix worth keeping."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable

import numpy as np

from multilora_engine.engine.block_events import BlockEvents, BlockRemoved, BlockStored
from multilora_engine.engine.engine_stats import PrefixCacheStats
from multilora_engine.sequences.sequence import BlockCopy, BlockTable, Sequence, Source


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

    In an encoder-decoder model a sequence has a second table, of its source's keys and values. All beams of a search
    use one such table. The source's own key is that of the tenant, the adapter's digest and all tokens of the source.
    The keys of the source's blocks, the last one included, and of the sequence's own blocks follow from that key. A
    source is known if all its blocks are: parts of a source are not reused.

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
        """events: is told which blocks become known and are forgotten.

        Not of encoder-decoder models: a router finds blocks by the beginnings of prompts, and a source is found whole.
        """
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
        """Whether there are blocks for all tokens of a request's beams, which have none."""
        num_blocks = self._num_needed(sequences)
        if num_blocks <= self.num_free:
            return True
        known = [block for sequence in sequences for block in self._known_prefix(sequence)]
        known += self._known_source(sequences[0])
        return num_blocks - sum(self._num_users[block] > 0 for block in known) <= self.num_free

    def part_of(self, *sequences: Sequence) -> float:
        """The part of all blocks that the tokens of a request's beams take."""
        return self._num_needed(sequences) / max(1, self.num_blocks)

    def knows_source(self, sequence: Sequence) -> bool:
        """Whether a sequence that starts now need not have its source encoded."""
        return bool(self._known_source(sequence))

    def start(self, sequence: Sequence) -> int:
        """Give a sequence that `can_start` blocks for all its tokens. The first beam to start brings the source's.

        Returns how many of its first tokens have keys and values already: never all, since the last token's logits are
        wanted. Of the source all tokens have them or none: see `Source.is_computed`.
        """
        assert not sequence.block_table.length
        sequence.block_table.weights_version = self._weights_version
        sequence.block_table.num_starts += 1
        known = self._known_prefix(sequence)
        num_hit_tokens = len(known) * self.block_size
        table = sequence.block_table
        if not table.num_allocated:
            table.num_cached_tokens = num_hit_tokens
        self._take_known(table, known)
        if sequence.source is None:
            self._queried_tokens += sequence.num_tokens
            self._hit_tokens += num_hit_tokens
        else:
            self._start_source(sequence, sequence.source)
        has_grown = self.grow(sequence, sequence.num_tokens)
        assert has_grown
        if sequence.adapter is not None:
            num_base_blocks = min(len(known), self._num_base_blocks(sequence))
            self._base_hit_tokens += num_base_blocks * self.block_size
        return num_hit_tokens

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Give a sequence the blocks for its first `num_tokens` tokens. False, and no change, if too few are free."""
        return self._grow(sequence.block_table, num_tokens)

    def branch(self, before: list[Sequence], after: list[Sequence], parents: list[int]) -> list[BlockCopy] | None:
        """Let sequence i of `after` go on where `before[parents[i]]` is. All of both belong to one beam search, whose
        source they share.

        Full blocks are shared. A last one that is not full goes to one child, and the others get copies of it: the
        caller copies the keys and values. Sequences without a child lose their blocks. None if too few blocks are free
        for the copies; then all these sequences must be freed, and start again from the tokens that they have now.
        """
        for index, sequence in enumerate(before):
            if index not in parents:
                self.free(sequence)
        states = [(sequence.block_table.ids.copy(), sequence.block_table.keys) for sequence in before]
        weights_version = min(sequence.block_table.weights_version for sequence in before)
        num_full = before[parents[0]].num_computed_tokens // self.block_size
        has_last = len(states[parents[0]][0]) > num_full
        if has_last and len(parents) - len(set(parents)) > self.num_free:
            for sequence, parent in zip(after, parents, strict=True):
                sequence.block_table.keys = list(states[parent][1])
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
        if (source := after[0].source) is not None:
            source.num_users = len(after)
        return copies

    def commit(self, sequence: Sequence, start: int, end: int) -> None:
        """The keys and values of the tokens start .. end - 1 have been computed, as those of all tokens before them had
        been.

        From now on other sequences find the blocks that are full, unless `forget_known` came after this one's start.
        """
        if not self._enable_prefix_caching or sequence.block_table.weights_version != self._weights_version:
            return
        for index in range(start // self.block_size, end // self.block_size):
            is_new = self._learn(self._key(sequence, index), sequence.block_table[index])
            if is_new and self._events.is_wanted and sequence.source is None:
                self._tell_stored(sequence, index)

    def commit_source(self, sequence: Sequence) -> None:
        """The keys and values of a sequence's source have been computed: see `commit`."""
        source = sequence.source
        assert source is not None
        if self._enable_prefix_caching and source.block_table.weights_version == self._weights_version:
            for key, block in zip(self._source_keys(sequence, source), source.block_table, strict=True):
                self._learn(key, block)

    def free(self, sequence: Sequence) -> None:
        """Take all blocks of a sequence back, and those of its source if no other beam has blocks."""
        if not sequence.block_table.length:
            return
        self._release(sequence.block_table)
        if (source := sequence.source) is not None:
            source.num_users -= 1
            if not source.num_users:
                self._release(source.block_table)
                source.is_computed = False

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
        sequences = [sequence for sequence in sequences if sequence.block_table.length]
        beams = Counter(sequence.source for sequence in sequences if sequence.source is not None)
        assert all(source.num_users == num_beams for source, num_beams in beams.items()), "beams are miscounted"
        tables = [sequence.block_table for sequence in sequences] + [source.block_table for source in beams]
        for source in beams:
            assert source.block_table.length == self._num_blocks(len(source.token_ids)), "a source lacks blocks"
        users = Counter(block for table in tables for block in table)
        assert [users[block] for block in range(self.num_blocks)] == self._num_users, "users of a block are miscounted"
        assert self._idle.keys() == {block for block in range(self.num_blocks) if not users[block]}, "a block is lost"
        assert self._key_of_block == {block: key for key, block in self._block_of_key.items()}, "a key has two blocks"

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def _num_needed(self, beams: Iterable[Sequence]) -> int:
        """Blocks for all tokens of a request's beams and for its source."""
        beams = list(beams)
        source = beams[0].source
        num_source_tokens = 0 if source is None else len(source.token_ids)
        return self._num_blocks(num_source_tokens) + sum(self._num_blocks(beam.num_tokens) for beam in beams)

    def _grow(self, table: BlockTable, num_tokens: int) -> bool:
        missing = self._num_blocks(num_tokens) - table.length
        if missing <= 0:
            return True
        if missing > self.num_free:
            return False
        table.extend([self._claim() for _ in range(missing)])
        table.num_allocated += missing
        return True

    def _start_source(self, sequence: Sequence, source: Source) -> None:
        """One more beam has blocks. The first one brings those of the source."""
        source.num_users += 1
        if source.num_users > 1:
            return
        table, num_tokens = source.block_table, len(source.token_ids)
        table.weights_version = self._weights_version
        known = self._known_source(sequence)
        source.is_computed = bool(known)
        num_hit_tokens = num_tokens if known else 0
        if not table.num_allocated:
            table.num_cached_tokens = num_hit_tokens
        self._take_known(table, known)
        has_grown = self._grow(table, num_tokens)
        assert has_grown
        self._queried_tokens += num_tokens
        self._hit_tokens += num_hit_tokens

    def _take_known(self, table: BlockTable, known: list[int]) -> None:
        for block in known:
            self._share(block)
        table.extend(known)
        table.num_allocated += len(known)
        table.num_reused += len(known)

    def _known_source(self, sequence: Sequence) -> list[int]:
        """The blocks of a sequence's source; none if one of them is not known, or without a source."""
        if not self._enable_prefix_caching or sequence.source is None:
            return []
        found = [self._block_of_key.get(key) for key in self._source_keys(sequence, sequence.source)]
        known = [block for block in found if block is not None]
        return known if len(known) == len(found) else []

    def _source_keys(self, sequence: Sequence, source: Source) -> list[bytes]:
        """The keys of all blocks of a source. What is hashed is of no length that a block of tokens has."""
        keys = source.block_table.keys
        if not keys:
            key, num_blocks = _source_key(sequence, source), self._num_blocks(len(source.token_ids))
            keys += [hashlib.sha256(key + b"block" + index.to_bytes(4)).digest() for index in range(num_blocks)]
        return keys

    def _learn(self, key: bytes, block: int) -> bool:
        """Know a block by its key from now on. False, and no change, if another block is known by it."""
        if key in self._block_of_key:
            return False
        assert block not in self._key_of_block
        self._block_of_key[key] = block
        self._key_of_block[block] = key
        return True

    def _release(self, table: BlockTable) -> None:
        """A table gives its blocks back."""
        for block in reversed(list(table)):
            self._num_users[block] -= 1
            if self._num_users[block] == 0:
                self._idle[block] = None
                if block not in self._key_of_block:
                    self._idle.move_to_end(block, last=False)
        table.clear()

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
            parent = keys[-1] if keys else _first_key(sequence)
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


def _first_key(sequence: Sequence) -> bytes:
    """The key before a sequence's first block."""
    return _root_key(sequence) if sequence.source is None else _source_key(sequence, sequence.source)


def _source_key(sequence: Sequence, source: Source) -> bytes:
    if not source.key:
        tokens = array("q", source.token_ids).tobytes()
        source.key = hashlib.sha256(b"source" + _root_key(sequence) + tokens).digest()
    return source.key


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
