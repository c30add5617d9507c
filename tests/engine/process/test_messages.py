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
    Outputs,
    adapter_header,
    adapter_payload,
    decode_from_engine,
    decode_to_engine,
    encode,
    output_frames,
    read_adapter,
)
from multilora_engine.request import GenerationRequest, SamplingParams, TokenOutput


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
