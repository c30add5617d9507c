"""The answers of a worker's system server about its adapters: `/v1/loras`, `/engine/update` and `/engine/control`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol
from urllib.parse import unquote, urlsplit

import msgspec

from multilora_engine.dynamo.cards import AdapterCard
from multilora_engine.errors import InvalidRequest, RequestError
from multilora_engine.process.operations import EventList
from multilora_wire.adapter_info import AdapterInfo

UPDATES = ("load_lora", "unload_lora", "list_loras")
"""The updates that Dynamo's system server passes on from `/v1/loras`."""

EVENTS = "adapter_events"
"""The control that tells the engine's events of adapters."""


class CardLoader(Protocol):
    """The part of `FleetCatalogue` that is needed."""

    async def load(self, name: str, path: str = "") -> AdapterCard: ...
    async def unload(self, name: str) -> AdapterCard: ...


class AdapterReports(Protocol):
    """The part of `EngineOperator` that is needed."""

    async def list_adapters(self) -> list[AdapterInfo]: ...
    async def events_since(self, number: int) -> EventList: ...


class SystemUpdates:
    """cards: reads the cards that the worker has published. worker_id: the number of the worker in the fleet."""

    def __init__(
        self, catalogue: CardLoader, operator: AdapterReports, cards: Callable[[], list[AdapterCard]], worker_id: int
    ) -> None:
        self._catalogue = catalogue
        self._operator = operator
        self._cards = cards
        self._worker_id = worker_id

    async def answer(self, update: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        """The answer to an update or a control; the caller's error becomes an answer with the status `error`."""
        try:
            match update:
                case "load_lora":
                    source = body.get("source")
                    uri = _text(source, "uri") if isinstance(source, Mapping) else ""
                    card = await self._catalogue.load(_text(body, "lora_name"), path_of(uri) if uri else "")
                    return _told(card, "loaded")
                case "unload_lora":
                    return _told(await self._catalogue.unload(_text(body, "lora_name")), "unloaded")
                case "list_loras":
                    return await self._list()
                case _:
                    return await self._events(body)
        except RequestError as error:
            return {"status": "error", "message": f"[{error.code}] {error}", "lora_name": body.get("lora_name")}

    async def _list(self) -> Mapping[str, Any]:
        """Id, version and tier at this worker of each adapter that requests may name."""
        cards = self._cards()
        here = {info.name: info for info in await self._operator.list_adapters() if info.name and not info.tenant}
        return {
            "status": "success",
            "loras": {card.name: card.lora_id for card in cards},
            "count": len(cards),
            "digests": {card.name: card.digest for card in cards},
            "adapters": [_described(card, here.get(card.name)) for card in cards],
        }

    async def _events(self, body: Mapping[str, Any]) -> Mapping[str, Any]:
        since = body.get("since", 0)
        if not isinstance(since, int) or since < 0:
            raise InvalidRequest(f"since is {since!r}; it is the number of an event, 0 for all")
        told = await self._operator.events_since(since)
        return {"status": "success", "instance_id": f"{self._worker_id:x}", **msgspec.to_builtins(told)}


def path_of(uri: str) -> str:
    """The path in the sources of a URI that Dynamo writes: file: and hf: lose their scheme.

    Raises InvalidRequest for a file of another machine.
    """
    parts = urlsplit(uri)
    if parts.scheme == "file":
        if parts.netloc not in ("", "localhost"):
            raise InvalidRequest(f"{uri!r} is a file of the machine {parts.netloc!r}; write file:///DIRECTORY")
        return unquote(parts.path)
    return f"{parts.netloc}{parts.path}" if parts.scheme == "hf" else uri


def _told(card: AdapterCard, done: str) -> Mapping[str, Any]:
    return {
        "status": "success",
        "message": f"LoRA adapter {card.name!r} {done}",
        "lora_name": card.name,
        "lora_id": card.lora_id,
        "digest": card.digest,
    }


def _described(card: AdapterCard, info: AdapterInfo | None) -> Mapping[str, Any]:
    """info: the engine's report of the adapter, None if only other workers or its source have it."""
    return {
        "name": card.name,
        "status": "NOT_DOWNLOADED" if info is None else info.status,
        "cache_location": "REMOTE" if info is None else info.location,
        "digest": card.digest or ("" if info is None else info.digest),
        "ranks": list(card.ranks or (() if info is None else info.ranks)),
        "modules": list(card.modules),
        "bytes": 0 if info is None else info.bytes,
    }


def _text(body: Mapping[str, Any], key: str) -> str:
    value = body.get(key)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(f"{key} is missing; it is a text")
    return value
