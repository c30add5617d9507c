"""The adapters of a worker and their cards, with an engine and a fleet of a few lines."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest

from multilora_engine.dynamo.adapters import FleetAdapters, answer_update, path_of
from multilora_engine.dynamo.card import AdapterCard
from multilora_engine.errors import AdapterNotHere, AdapterNotKnown, InvalidRequest, RelayedError
from multilora_engine.lora.names import task_id_of
from multilora_wire.adapter_info import AdapterInfo

MODULES = {0: "attn_qkv", 4: "attn_dense"}


def info(name: str, digest: str, status: str = "READY_FOR_USE") -> AdapterInfo:
    ranks, modules = ((4, 8), (0, 4)) if digest else ((), ())
    return AdapterInfo(
        task_id_of(name),
        name,
        digest,
        status,
        "DEVICE",
        1,
        ranks,
        0,
        False,
        0.0,
        0,
        module_ids=modules,  # type: ignore[arg-type]
    )


class Fleet:
    """An engine whose sources have `at_path`, and the cards that are published. log: what happened, in order."""

    def __init__(self) -> None:
        self.at_path = {"/a": "d1", "/b": "d2"}
        self.in_sources: list[str] = []
        self.loaded: dict[str, str] = {}
        self.cards: dict[str, AdapterCard] = {}
        self.log: list[str] = []
        self.fails_to_publish = False

    async def list_adapters(self) -> list[AdapterInfo]:
        here = [info(name, digest) for name, digest in self.loaded.items()]
        return here + [info(name, "", "NOT_DOWNLOADED") for name in self.in_sources if name not in self.loaded]

    async def load(self, name: str, path: str = "") -> AdapterInfo:
        await asyncio.sleep(0)
        if path:
            self.loaded[name] = self.at_path[path]
        elif name not in self.loaded:
            if name not in self.in_sources:
                raise AdapterNotKnown(name)
            self.loaded[name] = f"source of {name}"
        self.log.append(f"load {name} {self.loaded[name]}")
        return info(name, self.loaded[name])

    async def unload(self, name: str) -> AdapterInfo:
        if name not in self.loaded:
            raise RelayedError("NOT_FOUND", str(AdapterNotHere(name)))
        self.log.append(f"unload {name}")
        return info(name, self.loaded.pop(name))

    async def publish(self, card: AdapterCard) -> None:
        if self.fails_to_publish:
            raise RuntimeError("discovery is gone")
        self.log.append(f"card {card.name} {card.digest}")
        assert card.name not in self.cards, "Dynamo lets nobody change a card"
        self.cards[card.name] = card

    async def withdraw(self, name: str) -> None:
        self.log.append(f"no card {name}")
        del self.cards[name]


@pytest.fixture
def fleet() -> Fleet:
    return Fleet()


@pytest.fixture
def adapters(fleet: Fleet) -> FleetAdapters:
    return FleetAdapters(fleet, fleet, "base", MODULES)


def run(*steps: Coroutine[Any, Any, Any]) -> list[Any]:
    async def one_after_the_other() -> list[Any]:
        return [await step for step in steps]

    return asyncio.run(one_after_the_other())


def test_a_card_tells_which_version_it_is_and_how_large(fleet: Fleet, adapters: FleetAdapters) -> None:
    (card,) = run(adapters.load("x", "file:///a"))
    assert fleet.cards == {"x": card}
    assert card.user_data == {
        "lora_adapter": True,
        "lora_id": card.lora_id,
        "digest": "d1",
        "rank": 8,
        "modules": ["attn_qkv", "attn_dense"],
    }
    assert fleet.log == ["load x d1", "card x d1"], "a card that came first would bring requests too early"


def test_a_name_moves_to_other_weights_under_the_same_card(fleet: Fleet, adapters: FleetAdapters) -> None:
    run(adapters.load("x", "file:///a"), adapters.load("x", "file:///a"), adapters.load("x", "file:///b"))
    assert fleet.log == ["load x d1", "card x d1", "load x d1", "load x d2"]
    assert [card.digest for card in adapters.cards] == ["d2"]


def test_the_card_goes_before_the_adapter(fleet: Fleet, adapters: FleetAdapters) -> None:
    run(adapters.load("x", "file:///a"), adapters.unload("x"))
    assert fleet.log[2:] == ["no card x", "unload x"]
    assert (adapters.cards, fleet.cards) == ([], {})


def test_an_adapter_that_was_evicted_can_be_unloaded(fleet: Fleet, adapters: FleetAdapters) -> None:
    run(adapters.load("x", "file:///a"))
    fleet.loaded.clear()
    run(adapters.unload("x"))
    assert fleet.cards == {}


def test_an_adapter_that_was_evicted_comes_back_from_where_it_was(fleet: Fleet, adapters: FleetAdapters) -> None:
    run(adapters.load("x", "file:///b"))
    fleet.loaded.clear()
    assert run(adapters.restore("x"), adapters.restore("nobody")) == [True, False]
    assert fleet.loaded == {"x": "d2"}
    assert fleet.log[2:] == ["load x d2"], "it has its card already"


def test_an_adapter_without_a_card_is_forgotten(fleet: Fleet, adapters: FleetAdapters) -> None:
    fleet.fails_to_publish = True
    with pytest.raises(RuntimeError, match="discovery is gone"):
        run(adapters.load("x", "file:///b"))
    assert (fleet.loaded, adapters.cards) == ({}, [])


def test_what_sources_have_gets_cards_and_is_read_later(fleet: Fleet, adapters: FleetAdapters) -> None:
    fleet.in_sources = ["s", "base"]
    assert run(adapters.publish_sources()) == [1]
    assert fleet.log == ["card s "]
    assert fleet.cards["s"].user_data["rank"] == 0
    run(adapters.load("s"))
    assert [card.digest for card in adapters.cards] == ["source of s"]


def test_loads_of_one_name_go_one_after_the_other(fleet: Fleet, adapters: FleetAdapters) -> None:
    async def load_both() -> None:
        await asyncio.gather(adapters.load("x", "file:///a"), adapters.load("x", "file:///b"))

    asyncio.run(load_both())
    assert fleet.log == ["load x d1", "card x d1", "load x d2"]


@pytest.mark.parametrize(("name", "uri"), [("base", "file:///a"), ("../x", "file:///a"), ("x", "file://host/a")])
def test_names_and_places_that_cannot_be(adapters: FleetAdapters, name: str, uri: str) -> None:
    with pytest.raises(InvalidRequest):
        run(adapters.load(name, uri))


@pytest.mark.parametrize(
    ("uri", "path"),
    [
        ("file:///data/my%20adapter", "/data/my adapter"),
        ("file://localhost/data", "/data"),
        ("hf://owner/name", "owner/name"),
        ("s3://bucket/key", "s3://bucket/key"),
        ("/data", "/data"),
    ],
)
def test_uris_are_what_the_sources_call_places(uri: str, path: str) -> None:
    assert path_of(uri) == path


def test_dynamo_s_endpoints(fleet: Fleet, adapters: FleetAdapters) -> None:
    loaded, listed, again, unloaded, gone, nothing, missing = run(
        answer_update(adapters, "load_lora", {"lora_name": "x", "source": {"uri": "file:///a"}}),
        answer_update(adapters, "list_loras", {}),
        answer_update(adapters, "load_lora", {"lora_name": "x", "source": {"uri": "file:///b"}}),
        answer_update(adapters, "unload_lora", {"lora_name": "x"}),
        answer_update(adapters, "unload_lora", {"lora_name": "x"}),
        answer_update(adapters, "load_lora", {}),
        answer_update(adapters, "load_lora", {"lora_name": "y"}),
    )
    card = AdapterCard("x")
    assert (loaded["status"], loaded["lora_id"], loaded["digest"]) == ("success", card.lora_id, "d1")
    assert (listed["loras"], listed["digests"], listed["count"]) == ({"x": card.lora_id}, {"x": "d1"}, 1)
    assert (again["digest"], unloaded["status"]) == ("d2", "success")
    assert [answer["status"] for answer in (gone, nothing, missing)] == ["error"] * 3
    assert "[NOT_FOUND]" in missing["message"]


@pytest.mark.parametrize("name", ["a", "pirate", "org/x", "длинное", "x" * 96])
def test_ids_are_dynamo_s(name: str) -> None:
    llm = pytest.importorskip("dynamo.llm", reason="ai-dynamo is not installed")
    assert AdapterCard(name).lora_id == llm.lora_name_to_id(name)
