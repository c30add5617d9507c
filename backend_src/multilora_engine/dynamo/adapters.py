"""`FleetAdapters`: the adapters that a worker answers for, by the names on their cards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from multilora_engine.dynamo.cards import AdapterCard, card_of
from multilora_engine.dynamo.keyed_locks import KeyedLocks
from multilora_engine.errors import InvalidRequest
from multilora_engine.lora.names import task_id_of
from multilora_wire.adapter_info import AdapterInfo


class AdapterLister(Protocol):
    """The part of `EngineOperator` that is needed."""

    async def list_adapters(self) -> list[AdapterInfo]: ...


class Cards(Protocol):
    """The part of `AdapterCards` that is needed."""

    async def publish(self, card: AdapterCard) -> None: ...
    async def withdraw(self, name: str) -> None: ...


class FleetAdapters:
    """Publishes the card of an adapter once it can answer, and withdraws it before the adapter is forgotten: a request
    that finds a card finds an adapter. An adapter that moves to other weights keeps its card. Calls for one name run
    one after the other.
    """

    def __init__(self, operator: AdapterLister, cards: Cards, base_name: str, module_names: Mapping[int, str]) -> None:
        self._operator = operator
        self._published = cards
        self._base_name = base_name
        self._module_names = module_names
        self._cards: dict[str, AdapterCard] = {}
        self._names: dict[int, str] = {}  # of the cards, by task id
        self._in_sources: set[str] = set()
        self._locks: KeyedLocks[str] = KeyedLocks()

    @property
    def cards(self) -> list[AdapterCard]:
        """The card of each adapter, of the version that new requests get."""
        return list(self._cards.values())

    def name_of(self, lora_task_id: int) -> str:
        """The name on the card of the adapter with this task id; empty if there is none."""
        return self._names.get(lora_task_id, "")

    def check_meant(self, model: str, lora_name: str) -> None:
        """Raises InvalidRequest for a request by the model of an adapter's card that names no adapter to the worker.

        The base model would answer it.
        """
        if model in self._cards and not lora_name:
            raise InvalidRequest(f"{model} is a LoRA adapter, and the request names no adapter; update Dynamo's front")

    def check_free(self, name: str) -> None:
        """Raises InvalidRequest if no adapter can have the name."""
        if name == self._base_name:
            raise InvalidRequest(f"{name} is the base model; give the adapter another name")

    async def show(self, card: AdapterCard) -> None:
        """Publish the card of an adapter; if it has one, remember the new version. Raises InvalidRequest."""
        self.check_free(card.name)
        async with self._locks.held(card.name):
            if card.name not in self._cards:
                await self._published.publish(card)
            self._cards[card.name] = card
            self._names[task_id_of(card.name)] = card.name

    async def hide(self, name: str) -> AdapterCard | None:
        """Withdraw the card of an adapter and return it; None if there is none."""
        async with self._locks.held(name):
            if name in self._cards:
                await self._published.withdraw(name)
            self._names.pop(task_id_of(name), None)
            return self._cards.pop(name, None)

    async def scan_sources(self) -> None:
        """Publish the cards of all named adapters that have come into a tier or a source since the last scan.

        Their weights are read when a request needs them. An adapter that was unloaded gets no new card as long as a
        source has it. The card of an adapter that no source and no tier has any more is withdrawn, unless the adapter
        came in another way.
        """
        listed = {
            info.name: info
            for info in await self._operator.list_adapters()
            if info.name and not info.tenant and info.name != self._base_name
        }
        for name in listed.keys() - self._in_sources - self._cards.keys():
            await self.show(card_of(listed[name], self._module_names))
        for name in self._in_sources - listed.keys():
            if name in self._cards and not self._cards[name].digest:
                await self.hide(name)
        self._in_sources = set(listed)
