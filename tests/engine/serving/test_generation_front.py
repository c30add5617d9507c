from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.adapters import TINY, wire_adapter
from support.fake_engine import HOLD, INFO, FakeEngine, text_of
from support.fake_triton import FakeRequest, FakeResponse
from support.fronts import TIMEOUT_S
from support.served_engine import served
from support.sources import peft_inputs

from multilora_engine.lora import format as lora_format
from multilora_engine.lora.format import pack_adapter
from multilora_engine.lora.layout import PackedAdapter
from multilora_engine.lora.names import task_id_of
from multilora_engine.serving import generation_front
from multilora_engine.serving.front import EngineLink
from multilora_engine.serving.generation_front import GenerationFront
from multilora_engine.serving.inputs import ENSEMBLE_NAMES
from multilora_engine.serving.llmapi import LlmapiFront
from multilora_engine.serving.replies import Responder
from multilora_engine.serving.vllm import VllmFront
from multilora_engine.text.tokenizer import Tokenizer
from multilora_wire.adapter_info import Alias, AliasMember

WIRE = wire_adapter(TINY, [(1, 0, 4), (6, 2, 7)])
ADAPTER = {"lora_weights_fp32": WIRE.weights.numpy()[None], "lora_config": WIRE.config.numpy()[None]}
FILES = peft_inputs(WIRE)
in_both_forms = pytest.mark.parametrize("adapter", [ADAPTER, FILES], ids=["tensors", "files"])


@pytest.fixture
def engine(tmp_path: Path, default_model_dir: Path) -> Iterator[FakeEngine]:
    engine = FakeEngine()
    engine.info = dataclasses.replace(INFO, tokenizer_path=str(default_model_dir))
    with served(engine, tmp_path / "engine.sock"):
        yield engine


@pytest.fixture
def front(link: EngineLink) -> Iterator[GenerationFront]:
    front = GenerationFront(link, can_stream=True)
    yield front
    front.close()


@pytest.fixture
def may_pack(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """No adapter is packed before it is set."""
    event = threading.Event()

    def pack_later(*wire: Any) -> PackedAdapter:
        assert event.wait(TIMEOUT_S)
        return pack_adapter(*wire)

    monkeypatch.setattr(lora_format, "pack_adapter", pack_later)
    return event


def ask(front: GenerationFront, tensors: dict[str, Any], **more: Any) -> list[FakeResponse]:
    request = FakeRequest(tensors, **more)
    front.accept(request)
    return request.sender.wait()


def error_of(responses: list[FakeResponse]) -> tuple[str, str]:
    assert len(responses) == 1
    assert responses[0].error is not None
    return responses[0].error.code, responses[0].error.message


def test_one_response_starts_with_the_prompt_unless_it_is_excluded(
    front: GenerationFront, tokenizer: Tokenizer
) -> None:
    prompt = tokenizer.encode("Hello there", add_special_tokens=True)
    answer = [prompt[0], prompt[1], prompt[0]]
    tensors = {"text_input": [["Hello there"]], "max_tokens": [[3]]}
    (response,) = ask(front, tensors)
    assert response.texts() == ["Hello there" + "".join(map(text_of, answer))]
    assert response.arrays["output_ids"].tolist() == [[prompt + answer]]
    assert response.arrays["sequence_length"].tolist() == [[5]]
    (response,) = ask(front, {**tensors, "exclude_input_in_output": [[True]]})
    assert response.texts() == ["".join(map(text_of, answer))]
    assert response.arrays["output_ids"].tolist() == [[answer]]


def test_a_stream_joined_is_the_one_response(front: GenerationFront) -> None:
    tensors = {"input_ids": [[5, 6, 7]], "max_tokens": [[20]], "exclude_input_in_output": [[True]]}
    (whole,) = ask(front, tensors)
    parts = ask(front, {**tensors, "streaming": [[True]]})
    assert "".join(part.texts()[0] for part in parts) == whole.texts()[0]
    assert (
        np.concatenate([part.arrays["output_ids"] for part in parts], axis=2).tolist()
        == whole.arrays["output_ids"].tolist()
    )
    assert parts[-1].arrays["finish_reason"].item() == b"length"


def test_a_door_of_the_ensembles_names_reads_what_they_mean(link: EngineLink, engine: FakeEngine) -> None:
    flat = partial(Responder, has_flat_text=True)
    text_door = GenerationFront(link, can_stream=True, renamed=ENSEMBLE_NAMES, make_responder=flat)
    sampling = {"top_k": [[7]], "top_p": np.array([[0.5]], np.float32), "length_penalty": np.array([[2.0]], np.float32)}
    parts = ask(text_door, {"text_input": [["Hello there"]], "max_tokens": [[20]], "stream": [[True]], **sampling})
    assert [part.arrays["text_output"].shape for part in parts] == [(1,)] * len(parts)
    # Only a stream leaves out the prompt.
    assert not "".join(part.texts()[0] for part in parts).startswith("Hello there")
    assert (engine.accepted[0].sampling.top_k, engine.accepted[0].sampling.top_p) == (7, 0.5)


@pytest.mark.parametrize("asked", [{}, {"return_kv_cache_reuse_stats": [[True]]}, {"return_perf_metrics": [[True]]}])
def test_blocks_of_the_kv_cache_are_told_to_a_request_that_asks(
    front: GenerationFront, asked: dict[str, list[list[bool]]]
) -> None:
    tensors = {"input_ids": [[5, 6, 7]], "max_tokens": [[50]], **asked}
    whole, streamed = ask(front, tensors), ask(front, tensors | {"streaming": [[True]]})
    for response in (*whole, *streamed):  # upstream's clients read them of each response
        assert ("kv_cache_reused_blocks" in response.arrays) == bool(asked)
        assert ("arrival_time_ns" in response.arrays) == ("return_perf_metrics" in asked)


def test_what_the_server_does_not_do_is_refused_by_its_name(front: GenerationFront) -> None:
    tensors = {"input_ids": [[5]], "max_tokens": [[1]], "draft_input_ids": [[7, 8]]}
    code, message = error_of(ask(front, tensors, id="ab12"))
    assert code == "UNSUPPORTED"
    assert message == (
        "[UNSUPPORTED] draft_input_ids: this server has no speculative decoding; leave the tensor out (request ab12)"
    )


@pytest.mark.parametrize("door", [GenerationFront, VllmFront, LlmapiFront])
def test_a_model_in_the_body_is_one_of_the_servers_or_refused_since_it_may_be_meant_as_an_adapter(
    link: EngineLink, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, door: type[GenerationFront]
) -> None:
    monkeypatch.setattr(link, "_model_names", {"ensemble"})
    of_text: dict[str, Any] = {"text_input": np.array([b"Hi"], np.object_)}
    tensors = {"input_ids": [[5]], "request_output_len": [[2]]} if door is GenerationFront else of_text
    outputs = () if door is GenerationFront else ("text_output",)
    for i, name in enumerate(("model", "Model_Name")):
        for known in ("ensemble", Path(INFO.model_path).name, INFO.model_path, ""):
            request = FakeRequest(tensors, own_parameters={name: known}, output_names=outputs)
            door(link, True).accept(request)
            last = request.sender.wait()[-1]
            assert last.error is None, last.error.message
        assert len(engine.accepted) == 4 * (i + 1)
        request = FakeRequest(tensors, own_parameters={name: "pirate"}, output_names=outputs)
        door(link, True).accept(request)
        code, message = error_of(request.sender.wait())
        assert (code, "'pirate', no model of this server" in message, "lora_name" in message) == (
            "INVALID_ARG",
            True,
            True,
        )
        assert len(engine.accepted) == 4 * (i + 1)


def test_the_log_tells_the_trace_that_a_request_is_part_of(
    front: GenerationFront, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    tensors = {"input_ids": [[5]], "max_tokens": [[2]]}
    ask(front, tensors, id="plain")
    ask(front, tensors, id="traced", trace_context='{"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad-01"}')
    lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("request ")]
    assert lines == [
        "request plain, adapter none: length, 1 + 2 tokens",
        "request traced, adapter none: length, 1 + 2 tokens, trace 0af7651916cd43dd8448eb211c80319c",
    ]


class UnreadableId(FakeRequest):
    """As Triton's Python bindings read an id that is not UTF-8."""

    def request_id(self) -> str:
        return b"fuzz\xf2".decode()


def test_an_id_that_is_not_utf8_is_as_good_as_none(front: GenerationFront) -> None:
    answered = UnreadableId({"input_ids": [[5]], "max_tokens": [[1]]})
    stopped = UnreadableId({"stop": [[True]]})
    for request in (answered, stopped):
        front.accept(request)
    assert len(answered.sender.wait()) == 1
    assert error_of(stopped.sender.wait())[1] == (
        "[INVALID_ARG] stop needs the request id of the request that shall end (request -)"
    )


def test_rows_of_one_request_are_answered_together_or_each_by_a_response_of_its_own(
    front: GenerationFront, link: EngineLink
) -> None:
    tensors = {
        "input_ids": [[5, 6], [7, 8]],
        "input_lengths": [[2], [1]],
        "max_tokens": [[1], [3]],
        "pad_id": [[0], [0]],
    }
    (response,) = ask(GenerationFront(link, can_stream=False), tensors)
    assert response.arrays["output_ids"].tolist() == [[[5, 6, 5, 0]], [[7, 7, 7, 7]]]
    assert response.arrays["batch_index"].tolist() == [[0], [1]]
    answers = {r.arrays["batch_index"].item(): r.arrays["output_ids"].tolist() for r in ask(front, tensors)}
    assert answers == {0: [[[5, 6, 5]]], 1: [[[7, 7, 7, 7]]]}


def test_several_sequences_differ_in_their_seeds_and_the_first_is_what_one_alone_gets(
    front: GenerationFront, engine: FakeEngine
) -> None:
    tensors = {"input_ids": [[5], [6]], "max_tokens": [[2], [2]], "seed": [[7], [8]]}
    ask(front, {**tensors, "num_return_sequences": [[3], [3]]})
    seeds = [request.sampling.seed for request in engine.accepted]
    assert (seeds[0], seeds[3]) == (7, 8)
    assert len(set(seeds)) == 6
    ask(front, {**tensors, "num_return_sequences": [[3], [3]]})
    assert [request.sampling.seed for request in engine.accepted[6:]] == seeds


def test_several_sequences_are_responses_of_one_door_and_beams_of_the_other(
    front: GenerationFront, link: EngineLink
) -> None:
    tensors = {"input_ids": [[5], [6]], "max_tokens": [[2], [2]], "num_return_sequences": [[3], [3]]}
    indices = [(i, j) for i in range(2) for j in range(3)]
    for streaming in (False, True):
        responses = ask(front, {**tensors, "streaming": [[streaming], [streaming]]})
        answered = {(r.arrays["batch_index"].item(), r.arrays["sequence_index"].item()) for r in responses}
        assert answered == set(indices)
        assert streaming or len(responses) == 6
    (response,) = ask(GenerationFront(link, can_stream=False), tensors)
    assert response.arrays["output_ids"].tolist() == [[[5, 5, 5]] * 3, [[6, 6, 6]] * 3]
    assert response.arrays["sequence_index"].tolist() == [[0]] * 2


@pytest.mark.parametrize("excludes_input", [False, True])
def test_the_beams_of_a_search_come_in_one_response_best_first(link: EngineLink, excludes_input: bool) -> None:
    tensors = {"input_ids": [[5], [7]], "max_tokens": [[2], [2]], "beam_width": [[4], [4]]}
    options = {"exclude_input_in_output": [[excludes_input]] * 2, "return_log_probs": [[True]] * 2, "pad_id": [[0]] * 2}
    count = {"num_return_sequences": [[3], [3]]}
    (response,) = ask(GenerationFront(link, can_stream=False), {**tensors, **options, **count})
    prompt = [] if excludes_input else [5]
    # The fake engine's beams: one token, two tokens, and no third.
    assert response.arrays["output_ids"][0].tolist() == [[*prompt, 5, 0], [*prompt, 6, 6], [*prompt, 0, 0]]
    assert response.arrays["output_ids"].shape == (2, 3, len(prompt) + 2)
    assert response.arrays["sequence_length"][0].tolist() == [len(prompt) + n for n in (1, 2, 0)]
    assert response.arrays["sequence_index"].tolist() == [[0]] * 2
    assert response.arrays["cum_log_probs"].tolist() == [[-1.0, -2.0, -np.inf]] * 2
    assert response.arrays["output_log_probs"].tolist() == [[[-1.0, 0.0], [-1.0, -1.0], [0.0, 0.0]]] * 2
    assert response.arrays["num_output_tokens"].tolist() == [[3]] * 2
    assert response.arrays["num_output_tokens_so_far"].tolist() == [[1, 2, 0]] * 2
    assert response.arrays["finish_reason"].tolist() == [[b"stop", b"length", b"stop"]] * 2
    assert response.arrays["text_output"][0, :2].tolist()[1].decode().endswith("<6><6>")
    each = ask(GenerationFront(link, can_stream=True), {**tensors, **options, **count})
    assert sorted(answer.arrays["batch_index"].tolist() for answer in each) == [[[0]], [[1]]]
    for answer in each:
        row = answer.arrays["batch_index"].item()
        for name in ("output_ids", "sequence_length", "cum_log_probs", "num_output_tokens"):
            assert answer.arrays[name].tolist() == response.arrays[name][row : row + 1].tolist()


@in_both_forms
def test_an_adapter_comes_with_the_first_request_and_serves_the_next_by_its_id(
    front: GenerationFront, adapter: dict[str, Any]
) -> None:
    tensors = {"input_ids": [[5]], "max_tokens": [[1]], "lora_task_id": [[0]]}
    (unknown,) = ask(front, tensors, id="ab12")
    (first,) = ask(front, {**tensors, **adapter})
    (second,) = ask(front, tensors)
    assert unknown.error is not None
    assert unknown.error.message == (
        "[NOT_FOUND] LoRA task 0 not found in cache. Please send LoRA weights with request (request ab12)"
    )
    assert first.arrays["lora_digest"].item() == second.arrays["lora_digest"].item() != b""


@in_both_forms
def test_an_upload_is_answered_by_id_and_digest_and_no_text(
    front: GenerationFront, engine: FakeEngine, adapter: dict[str, Any]
) -> None:
    (response,) = ask(front, {"lora_task_id": [[2**64 - 1]], **adapter})
    assert response.texts() == [""]
    assert response.arrays["finish_reason"].item() == b"stop"
    assert response.arrays["lora_task_id_out"].item() == 2**64 - 1
    assert response.arrays["lora_digest"].item().decode() == engine.adapters[2**64 - 1].digest
    assert all(array.size for array in response.arrays.values())


def test_stop_ends_the_requests_of_its_id_through_any_front(front: GenerationFront, link: EngineLink) -> None:
    victim = FakeRequest({"input_ids": [[HOLD]], "max_tokens": [[5]]}, id="mine")
    front.accept(victim)
    (stopped,) = ask(GenerationFront(link, can_stream=False), {"stop": [[True]], "input_ids": [[0]]}, id="mine")
    assert (stopped.arrays, stopped.error) == ({}, None)
    (response,) = victim.sender.wait()
    assert response.arrays["finish_reason"].item() == b"cancelled"


def test_stop_without_an_id_is_refused(front: GenerationFront) -> None:
    assert error_of(ask(front, {"stop": [[True]]}))[0] == "INVALID_ARG"


def test_a_cancelled_request_is_answered_so_and_leaves_the_engine(front: GenerationFront, engine: FakeEngine) -> None:
    request = FakeRequest({"input_ids": [[HOLD]], "max_tokens": [[5]]})
    front.accept(request)
    request.sender.cancelled.set()
    assert error_of(request.sender.wait())[0] == "CANCELLED"
    with engine.changed:
        assert engine.changed.wait_for(lambda: not engine.requests, TIMEOUT_S)


def test_a_front_of_one_response_refuses_to_stream(link: EngineLink) -> None:
    tensors = {"input_ids": [[5]], "max_tokens": [[1]], "streaming": [[True]]}
    code, message = error_of(ask(GenerationFront(link, can_stream=False), tensors))
    assert code == "INVALID_ARG"
    assert "call the model generation" in message


def test_a_malformed_request_is_answered_by_the_same_thread_as_all_others(front: GenerationFront) -> None:
    good = FakeRequest({"input_ids": [[5]], "max_tokens": [[1]]})
    bad = FakeRequest({"input_ids": [[5]], "max_tokens": [[-1]]}, id="ab12")
    for request in (good, bad):
        front.accept(request)
        request.sender.wait()
    assert error_of(bad.sender.responses)[1] == "[INVALID_ARG] max_tokens is -1, expected a number >= 0 (request ab12)"
    assert good.sender.threads == bad.sender.threads


def test_a_bug_in_reading_a_request_is_its_answer_too(front: GenerationFront) -> None:
    code, message = error_of(ask(front, {"text_input": np.array([[3.5]]), "max_tokens": [[1]]}))
    assert code == "INTERNAL"
    assert "AttributeError" in message


def test_the_clients_timeout_reaches_the_engine_in_seconds(front: GenerationFront, engine: FakeEngine) -> None:
    engine.step_gate.clear()
    request = FakeRequest({"input_ids": [[5]], "max_tokens": [[1]]}, timeout_us=1_500_000)
    front.accept(request)
    engine.step_gate.set()
    request.sender.wait()
    assert engine.accepted[-1].timeout_s == 1.5


def test_a_priority_is_of_its_row_and_0_without_one_and_never_smaller(
    front: GenerationFront, engine: FakeEngine
) -> None:
    tensors = {"input_ids": [[5], [6]], "max_tokens": [[1], [1]]}
    ask(front, {**tensors, "priority": [[-3], [7]]})
    ask(front, tensors)
    assert [request.priority for request in engine.accepted] == [0, 7, 0, 0]


def test_without_an_engine_a_request_is_told_to_try_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multilora_engine.serving.front._FIRST_CONTACT_S", 0.0)
    link = EngineLink(tmp_path / "nobody.sock")
    assert error_of(ask(GenerationFront(link, can_stream=True), {"input_ids": [[5]]}))[0] == "UNAVAILABLE"
    link.close()


def test_an_adapter_may_go_by_its_name_alone(front: GenerationFront, engine: FakeEngine) -> None:
    prompt = {"input_ids": [[5]], "max_tokens": [[1]]}
    (first,) = ask(front, {**prompt, **ADAPTER, "lora_name": [["acme/pirate"]]})
    (later,) = ask(front, {**prompt, "lora_name": [["acme/pirate"]]})
    (by_id,) = ask(front, {**prompt, "lora_task_id": [[task_id_of("acme/pirate")]], "lora_name": [["acme/pirate"]]})
    for response in (first, later, by_id):
        assert response.arrays["lora_task_id_out"].tolist() == [[task_id_of("acme/pirate")]]
        assert response.arrays["lora_digest"].item() != b""
    assert [info.name for info in engine.loras.inventory.describe()] == ["acme/pirate"]


def test_an_alias_is_answered_by_a_member_which_the_response_names(
    front: GenerationFront, engine: FakeEngine, link: EngineLink
) -> None:
    for name in ("chat-v7", "chat-v8"):
        ask(front, {**ADAPTER, "lora_name": [[name]]})
    weights = {"chat-v7": 50, "chat-v8": 50}
    engine.loras.aliases.set(Alias("chat", tuple(AliasMember(name, weight) for name, weight in weights.items())))
    by_name, by_id = {"lora_name": [["chat"]]}, {"lora_task_id": np.array([[task_id_of("chat")]], np.uint64)}
    prompt = {"input_ids": [[5]], "max_tokens": [[1]], "num_return_sequences": [[2]]}

    def answered_by(more: dict[str, Any], request_id: str = "") -> str:
        responses = ask(front, {**prompt, **more}, id=request_id)
        names = {response.arrays["lora_name_out"].item().decode() for response in responses}
        assert len(names) == 1, "all answers of a request are by one member"
        name = names.pop()
        assert {response.arrays["lora_task_id_out"].item() for response in responses} == {task_id_of(name)}
        return name

    assert {answered_by(by_name) for _ in range(20)} == weights.keys(), "each request by itself"
    for i in range(4):
        session = {"lora_session": [[f"Ann {i}"]]}
        assert len({answered_by({**which, **session}, f"{n}") for n in range(3) for which in (by_name, by_id)}) == 1
        assert len({answered_by(by_name, f"mine {i}") for _ in range(3)}) == 1, "its own id"
    engine.loras.unload(task_id_of("chat-v8"))
    engine.loras.aliases.set(Alias("chat", (AliasMember("chat-v7", 0), AliasMember("chat-v8", 1))))
    code, message = error_of(ask(front, {**prompt, **by_name}))
    assert (code, "LoRA adapter 'chat-v8' not found in cache" in message) == ("NOT_FOUND", True)
    long = error_of(ask(front, {**prompt, **by_name, "lora_session": [["x" * 1025]]}))
    assert (long[0], "lora_session has 1025 bytes, at most 1024" in long[1]) == ("INVALID_ARG", True)


def test_an_upload_may_go_by_a_name_alone(front: GenerationFront, engine: FakeEngine) -> None:
    (response,) = ask(front, {**ADAPTER, "lora_name": [["pirate"]]})
    assert response.arrays["lora_task_id_out"].tolist() == [[task_id_of("pirate")]]
    assert [info.name for info in engine.loras.inventory.describe()] == ["pirate"]


def test_a_name_nobody_has_sent_is_not_found_and_named(front: GenerationFront) -> None:
    code, message = error_of(ask(front, {"input_ids": [[5]], "max_tokens": [[1]], "lora_name": [["json"]]}))
    assert (code, "LoRA adapter 'json' not found in cache. Please send LoRA weights" in message) == ("NOT_FOUND", True)


@pytest.mark.parametrize(
    ("adapter", "reason"),
    [
        ({"lora_name": [["pirate"]], "lora_task_id": [[7]]}, "and lora_task_id is 7; send one of them"),
        ({"lora_name": [["../pirate"]]}, "is not plain"),
    ],
)
def test_a_name_that_contradicts_the_id_or_is_not_plain_is_refused(
    front: GenerationFront, adapter: dict[str, Any], reason: str
) -> None:
    code, message = error_of(ask(front, {"input_ids": [[5]], "max_tokens": [[1]], **adapter}))
    assert (code, reason in message) == ("INVALID_ARG", True)


def test_a_text_too_long_is_refused_before_it_is_tokenized(front: GenerationFront) -> None:
    for prompt in ({"text_input": [["é" * 5001]]}, {"messages": [["x" * 10_002]]}):
        code, message = error_of(ask(front, {**prompt, "max_tokens": [[1]]}))
        assert code == "INVALID_ARG"
        assert "has 10002 bytes; a prompt may have 10000" in message


def test_an_adapter_too_large_is_refused_with_the_numbers(front: GenerationFront) -> None:
    large = ADAPTER | {"lora_weights_fp32": np.zeros((1, 2, 200_000), np.float32)}
    code, message = error_of(ask(front, {**large, "lora_task_id": [[7]]}))
    assert code == "INVALID_ARG"
    assert "lora_weights has 1600000 bytes and lora_max_adapter_bytes is 1000000" in message
    large = FILES | {"lora_peft_weights": np.zeros((1, 1_000_001), np.uint8)}
    code, message = error_of(ask(front, {**large, "lora_task_id": [[7]]}))
    assert code == "INVALID_ARG"
    assert "lora_peft_weights has 1000001 bytes and lora_max_adapter_bytes is 1000000" in message


def test_a_door_serves_others_while_it_packs_an_adapter(front: GenerationFront, may_pack: threading.Event) -> None:
    upload = FakeRequest({**ADAPTER, "lora_task_id": [[7]]})
    front.accept(upload)
    assert ask(front, {"input_ids": [[5]], "max_tokens": [[1]]})[0].error is None
    assert upload.sender.responses == []
    may_pack.set()
    assert upload.sender.wait()[0].error is None


def test_a_request_by_id_does_not_overtake_the_upload_of_its_adapter(
    front: GenerationFront, may_pack: threading.Event
) -> None:
    prompt = {"input_ids": [[5]], "max_tokens": [[1]]}
    tensors = [{**ADAPTER, "lora_task_id": [[7]]}, {**prompt, "lora_task_id": [[7]]}, {**prompt, "lora_task_id": [[8]]}]
    upload, user, other = (FakeRequest(each) for each in tensors)
    for request in (upload, user, other):
        front.accept(request)
    assert error_of(other.sender.wait())[0] == "NOT_FOUND"
    assert user.sender.responses == []
    may_pack.set()
    digests = [request.sender.wait()[0].arrays["lora_digest"].item() for request in (upload, user)]
    assert digests[0] == digests[1] != b""


def test_a_stop_does_not_overtake_the_request_that_it_ends(front: GenerationFront, may_pack: threading.Event) -> None:
    tensors = {"input_ids": [[HOLD]], "max_tokens": [[5]], "lora_task_id": [[7]], **ADAPTER}
    victim, stop = FakeRequest(tensors, id="mine"), FakeRequest({"stop": [[True]]}, id="mine")
    front.accept(victim)
    front.accept(stop)
    may_pack.set()
    assert victim.sender.wait()[0].arrays["finish_reason"].item() == b"cancelled"
    assert stop.sender.wait()[0].error is None


def test_a_request_beyond_its_limits_is_refused_before_its_adapter_is_packed(
    front: GenerationFront, may_pack: threading.Event
) -> None:
    tensors = {"input_ids": [[5]] * 17, "max_tokens": [[1]] * 17, "lora_task_id": [[7]] * 17, **ADAPTER}
    assert error_of(ask(front, tensors))[0] == "INVALID_ARG"
    assert not may_pack.is_set()


def test_a_bug_in_packing_is_the_answer_and_frees_the_place(
    front: GenerationFront, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> PackedAdapter:
        raise RuntimeError("a bug in packing")

    tensors = {**ADAPTER, "lora_task_id": [[7]]}
    with monkeypatch.context() as patch:
        patch.setattr(lora_format, "pack_adapter", fail)
        for _ in range(3):
            code, message = error_of(ask(front, tensors))
            assert (code, "a bug in packing" in message) == ("INTERNAL", True)
    assert ask(front, tensors)[0].error is None


def test_clients_without_a_name_may_send_many_small_adapters_at_once(
    front: GenerationFront, engine: FakeEngine, may_pack: threading.Event
) -> None:
    uploads = [FakeRequest({**ADAPTER, "lora_task_id": [[task_id]]}) for task_id in range(20)]
    for request in uploads:
        front.accept(request)
    may_pack.set()
    assert [request.sender.wait()[0].error for request in uploads] == [None] * 20
    assert len(engine.adapters) == 20


class UploadingClient:
    def __init__(self, front: GenerationFront) -> None:
        self._front = front

    def send(self, task_id: int, client: str, **more: Any) -> FakeRequest:
        """Upload an adapter in one form under even ids, in the other under odd ones."""
        tensors = (FILES if task_id % 2 else ADAPTER) | {"lora_task_id": [[task_id]]} | more
        request = FakeRequest(tensors, headers={"X-Multilora-Client": client})
        self._front.accept(request)
        return request


def test_a_client_may_send_so_many_adapters_at_once_and_others_do_not_suffer(
    front: GenerationFront, engine: FakeEngine
) -> None:
    client = UploadingClient(front)
    engine.step_gate.clear()
    blocker = FakeRequest({"input_ids": [[5]], "max_tokens": [[1]]})
    front.accept(blocker)
    greedy = [client.send(task_id, "greedy") for task_id in range(3)]
    modest = client.send(3, "modest")
    assert error_of(greedy[2].sender.wait()) == (
        "UNAVAILABLE",
        "[UNAVAILABLE] 2 adapters of this client are being uploaded already (request -)",
    )
    engine.step_gate.set()
    for request in (*greedy[:2], modest):
        assert request.sender.wait()[0].error is None
    assert client.send(4, "greedy").sender.wait()[0].error is None


def test_an_adapter_that_the_engine_has_counts_no_longer_however_long_its_answer_takes(front: GenerationFront) -> None:
    client = UploadingClient(front)
    unending = [client.send(i, "one", input_ids=[[HOLD]], max_tokens=[[9]], streaming=[[True]]) for i in range(2)]
    # These wait until the adapters are packed, and their answers come after what the engine said of those.
    for task_id in range(2):
        plain = {"input_ids": [[5]], "max_tokens": [[1]], "lora_task_id": [[task_id]]}
        assert ask(front, plain)[0].error is None
    assert client.send(2, "one").sender.wait()[0].error is None
    for request in unending:
        request.sender.cancelled.set()
        assert error_of(request.sender.wait())[0] == "CANCELLED"


@pytest.mark.parametrize("wrong", [{"lora_config": np.zeros((1, 1, 2), np.int32)}, {"input_ids": [[5]]}])
def test_what_is_refused_gives_its_place_back(front: GenerationFront, wrong: dict[str, Any]) -> None:
    client = UploadingClient(front)
    for task_id in range(5):
        assert error_of(client.send(task_id, "one", **wrong).sender.wait())[0] == "INVALID_ARG"
    assert client.send(9, "one").sender.wait()[0].error is None


def test_logits_of_all_requests_in_flight_are_bounded(front: GenerationFront) -> None:
    tensors = {"input_ids": [[HOLD] * 50], "max_tokens": [[1]], "return_context_logits": [[True]]}
    first, second = (FakeRequest(tensors) for _ in range(2))
    front.accept(first)
    front.accept(second)
    more = {**tensors, "input_ids": [[5] * 100]}
    assert error_of(ask(front, more)) == (
        "UNAVAILABLE",
        "[UNAVAILABLE] the request asks for 819200 bytes of logits, 819200 are in flight, and together they may "
        "have 1572864 (request -)",
    )
    first.sender.cancelled.set()
    assert error_of(first.sender.wait())[0] == "CANCELLED"
    assert ask(front, more)[0].error is None
    second.sender.cancelled.set()
    assert error_of(second.sender.wait())[0] == "CANCELLED"


def test_a_request_id_may_have_128_characters(front: GenerationFront) -> None:
    tensors = {"input_ids": [[5]], "max_tokens": [[1]]}
    assert ask(front, tensors, id="x" * 128)[0].error is None
    code, message = error_of(ask(front, tensors, id="x" * 100_000))
    assert code == "INVALID_ARG"
    assert message.startswith("[INVALID_ARG] the request id has 100000 characters, at most 128 are accepted (request x")
    assert len(message) < 300


def test_metadata_too_long_is_refused(front: GenerationFront) -> None:
    tensors = ADAPTER | {"lora_task_id": [[7]]}
    code, message = error_of(ask(front, tensors, headers={"x": "y" * 1000}))
    assert code == "INVALID_ARG"
    assert "bytes; a request may have 1000" in message


def test_a_request_larger_than_its_limits_is_refused_with_the_numbers(front: GenerationFront) -> None:
    code, message = error_of(ask(front, {"input_ids": [[5]] * 17, "max_tokens": [[1]] * 17}))
    assert code == "INVALID_ARG"
    assert "17 sequences in all; a request may have 16" in message


@pytest.mark.parametrize("name", ["text_input", "messages"])
def test_a_door_serves_others_while_it_reads_a_long_prompt(
    front: GenerationFront, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    may_end, encode = threading.Event(), Tokenizer.encode

    def encode_later(self: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
        if len(text) > 5000:
            assert may_end.wait(TIMEOUT_S)
        return encode(self, text, add_special_tokens)

    monkeypatch.setattr(Tokenizer, "encode", encode_later)
    monkeypatch.setattr(generation_front, "LONG_REQUEST_BYTES", 5000)
    prompt = "a b " * 1500 if name == "text_input" else f'[{{"role": "user", "content": "{"a b " * 1500}"}}]'
    long = FakeRequest({name: [[prompt]], "max_tokens": [[1]], "truncate_prompt_tokens": [[4]]}, id="long")
    front.accept(long)
    (response,) = ask(front, {"text_input": [["Hello"]], "max_tokens": [[1]]})
    assert response.error is None
    assert long.sender.responses == []
    may_end.set()
    (response,) = long.sender.wait()
    assert response.error is None


def test_an_error_that_waits_to_be_told_keeps_nothing_of_its_request(front: GenerationFront) -> None:
    told: list[Exception] = []

    class Watching(FakeRequest):
        def requested_output_names(self) -> tuple[str, ...]:
            return ("text_output",)

    def remember(responder: object, error: Exception) -> None:
        told.append(error)

    front._fail = remember  # type: ignore[method-assign,assignment]
    front.accept(Watching({"text_input": [["x" * 20_000]], "max_tokens": [[1]]}))
    front.close()
    assert [error.__traceback__ for error in told] == [None]
