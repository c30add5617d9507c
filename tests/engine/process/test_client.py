from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from support.adapters import TINY, wire_adapter
from support.fake_engine import BUG, HOLD, INFO, FakeEngine, text_of
from support.fronts import TIMEOUT_S, RecordingListener, generation_request
from support.served_engine import served

from multilora_engine.engine.block_events import BlockEvent, BlockRemoved
from multilora_engine.engine_info import ClientPolicy
from multilora_engine.errors import ConfigError, EngineUnavailable
from multilora_engine.lora.format import pack_adapter
from multilora_engine.lora.layout import PackedAdapter
from multilora_engine.process import client as client_module
from multilora_engine.process.client import EngineClient
from multilora_engine.process.messages import PROTOCOL_VERSION
from multilora_engine.process.operations import ReadEvents
from multilora_engine.request import GenerationRequest, Sender, TokenOutput

ACME = Sender(tenant="acme", name="acme", key_id="0123")


def adapter(seed: int = 0) -> PackedAdapter:
    wire = wire_adapter(TINY, [(1, 0, 4), (6, 2, 7)], seed=seed)
    return pack_adapter(wire.weights, wire.config, TINY)


def request_of(sender: Sender, request_id: str) -> GenerationRequest:
    """One that does not end by itself."""
    return msgspec.structs.replace(generation_request(request_id, [HOLD]), sender=sender)


def wait_for(engine: FakeEngine, condition: Callable[[], bool]) -> None:
    with engine.changed:
        assert engine.changed.wait_for(condition, TIMEOUT_S)


def test_the_engine_describes_itself_to_a_front(client: EngineClient) -> None:
    assert client.wait_until_ready(TIMEOUT_S) == INFO


def test_a_message_that_cannot_be_sent_is_answered_and_the_next_one_too(client: EngineClient) -> None:
    listener, after = RecordingListener(), RecordingListener()
    client.operate(listener, "o", ReadEvents(10**30))
    client.generate(after, [generation_request("r", [5])])
    assert listener.wait()[-1].error_code == "INTERNAL"
    assert after.wait()[-1].error_code is None


def test_outputs_arrive_in_order_and_on_one_thread(client: EngineClient) -> None:
    listeners = [RecordingListener() for _ in range(3)]
    for i, listener in enumerate(listeners):
        client.generate(listener, [generation_request(f"r{i}", [10 * i, 10 * i + 1], max_tokens=5)])
    for i, listener in enumerate(listeners):
        outputs = listener.wait()
        expected = [10 * i, 10 * i + 1] * 2 + [10 * i]
        assert [token_id for output in outputs for token_id in output.token_ids] == expected
        assert "".join(output.text for output in outputs) == "".join(map(text_of, expected))
        assert [output.finish_reason for output in outputs if output.is_final] == ["length"]
        assert outputs[-1].num_output_tokens == 5
    assert len(set.union(*(listener.threads for listener in listeners))) == 1


def test_a_thousand_requests_from_four_threads_all_end_once_and_leave_nothing(
    client: EngineClient, engine: FakeEngine
) -> None:
    listeners = {f"{t}-{i}": RecordingListener() for t in range(4) for i in range(250)}

    def submit(thread: int) -> None:
        for i in range(250):
            request = generation_request(f"{thread}-{i}", [HOLD if i % 50 == 7 else i], max_tokens=1 + i % 4)
            client.generate(listeners[request.request_id], [request])
            if request.prompt_token_ids == [HOLD]:
                listeners[request.request_id].cancel()

    threads = [threading.Thread(target=submit, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for request_id, listener in listeners.items():
        i = int(request_id.split("-")[1])
        final = listener.wait()[-1]
        assert (final.error_code, final.num_output_tokens) == (("CANCELLED", 0) if i % 50 == 7 else (None, 1 + i % 4))
    wait_for(engine, lambda: not engine.requests)
    assert client.num_requests == 0
    assert [listener.num_ends for listener in listeners.values()] == [0] * 1000


def test_a_listener_that_lags_gets_what_has_piled_up_as_one_output(client: EngineClient, engine: FakeEngine) -> None:
    class Laggard(RecordingListener):
        def on_output(self, output: TokenOutput) -> None:
            if not self.outputs:
                wait_for(engine, lambda: not engine.requests)
            super().on_output(output)

    listener, marker = Laggard(), RecordingListener()
    client.generate(listener, [generation_request("r", [1, 2, 3], max_tokens=20)])
    outputs = listener.wait()
    client.generate(marker, [generation_request("marker", [1])])
    marker.wait()
    assert len(outputs) < 20
    assert [token_id for output in outputs for token_id in output.token_ids] == ([1, 2, 3] * 7)[:20]
    assert [output.is_final for output in outputs] == [False] * (len(outputs) - 1) + [True]


def test_a_listener_passes_on_what_it_has_when_all_that_arrived_is_heard(client: EngineClient) -> None:
    listener, marker = RecordingListener(num_requests=3), RecordingListener()
    client.generate(listener, [generation_request(name, [1], max_tokens=1) for name in "abc"])
    listener.wait()
    client.generate(marker, [generation_request("marker", [1])])
    marker.wait()
    assert listener.num_outputs_at_flush == [3]


def test_of_the_answers_to_a_step_the_largest_leaves_last(client: EngineClient) -> None:
    sizes = {"token": 4, "logits": 1 << 26, "empty": 0, "log-probs": 1 << 10}
    order: list[str] = []
    all_have_begun = threading.Event()

    class Sized(RecordingListener):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name, self.unsent_bytes = name, sizes[name]

        def flush(self) -> None:
            order.append(self.name)
            if all(order.count(name) >= 10 for name in sizes):
                all_have_begun.set()

    listeners = [Sized(name) for name in sizes]
    for listener in listeners:
        client.generate(listener, [generation_request(listener.name, [1], max_tokens=1_000_000)])
    assert all_have_begun.wait(TIMEOUT_S)
    end = len(order)
    for listener in listeners:
        listener.cancel()
        listener.wait()
    # A step has a token for each of them.
    assert "".join(order[end - 20 : end]) in "".join(["empty", "token", "log-probs", "logits"] * 6)


def test_an_adapter_and_the_request_that_uses_it_travel_together(client: EngineClient, engine: FakeEngine) -> None:
    listener, packed = RecordingListener(), adapter()
    client.generate(listener, [generation_request("r", [5], lora_task_id=7)], adapter=(7, packed))
    assert {output.lora_digest for output in listener.wait()} == {packed.digest}
    assert engine.adapters[7].rows == packed.rows
    assert engine.adapters[7].pages.equal(packed.pages)


def test_an_uploaded_adapter_is_confirmed_by_its_digest_and_serves_later_requests(client: EngineClient) -> None:
    upload, use, packed = RecordingListener(), RecordingListener(), adapter()
    client.put_adapter(upload, "upload", 2**64 - 1, packed)
    client.generate(use, [generation_request("r", [5], lora_task_id=2**64 - 1)])
    assert upload.wait() == [TokenOutput("upload", [], "", finish_reason="stop", lora_digest=packed.digest)]
    assert use.wait()[-1].lora_digest == packed.digest


def test_what_the_engine_refuses_fails_that_call_alone(client: EngineClient) -> None:
    calls = {
        "unknown adapter": generation_request("unknown adapter", [1], lora_task_id=9),
        "no tokens": generation_request("no tokens", [1], max_tokens=0),
        "bug": generation_request("bug", [BUG]),
        "good": generation_request("good", [1]),
    }
    listeners = {name: RecordingListener() for name in calls}
    for name, request in calls.items():
        client.generate(listeners[name], [request])
    codes = {name: [output.error_code for output in listener.wait()][-1] for name, listener in listeners.items()}
    assert codes == {"unknown adapter": "NOT_FOUND", "no tokens": "INVALID_ARG", "bug": "INTERNAL", "good": None}
    message = listeners["unknown adapter"].outputs[0].error_message
    assert message == "LoRA task 9 not found in cache. Please send LoRA weights with request"


def test_an_adapter_in_conflict_with_the_cached_one_fails_its_upload(client: EngineClient) -> None:
    first, second = RecordingListener(), RecordingListener()
    client.put_adapter(first, "first", 1, adapter(seed=0))
    client.put_adapter(second, "second", 1, adapter(seed=1))
    assert first.wait()[0].error_code is None
    assert second.wait()[0].error_code == "ALREADY_EXISTS"


def test_the_requests_of_a_call_are_accepted_together_or_not_at_all(client: EngineClient, engine: FakeEngine) -> None:
    listener = RecordingListener(num_requests=3)
    requests = [
        generation_request("a", [HOLD]),
        generation_request("b", [HOLD]),
        generation_request("c", [HOLD], lora_task_id=3),
    ]
    client.generate(listener, requests)
    assert [output.error_code for output in listener.wait()] == ["NOT_FOUND"]
    assert engine.aborted == ["a", "b"]
    assert client.num_requests == 0


def test_a_call_of_several_requests_ends_when_each_has_ended(client: EngineClient) -> None:
    listener = RecordingListener(num_requests=2)
    client.generate(listener, [generation_request("a", [1], max_tokens=1), generation_request("b", [2], max_tokens=9)])
    finals = [output.request_id for output in listener.wait() if output.is_final]
    assert finals == ["a", "b"]
    assert listener.num_ends == 0


def test_a_cancelled_call_is_told_so_and_leaves_the_engine(client: EngineClient, engine: FakeEngine) -> None:
    listener = RecordingListener(num_requests=2)
    client.generate(listener, [generation_request("a", [HOLD]), generation_request("b", [HOLD])])
    listener.cancel()
    assert [output.error_code for output in listener.wait()] == ["CANCELLED"]
    wait_for(engine, lambda: set(engine.aborted) == {"a", "b"})


def test_stop_ends_all_requests_of_a_client_id_with_a_normal_final_output(client: EngineClient) -> None:
    first, second, other, stop = (RecordingListener() for _ in range(4))
    client.generate(first, [request_of(ACME, "a"), request_of(ACME, "b")], client_request_id="mine")
    client.generate(second, [request_of(ACME, "c")], client_request_id="mine")
    client.generate(other, [generation_request("d", [4], max_tokens=50)], client_request_id="other")
    client.stop(stop, "stop", "mine", ACME)
    assert stop.wait() == [TokenOutput("stop", [], "", finish_reason="stop")]
    assert [listener.wait()[-1].finish_reason for listener in (first, second)] == ["cancelled", "cancelled"]
    assert other.wait()[-1].finish_reason == "length"


def test_a_stop_ends_no_request_of_another_sender_whatever_id_it_names(client: EngineClient) -> None:
    victim, stop = RecordingListener(), RecordingListener(num_requests=6)
    client.generate(victim, [request_of(ACME, "a")], client_request_id="mine")
    senders = [Sender(), Sender(name="bolt"), Sender(tenant="bolt", name="bolt", key_id="k")]
    for index, (sender, name) in enumerate(itertools.product(senders, ["mine", "a"])):
        client.stop(stop, f"stop {index}", name, sender)
    assert [output.finish_reason for output in stop.wait()] == ["stop"] * 6
    own = RecordingListener()
    client.stop(own, "own", "mine", ACME)
    own.wait()
    assert victim.wait()[-1].finish_reason == "cancelled"


def test_senders_who_are_not_known_do_not_meet_under_one_id(client: EngineClient) -> None:
    first, second, stop, again = (RecordingListener() for _ in range(4))
    client.generate(first, [generation_request("a", [HOLD])], client_request_id="1")
    client.generate(second, [generation_request("b", [HOLD])], client_request_id="1")
    client.stop(stop, "stop", "1")
    assert "several requests in flight have the id '1'" in (stop.wait()[-1].error_message or "")
    client.stop(again, "again", "a")
    again.wait()
    assert first.wait()[-1].finish_reason == "cancelled"
    assert second.outputs == []


@pytest.mark.parametrize("engine", [ClientPolicy(stop_needs_sender=True)], indirect=True)
def test_where_a_stop_needs_a_sender_only_the_servers_own_id_does_without(client: EngineClient) -> None:
    listener, refused, stop = (RecordingListener() for _ in range(3))
    client.generate(listener, [generation_request("a", [HOLD])], client_request_id="mine")
    client.stop(refused, "refused", "mine")
    assert refused.wait()[-1].error_code == "PERMISSION_DENIED"
    client.stop(stop, "stop", "a")
    stop.wait()
    assert listener.wait()[-1].finish_reason == "cancelled"


def test_stopping_an_id_nobody_uses_is_no_error(client: EngineClient) -> None:
    stop = RecordingListener()
    client.stop(stop, "stop", "nobody")
    assert stop.wait()[-1].finish_reason == "stop"


@pytest.mark.parametrize("method", ["on_output", "flush", "is_cancelled"])
def test_a_listener_that_raises_loses_its_own_call_only(
    client: EngineClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fail(*arguments: object) -> None:
        raise RuntimeError("the response cannot be sent")

    broken, good = RecordingListener(), RecordingListener()
    monkeypatch.setattr(broken, method, fail)
    client.generate(broken, [generation_request("broken", [1], max_tokens=10**6)])
    wait_for(engine, lambda: engine.aborted == ["broken"])
    client.generate(good, [generation_request("good", [1])])
    assert good.wait()[-1].finish_reason == "length"


@pytest.mark.parametrize("method", ["on_output", "flush"])
def test_a_listener_that_raises_once_still_hears_that_its_call_has_ended(
    client: EngineClient, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    broken = RecordingListener()
    works, failures = getattr(broken, method), iter([RuntimeError("the response cannot be made")])

    def fail_once(*arguments: TokenOutput) -> None:
        for failure in failures:
            raise failure
        works(*arguments)

    monkeypatch.setattr(broken, method, fail_once)
    client.generate(broken, [generation_request("broken", [1], max_tokens=10**6)])
    last = broken.wait()[-1]
    assert (last.error_code, last.error_message) == ("INTERNAL", "RuntimeError: the response cannot be made")
    client.close()
    assert broken.num_ends == 0
    assert broken.num_outputs_at_flush[-1] == len(broken.outputs)


def test_a_block_listener_that_raises_loses_no_call(socket_path: Path) -> None:
    class Router:
        def __init__(self) -> None:
            self.calls: list[str] = []

        def on_events(self, events: list[BlockEvent]) -> None:
            self.calls.append("events")
            raise RuntimeError("the router is gone")

        def on_loss(self) -> None:
            self.calls.append("loss")
            raise RuntimeError("the router is gone")

    engine, router = FakeEngine(), Router()
    with closing(EngineClient(socket_path, router)) as client:
        with served(engine, socket_path):
            client.wait_until_ready(TIMEOUT_S)
            for request_id in ("watches", "hears", "hears again"):
                listener = RecordingListener()
                client.generate(listener, [generation_request(request_id, [1])])
                assert listener.wait()[-1].finish_reason == "length"
                if request_id != "hears again":
                    engine.block_events.append(BlockRemoved(b"key"))
            held = RecordingListener()
            client.generate(held, [generation_request("held", [HOLD])])
        assert held.wait()[-1].error_code == "UNAVAILABLE"
    assert router.calls == ["events", "events", "loss"]


def test_without_an_engine_requests_fail_at_once(socket_path: Path) -> None:
    client, listener = EngineClient(socket_path), RecordingListener()
    client.generate(listener, [generation_request("r", [1])])
    assert [output.error_code for output in listener.wait()] == ["UNAVAILABLE"]
    with pytest.raises(EngineUnavailable):
        client.wait_until_ready(timeout_s=0)
    client.close()


def test_closing_a_client_fails_what_is_in_flight(client: EngineClient) -> None:
    listener = RecordingListener()
    client.generate(listener, [generation_request("r", [HOLD])])
    client.close()
    assert [output.error_code for output in listener.wait()] == ["UNAVAILABLE"]


def test_an_engine_of_another_version_is_not_used(
    engine: FakeEngine, socket_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "PROTOCOL_VERSION", 0)
    client, listener = EngineClient(socket_path), RecordingListener()
    with pytest.raises(ConfigError, match=f"the front speaks protocol version 0 and the engine {PROTOCOL_VERSION}"):
        client.wait_until_ready(TIMEOUT_S)
    client.generate(listener, [generation_request("r", [1])])
    assert [output.error_code for output in listener.wait()] == ["UNAVAILABLE"]
    client.close()
    assert engine.produced == {}
