"""`FleetAdapters`: the adapters that a worker answers for, by the names on their cards."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

from multilora_engine.dynamo.card import AdapterCard, card_of
from multilora_engine.errors import InvalidRequest, RequestError
from multilora_engine.lora.names import check_name
from multilora_wire.adapter_info import AdapterInfo

UPDATES = ("load_lora", "unload_lora", "list_loras")
"""The updates that Dynamo's system server hands on of `/v1/loras`."""


class Operator(Protocol):
    """The part of `EngineOperator` that is needed."""

    async def list_adapters(self) -> list[AdapterInfo]: ...
    async def load(self, name: str, path: str = "") -> AdapterInfo: ...
    async def unload(self, name: str) -> AdapterInfo: ...


class Cards(Protocol):
    """The part of `AdapterCards` that is needed."""

    async def publish(self, card: AdapterCard) -> None: ...
    async def withdraw(self, name: str) -> None: ...


@dataclass(frozen=True)
class _Entry:
    """card: of the version that new requests get. path: where it comes from, empty where the sources know its name."""

    card: AdapterCard
    path: str


class FleetAdapters:
    """Loads, unloads and lists adapters as Dynamo asks for it, and knows where each one comes from.

    An adapter has a card from when it can answer until before it is forgotten: no request for it finds a worker
    without it. To load a name from elsewhere, or again, moves it to the weights that are there now: new requests get
    these, running ones keep theirs, and nobody waits. Calls for one name go one after the other.
    """

    def __init__(self, operator: Operator, cards: Cards, base_name: str, module_names: Mapping[int, str]) -> None:
        self._operator = operator
        self._cards = cards
        self._base_name = base_name
        self._module_names = module_names
        self._entries: dict[str, _Entry] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    @property
    def cards(self) -> list[AdapterCard]:
        """The version of each that new requests get."""
        return [entry.card for entry in self._entries.values()]

    async def load(self, name: str, uri: str = "") -> AdapterCard:
        """Have the adapter that is at `uri`, or that the sources have under `name`, and its card in the fleet.

        Raises RequestError. If the card cannot be published, the adapter is forgotten.
        """
        if check_name(name) == self._base_name:
            raise InvalidRequest(f"{name} is the base model; give the adapter another name")
        async with self._locks[name]:
            return await self._load(name, path_of(uri) if uri else self._path(name))

    async def unload(self, name: str) -> AdapterCard:
        """Take the card away, then forget the adapter. Raises RequestError if there is no card of the name."""
        async with self._locks[name]:
            entry = self._entries.get(name)
            if entry is None:
                raise InvalidRequest(f"LoRA adapter {name!r} is not loaded; loaded are {len(self._entries)} others")
            await self._cards.withdraw(name)
            del self._entries[name]
            try:
                await self._operator.unload(name)
            except RequestError as error:
                if error.code != "NOT_FOUND":  # no tier had it any more
                    raise
            return entry.card

    async def restore(self, name: str) -> bool:
        """Have an adapter in memory again that no tier has any more; whether there is such an adapter.

        Raises RequestError if it cannot be had.
        """
        if name not in self._entries:
            return False
        async with self._locks[name]:
            await self._load(name, self._path(name))
            return True

    async def show(self, card: AdapterCard) -> None:
        """Have a card of an adapter that the engine gets by other ways: of a client, or by an operator of the fleet."""
        if card.name == self._base_name:
            raise InvalidRequest(f"{card.name} is the base model; give the adapter another name")
        async with self._locks[card.name]:
            if card.name in self._entries:
                self._entries[card.name] = _Entry(card, self._path(card.name))
            else:
                await self._publish(card, path="")

    async def hide(self, name: str) -> None:
        """Take the card of an adapter away, if there is one."""
        async with self._locks[name]:
            if name in self._entries:
                await self._cards.withdraw(name)
                del self._entries[name]

    async def publish_sources(self) -> int:
        """Put cards of all named adapters that tiers and sources have into the fleet; how many there are.

        Their weights are read when somebody asks for them.
        """
        for info in await self._operator.list_adapters():
            if info.name and not info.tenant and info.name not in self._entries and info.name != self._base_name:
                async with self._locks[info.name]:
                    await self._publish(card_of(info, self._module_names), path="")
        return len(self._entries)

    def _path(self, name: str) -> str:
        return self._entries[name].path if name in self._entries else ""

    async def _load(self, name: str, path: str) -> AdapterCard:
        card = card_of(await self._operator.load(name, path), self._module_names)
        if name in self._entries:
            self._entries[name] = _Entry(card, path)
            return card
        try:
            await self._publish(card, path)
        except Exception:
            await self._operator.unload(name)
            raise
        return card

    async def _publish(self, card: AdapterCard, path: str) -> None:
        await self._cards.publish(card)
        self._entries[card.name] = _Entry(card, path)


def path_of(uri: str) -> str:
    """The sources' path of a place that Dynamo writes as a URI: file: and hf: lose their scheme.

    Raises InvalidRequest for a file of another machine.
    """
    parts = urlsplit(uri)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise InvalidRequest(f"{uri!r} is a file of the machine {parts.netloc!r}; write file:///DIRECTORY")
        return unquote(parts.path)
    return f"{parts.netloc}{parts.path}" if parts.scheme == "hf" else uri


async def answer_update(adapters: FleetAdapters, update: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
    """The answer of Dynamo's system server to `load_lora`, `unload_lora` and `list_loras`."""
    try:
        if update == "list_loras":
            loras = {card.name: card.lora_id for card in adapters.cards}
            digests = {card.name: card.digest for card in adapters.cards}
            return {"status": "success", "loras": loras, "digests": digests, "count": len(loras)}
        name = _text(body, "lora_name")
        if update == "unload_lora":
            card, done = await adapters.unload(name), "unloaded"
        else:
            source = body.get("source")
            uri = _text(source, "uri") if isinstance(source, Mapping) else ""
            card, done = await adapters.load(name, uri), "loaded"
    except RequestError as error:
        return {"status": "error", "message": f"[{error.code}] {error}", "lora_name": body.get("lora_name")}
    return {
        "status": "success",
        "message": f"LoRA adapter {name!r} {done}",
        "lora_name": name,
        "lora_id": card.lora_id,
        "digest": card.digest,
    }


def _text(body: Mapping[str, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{key} is missing; it is a text")
    return value
