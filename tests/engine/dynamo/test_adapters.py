"""The adapters of workers and their cards, as an operator and Dynamo's system server load, unload and list them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import pytest
from support.adapters import wire_adapter
from support.fake_fleet import BASE, LAYOUT, FakeFleet, FakeWorker

from multilora_engine.dynamo.cards import AdapterCard
from multilora_engine.dynamo.fleet_messages import NEW_VERSION, Describe, Found, Upload
from multilora_engine.dynamo.fleet_uploads import UploadLost, pages_of
from multilora_engine.dynamo.updates import EVENTS, SystemUpdates, path_of
from multilora_engine.dynamo.workers import WorkerGone
from multilora_engine.errors import (
    AdapterConflict,
    AdapterNotFound,
    InvalidRequest,
    PathNotCovered,
    RelayedError,
    RequestError,
)
from multilora_engine.lora.format import content_digest, pack_adapter
from multilora_engine.lora.layout import PackedAdapter
from multilora_engine.lora.names import task_id_of
from multilora_engine.process.messages import adapter_header
from multilora_engine.process.operations import EventList
from multilora_wire.adapter_event import AdapterEvent

X = task_id_of("x")


def packed(seed: int) -> PackedAdapter:
    wire = wire_adapter(LAYOUT, [(0, 0, 4), (4, 1, 3)], seed)
    return pack_adapter(wire.weights, wire.config, LAYOUT)


A, B = packed(1), packed(2)


@pytest.fixture
def fleet() -> FakeFleet:
    """Workers whose sources have the same adapters."""
    fleet = FakeFleet(3)
    for worker in fleet.workers.values():
        worker.at_path = {"/a": A, "/b": B}
    return fleet


def run(*steps: Coroutine[Any, Any, Any]) -> list[Any]:
    async def one_after_the_other() -> list[Any]:
        return [await step for step in steps]

    return asyncio.run(asyncio.wait_for(one_after_the_other(), 60))


async def hear(worker: FakeWorker) -> None:
    """Ask another worker for news, once."""
    following = asyncio.create_task(worker.catalogue.follow_news())
    for _ in range(200):
        await asyncio.sleep(0)
    following.cancel()


def test_a_card_tells_which_version_it_is_and_how_large(fleet: FakeFleet) -> None:
    (card,) = run(fleet[1].catalogue.load("x", "/a"))
    assert fleet[1].cards == {"x": card}
    assert card.user_data == {
        "lora_adapter": True,
        "lora_id": card.lora_id,
        "digest": A.digest,
        "rank": 4,
        "modules": ["attn_qkv", "attn_dense"],
    }
    assert fleet[1].log == ["read /a", f"put {A.digest}", "card x"], "an earlier card would bring requests too early"


def test_what_one_worker_loads_is_a_model_at_all_and_comes_to_the_others_by_its_digest(fleet: FakeFleet) -> None:
    run(fleet[1].catalogue.load("x", "/a"), fleet[2].uploads.bring(X))
    assert fleet[2].cards["x"] == fleet[3].cards["x"] == fleet[1].cards["x"]
    assert fleet[2].in_engine == {X: A.digest}
    assert fleet[2].log == ["card x", f"put {A.digest}"], "it read nothing from its own sources"
    assert fleet[3].in_engine == {}, "nobody has asked there"


def test_a_name_moves_to_other_weights_at_every_worker_under_the_same_card(fleet: FakeFleet) -> None:
    run(
        fleet[1].catalogue.load("x", "/a"),
        fleet[2].uploads.bring(X),
        fleet[1].catalogue.load("x", "/a"),
        fleet[3].catalogue.load("x", "/b"),
    )
    assert fleet[1].uploads.is_behind(X)
    assert fleet[2].uploads.is_behind(X), "its next request brings the later weights first"
    run(fleet[2].uploads.bring(X))
    assert fleet[2].in_engine == {X: B.digest}
    assert [worker.adapters.cards[0].digest for worker in fleet.workers.values()] == [B.digest] * 3
    assert fleet[1].log.count(f"put {A.digest}") == 1, "the same weights again are nothing new"


def test_the_card_goes_before_the_adapter_everywhere(fleet: FakeFleet) -> None:
    run(fleet[1].catalogue.load("x", "/a"), fleet[2].uploads.bring(X), fleet[3].catalogue.unload("x"))
    assert fleet[2].log[-2:] == ["no card x", f"unload {A.digest}"]
    assert all(worker.cards == worker.in_engine == {} for worker in fleet.workers.values())
    assert run(*(worker.uploads.bring(X) for worker in fleet.workers.values())) == [False] * 3
    run(fleet[2].catalogue.load("x", "/b"))
    assert run(*(worker.uploads.bring(X) for worker in fleet.workers.values())) == [True] * 3


def test_an_adapter_that_was_evicted_everywhere_is_read_again_and_must_be_the_same(fleet: FakeFleet) -> None:
    run(fleet[1].catalogue.load("x", "/a"))
    fleet.kill(1)
    assert run(fleet[2].uploads.bring(X)) == [True]
    assert fleet[2].log[-2:] == ["read /a", f"put {A.digest}"]
    fleet[3].at_path["/a"] = B
    fleet.kill(2)
    with pytest.raises(Exception, match=r"'x' not found in cache.*at their source: the adapter has the digest"):
        run(fleet[3].uploads.bring(X))
    assert fleet[3].in_engine == {}


def test_weights_that_are_where_nobody_reaches_are_not_lost(fleet: FakeFleet) -> None:
    run(fleet[1].catalogue.load("x", "/a"))
    fleet[2].at_path.clear()
    fleet.kill(3)
    fleet[2].is_cut_off = True
    with pytest.raises(UploadLost) as lost:
        run(fleet[2].uploads.bring(X))
    assert lost.value.may_be_elsewhere
    errors = pytest.importorskip("multilora_engine.dynamo.answers", reason="ai-dynamo is not installed")
    assert type(errors.dynamo_error(lost.value)).__name__ == "EngineShutdown"


def test_a_path_that_no_source_covers_is_not_read_whoever_names_it(fleet: FakeFleet) -> None:
    with pytest.raises(PathNotCovered):
        run(fleet[1].catalogue.load("x", "/etc"))
    run(fleet[1].catalogue.load("x", "/a"))
    fleet[2].at_path.clear()
    fleet.kill(1)
    with pytest.raises(Exception, match=r"no worker has them, and at their source: adapters cannot be loaded from"):
        run(fleet[2].uploads.bring(X))


def test_an_adapter_without_a_card_is_forgotten(fleet: FakeFleet) -> None:
    fleet[1].fails_to_publish = True
    with pytest.raises(RuntimeError, match="discovery is gone"):
        run(fleet[1].catalogue.load("x", "/b"))
    assert all((worker.in_engine, worker.cards) == ({}, {}) for worker in fleet.workers.values())


def test_what_sources_have_gets_cards_and_is_read_later(fleet: FakeFleet) -> None:
    one = fleet[1]
    one.in_sources = ["s", BASE]
    run(one.adapters.scan_sources())
    assert one.log == ["card s"]
    assert one.cards["s"].user_data["rank"] == 0
    run(one.catalogue.load("s"))
    assert [card.digest for card in one.adapters.cards] == ["source of s"]


def test_an_adapter_of_the_sources_stays_a_model_when_a_client_sends_other_weights_for_it(fleet: FakeFleet) -> None:
    pages = bytes(pages_of(B))
    digest = content_digest(B.rows, B.pages, LAYOUT.lora_dtype)
    sent = Upload(adapter_header(X, B), "", digest, len(pages), NEW_VERSION)
    for worker in fleet.workers.values():
        worker.in_sources = ["x"]
    run(*(worker.adapters.scan_sources() for worker in fleet.workers.values()))
    run(fleet[1].catalogue.take_piece(sent, 0, pages), *(worker.uploads.bring(X) for worker in fleet.workers.values()))
    run(*(worker.adapters.scan_sources() for worker in fleet.workers.values()))
    assert [[card.digest for card in worker.adapters.cards] for worker in fleet.workers.values()] == [[B.digest]] * 3
    assert all(set(worker.cards) == {"x"} for worker in fleet.workers.values())


def test_a_request_for_the_model_of_a_card_that_names_no_adapter_is_not_the_base_models(fleet: FakeFleet) -> None:
    adapters = fleet[1].adapters
    run(fleet[1].catalogue.load("x", "/a"))
    for model, lora_name in ((BASE, ""), ("", ""), ("x", "x"), ("unknown", "")):
        adapters.check_meant(model, lora_name)
    with pytest.raises(InvalidRequest, match="x is a LoRA adapter, and the request names no adapter"):
        adapters.check_meant("x", "")


def test_sources_are_looked_at_again(fleet: FakeFleet) -> None:
    one = fleet[1]
    one.in_sources = ["s", "t"]
    run(one.adapters.scan_sources())
    one.in_sources = ["t", "u"]
    run(one.adapters.scan_sources())
    assert set(one.cards) == {"t", "u"}
    run(one.catalogue.unload("t"), one.adapters.scan_sources())
    assert set(one.cards) == {"u"}, "an operator has unloaded t"
    one.in_sources = ["u"]
    run(one.adapters.scan_sources())
    one.in_sources = ["t", "u"]
    run(one.adapters.scan_sources())
    assert set(one.cards) == {"t", "u"}, "somebody has put another t there"


def test_loads_of_one_name_go_one_after_the_other(fleet: FakeFleet) -> None:
    async def load_both() -> None:
        await asyncio.gather(fleet[1].catalogue.load("x", "/a"), fleet[1].catalogue.load("x", "/b"))

    run(load_both())
    assert fleet[1].log.count("card x") == 1
    assert fleet[1].in_engine[X] == B.digest


def test_a_new_worker_hears_of_what_the_others_know(fleet: FakeFleet) -> None:
    run(fleet[1].catalogue.load("x", "/a"))
    new = fleet.start(4)
    run(hear(new))
    assert set(new.cards) == {"x"}
    assert new.in_engine == {}
    fleet.kill(2)
    fleet.kill(3)
    assert run(new.uploads.bring(X)) == [True]


def test_a_worker_that_does_not_answer_is_missed_before_discovery_knows(fleet: FakeFleet) -> None:
    pages = bytes(pages_of(A))
    digest = content_digest(A.rows, A.pages, LAYOUT.lora_dtype)

    async def another_keeps_it() -> None:
        following = asyncio.create_task(fleet[1].catalogue.follow_news())
        while not all(fleet[number].uploads.pages(digest) for number in (1, *others)):
            with suppress(WorkerGone):
                await fleet[1].others.ask(keeper, Describe())
            await asyncio.sleep(0.01)
        following.cancel()

    run(fleet[1].catalogue.take_piece(Upload(adapter_header(X, A), "", digest, len(pages), NEW_VERSION), 0, pages))
    (keeper,) = [number for number in (2, 3) if fleet[number].uploads.pages(digest) is not None]
    others = {2, 3} - {keeper}
    run(hear(fleet[1]))
    fleet[keeper].is_cut_off = True
    run(another_keeps_it())


def test_what_a_client_sent_outlives_one_worker_after_the_other(fleet: FakeFleet) -> None:
    pages = bytes(pages_of(A))
    digest = content_digest(A.rows, A.pages, LAYOUT.lora_dtype)
    for number in (4, 5, 6):
        fleet.start(number)

    def keepers() -> list[int]:
        return [number for number, worker in fleet.workers.items() if worker.uploads.pages(digest) is not None]

    async def follow_until_two_keep_it() -> None:
        following = [asyncio.create_task(worker.catalogue.follow_news()) for worker in fleet.workers.values()]
        while len(keepers()) < 2:
            await asyncio.sleep(0.01)
        for task in following:
            task.cancel()

    run(fleet[1].catalogue.take_piece(Upload(adapter_header(X, A), "", digest, len(pages), NEW_VERSION), 0, pages))
    assert len(keepers()) == 2
    for _ in range(4):
        run(*(hear(worker) for worker in fleet.workers.values()))
        fleet.kill(keepers()[0])
        run(follow_until_two_keep_it())
    assert [run(worker.uploads.bring(X)) for worker in fleet.workers.values()] == [[True], [True]]


def test_a_worker_that_was_cut_off_hears_of_what_it_has_missed(fleet: FakeFleet) -> None:
    run(fleet[1].catalogue.load("x", "/a"), fleet[1].catalogue.load("y", "/a"), fleet[3].uploads.bring(X))
    fleet[3].is_cut_off = True
    run(fleet[1].catalogue.load("x", "/b"), fleet[2].catalogue.unload("y"))
    run(hear(fleet[3]))
    assert set(fleet[3].cards) == {"x", "y"}
    fleet[3].is_cut_off = False
    run(hear(fleet[3]))
    assert set(fleet[3].cards) == {"x"}
    assert fleet[3].uploads.is_behind(X)
    assert len({worker.uploads.state for worker in fleet.workers.values()}) == 1
    assert run(fleet[3].uploads.bring(X)) == [True]
    assert fleet[3].in_engine[X] == B.digest


def refusing_fleet(num_workers: int) -> FakeFleet:
    fleet = FakeFleet(num_workers, replaces=False)
    for worker in fleet.workers.values():
        worker.at_path = {"/a": A, "/b": B}
    return fleet


@pytest.mark.parametrize("num_turns", range(0, 60, 3))
@pytest.mark.parametrize("second", [1, 3])
def test_of_two_loads_at_the_same_moment_one_is_refused_and_all_workers_agree(num_turns: int, second: int) -> None:
    fleet = refusing_fleet(3)

    async def load_later() -> AdapterCard:
        for _ in range(num_turns):
            await asyncio.sleep(0)
        return await fleet[second].catalogue.load("x", "/b")

    async def race() -> list[AdapterCard | BaseException]:
        return await asyncio.gather(fleet[2].catalogue.load("x", "/a"), load_later(), return_exceptions=True)

    told = run(race())[0]
    (won,) = [card for card in told if isinstance(card, AdapterCard)]
    (refused,) = [error for error in told if isinstance(error, RequestError)]
    assert refused.code == "ALREADY_EXISTS"
    assert [run(worker.uploads.bring(X)) for worker in fleet.workers.values()] == [[True]] * 3
    assert [worker.in_engine for worker in fleet.workers.values()] == [{X: won.digest}] * 3
    assert [worker.adapters.cards for worker in fleet.workers.values()] == [[won]] * 3
    assert len({worker.uploads.state for worker in fleet.workers.values()}) == 1


def test_a_worker_that_missed_an_unload_learns_other_weights_although_it_refuses_them() -> None:
    fleet = refusing_fleet(2)
    run(fleet[1].catalogue.load("x", "/a"), fleet[2].uploads.bring(X))
    fleet[2].is_cut_off = True
    run(fleet[1].catalogue.unload("x"), fleet[1].catalogue.load("x", "/b"))
    fleet[2].is_cut_off = False
    run(hear(fleet[2]), fleet[2].uploads.bring(X))
    assert fleet[2].in_engine == fleet[1].in_engine == {X: B.digest}
    with pytest.raises(AdapterConflict):
        run(fleet[2].catalogue.load("x", "/a"))
    assert fleet[2].uploads.state == fleet[1].uploads.state


def test_an_upload_that_is_sent_again_after_its_end_gets_no_card(fleet: FakeFleet) -> None:
    pages = bytes(pages_of(A))
    digest = content_digest(A.rows, A.pages, LAYOUT.lora_dtype)
    new = Upload(adapter_header(X, A), "x", digest, len(pages), NEW_VERSION)
    (upload,) = run(fleet[1].catalogue.take_piece(new, 0, pages))
    run(fleet[2].catalogue.unload("x"))
    with pytest.raises(AdapterNotFound):
        run(fleet[1].catalogue.take_piece(upload, 0, pages))
    assert all(worker.cards == worker.in_engine == {} for worker in fleet.workers.values())


def test_all_workers_forget_the_uploads_that_came_first() -> None:
    fleet = FakeFleet(2, max_known=3)
    for worker in fleet.workers.values():
        worker.at_path = {"/a": A}
    run(*(fleet[1 + number % 2].catalogue.load(f"n{number}", "/a") for number in range(5)))
    assert [
        sorted(news.name for news in worker.uploads.news() if not isinstance(news, Found))
        for worker in fleet.workers.values()
    ] == [["n2", "n3", "n4"]] * 2
    assert fleet[1].uploads.state == fleet[2].uploads.state


@pytest.mark.parametrize("name", [BASE, "../x", "x" * 200])
def test_names_that_cannot_be(fleet: FakeFleet, name: str) -> None:
    with pytest.raises(InvalidRequest):
        run(fleet[1].catalogue.load(name, "/a"))
    assert fleet[1].log == []


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


def test_a_file_of_another_machine_is_no_place() -> None:
    with pytest.raises(InvalidRequest, match="a file of the machine 'host'"):
        path_of("file://host/a")


class Events:
    """The events of an engine."""

    def __init__(self, worker: FakeWorker) -> None:
        self.list_adapters = worker.list_adapters

    async def events_since(self, number: int) -> EventList:
        events = [AdapterEvent("uploaded", X, A.digest, 5, "host:1"), AdapterEvent("evicted", X, A.digest, 6, "host:1")]
        return EventList(events[number:], 2, 0)


def test_dynamo_s_endpoints(fleet: FakeFleet) -> None:
    one = fleet[1]
    one.in_sources = ["s"]
    system = SystemUpdates(one.catalogue, Events(one), lambda: one.adapters.cards, 0xABC)
    _, loaded, listed, again, unloaded, gone, nothing, missing, events, wrong = run(
        one.adapters.scan_sources(),
        system.answer("load_lora", {"lora_name": "x", "source": {"uri": "file:///a"}}),
        system.answer("list_loras", {}),
        system.answer("load_lora", {"lora_name": "x", "source": {"uri": "file:///b"}}),
        system.answer("unload_lora", {"lora_name": "x"}),
        system.answer("unload_lora", {"lora_name": "x"}),
        system.answer("load_lora", {}),
        system.answer("load_lora", {"lora_name": "y"}),
        system.answer(EVENTS, {"since": 1}),
        system.answer(EVENTS, {"since": "yesterday"}),
    )
    card = AdapterCard("x")
    assert (loaded["status"], loaded["lora_id"], loaded["digest"]) == ("success", card.lora_id, A.digest)
    assert listed["loras"] == {"s": AdapterCard("s").lora_id, "x": card.lora_id}
    assert (listed["digests"]["x"], listed["count"]) == (A.digest, 2)
    assert [(one["name"], one["status"], one["cache_location"]) for one in listed["adapters"]] == [
        ("s", "NOT_DOWNLOADED", "REMOTE"),
        ("x", "NOT_DOWNLOADED", "REMOTE"),
    ], "this engine lists what its sources have"
    assert listed["adapters"][1]["ranks"] == [3, 4]
    assert (again["digest"], unloaded["status"]) == (B.digest, "success")
    assert [answer["status"] for answer in (gone, nothing, missing, wrong)] == ["error"] * 4
    assert "[NOT_FOUND]" in missing["message"]
    assert (events["instance_id"], [event["kind"] for event in events["events"]]) == ("abc", ["evicted"])


def test_an_error_of_the_engine_is_the_answer(fleet: FakeFleet) -> None:
    with pytest.raises(RelayedError):
        run(fleet[1].catalogue.load("nobody"))


@pytest.mark.parametrize("name", ["a", "pirate", "org/x", "длинное", "x" * 96])
def test_ids_are_dynamo_s(name: str) -> None:
    llm = pytest.importorskip("dynamo.llm", reason="ai-dynamo is not installed")
    assert AdapterCard(name).lora_id == llm.lora_name_to_id(name)
