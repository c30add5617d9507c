"""Outputs that wait are joined, and nothing of them is lost."""

from __future__ import annotations

import sys

import msgspec
import torch
from support.adapters import TINY, wire_adapter

from multilora_engine.lora.format import pack_adapter
from multilora_engine.lora.layout import AdapterTraits
from multilora_engine.process.messages import (
    Add,
    Launch,
    Outbox,
    Outputs,
    adapter_header,
    adapter_payload,
    decode_from_engine,
    decode_to_engine,
    encode,
    join_outputs,
    output_frames,
    read_adapter,
)
from multilora_engine.request import GenerationRequest, PerfMetrics, SamplingParams, TokenLogProb, TokenOutput


def test_an_adapter_arrives_bit_for_bit_and_its_pages_are_not_copied() -> None:
    wire = wire_adapter(TINY, [(module_id, layer, 16) for module_id in (1, 4, 6) for layer in range(3)])
    packed = pack_adapter(wire.weights, wire.config, TINY, AdapterTraits(invocation_tokens=(0, sys.maxunicode)))
    payload = adapter_payload(packed)
    message = decode_to_engine(memoryview(encode(Add([], "id", adapter_header(2**64 - 1, packed)))))
    assert isinstance(message, Add)
    assert message.adapter is not None
    received = read_adapter(message.adapter, payload)
    assert message.adapter.lora_task_id == 2**64 - 1
    assert (received.digest, received.rows, received.traits) == (packed.digest, packed.rows, packed.traits)
    assert torch.equal(received.pages, packed.pages)
    assert received.pages.data_ptr() == packed.pages.data_ptr()


def test_requests_and_outputs_survive_the_wire_with_extreme_values() -> None:
    sampling = SamplingParams(
        max_tokens=1, temperature=1e-30, seed=2**64 - 1, end_id=-1, stop_words=("", "\n\0", "é🏴‍☠️")
    )
    request = GenerationRequest("é", [0, 2**31 - 1], sampling, lora_task_id=0, timeout_s=0.5, priority=-3)
    output = TokenOutput("é", [], "�🏴‍☠️", finish_reason="stop")
    assert decode_to_engine(memoryview(encode(Add([request])))) == Add([request])
    assert decode_from_engine(memoryview(encode(Outputs([output])))) == Outputs([output])


def test_logits_of_prompts_follow_the_message_in_frames_of_their_own() -> None:
    outputs = [
        TokenOutput(name, [], "", context_logits=logits) for name, logits in {"a": b"12", "b": b"", "c": b"3"}.items()
    ]
    message, *logits = output_frames(outputs)
    assert logits == [b"12", b"3"]
    assert logits[0] is outputs[0].context_logits, "a copy"
    assert decode_from_engine(*map(memoryview, (message, *logits))) == Outputs(outputs, [0, 2])
    assert output_frames(outputs[1:2]) == [encode(Outputs(outputs[1:2]))]


def test_a_launch_is_one_line() -> None:
    assert b"\n" not in msgspec.json.encode(Launch({"model_path": "a\nb"}, "/c\n/d", 3, 1.5))


_PERF = PerfMetrics(arrival_time_ns=1)


def output(request_id: str, token_id: int, is_last: bool = False) -> TokenOutput:
    return TokenOutput(
        request_id,
        [token_id],
        f"<{token_id}>",
        finish_reason="stop" if is_last else None,
        num_prompt_tokens=3,
        num_output_tokens=token_id,
        log_probs=[TokenLogProb(-token_id)],
        generation_logits=bytes([token_id]),
        prompt_log_probs=b"p" if token_id == 1 else b"",
        num_cached_tokens=16,
        cum_log_prob=-token_id * 10,
        perf=_PERF if is_last else None,
    )


def test_the_outputs_of_a_request_become_one_with_all_tokens_and_the_last_totals() -> None:
    (joined,) = join_outputs([output("a", 1), output("a", 2), output("a", 3, is_last=True)])
    assert joined == TokenOutput(
        "a",
        [1, 2, 3],
        "<1><2><3>",
        finish_reason="stop",
        num_prompt_tokens=3,
        num_output_tokens=3,
        log_probs=[TokenLogProb(-1), TokenLogProb(-2), TokenLogProb(-3)],
        generation_logits=bytes([1, 2, 3]),
        prompt_log_probs=b"p",
        num_cached_tokens=16,
        cum_log_prob=-30,
        perf=_PERF,
    )


def test_an_error_does_not_take_the_tokens_before_it_along() -> None:
    failed = TokenOutput("a", [], "", error_code="INTERNAL")
    assert join_outputs([output("a", 1), output("b", 1), output("a", 2), failed]) == [
        *join_outputs([output("a", 1), output("a", 2)]),
        output("b", 1),
        failed,
    ]


def test_the_logits_of_prompts_are_not_joined_and_come_before_the_tokens() -> None:
    parts = [TokenOutput("a", [], "", context_logits=bytes([number])) for number in range(2)]
    tokens = [output("a", 1), output("a", 2)]
    first = msgspec.structs.replace(tokens[0], context_logits=b"2")
    assert join_outputs([*parts, output("b", 1), first]) == [*parts, output("b", 1), first]
    assert join_outputs([*parts, *tokens]) == [*parts, *join_outputs(tokens)]


def test_what_waits_for_one_front_is_its_own_and_goes_once() -> None:
    outbox = Outbox()
    assert not outbox
    for front, item in ((b"x", output("a", 1)), (b"y", output("c", 1)), (b"x", output("b", 1)), (b"x", output("a", 2))):
        outbox.add(front, item)
    assert outbox.fronts == [b"x", b"y"]
    assert outbox.take(b"x") == join_outputs([output("a", 1), output("b", 1), output("a", 2)])
    assert outbox.fronts == [b"y"]
    assert outbox.take(b"y") == [output("c", 1)]
    assert outbox.take(b"unknown") == []
    assert not outbox
