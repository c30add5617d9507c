"""`BlockEvents`: which blocks the prefix cache comes to know and forgets, for routers that send prompts to them.

The fronts import this file, so it imports no torch.
"""

from __future__ import annotations

import msgspec


class BlockStored(msgspec.Struct, frozen=True, tag=True):
    """A full block is known from now on.

    key: in the prefix cache. parent_key: of the block before it, empty for the first block of a prompt. lora_name,
    digest: of the adapter that computed it, by the name that the request had for it, or the task id in digits; empty
    for the base model. tenant: of the request; requests of other tenants do not find the block.
    """

    key: bytes
    parent_key: bytes
    token_ids: list[int]
    lora_name: str = ""
    digest: str = ""
    tenant: str = ""


class BlockRemoved(msgspec.Struct, frozen=True, tag=True):
    """The block with this key is known no more."""

    key: bytes


BlockEvent = BlockStored | BlockRemoved


class BlockEvents:
    """Keeps events in order until a reader takes them. Until `want` is called it keeps none."""

    def __init__(self) -> None:
        self._is_wanted = False
        self._events: list[BlockEvent] = []

    @property
    def is_wanted(self) -> bool:
        """Whether a reader takes the events."""
        return self._is_wanted

    def want(self) -> None:
        """Keep the events from now on."""
        self._is_wanted = True

    def append(self, event: BlockEvent) -> None:
        if self._is_wanted:
            self._events.append(event)

    def take(self) -> list[BlockEvent]:
        """The events since the last time."""
        events, self._events = self._events, []
        return events
