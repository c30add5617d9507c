"""A front and the workers of a fleet, with a runtime of a few lines between them."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from support.adapters import wire_adapter
from support.fake_engine import HOLD, INFO
from support.fake_fleet import LAYOUT, FakeClient, FakeContext, FakeFleet
from support.fronts import TIMEOUT_S, RecordingListener, generation_request

from multilora_engine.dynamo import front_uploads
from multilora_engine.dynamo.fleet_aliases import FleetAliases
from multilora_engine.dynamo.fleet_messages import (
    NEW_VERSION,
    Announce,
    Described,
    PagesPiece,
    TakePiece,
    Upload,
    read_worker_chunk,
    read_worker_request,
    worker_chunk,
    worker_request,
)
from multilora_engine.dynamo.fleet_operations import FleetOperator
from multilora_engine.dynamo.fleet_router import FleetRouter
from multilora_engine.dynamo.fleet_uploads import FleetUploads, UploadLost
from multilora_engine.dynamo.front_uploads import FrontUploads
from multilora_engine.dynamo.page_store import PageStore, pieces
from multilora_engine.dynamo.relay import FleetRelay
from multilora_engine.dynamo.residency_taints import preferred_taints
from multilora_engine.dynamo.workers import Workers
from multilora_engine.errors import InvalidRequest, RelayedError
from multilora_engine.lora.format import content_digest, pack_adapter
from multilora_engine.lora.layout import NO_TRAITS, AdapterTraits, PackedAdapter
from multilora_engine.lora.names import task_id_of
from multilora_engine.process.client import EngineClient
from multilora_engine.process.liveness import DrainOrder, drained_file
from multilora_engine.process.messages import adapter_header, adapter_payload
from multilora_engine.process.operations import (
    AdapterList,
    AliasReport,
    ListAdapters,
    LoadAdapter,
    Operation,
    PinAdapter,
    ReadStats,
    RemoveAlias,
    SetAlias,
    UnloadAdapter,
)
from multilora_engine.request import UNWRITTEN, GenerationRequest, SamplingParams, TokenOutput
from multilora_wire.adapter_info import Alias, AliasMember
from multilora_wire.adapter_use import AdapterUse, use_digest


def packed(seed: int = 0, traits: AdapterTraits = NO_TRAITS) -> PackedAdapter:
    wire = wire_adapter(LAYOUT, [(0, 0, 4), (4, 1, 3)], seed)
    return pack_adapter(wire.weights, wire.config, LAYOUT, traits)


def upload_of(
    number: int, seed: int = 0, version: int = 1, name: str = "", traits: AdapterTraits = NO_TRAITS
) -> tuple[Upload, bytes]:
    adapter = packed(seed, traits)
    pages = bytes(adapter_payload(adapter))
    digest = traits.digest(content_digest(adapter.rows, adapter.pages, LAYOUT.lora_dtype))
    return Upload(adapter_header(number, adapter), name, digest, len(pages), version), pages


async def send(fleet: FakeFleet, worker_id: int, upload: Upload, pages: bytes) -> None:
    workers = Workers(FakeClient(fleet), FakeContext)
    for offset, piece in pieces(pages):
        await workers.ask(worker_id, TakePiece(upload, offset, piece))


class Front:
    """A stub's end of a relay."""

    def __init__(self, client: EngineClient, relay: FleetRelay, drain: DrainOrder, path: Path) -> None:
        self.client = client
        self.relay = relay
        self.drain = drain
        self.path = path

    async def ask(
        self, request_id: str, prompt: list[int], task_id: int | None = None, adapter: PackedAdapter | None = None
    ) -> list[TokenOutput]:
        listener = self.begin(request_id, prompt, task_id, adapter)
        return await asyncio.to_thread(listener.wait)

    def begin(
        self, request_id: str, prompt: list[int], task_id: int | None = None, adapter: PackedAdapter | None = None
    ) -> RecordingListener:
        listener, request = RecordingListener(), generation_request(request_id, prompt, lora_task_id=task_id)
        put = None if adapter is None or task_id is None else (task_id, adapter)
        self.client.generate(listener, [request], f"client {request_id}", put)
        return listener

    async def put(self, task_id: int, adapter: PackedAdapter, name: str = "") -> TokenOutput:
        listener = RecordingListener()
        self.client.put_adapter(listener, "put", task_id, adapter, name)
        return (await asyncio.to_thread(listener.wait))[-1]

    async def operate(self, operation: Operation) -> TokenOutput:
        listener = RecordingListener()
        self.client.operate(listener, "operate", operation)
        return (await asyncio.to_thread(listener.wait))[-1]


@asynccontextmanager
async def served(fleet: FakeFleet, path: Path, max_bytes: int = 1 << 22) -> AsyncIterator[Front]:
    workers = Workers(FakeClient(fleet), FakeContext)
    router = FleetRouter(fleet, workers, dict)
    uploads = FrontUploads(workers, max_bytes, LAYOUT.lora_dtype)
    operator = FleetOperator(workers, uploads, Described(INFO, "tiny", 16), FleetAliases())
    socket_path = path / "engine.sock"
    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket, closing(DrainOrder(socket_path)) as drain:
        socket.set(zmq.LINGER, 0)
        socket.set(zmq.ROUTER_MANDATORY, 1)
        socket.bind(f"ipc://{socket_path}")
        with closing(FleetRelay(socket, workers, router, uploads, operator, INFO, drain)) as relay:
            relay.start()
            client = EngineClient(socket_path)
            try:
                assert await asyncio.to_thread(client.wait_until_ready, 30.0) == INFO
                yield Front(client, relay, drain, socket_path)
            finally:
                await asyncio.to_thread(client.close)


class AskedListener(RecordingListener):
    """asked: the uses by which the front shall write a chat."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: queue.SimpleQueue[str] = queue.SimpleQueue()

    def on_output(self, output: TokenOutput) -> None:
        if output.asked_use is None:
            super().on_output(output)
        else:
            self.asked.put(output.asked_use)


def tokens(outputs: list[TokenOutput]) -> list[int]:
    return [token for output in outputs for token in output.token_ids]


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test, 120))


def test_messages_pass_through_json() -> None:
    upload, _ = upload_of(7)
    for message in (Announce(upload), TakePiece(upload, 3, b"\x00\xff")):
        assert read_worker_request(worker_request(message)) == message
    assert read_worker_chunk(worker_chunk(PagesPiece(b"\x80"))) == PagesPiece(b"\x80")
    assert read_worker_request({"token_ids": [1], "extra_args": None}) is None
    for broken in ("%%%", "AAAA", 7):
        with pytest.raises(InvalidRequest, match="cannot be read"):
            read_worker_request({"extra_args": {"multilora": broken}})


def test_pages_that_nobody_asked_for_longest_go_first() -> None:
    store = PageStore(10)
    store.put("a", bytearray(4))
    store.put("b", bytearray(4))
    assert store.get("a") == bytearray(4)
    store.put("c", bytearray(4))
    assert ("a" in store, "b" in store, "c" in store, store.num_bytes) == (True, False, True, 8)
    with pytest.raises(InvalidRequest, match="takes 11 bytes; adapters that clients send have 10"):
        store.put("d", bytearray(11))


def test_pieces_come_in_order_or_not_at_all() -> None:
    upload, pages = upload_of(7)
    store = PageStore(1 << 22)
    assert store.take_piece(upload, 0, pages[:10]) is None
    with pytest.raises(InvalidRequest, match=r"bytes 11 \.\. 12 .* when 10 of them were here"):
        store.take_piece(upload, 11, b"x")
    with pytest.raises(InvalidRequest, match="when none of them were here"):
        store.take_piece(upload, 10, pages[10:])
    assert store.take_piece(upload, 0, pages[:10]) is None
    assert store.take_piece(upload, 10, pages[10:]) == pages
    assert store.num_bytes == 0


def test_uploads_on_their_way_take_no_more_than_the_room() -> None:
    uploads = [upload_of(number, seed=number) for number in range(3)]
    max_bytes = len(uploads[0][1]) + 10
    store = PageStore(max_bytes)
    for upload, pages in uploads:
        assert store.take_piece(upload, 0, pages[:5]) is None
    for upload, pages in uploads:
        with suppress(InvalidRequest):
            store.take_piece(upload, 5, pages[5:-1])
        assert store.num_bytes <= max_bytes
    arrived = []
    for upload, pages in uploads:
        with suppress(InvalidRequest):
            arrived.append(store.take_piece(upload, len(pages) - 1, pages[-1:]))
    assert arrived == [uploads[1][1]], "the only one that no later piece of another has driven out"


def test_an_upload_that_was_given_up_makes_room_before_pages_that_are_asked_for() -> None:
    upload, pages = upload_of(7)
    store = PageStore(len(pages) + 20)
    store.put("asked for", bytearray(10))
    assert store.take_piece(upload, 0, pages[:-1]) is None
    assert store.get("asked for") is not None
    store.put("new", bytearray(20))
    assert ("asked for" in store, "new" in store, store.num_bytes) == (True, True, 30)


def test_pages_that_come_twice_take_no_room_of_others() -> None:
    store = PageStore(10)
    store.put("a", bytearray(4))
    store.put("b", bytearray(6))
    store.put("b", bytearray(6))
    assert ("a" in store, "b" in store, store.num_bytes) == (True, True, 10)


def test_a_piece_of_another_size_than_the_upload_began_with_is_refused() -> None:
    upload, pages = upload_of(7)
    store = PageStore(len(pages))
    assert store.take_piece(upload, 0, pages[:10]) is None
    larger = msgspec.structs.replace(upload, num_bytes=2 * len(pages))
    with pytest.raises(InvalidRequest, match="adapters that clients send have"):
        store.take_piece(larger, 10, bytes(2 * len(pages) - 10))


def test_a_front_knows_the_uploads_that_came_last() -> None:
    async def test() -> None:
        workers = Workers(FakeClient(FakeFleet(1)), FakeContext)
        uploads = FrontUploads(workers, 1 << 22, LAYOUT.lora_dtype, max_known=2)
        for number in (7, 8, 7, 9):
            upload, pages = upload_of(number, seed=number)
            await uploads.take(upload.header, "", memoryview(pages), partial(asyncio.sleep, 0, 1))
        assert [uploads.find(number) is not None for number in (7, 8, 9)] == [True, False, True]

    run(test())


def test_pages_that_leave_a_front_while_it_waits_to_send_them_are_not_here() -> None:
    async def test() -> None:
        workers = Workers(FakeClient(FakeFleet(1)), FakeContext)
        first, first_pages = upload_of(7, seed=1)
        other, other_pages = upload_of(7, seed=2)
        uploads = FrontUploads(workers, len(first_pages), LAYOUT.lora_dtype)
        await uploads.take(first.header, "", memoryview(first_pages), partial(asyncio.sleep, 0, 1))
        sent = uploads.find(7)
        assert sent is not None
        take = uploads.take(other.header, "", memoryview(other_pages), partial(asyncio.sleep, 0, 1))
        _, is_here = await asyncio.gather(take, uploads.send_again(sent, 1))
        assert not is_here, "the later upload has taken the place of its pages"

    run(test())


def test_a_worker_that_stops_in_the_midst_of_pages_is_given_up() -> None:
    async def test() -> None:
        fleet = FakeFleet(2)
        upload, pages = upload_of(7)
        await send(fleet, 1, upload, pages)
        fleet[1].lies = "hangs"
        workers = Workers(FakeClient(fleet), FakeContext, 2)
        uploads = FleetUploads(fleet[2], workers, fleet[2], LAYOUT, 1 << 22, True, piece_timeout_s=0.01)
        uploads.learn(upload)
        with pytest.raises(UploadLost) as lost:
            await uploads.bring(7)
        assert lost.value.may_be_elsewhere

    run(test())


def test_news_are_followed_although_discovery_fails_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        monkeypatch.setattr("multilora_engine.dynamo.catalogue._NEWS_INTERVAL_S", 0.0)
        fleet = FakeFleet(2)
        upload, pages = upload_of(task_id_of("pirate"), name="pirate")
        fleet[2].is_cut_off = True
        await send(fleet, 1, upload, pages)
        fleet[2].fails_to_publish, fleet[2].is_cut_off = True, False
        following = asyncio.create_task(fleet[2].catalogue.follow_news())
        while fleet[2].uploads.find(upload.task_id) is None:
            await asyncio.sleep(0)
        fleet[2].fails_to_publish = False
        later, later_pages = upload_of(task_id_of("parrot"), seed=2, name="parrot")
        fleet[2].is_cut_off = True
        await send(fleet, 1, later, later_pages)
        fleet[2].is_cut_off = False
        while fleet[2].cards.keys() != {"pirate", "parrot"}:
            await asyncio.sleep(0)
        following.cancel()

    run(test())


@pytest.mark.parametrize(
    ("lie", "says"), [("others", "has the digest"), ("more", "sends more than the"), ("none", "sends Found in place")]
)
def test_a_worker_has_an_adapter_from_another_one_and_checks_it(
    caplog: pytest.LogCaptureFixture, lie: str, says: str
) -> None:
    async def test() -> None:
        fleet = FakeFleet(3)
        upload, pages = upload_of(7)
        fleet[1].lies = lie
        await send(fleet, 1, upload, pages)
        assert not await fleet[2].uploads.bring(8)
        with pytest.raises(Exception, match=r"LoRA task 7 not found in cache\. Please send LoRA weights with request"):
            await fleet[2].uploads.bring(7)
        assert says in caplog.text
        assert 7 not in fleet[2].in_engine
        await send(fleet, 3, upload, pages)
        assert await fleet[2].uploads.bring(7)
        assert fleet[2].in_engine[7] == upload.header.digest
        fleet.kill(1)
        fleet.kill(3)
        assert await fleet[2].uploads.bring(7, is_lost=True), "it has the pages itself now"

    caplog.set_level("INFO")
    run(test())


def test_what_a_client_sends_outlives_the_worker_that_took_it() -> None:
    async def test() -> None:
        fleet = FakeFleet(3)
        upload, pages = upload_of(7)
        await send(fleet, 1, upload, pages)
        fleet.kill(1)
        assert await fleet[2].uploads.bring(7)
        assert await fleet[3].uploads.bring(7)

    run(test())


@pytest.mark.parametrize("harm", ["digest", "rows", "size", "page_bytes", "traits"])
def test_a_worker_takes_nothing_that_is_not_the_adapter(harm: str) -> None:
    async def test() -> None:
        fleet = FakeFleet(1)
        upload, pages = upload_of(7)
        header = upload.header
        match harm:
            case "digest":
                pages = pages[:-1] + bytes([pages[-1] ^ 1])
            case "rows":
                header = msgspec.structs.replace(header, rows=header.rows[:1])
            case "size":
                pages = pages + bytes(LAYOUT.page_bytes)
                upload = msgspec.structs.replace(upload, num_bytes=len(pages))
            case "page_bytes":
                header = msgspec.structs.replace(header, page_bytes=2 * header.page_bytes)
            case "traits":
                header = msgspec.structs.replace(header, traits=AdapterTraits(invocation_tokens=(5,)))
        with pytest.raises(Exception, match=r"digest|fit this model|pages of"):
            await send(fleet, 1, msgspec.structs.replace(upload, header=header), pages)
        assert (fleet[1].in_engine, fleet[1].uploads.find(7)) == ({}, None)

    run(test())


def test_the_same_weights_with_other_traits_are_another_adapter_at_every_worker() -> None:
    async def test() -> None:
        fleet = FakeFleet(2)
        for traits in (NO_TRAITS, AdapterTraits(invocation_tokens=(5,)), AdapterTraits(invocation_tokens=(6,))):
            upload, pages = upload_of(7, version=0, traits=traits)
            await send(fleet, 1, upload, pages)
            for number in (1, 2):
                assert await fleet[number].uploads.bring(7)
                assert fleet[number].in_engine[7] == upload.header.digest
                known = fleet[number].uploads.find(7)
                assert known is not None
                assert known.header.traits == traits

    run(test())


def test_the_later_of_two_uploads_counts_in_whatever_order_they_are_heard_of() -> None:
    async def test() -> None:
        fleet = FakeFleet(2)
        (old, old_pages), (new, new_pages) = upload_of(7, 1, version=1), upload_of(7, 2, version=2)
        await send(fleet, 1, new, new_pages)
        await send(fleet, 1, old, old_pages)
        assert fleet[1].in_engine[7] == new.header.digest
        fleet[2].uploads.learn(new)
        fleet[2].uploads.learn(old)
        await fleet[2].uploads.bring(7)
        assert fleet[2].in_engine[7] == new.header.digest
        refusing = FakeFleet(1, replaces=False)
        await send(refusing, 1, old, old_pages)
        with pytest.raises(RelayedError, match="is cached with other weights") as refused:
            await send(refusing, 1, msgspec.structs.replace(new, version=NEW_VERSION), new_pages)
        assert refused.value.code == "ALREADY_EXISTS"
        await send(refusing, 1, new, new_pages)
        assert refusing[1].in_engine[7] == new.header.digest, "another worker has taken it: its version decides"

    run(test())


def test_an_adapter_comes_with_a_request_and_answers_everywhere(tmp_path: Path) -> None:
    async def test() -> None:
        fleet = FakeFleet(3)
        adapter = packed()
        async with served(fleet, tmp_path) as front:
            told = [await front.ask("r0", [5, 6], 7, adapter)]
            told += [await front.ask(f"r{number}", [5, 6], 7) for number in (1, 2)]
        assert [tokens(outputs) for outputs in told] == [[1, 5, 6], [2, 5, 6], [3, 5, 6]]
        assert all(outputs[-1].lora_digest == adapter.digest for outputs in told)
        assert fleet.begun == fleet.freed == ["r0", "r1", "r2"]

    run(test())


def test_a_named_adapter_that_is_sent_has_cards_everywhere(tmp_path: Path) -> None:
    async def test() -> None:
        fleet = FakeFleet(2)
        adapter = packed()
        async with served(fleet, tmp_path) as front:
            done = await front.put(task_id_of("pirate"), adapter, "pirate")
        assert (done.finish_reason, done.lora_digest) == ("stop", adapter.digest)
        assert [fleet[number].cards["pirate"].digest for number in (1, 2)] == [adapter.digest] * 2
        assert fleet[1].cards["pirate"].ranks == (3, 4)

    run(test())


def test_requests_wait_for_the_upload_before_them_and_later_weights_answer(tmp_path: Path) -> None:
    async def test() -> None:
        fleet = FakeFleet(3)
        first, second = packed(1), packed(2)
        async with served(fleet, tmp_path) as front:
            listeners = [front.begin("a", [5], 7, first), front.begin("b", [5], 7), front.begin("c", [5], 7)]
            for listener in listeners:
                assert (await asyncio.to_thread(listener.wait))[-1].lora_digest == first.digest
            await front.put(7, second)
            for number in range(3):
                assert (await front.ask(f"d{number}", [5], 7))[-1].lora_digest == second.digest

    run(test())


def test_a_chat_is_written_by_the_use_of_the_version_that_answers(tmp_path: Path) -> None:
    """Also where another version comes while the front writes."""

    async def test() -> None:
        fleet = FakeFleet(2)
        async with served(fleet, tmp_path) as front:
            uses = [AdapterUse(system_prompt=text).text for text in ("Be brief.", "Be long.")]
            adapters = [packed(seed, AdapterTraits(use=use)) for seed, use in enumerate(uses)]
            await front.put(7, adapters[0])
            for number in range(4):  # at both workers
                listener, unwritten = AskedListener(), generation_request(f"r{number}", [0], lora_task_id=7)
                unwritten = msgspec.structs.replace(unwritten, chat_use=UNWRITTEN)
                front.client.generate(listener, [unwritten])
                assert await asyncio.to_thread(listener.asked.get, timeout=TIMEOUT_S) == uses[number > 1]
                if number == 1:
                    await front.put(7, adapters[1])
                    written = msgspec.structs.replace(unwritten, prompt_token_ids=[5, 1], chat_use=use_digest(uses[0]))
                    front.client.give_prompt(written)
                    assert await asyncio.to_thread(listener.asked.get, timeout=TIMEOUT_S) == uses[1]
                answering = number > 0
                prompt = [6, int(answering)]
                written = msgspec.structs.replace(
                    unwritten, prompt_token_ids=prompt, chat_use=use_digest(uses[answering])
                )
                front.client.give_prompt(written)
                outputs = await asyncio.to_thread(listener.wait)
                assert tokens(outputs)[1:] == prompt
                assert outputs[-1].lora_digest == adapters[answering].digest
            assert not fleet.counted

    run(test())


def test_an_unknown_adapter_is_asked_from_the_client(tmp_path: Path) -> None:
    async def test() -> None:
        async with served(FakeFleet(2), tmp_path) as front:
            (output,) = await front.ask("r", [5], 9)
        assert output.error_code == "NOT_FOUND"
        assert output.error_message == "LoRA task 9 not found in cache. Please send LoRA weights with request"

    run(test())


def test_an_adapter_that_all_workers_have_lost_comes_from_the_front(tmp_path: Path) -> None:
    async def test() -> None:
        fleet = FakeFleet(1)
        adapter = packed()
        async with served(fleet, tmp_path) as front:
            await front.put(7, adapter)
            fleet.workers = FakeFleet(1).workers  # it has started again, and knows nothing
            assert (await front.ask("r", [5], 7))[-1].lora_digest == adapter.digest

    run(test())


def test_an_adapter_that_was_unloaded_elsewhere_does_not_come_back_from_the_front(tmp_path: Path) -> None:
    async def test() -> None:
        fleet = FakeFleet(2)
        x = task_id_of("x")
        async with served(fleet, tmp_path) as front:
            await front.put(x, packed(), "x")
            await fleet[2].catalogue.unload("x")
            told = [await front.ask("r0", [5], x), await front.ask("r1", [5], x)]
            assert all(worker.cards == {} for worker in fleet.workers.values())
            fleet.workers = FakeFleet(2).workers  # they have started again, and know nothing of its end
            told.append(await front.ask("r2", [5], x))
        assert [outputs[-1].error_code for outputs in told] == ["NOT_FOUND"] * 3
        assert all(worker.cards == worker.in_engine == {} for worker in fleet.workers.values())

    run(test())


def test_an_earlier_version_does_not_come_back_from_the_front(tmp_path: Path) -> None:
    async def test() -> None:
        fleet = FakeFleet(2)
        for worker in fleet.workers.values():
            worker.at_path = {"/b": packed(2)}
        x = task_id_of("x")
        async with served(fleet, tmp_path) as front:
            await front.put(x, packed(1), "x")
            await fleet[2].catalogue.load("x", "/b")
            assert (await front.ask("r0", [5], x))[-1].lora_digest == packed(2).digest
            fleet.workers = FakeFleet(2).workers  # they have started again, and know nothing of either version
            assert (await front.ask("r1", [5], x))[-1].error_code == "NOT_FOUND"
            await front.put(x, packed(1), "x")
            assert (await front.ask("r2", [5], x))[-1].lora_digest == packed(1).digest

    run(test())


def test_a_front_drops_a_version_that_a_worker_replaces_as_it_is_sent_again() -> None:
    async def test() -> None:
        fleet = FakeFleet(1)
        uploads = FrontUploads(Workers(FakeClient(fleet), FakeContext), 1 << 22, LAYOUT.lora_dtype)
        upload, pages = upload_of(7, seed=1)
        await uploads.take(upload.header, "", memoryview(pages), partial(asyncio.sleep, 0, 1))
        sent = uploads.find(7)
        assert sent is not None
        later, later_pages = upload_of(7, seed=2, version=sent.version + 1)
        await send(fleet, 1, later, later_pages)
        assert await uploads.send_again(sent, 1)
        assert uploads.find(7) is None
        assert fleet[1].uploads.find(7) == later

    run(test())


def test_a_dead_worker_s_requests_go_to_another_one_unless_they_have_begun(tmp_path: Path) -> None:
    async def test() -> None:
        fleet = FakeFleet(3)
        async with served(fleet, tmp_path) as front:
            fleet.kill(1)
            fleet[2].dies_after = fleet[3].dies_after = 1
            (output,) = [one for one in await front.ask("a", [5]) if one.error_code]
            assert output.error_code == "UNAVAILABLE"
            fleet.num_picked, fleet[2].dies_after, fleet[3].dies_after = 0, 0, None
            outputs = await front.ask("b", [5])
            assert (tokens(outputs), outputs[-1].finish_reason) == ([3, 5], "length")
            fleet[3].dies_after = 0
            (output,) = await front.ask("c", [5])
            assert output.error_code == "UNAVAILABLE"
            assert "2 were tried" in (output.error_message or "")
            fleet.workers.clear()
            assert (await front.ask("d", [5]))[-1].error_code == "UNAVAILABLE"

    run(test())


def test_a_request_that_nobody_waits_for_ends_at_its_worker(tmp_path: Path) -> None:
    async def test() -> None:
        fleet = FakeFleet(1)
        async with served(fleet, tmp_path) as front:
            listener = front.begin("r", [HOLD])
            while not fleet.begun:
                await asyncio.sleep(0.001)
            listener.cancel()
            outputs = await asyncio.to_thread(listener.wait)
            assert outputs[-1].error_code == "CANCELLED"
            while front.relay.num_requests:
                await asyncio.sleep(0.001)
            assert [context.is_stopped for context in fleet[1].held] == [True]
            assert fleet.freed == ["r"]

    run(test())


def test_a_request_aborted_before_its_adapter_is_on_the_way_is_not_counted_by_the_router(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_ended = threading.Event()
    digest_of = front_uploads._digest

    def late_digest(*arguments: Any) -> str:
        assert has_ended.wait(60)
        return digest_of(*arguments)

    async def test() -> None:
        fleet = FakeFleet(1)
        async with served(fleet, tmp_path) as front:
            listener = front.begin("r", [5], 7, packed())
            while not front.relay.num_requests:
                await asyncio.sleep(0.001)
            listener.cancel()
            while front.relay.num_requests:
                await asyncio.sleep(0.001)
            assert fleet.num_picked == 0
            has_ended.set()
            while fleet[1].uploads.find(7) is None or fleet.counted:
                await asyncio.sleep(0.001)
            assert fleet.num_picked == 1

    monkeypatch.setattr(front_uploads, "_digest", late_digest)
    run(test())


def test_stop_reaches_every_worker(tmp_path: Path) -> None:
    async def test() -> None:
        fleet = FakeFleet(2)
        async with served(fleet, tmp_path) as front:
            listener = RecordingListener()
            front.client.stop(listener, "stop", "mine")
            assert (await asyncio.to_thread(listener.wait))[-1].finish_reason == "stop"
        assert [fleet[number].ended for number in (1, 2)] == [["mine"], ["mine"]]

    run(test())


def test_operations_concern_every_worker(tmp_path: Path) -> None:
    async def test() -> None:
        fleet = FakeFleet(2)
        async with served(fleet, tmp_path) as front:
            fleet[1].in_engine = {3: "d", 4: "d"}
            fleet[2].in_engine = {4: "d", 5: "d"}
            listed = msgspec.json.decode((await front.operate(ListAdapters())).text, type=AdapterList).adapters
            assert [(one.lora_task_id, one.location) for one in listed] == [(3, "HOST"), (4, "DEVICE"), (5, "DEVICE")]
            assert (await front.operate(UnloadAdapter(5))).error_code is None
            assert (await front.operate(UnloadAdapter(5))).error_code == "NOT_FOUND"
            assert (await front.operate(UnloadAdapter(4))).error_code is None
            assert (fleet[1].in_engine, fleet[2].in_engine) == ({3: "d"}, {})
            await front.put(7, packed())
            assert (await front.operate(UnloadAdapter(7))).error_code is None
            for number in range(2):
                (output,) = await front.ask(f"r{number}", [5], 7)
                assert output.error_code == "NOT_FOUND", "it has come back from another worker"
            assert (await front.operate(PinAdapter(3))).error_code == "INVALID_ARG"
            assert (await front.operate(ReadStats())).error_code == "UNSUPPORTED"
            fleet.workers.clear()
            assert (await front.operate(ListAdapters())).error_code == "UNAVAILABLE"

    run(test())


CHAT = (AliasMember("chat-v7", 0), AliasMember("chat-v8", 1))


async def put_members(front: Front) -> dict[str, str]:
    """Sends the adapters of `CHAT`. Their digests."""
    adapters = {member.name: packed(seed) for seed, member in enumerate(CHAT)}
    for name, adapter in adapters.items():
        assert (await front.put(task_id_of(name), adapter, name)).error_code is None
    return {name: adapter.digest for name, adapter in adapters.items()}


async def digest_by(front: Front, name: str, **options: Any) -> str:
    """The digest of the adapter that answers a request by a name, or the code of the error."""
    listener, request = RecordingListener(), generation_request("r", [5], lora_task_id=task_id_of(name))
    asked = msgspec.structs.replace(request, lora_name=name, **options)
    front.client.generate(listener, [asked])
    final = (await asyncio.to_thread(listener.wait))[-1]
    return final.error_code or final.lora_digest


def test_an_alias_that_is_set_at_a_front_is_known_to_all_workers_and_fronts(tmp_path: Path) -> None:
    async def test() -> None:
        fleet = FakeFleet(3)
        (tmp_path / "other").mkdir()
        async with served(fleet, tmp_path) as front, served(fleet, tmp_path / "other") as other:
            digests = await put_members(front)
            made = msgspec.json.decode((await front.operate(SetAlias("chat", CHAT))).text, type=AliasReport).alias
            assert (made.members, made.version > 0) == (CHAT, True)
            for worker in fleet.workers.values():
                assert worker.aliases.table.news == [made]
                assert worker.alias_operations == [SetAlias("chat", CHAT, version=made.version)]
            # The other front has not heard of it: its worker resolves the alias.
            for door in (front, other) * 3:
                assert await digest_by(door, "chat") == digests["chat-v8"]
            assert fleet.constraints[-2] == preferred_taints("chat-v8"), "the router is asked for the member"
            for door in (front, other):
                for digest in digests.values():
                    assert await digest_by(door, "chat", lora_expected_digest=digest) == digest
                assert await digest_by(door, "chat", lora_expected_digest="f" * 32) == "NOT_FOUND"
            in_a_source = (*CHAT, AliasMember("chat-v9", 0))
            for worker in fleet.workers.values():
                worker.named["chat-v9"] = worker.in_engine[task_id_of("chat-v9")] = "9" * 32
            assert (await other.operate(SetAlias("chat", in_a_source))).error_code is None
            assert await digest_by(front, "chat", lora_expected_digest="9" * 32) == "9" * 32
            moved = (AliasMember("chat-v7", 1),)
            assert (await other.operate(SetAlias("chat", moved))).error_code is None
            assert await digest_by(other, "chat") == digests["chat-v7"]
            listed = msgspec.json.decode((await front.operate(ListAdapters())).text, type=AdapterList).aliases
            assert [alias.members for alias in listed] == [moved]
            await front.relay._operator.aliases.read_any(Workers(FakeClient(fleet), FakeContext))
            assert await digest_by(front, "chat") == digests["chat-v7"]
            assert (await front.operate(SetAlias("chat-v7", CHAT[1:]))).error_code == "ALREADY_EXISTS"
            fleet.workers.clear()
            assert (await front.operate(SetAlias("chat", CHAT))).error_code == "UNAVAILABLE"

    run(test())


class WritingListener(RecordingListener):
    """Writes each chat that it is asked for at once."""

    def __init__(self, front: Front, requests: list[GenerationRequest]) -> None:
        super().__init__(len(requests))
        self.front = front
        self.requests = {request.request_id: request for request in requests}

    def on_output(self, output: TokenOutput) -> None:
        if (use := output.asked_use) is None:
            super().on_output(output)
            return
        unwritten = self.requests[output.request_id]
        self.front.client.give_prompt(
            msgspec.structs.replace(unwritten, prompt_token_ids=[5, 6], chat_use=use_digest(use))
        )


def test_one_member_of_an_alias_answers_all_requests_of_a_call_also_when_their_chats_are_written_anew(
    tmp_path: Path,
) -> None:
    async def test() -> None:
        fleet = FakeFleet(2)
        (tmp_path / "other").mkdir()
        async with served(fleet, tmp_path) as front, served(fleet, tmp_path / "other") as other:
            members = (AliasMember("chat-v7", 1), AliasMember("chat-v8", 1))
            for seed, member in enumerate(members):
                use = AdapterUse(system_prompt=member.name).text
                await front.put(task_id_of(member.name), packed(seed, AdapterTraits(use=use)), member.name)
            await front.operate(SetAlias("chat", members))
            answered = set()
            for number in range(4):
                for door in (front, other):  # The other one has not heard of the alias.
                    requests = [
                        GenerationRequest(
                            f"r{number}.{i}",
                            [0],
                            SamplingParams(3),
                            task_id_of("chat"),
                            lora_name="chat",
                            chat_use=UNWRITTEN,
                        )
                        for i in range(5)
                    ]
                    listener = WritingListener(door, requests)
                    door.client.generate(listener, requests)
                    outputs = await asyncio.to_thread(listener.wait)
                    assert tokens(outputs)[-2:] == [5, 6]
                    (digest,) = {output.lora_digest for output in outputs}
                    answered.add(digest)
            assert len(answered) == 2

    run(test())


def test_a_change_of_an_alias_that_the_asked_worker_cannot_store_holds_nowhere(tmp_path: Path) -> None:
    async def test() -> None:
        fleet = FakeFleet(2)
        async with served(fleet, tmp_path) as front:
            digests = await put_members(front)
            assert (await front.operate(SetAlias("chat", CHAT))).error_code is None
            for worker in fleet.workers.values():
                worker.stores_aliases = False
            for change in (RemoveAlias("chat"), SetAlias("chat", CHAT[:1])):
                assert (await front.operate(change)).error_code == "UNAVAILABLE"
            assert (await front.operate(SetAlias("talk", (AliasMember("chat-v7", 1),)))).error_code == "UNAVAILABLE"
            for _ in fleet.workers:
                assert await digest_by(front, "chat") == digests["chat-v8"]
                assert await digest_by(front, "talk") == "NOT_FOUND"

    run(test())


def test_a_removed_alias_answers_at_no_worker_although_one_cannot_store_that(tmp_path: Path) -> None:
    async def test() -> None:
        fleet = FakeFleet(2)
        async with served(fleet, tmp_path) as front:
            await put_members(front)
            assert (await front.operate(SetAlias("chat", CHAT))).error_code is None
            fleet[2].stores_aliases = False
            while (await front.operate(RemoveAlias("chat"))).error_code == "UNAVAILABLE":
                """The front asks a worker by chance."""
            assert (len(fleet[1].engine_aliases), len(fleet[2].engine_aliases)) == (0, 1)
            for _ in fleet.workers:
                assert await digest_by(front, "chat") == "NOT_FOUND"

    run(test())


def test_an_adapter_is_loaded_from_a_path_by_a_worker_that_has_it_and_comes_to_all(tmp_path: Path) -> None:
    """By the other worker, whichever is asked first; a path that no source covers is no matter of chance."""

    async def test() -> None:
        fleet = FakeFleet(3)
        async with served(fleet, tmp_path) as front:
            for number, worker_id in enumerate(fleet.workers):
                fleet[worker_id].at_path[f"/adapters/{number}"] = packed(number)
                for other in fleet.workers.keys() - {worker_id}:
                    fleet[other].lacks.add(f"/adapters/{number}")
                loaded = await front.operate(LoadAdapter(number, path=f"/adapters/{number}"))
                assert loaded.error_code is None
                assert {worker.in_engine[number] for worker in fleet.workers.values()} == {packed(number).digest}
            for worker in fleet.workers.values():
                worker.lacks.add("/adapters/none")
            assert (await front.operate(LoadAdapter(9, path="/adapters/none"))).error_code == "NOT_FOUND"
            assert (await front.operate(LoadAdapter(9, path="/etc"))).error_code == "INVALID_ARG"
            fleet.workers.clear()
            assert (await front.operate(LoadAdapter(9, path="/adapters/0"))).error_code == "UNAVAILABLE"

    run(test())


def test_a_worker_that_is_new_or_was_cut_off_hears_of_aliases_and_of_those_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test() -> None:
        monkeypatch.setattr("multilora_engine.dynamo.fleet_aliases._INTERVAL_S", 0.0)
        fleet = FakeFleet(2)
        async with served(fleet, tmp_path) as front:
            digests = await put_members(front)
            fleet[2].is_cut_off = True
            while (await front.operate(SetAlias("chat", CHAT))).error_code == "UNAVAILABLE":
                """The front asks a worker by chance."""
            assert fleet[2].aliases.table.news == []
            fleet[2].is_cut_off = False
            following = asyncio.create_task(fleet[2].aliases.follow())
            while fleet[2].aliases.table.news != fleet[1].aliases.table.news:
                await asyncio.sleep(0)
            assert fleet[2].alias_operations[-1].name == "chat"
            new = fleet.start(3)
            await new.aliases.hear()
            assert new.aliases.table.news == fleet[1].aliases.table.news
            stale, own = Alias("chat", CHAT[:1], version=1), Alias("talk", CHAT, version=1)
            new.stored = [stale, own]
            new_follows = asyncio.create_task(new.aliases.follow())
            while fleet[2].aliases.table.get(task_id_of("talk")) != own:
                await asyncio.sleep(0)
            new_follows.cancel()
            chat = new.aliases.table.get(task_id_of("chat"))
            assert chat is not None
            assert new.alias_operations[-1] == SetAlias("chat", CHAT, version=chat.version), "stored before the change"
            assert await digest_by(front, "chat") == digests["chat-v8"]
            fleet[2].is_cut_off = True
            while (await front.operate(RemoveAlias("chat"))).error_code == "UNAVAILABLE":
                """The same."""
            fleet[2].is_cut_off = False
            while fleet[2].aliases.table.get(task_id_of("chat")) is not None:
                await asyncio.sleep(0)
            following.cancel()
            assert fleet[2].alias_operations[-1] == RemoveAlias("chat")

    run(test())


@given(st.permutations(range(6)), st.permutations(range(6)))
def test_workers_that_have_heard_the_same_aliases_in_any_order_know_the_same(one: list[int], other: list[int]) -> None:
    """Two changes at the same time, and a removal among them."""
    changes = [
        Alias("chat", CHAT[i % 2 :] if i != 3 else (), version=i // 2) if i < 5 else Alias("talk", CHAT, version=1)
        for i in range(6)
    ]
    tables = FleetAliases(), FleetAliases()
    for table, order in zip(tables, (one, other), strict=True):
        for index in order:
            table.learn(changes[index])
    assert sorted(map(repr, tables[0].news)) == sorted(map(repr, tables[1].news))
    assert {alias.version for alias in tables[0].news if alias.name == "chat"} == {2}


def test_a_version_is_unloaded_by_its_digest_and_other_operations_by_digest_are_refused_by_name(tmp_path: Path) -> None:
    async def test() -> None:
        fleet = FakeFleet(2)
        async with served(fleet, tmp_path) as front:
            digest = packed().digest
            await front.put(7, packed(), "chat")
            refused = await front.operate(UnloadAdapter(7, expected_digest="0" * 32))
            assert refused.error_code == "ALREADY_EXISTS"
            assert f"has the digest {digest} and the expected digest is {'0' * 32}" in str(refused.error_message)
            assert (await front.ask("r", [5], 7))[-1].lora_digest == digest
            fleet[1].in_engine[9] = "e" * 32
            assert (await front.operate(UnloadAdapter(9, expected_digest="0" * 32))).error_code == "ALREADY_EXISTS"
            assert fleet[1].in_engine[9] == "e" * 32
            assert (await front.operate(UnloadAdapter(9, expected_digest="e" * 32))).error_code is None
            assert (await front.operate(UnloadAdapter(7, expected_digest=digest))).error_code is None
            assert (await front.ask("s", [5], 7))[-1].error_code == "NOT_FOUND"
            assert (await front.operate(LoadAdapter(7, expected_digest=digest))).error_code == "UNSUPPORTED"
            put = RecordingListener()
            front.client.put_adapter(put, "put", 7, packed(), expected_digest=digest)
            assert (await asyncio.to_thread(put.wait))[-1].error_code == "UNSUPPORTED"

    run(test())


def test_weights_of_another_version_than_a_request_demands_do_not_enter_the_fleet(tmp_path: Path) -> None:
    async def test() -> None:
        fleet = FakeFleet(2)
        async with served(fleet, tmp_path) as front:
            listener = RecordingListener()
            request = generation_request("r", [5], lora_task_id=7)
            demanding = msgspec.structs.replace(request, lora_expected_digest="0" * 32)
            front.client.generate(listener, [demanding], adapter=(7, packed()))
            assert (await asyncio.to_thread(listener.wait))[-1].error_code == "NOT_FOUND"
            assert (fleet[1].uploads.find(7), fleet[2].uploads.find(7)) == (None, None)

    run(test())


def test_a_drained_front_takes_no_more_and_says_when_it_has_ended(tmp_path: Path) -> None:
    async def test() -> None:
        fleet = FakeFleet(1)
        async with served(fleet, tmp_path) as front:
            held = front.begin("r", [HOLD])
            while not fleet.begun:
                await asyncio.sleep(0.001)
            front.drain.give()
            while (await front.ask("s", [5]))[-1].error_code is None:
                pass
            assert not drained_file(front.path).exists()
            held.cancel()
            while not drained_file(front.path).exists():
                await asyncio.sleep(0.001)

    run(test())
