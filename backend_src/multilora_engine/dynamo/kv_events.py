"""`BlockPublisher`: tells Dynamo's router which prefixes this worker has, so that prompts that share them come here."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from multilora_engine.engine.block_events import BlockEvent, BlockRemoved, BlockStored

_HASH_BYTES = 8

logger = logging.getLogger(__name__)


class EventPublisher(Protocol):
    """The part of Dynamo's `KvEventPublisher` that is needed."""

    def publish_batch(self, events: Sequence[Mapping[str, Any]]) -> None: ...


class BlockPublisher:
    """The listener of the engine's blocks. Only the client's thread calls it, but for `start`, which comes first.

    Dynamo computes the hash that it routes by from published values: tokens, name of the adapter, salt. That hash
    knows no versions: when a name has moved to other weights, the first block of the later weights takes back the
    blocks of the earlier weights. Blocks behind an unpublished block are left out: the router cannot place them.
    """

    def __init__(self) -> None:
        self._publisher: EventPublisher | None = None
        self._published: dict[int, str] = {}
        self._hashes_of_name: defaultdict[str, set[int]] = defaultdict(set)
        self._digests: dict[str, str] = {}

    def start(self, publisher: EventPublisher) -> None:
        """Publish from now on; earlier events are dropped."""
        self._publisher = publisher

    def on_events(self, events: list[BlockEvent]) -> None:
        if self._publisher is None:
            return
        batch: list[Mapping[str, Any]] = []
        for event in events:
            match event:
                case BlockStored():
                    batch += self._stored(event)
                case BlockRemoved(key):
                    batch += self._removed([block_hash(key)])
        self._publish(batch)

    def on_loss(self) -> None:
        self._publish(self._removed(list(self._published)))

    def _stored(self, event: BlockStored) -> list[Mapping[str, Any]]:
        number, name = block_hash(event.key), event.lora_name
        parent = block_hash(event.parent_key) if event.parent_key else None
        has_moved = self._digests.get(name, event.digest) != event.digest
        moved = self._removed(list(self._hashes_of_name[name])) if has_moved else []
        if parent is not None and parent not in self._published:
            return moved
        self._digests[name] = event.digest
        self._published[number] = name
        self._hashes_of_name[name].add(number)
        stored = {
            "type": "stored",
            "token_ids": event.token_ids,
            "num_block_tokens": [len(event.token_ids)],
            "block_hashes": [number],
            "parent_hash": parent,
            "lora_name": name or None,
            "cache_salt": event.tenant or None,
        }
        return [*moved, stored]

    def _removed(self, hashes: list[int]) -> list[Mapping[str, Any]]:
        """Forget the published blocks among `hashes`. Returns the event that says so."""
        known = [number for number in hashes if number in self._published]
        for number in known:
            name = self._published.pop(number)
            self._hashes_of_name[name].discard(number)
            if not self._hashes_of_name[name]:
                # Clients choose the names: one without blocks takes no memory.
                del self._hashes_of_name[name], self._digests[name]
        return [{"type": "removed", "block_hashes": known}] if known else []

    def _publish(self, batch: list[Mapping[str, Any]]) -> None:
        if batch and self._publisher is not None:
            self._publisher.publish_batch(batch)


def block_hash(key: bytes) -> int:
    """The number by which Dynamo knows a block, 64 bits with a sign. key: of our prefix cache, a SHA-256."""
    return int.from_bytes(key[:_HASH_BYTES], "little", signed=True)
