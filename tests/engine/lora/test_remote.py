"""Adapters on their way: fetched once, put once, given up without a trace; and an engine that waits for them."""

from __future__ import annotations

import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from support.adapters import TINY, wire_adapter
from support.engines import Answer, assert_idle, run_all
from support.fronts import TIMEOUT_S
from support.oracle import ATTENTION, MLP, Oracle, tiny_llama_oracle
from support.sources import ROWS, GatedSource, key

from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.errors import (
    AdapterConflict,
    AdapterNotFound,
    AdapterVersionNotFound,
    AliasConflict,
    FetchConflict,
    InvalidRequest,
    PathNotCovered,
    QueueFull,
    SourceUnavailable,
)
from multilora_engine.lora import remote as remote_module
from multilora_engine.lora.adapter_events import EventLog
from multilora_engine.lora.device_tier import DeviceTier
from multilora_engine.lora.disk_tier import DiskTier
from multilora_engine.lora.format import pack_adapter
from multilora_engine.lora.host_tier import HostTier
from multilora_engine.lora.layout import PackedAdapter
from multilora_engine.lora.manager import LoRAManager
from multilora_engine.lora.names import task_id_of
from multilora_engine.lora.remote import Fetch, RemoteAdapters
from multilora_engine.lora.sources import fetcher as fetcher_module
from multilora_engine.lora.sources.fetcher import FetchedAdapter
from multilora_engine.lora.sources.source import AdapterKey, FolderChange
from multilora_engine.lora.versions import Expectation
from multilora_engine.lora_config import LoRAConfig
from multilora_engine.request import GenerationRequest, SamplingParams
from multilora_wire.adapter_event import AdapterEvent
from multilora_wire.adapter_info import Alias, AliasMember


def packed(seed: int) -> PackedAdapter:
    wire = wire_adapter(TINY, ROWS, seed=seed)
    return pack_adapter(wire.weights, wire.config, TINY)


class HeldFetcher:
    """Fetches end when the test says so. fetches: (key, source, future) of each."""

    def __init__(self) -> None:
        self.fetches: list[tuple[AdapterKey, str, Future[FetchedAdapter]]] = []

    def fetch(self, wanted: AdapterKey, source: str = "", path: str = "") -> Future[FetchedAdapter]:
        self.fetches.append((wanted, source, Future()))
        return self.fetches[-1][2]

    def begin(self) -> Future[FetchedAdapter]:
        future = self.fetches[-1][2]
        assert future.set_running_or_notify_cancel()
        return future

    def watch(self, on_change: Callable[[FolderChange], None]) -> bool:
        self.tell_change = on_change
        return True

    def close(self) -> None:
        """Nothing to end."""


class World:
    def __init__(self, num_pages: int = 8, on_conflict: str = "refuse", disk: DiskTier | None = None) -> None:
        host = HostTier(num_pages, TINY.page_bytes)
        device = DeviceTier(TINY, host.pool, host.pool, 4)
        self.loras = LoRAManager(host, device, on_conflict, disk=disk)  # type: ignore[arg-type]
        self.fetcher = HeldFetcher()
        self.events: EventLog[AdapterEvent] = EventLog(100)
        self.remote = RemoteAdapters(self.loras, self.fetcher, self.events.append)  # type: ignore[arg-type]

    def upload(self, name: str, adapter: PackedAdapter) -> None:
        self.loras.put(task_id_of(name), adapter)
        self.remote.supersede(task_id_of(name))


def test_an_adapter_is_fetched_once_for_all_who_wait() -> None:
    world = World()
    first, second = world.remote.fetch(key("x")), world.remote.fetch(key("x"))
    assert first is second
    assert len(world.fetcher.fetches) == 1
    assert list(world.remote.poll()) == []
    (info,) = world.remote.describe()
    assert (info.name, info.status, info.location, info.digest) == ("x", "DOWNLOADING", "REMOTE", "")
    world.fetcher.begin().set_result(FetchedAdapter(packed(1), "x"))
    assert list(world.remote.poll()) == [first]
    assert (first.is_done, first.error) == (True, None)
    (info,) = world.loras.inventory.describe()
    assert (info.name, info.digest, info.location) == ("x", packed(1).digest, "HOST")
    assert not world.remote.is_busy
    assert world.remote.stats.copies == 1


def test_an_adapter_that_is_on_its_way_from_elsewhere_is_not_taken_for_that_of_the_source_that_was_asked_for() -> None:
    world = World()
    for under_way, told in (("", "the first source that has it"), ("a", "source 'a'")):
        fetch = world.remote.fetch(key("x"), under_way)
        for source in {"", under_way}:
            assert world.remote.fetch(key("x"), source) is fetch
        with pytest.raises(FetchConflict, match=rf"'x' is on its way from {told}: .* load it from 'b' again"):
            world.remote.fetch(key("x"), "b")
        assert fetch.num_waiting == 2 + bool(under_way)
        for _ in range(fetch.num_waiting):
            world.remote.give_up(fetch)
    assert [source for _, source, _ in world.fetcher.fetches] == ["", "a"]


def test_what_is_at_a_path_is_fetched_apart_and_takes_the_name_it_was_asked_for_under() -> None:
    world = World()
    named = world.remote.fetch(key("x"))
    named_future = world.fetcher.begin()
    there = world.remote.fetch(key("x"), path="/there")
    assert there is not named
    assert world.remote.fetch(key("x"), path="/there") is there
    world.fetcher.begin().set_result(FetchedAdapter(packed(2), ""))
    assert list(world.remote.poll()) == [there]
    (info,) = world.loras.inventory.describe()
    assert (info.name, info.digest) == ("x", packed(2).digest)
    assert list(world.remote.poll()) == [named], "it is known now"
    named_future.set_result(FetchedAdapter(packed(1), "x"))
    assert world.loras.inventory.info(task_id_of("x")).digest == packed(2).digest


def test_an_adapter_whose_folder_has_an_alias_s_name_is_refused_as_a_client_s_mistake() -> None:
    world = World()
    there = world.remote.fetch(key("x"), path="/there/chat")
    world.loras.aliases.set(Alias("chat", (AliasMember("chat-v7", 1),)))
    world.fetcher.begin().set_result(FetchedAdapter(packed(2), "chat"))
    assert list(world.remote.poll()) == [there]
    assert isinstance(there.error, AliasConflict)
    assert there.error.code == "ALREADY_EXISTS"
    assert world.remote.stats.failures == 0
    assert world.loras.inventory.describe() == []


def kinds_of_events(world: World) -> list[str]:
    return [event.kind for event in world.events.since(0).events]


@pytest.mark.parametrize("on_conflict", ["refuse", "replace"])
def test_a_changed_folder_of_a_cached_adapter_follows_lora_on_conflict(
    on_conflict: str, caplog: pytest.LogCaptureFixture
) -> None:
    world = World(on_conflict=on_conflict)
    world.loras.put(task_id_of("x"), packed(1), "x")
    in_flight = world.loras.pin(task_id_of("x"))
    assert not world.remote.is_busy
    world.fetcher.tell_change(FolderChange(key("x")))
    assert world.remote.is_busy
    assert list(world.remote.poll()) == []
    world.fetcher.begin().set_result(FetchedAdapter(packed(2), "x"))
    (fetch,) = world.remote.poll()
    assert in_flight.digest == packed(1).digest
    is_refused = on_conflict == "refuse"
    assert isinstance(fetch.error, AdapterConflict) == is_refused
    assert world.loras.inventory.digest(task_id_of("x")) == packed(1 if is_refused else 2).digest
    assert ("fetch_failed" in kinds_of_events(world)) == is_refused
    assert (packed(2).digest[:12] in caplog.text) == is_refused
    world.loras.memory.unpin(in_flight)
    world.loras.check_integrity()
    assert not world.remote.is_busy


def test_a_changed_folder_of_an_adapter_that_no_tier_has_is_not_read() -> None:
    world = World()
    world.fetcher.tell_change(FolderChange(key("x")))
    assert list(world.remote.poll()) == []
    assert (world.fetcher.fetches, world.remote.is_busy) == ([], False)


@pytest.mark.parametrize("is_uploaded", [True, False])
def test_what_a_client_did_after_a_folder_changed_stays(is_uploaded: bool) -> None:
    world = World(on_conflict="replace")
    world.upload("x", packed(1))
    world.fetcher.tell_change(FolderChange(key("x")))
    assert list(world.remote.poll()) == []
    future = world.fetcher.begin()
    if is_uploaded:
        world.upload("x", packed(3))
    else:
        world.loras.unload(task_id_of("x"))
    assert len(list(world.remote.poll())) == is_uploaded, "of use to nobody"
    future.set_result(FetchedAdapter(packed(2), "x"))
    assert len(list(world.remote.poll())) == (not is_uploaded)
    assert world.loras.inventory.digest(task_id_of("x")) == (packed(3).digest if is_uploaded else "")
    assert "fetch_failed" not in kinds_of_events(world)


def test_a_request_that_comes_after_an_unload_takes_the_version_that_is_on_its_way() -> None:
    world = World(on_conflict="replace")
    world.upload("x", packed(1))
    world.fetcher.tell_change(FolderChange(key("x")))
    assert list(world.remote.poll()) == []
    world.loras.unload(task_id_of("x"))
    wanted = Expectation(answering=packed(2).digest)
    fetch = world.remote.fetch(key("x"), expectation=wanted)
    world.fetcher.begin().set_result(FetchedAdapter(packed(2), "x"))
    assert list(world.remote.poll()) == [fetch]
    fetch.check(wanted)
    assert world.loras.inventory.digest(task_id_of("x")) == packed(2).digest


@pytest.mark.parametrize("is_read", [True, False])
def test_what_a_client_sends_after_a_folder_changed_answers_a_request_that_waits_for_the_folder(is_read: bool) -> None:
    world = World(on_conflict="replace")
    world.upload("x", packed(1))
    world.fetcher.tell_change(FolderChange(key("x")))
    assert list(world.remote.poll()) == []
    world.loras.unload(task_id_of("x"))
    fetch = world.remote.fetch(key("x"))
    future = world.fetcher.begin()
    if is_read:
        future.set_result(FetchedAdapter(packed(2), "x"))
    world.upload("x", packed(3))
    assert list(world.remote.poll()) == [fetch]
    fetch.check(Expectation())
    assert world.loras.inventory.digest(task_id_of("x")) == packed(3).digest
    assert not world.remote.is_busy


@pytest.mark.parametrize(("path", "is_there"), [("/a/owner/x", True), ("/a/owner/x/", True), ("/a/owner/y", False)])
def test_what_was_read_at_a_path_is_compared_again_after_a_watched_folder_changed(path: str, is_there: bool) -> None:
    world = World()
    world.remote.fetch(AdapterKey(7), path=path)
    world.fetcher.begin().set_result(FetchedAdapter(packed(1), ""))
    assert len(list(world.remote.poll())) == 1
    for reason, is_known in [("half of it", True), ("", not is_there)]:
        assert world.remote.has_from(7, path)
        world.fetcher.tell_change(FolderChange(key("owner/x"), reason))
        assert list(world.remote.poll()) == []
        assert world.remote.has_from(7, path) == is_known


def test_a_folder_that_changes_during_its_fetch_is_fetched_once_more() -> None:
    world = World(on_conflict="replace")
    world.remote.fetch(key("x"))
    world.fetcher.tell_change(FolderChange(key("x")))
    assert list(world.remote.poll()) == []
    assert len(world.fetcher.fetches) == 1
    world.fetcher.begin().set_result(FetchedAdapter(packed(1), "x"))
    assert len(list(world.remote.poll())) == 1
    assert list(world.remote.poll()) == []
    world.fetcher.begin().set_result(FetchedAdapter(packed(2), "x"))
    assert len(list(world.remote.poll())) == 1
    assert world.loras.inventory.digest(task_id_of("x")) == packed(2).digest


@pytest.mark.parametrize("on_conflict", ["refuse", "replace"])
def test_a_folder_that_was_exchanged_while_no_server_was_there_is_read_although_the_disk_has_its_adapter(
    on_conflict: str, tmp_path: Path
) -> None:
    def world() -> World:
        return World(on_conflict=on_conflict, disk=DiskTier(tmp_path, 1 << 20, TINY))

    before = world()
    for name in ("x", "y"):
        before.loras.put(task_id_of(name), packed(1), name)
    before.loras.close()
    for file in tmp_path.iterdir():
        os.utime(file, (9, 9))
    after = world()
    after.upload("z", packed(1))
    for name, changed_s in (("x", 9.5), ("y", 9), ("z", 10)):
        after.fetcher.tell_change(FolderChange(key(name), changed_s=changed_s))
    assert list(after.remote.poll()) == []
    assert [str(wanted) for wanted, _, _ in after.fetcher.fetches] == ["x"]
    after.fetcher.begin().set_result(FetchedAdapter(packed(2), "x"))
    assert len(list(after.remote.poll())) == 1
    assert after.loras.inventory.digest(task_id_of("x")) == packed(1 if on_conflict == "refuse" else 2).digest
    assert not after.remote.is_busy
    after.loras.close()


def test_many_changed_folders_leave_threads_for_adapters_that_requests_wait_for() -> None:
    world = World(on_conflict="replace")
    names = ["a", "b", "c", "d"]
    for name in names:
        world.upload(name, packed(1))
        world.fetcher.tell_change(FolderChange(key(name)))
    for num_fetches in (2, 4):
        assert list(world.remote.poll()) == []
        assert len(world.fetcher.fetches) == num_fetches
        assert world.remote.is_busy
        for _, _, future in world.fetcher.fetches[-2:]:
            assert future.set_running_or_notify_cancel()
            future.set_result(FetchedAdapter(packed(2), ""))
        assert len(list(world.remote.poll())) == 2
    assert {world.loras.inventory.digest(task_id_of(name)) for name in names} == {packed(2).digest}
    assert not world.remote.is_busy


def test_half_a_folder_is_named_in_the_log_and_the_events(caplog: pytest.LogCaptureFixture) -> None:
    world = World()
    world.upload("x", packed(1))
    world.fetcher.tell_change(FolderChange(key("x"), "the weights end early"))
    assert list(world.remote.poll()) == []
    assert "x could not be fetched: the weights end early" in caplog.text
    assert kinds_of_events(world)[-1] == "fetch_failed"
    assert (world.remote.stats.failures, world.fetcher.fetches) == (1, [])


def test_an_alias_means_the_new_version_and_a_folder_of_its_name_is_refused() -> None:
    world = World(on_conflict="replace")
    world.upload("x", packed(1))
    world.loras.aliases.set(Alias("chat", (AliasMember("x", 1),)))
    world.fetcher.tell_change(FolderChange(key("chat")))
    world.fetcher.tell_change(FolderChange(key("x")))
    assert list(world.remote.poll()) == []
    assert [str(wanted) for wanted, _, _ in world.fetcher.fetches] == ["x"]
    world.fetcher.begin().set_result(FetchedAdapter(packed(2), "x"))
    assert len(list(world.remote.poll())) == 1
    assert world.loras.inventory.digest(task_id_of("x")) == packed(2).digest


@pytest.mark.parametrize("on_conflict", ["refuse", "replace"])
def test_another_version_at_a_path_follows_lora_on_conflict(on_conflict: str) -> None:
    world = World(on_conflict=on_conflict)
    world.loras.put(task_id_of("x"), packed(1), "x")
    fetch = world.remote.fetch(key("x"), path="/there")
    assert list(world.remote.poll()) == []
    world.fetcher.begin().set_result(FetchedAdapter(packed(2), ""))
    assert list(world.remote.poll()) == [fetch]
    is_refused = on_conflict == "refuse"
    assert isinstance(fetch.error, AdapterConflict) == is_refused
    assert world.loras.inventory.info(task_id_of("x")).digest == packed(1 if is_refused else 2).digest
    assert world.remote.stats.failures == 0


@pytest.mark.parametrize("on_conflict", ["refuse", "replace"])
def test_an_adapter_is_from_a_path_while_it_has_the_content_that_was_read_there(on_conflict: str) -> None:
    world = World(on_conflict=on_conflict)
    task_id = task_id_of("x")

    def read(path: str, seed: int) -> None:
        world.remote.fetch(key("x"), path=path)
        world.fetcher.begin().set_result(FetchedAdapter(packed(seed), ""))
        list(world.remote.poll())

    assert not world.remote.has_from(task_id, "/a")
    read("/a", 1)
    assert world.remote.has_from(task_id, "/a")
    assert not world.remote.has_from(task_id, "/b")
    read("/b", 2)
    assert world.remote.has_from(task_id, "/a" if on_conflict == "refuse" else "/b")
    assert not world.remote.has_from(task_id, "/b" if on_conflict == "refuse" else "/a")
    world.loras.unload(task_id)
    assert not any(world.remote.has_from(task_id, path) for path in ("/a", "/b")), "evicted"
    world.upload("x", packed(3))
    assert not any(world.remote.has_from(task_id, path) for path in ("/a", "/b")), "sent by a client"


def test_paths_of_adapters_that_are_gone_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_module, "_NUM_PATHS", 4)
    world = World()
    for number in range(20):
        world.remote.fetch(AdapterKey(number), path="/there")
        world.fetcher.begin().set_result(FetchedAdapter(packed(1), ""))
        list(world.remote.poll())
        if number != 7:
            world.loras.unload(number)
    assert world.remote.has_from(7, "/there")
    assert len(world.remote._read_at) <= 5


def test_a_path_without_sources_is_refused() -> None:
    remote = RemoteAdapters(World().loras, None, EventLog[AdapterEvent](1).append)
    with pytest.raises(PathNotCovered, match="'/there': the server has no lora_sources"):
        remote.fetch(key("x"), path="/there")


def test_whoever_gives_up_last_drops_a_fetch_that_has_not_begun() -> None:
    world = World()
    fetch = world.remote.fetch(key("x"))
    world.remote.fetch(key("x"))
    world.remote.give_up(fetch)
    assert world.remote.is_busy
    world.remote.give_up(fetch)
    assert not world.remote.is_busy
    assert world.fetcher.fetches[0][2].cancelled()


def test_a_fetch_that_has_begun_is_kept_for_the_next_who_asks() -> None:
    world = World()
    fetch = world.remote.fetch(key("x"))
    future = world.fetcher.begin()
    world.remote.give_up(fetch)
    assert world.remote.fetch(key("x")) is fetch
    world.remote.give_up(fetch)
    future.set_result(FetchedAdapter(packed(1), "x"))
    assert list(world.remote.poll()) == [fetch]
    assert world.loras.inventory.is_known(task_id_of("x"))


def test_an_upload_meanwhile_wins_over_the_source() -> None:
    world = World()
    fetch = world.remote.fetch(key("x"))
    future = world.fetcher.begin()
    world.upload("x", packed(2))
    assert list(world.remote.poll()) == [fetch]
    assert fetch.error is None
    future.set_result(FetchedAdapter(packed(1), "x"))
    assert list(world.remote.poll()) == []
    assert world.loras.inventory.info(task_id_of("x")).digest == packed(2).digest


def test_an_upload_that_is_gone_again_leaves_the_fetch_under_way() -> None:
    world = World()
    fetch = world.remote.fetch(key("x"))
    world.upload("x", packed(2))
    world.loras.unload(task_id_of("x"))
    assert list(world.remote.poll()) == []
    world.fetcher.begin().set_result(FetchedAdapter(packed(1), "x"))
    assert list(world.remote.poll()) == [fetch]
    assert world.loras.inventory.info(task_id_of("x")).digest == packed(1).digest


def test_a_step_looks_at_no_fetch_that_is_still_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    fetches = [world.remote.fetch(key(f"adapter-{i}")) for i in range(50)]
    world.fetcher.begin().set_result(FetchedAdapter(packed(1), "x"))
    asked = []
    is_done = Future.done
    monkeypatch.setattr(Future, "done", lambda future: asked.append(future) or is_done(future))
    assert list(world.remote.poll()) == [fetches[-1]]
    assert asked == [fetches[-1].future]


def test_what_cannot_be_fetched_or_kept_is_told_and_may_be_asked_for_again() -> None:
    world = World(num_pages=1)
    fetch = world.remote.fetch(key("x"))
    world.fetcher.begin().set_exception(SourceUnavailable("x", "ours", "no route"))
    assert list(world.remote.poll()) == [fetch]
    assert "cannot be had from source 'ours' now: no route" in str(fetch.error)
    world.loras.put(1, packed(1))
    world.loras.pin(1)
    again = world.remote.fetch(key("x"))
    world.fetcher.begin().set_result(FetchedAdapter(packed(2), "x"))
    assert list(world.remote.poll()) == [again]
    assert "Cache is full" in str(again.error)
    assert [event.kind for event in world.events.since(0).events] == ["fetch_failed"] * 2
    assert world.remote.stats.failures == 2


def test_without_sources_nothing_is_fetched() -> None:
    remote = RemoteAdapters(World().loras, None, lambda event: None)
    with pytest.raises(AdapterNotFound):
        remote.fetch(key("x"))
    assert remote.list_sources().result(0) == []


NAMES = ("a", "b", "c")
VERSIONS = (packed(0), packed(1))
names = st.sampled_from(NAMES)


class RemoteMachine(RuleBasedStateMachine):
    """Asks, gives up, uploads, and fetches that begin and end in any order; the model counts who waits for what.

    A source has version 0 of every adapter, uploads bring version 1.
    """

    def __init__(self) -> None:
        super().__init__()
        self.world = World(num_pages=6)
        self.waiting: dict[str, Counter[Fetch]] = {name: Counter() for name in NAMES}
        self.present: dict[str, int] = {}

    @rule(name=names)
    def ask(self, name: str) -> None:
        if name not in self.present:
            self.waiting[name][self.world.remote.fetch(key(name))] += 1

    @rule(name=names)
    def give_up(self, name: str) -> None:
        for fetch in list(self.waiting[name])[:1]:
            self.world.remote.give_up(fetch)
            self.waiting[name] -= Counter([fetch])

    @rule(name=names)
    def upload(self, name: str) -> None:
        if name not in self.present:
            self.world.upload(name, VERSIONS[1])
            self.present[name] = 1

    @rule(name=names)
    def unload(self, name: str) -> None:
        if name in self.present and not self.waiting[name]:
            self.world.loras.unload(task_id_of(name))
            del self.present[name]

    @rule(name=names, fails=st.booleans())
    def end_fetch(self, name: str, fails: bool) -> None:
        for wanted, _, future in self.world.fetcher.fetches:
            if wanted.name == name and not future.done() and future.set_running_or_notify_cancel():
                if fails:
                    future.set_exception(SourceUnavailable(name, "ours", "no route"))
                else:
                    future.set_result(FetchedAdapter(VERSIONS[0], name))

    @rule()
    def poll(self) -> None:
        for fetch in self.world.remote.poll():
            name = fetch.key.name
            assert set(self.waiting[name]) <= {fetch}
            assert fetch.num_waiting == self.waiting[name][fetch]
            self.waiting[name].clear()
            if fetch.error is None:
                self.present.setdefault(name, 0)

    @invariant()
    def sound(self) -> None:
        self.world.remote.check_integrity()
        self.world.loras.check_integrity()
        for name in NAMES:
            known = self.world.loras.inventory.is_known(task_id_of(name))
            assert known == (name in self.present)
            assert (
                not known
                or self.world.loras.inventory.info(task_id_of(name)).digest == VERSIONS[self.present[name]].digest
            )
        assert len({fetch for waiting in self.waiting.values() for fetch in waiting}) <= len(NAMES)
        assert all(len(waiting) <= 1 for waiting in self.waiting.values()), "an adapter is fetched twice at once"

    def teardown(self) -> None:
        for name in NAMES:
            self.end_fetch(name=name, fails=False)
        self.poll()
        assert not self.world.remote.is_busy
        assert not any(self.waiting.values()), "somebody waits for ever"


RemoteMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestRemoteMachine = RemoteMachine.TestCase


@pytest.fixture(scope="module")
def oracle_and_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Oracle, Path]:
    """A tiny Llama, and the PEFT adapters `pirate` and `parrot` in a directory."""
    oracle, path = tiny_llama_oracle(tmp_path_factory.mktemp("oracle"))
    oracle.add_random("pirate", 4, ATTENTION + MLP, seed=1)
    oracle.add_random("parrot", 9, ATTENTION, seed=2, use_dora=True)
    return oracle, path


@pytest.fixture
def engine(oracle_and_checkpoint: tuple[Oracle, Path], default_model_dir: Path) -> Iterator[Engine]:
    """An engine with a directory source that waits for `GatedSource.gate`."""
    oracle, checkpoint = oracle_and_checkpoint
    GatedSource.gate.clear()
    GatedSource.asked.clear()
    sources = [{"source": "support.sources:GatedSource", "root": str(oracle.adapters["pirate"].parent)}]
    config = EngineConfig(
        model_path=checkpoint,
        tokenizer_path=default_model_dir,
        num_threads=1,
        max_queue_size=40,
        kv_cache_memory_bytes=32 << 20,
        lora=LoRAConfig.model_validate({"lora_sources": sources, "lora_cache_host_memory_bytes": 32 << 20}),
    )
    engine = Engine(config)
    yield engine
    GatedSource.gate.set()
    engine.close()


PROMPT = [5, 6, 7, 8]


def request(request_id: str, name: str = "", **options: Any) -> GenerationRequest:
    task = task_id_of(name) if name else None
    given = {"sampling": SamplingParams(max_tokens=8, end_id=-1), "lora_task_id": task, "lora_name": name}
    return GenerationRequest(request_id, PROMPT, **{**given, **options})


def finish(engine: Engine) -> dict[str, Answer]:
    """Step until nothing is left: what each request got since."""
    answers: dict[str, Answer] = {}
    while engine.has_work:
        for output in engine.step():
            answers.setdefault(output.request_id, Answer()).add(output)
        engine.check_integrity()
    assert_idle(engine)
    return answers


def test_requests_for_an_uncached_adapter_wait_for_its_source_and_then_answer_as_peft_does(
    engine: Engine, oracle_and_checkpoint: tuple[Oracle, Path]
) -> None:
    for i in range(20):
        engine.add_request(request(f"pirate {i}", "pirate"))
    engine.add_request(request("by id", lora_task_id=task_id_of("parrot")))
    for i in range(3):
        engine.add_request(request(f"base {i}"))
        # The fetch is stuck: others are served all the same, however many wait for it.
        served: set[str] = set()
        while f"base {i}" not in served:
            served |= {output.request_id for output in engine.step() if output.is_final}
        assert served == {f"base {i}"}
        engine.check_integrity()
    GatedSource.gate.set()
    answers = finish(engine)
    assert sorted(GatedSource.asked) == sorted(["pirate", str(task_id_of("parrot"))])
    oracle, _ = oracle_and_checkpoint
    assert len(answers) == 21
    for request_id, answer in answers.items():
        name = "parrot" if request_id == "by id" else "pirate"
        expected = oracle.logits(name, PROMPT, answer.token_ids).argmax(dim=-1).tolist()
        assert answer.token_ids == expected
        assert answer.token_ids != oracle.logits(None, PROMPT, answer.token_ids).argmax(dim=-1).tolist()
        assert answer.final is not None
        assert answer.final.lora_digest == engine.loras.inventory.info(task_id_of(name)).digest


def test_an_adapter_that_no_source_has_is_not_found_in_the_words_of_who_asked(engine: Engine) -> None:
    GatedSource.gate.set()
    answers = run_all(engine, [request("by name", "nobody"), request("by id", lora_task_id=404), request("base")])
    finals = {request_id: answer.final for request_id, answer in answers.items()}
    assert finals["by name"] is not None
    assert finals["by id"] is not None
    assert finals["base"] is not None
    assert finals["base"].finish_reason == "length"
    assert (finals["by name"].error_code, finals["by id"].error_code) == ("NOT_FOUND", "NOT_FOUND")
    assert "LoRA adapter 'nobody' not found in cache. Please send LoRA weights" in str(finals["by name"].error_message)
    assert "LoRA task 404 not found in cache. Please send LoRA weights" in str(finals["by id"].error_message)


@pytest.mark.parametrize("on_conflict", ["refuse", "replace"])
def test_a_request_with_a_path_is_answered_by_the_adapter_there_or_not_at_all(
    oracle_and_checkpoint: tuple[Oracle, Path], default_model_dir: Path, tmp_path: Path, on_conflict: str
) -> None:
    oracle, checkpoint = oracle_and_checkpoint
    paths = {name: str(oracle.adapters[name]) for name in ("pirate", "parrot")}
    lora = {
        "lora_sources": [{"source": "directory", "root": str(oracle.adapters["pirate"].parent)}],
        "lora_cache_host_memory_bytes": 32 << 20,
        "lora_on_conflict": on_conflict,
    }
    config = EngineConfig(
        model_path=checkpoint,
        tokenizer_path=default_model_dir,
        num_threads=1,
        kv_cache_memory_bytes=32 << 20,
        lora=LoRAConfig.model_validate(lora),
    )
    with closing(Engine(config)) as engine:

        def ask(path: str) -> Answer:
            engine.add_request(request("r", lora_task_id=7, lora_path=path))
            (answer,) = finish(engine).values()
            return answer

        def assert_answers(name: str) -> None:
            answer = ask(paths[name])
            assert answer.token_ids == oracle.logits(name, PROMPT, answer.token_ids).argmax(dim=-1).tolist()

        def error_of(path: str) -> str:
            final = ask(path).final
            assert final is not None
            return f"{final.error_code} {final.error_message}"

        assert_answers("pirate")
        num_fetched = engine.remote.stats.copies
        assert_answers("pirate")
        assert engine.remote.stats.copies == num_fetched, "it is not read again"
        if on_conflict == "replace":
            assert_answers("parrot")
            assert_answers("pirate")
        else:
            assert error_of(paths["parrot"]).startswith("ALREADY_EXISTS LoRA task 7 is cached with other weights")
        engine.loras.unload(7)
        assert_answers("pirate")  # evicted, it comes back from its path
        assert error_of("/etc").startswith("INVALID_ARG adapters cannot be loaded from '/etc'")
        assert error_of(f"{paths['pirate']}/../../checkpoint").startswith("INVALID_ARG adapters cannot be loaded from")
        assert error_of(f"{paths['pirate']}x").startswith("NOT_FOUND LoRA task 7 not found")
        assert_answers("pirate")


def test_an_exchanged_folder_answers_new_requests_and_not_those_in_flight(
    oracle_and_checkpoint: tuple[Oracle, Path],
    default_model_dir: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fetcher_module, "_SCAN_INTERVAL_S", 0.01)
    oracle, checkpoint = oracle_and_checkpoint
    root = tmp_path / "root"
    for version in ("pirate", "parrot"):
        shutil.copytree(oracle.adapters[version], tmp_path / version)
    root.mkdir()
    (tmp_path / "pirate").rename(root / "x")
    lora = {
        "lora_sources": [{"source": "directory", "root": str(root), "watch": True}],
        "lora_cache_host_memory_bytes": 32 << 20,
        "lora_on_conflict": "replace",
    }
    config = EngineConfig(
        model_path=checkpoint,
        tokenizer_path=default_model_dir,
        num_threads=1,
        kv_cache_memory_bytes=32 << 20,
        lora=LoRAConfig.model_validate(lora),
    )
    with closing(Engine(config)) as engine:
        (old,) = run_all(engine, [request("old", "x")]).values()
        assert old.final is not None
        old_digest = old.final.lora_digest
        engine.add_request(request("in flight", "x", sampling=SamplingParams(max_tokens=100, end_id=-1)))
        in_flight = Answer()
        while not in_flight.token_ids:
            for output in engine.step():
                in_flight.add(output)
        (root / "x").rename(tmp_path / "old")
        (tmp_path / "parrot").rename(root / "x")
        deadline = time.monotonic() + TIMEOUT_S
        while engine.loras.inventory.digest(task_id_of("x")) == old_digest or engine.has_work:
            assert time.monotonic() < deadline
            for output in engine.step():
                in_flight.add(output)
            engine.check_integrity()
        demanding = request("demanding", "x", lora_expected_digest=old_digest)
        with pytest.raises(AdapterVersionNotFound, match=old_digest):
            engine.add_request(demanding)
        (new,) = run_all(engine, [request("new", "x")]).values()
        assert in_flight.final is not None
        assert in_flight.final.lora_digest == old_digest
        for answer, version in ((old, "pirate"), (in_flight, "pirate"), (new, "parrot")):
            assert answer.token_ids == oracle.logits(version, PROMPT, answer.token_ids).argmax(dim=-1).tolist()
        assert_idle(engine)


def test_parked_requests_can_be_cancelled_and_reach_their_deadlines(engine: Engine) -> None:
    engine.add_request(request("stopped", "pirate"))
    beams = SamplingParams(max_tokens=8, end_id=-1, beam_width=3)
    engine.add_request(request("stopped beams", "pirate", sampling=beams))
    engine.add_request(request("late", "pirate", timeout_s=0.0))
    engine.add_request(request("patient", "pirate"))
    for stopped in map(engine.abort, ("stopped", "stopped beams")):
        assert stopped is not None
        assert stopped.finish_reason == "cancelled"
    (late,) = engine.step()
    assert (late.request_id, late.error_code) == ("late", "CANCELLED")
    engine.check_integrity()
    GatedSource.gate.set()
    assert list(finish(engine)) == ["patient"]


def test_parked_requests_count_as_waiting(engine: Engine) -> None:
    for i in range(40):
        engine.add_request(request(f"r{i}", "pirate"))
    with pytest.raises(QueueFull, match="40 requests are waiting"):
        engine.add_request(request("one more"))


def test_a_name_that_belongs_to_another_id_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="lora_name 'pirate' is LoRA task"):
        engine.add_request(request("r", "pirate", lora_task_id=7))
    with pytest.raises(InvalidRequest, match=r"'\.\./pirate' is not plain"):
        engine.add_request(request("r", lora_name="../pirate", lora_task_id=7))
    assert_idle(engine)


def test_an_engine_closes_while_a_source_is_stuck(engine: Engine) -> None:
    engine.add_request(request("r", "pirate"))
    engine.close()
    assert_idle(engine)
