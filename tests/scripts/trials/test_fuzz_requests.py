"""Fuzzed requests: the same for the same number, of every kind, and all of them can be sent."""

from __future__ import annotations

from collections import Counter

import pytest

from trials.fuzz_doors import ANSWERED, REFUSED_BY_TRITON, grpc_message, http_call, http_outcome
from trials.fuzz_requests import MUTATIONS, Case, make_case
from trials.wire_requests import DOORS, InputSpec, ModelFacts

SPECS = {
    "text_input": InputSpec("BYTES", (1,)),
    "messages": InputSpec("BYTES", (1,)),
    "input_ids": InputSpec("INT32", (-1,)),
    "max_tokens": InputSpec("INT32", (1,)),
    "temperature": InputSpec("FP32", (1,)),
    "seed": InputSpec("UINT64", (1,)),
    "lora_task_id": InputSpec("UINT64", (1,)),
    "lora_weights": InputSpec("FP16", (-1, -1)),
    "lora_weights_bf16": InputSpec("BF16", (-1, -1)),
    "lora_config": InputSpec("INT32", (-1, -1)),
    "lora_peft_config": InputSpec("BYTES", (1,)),
    "lora_peft_weights": InputSpec("UINT8", (-1,)),
    "lora_expected_digest": InputSpec("BYTES", (1,)),
    "lora_session": InputSpec("BYTES", (1,)),
    "lora_use": InputSpec("BYTES", (1,)),
    "default_inputs": InputSpec("BYTES", (-1,)),
    "streaming": InputSpec("BOOL", (1,)),
}
FACTS = ModelFacts(dict.fromkeys(DOORS.values(), SPECS), {1: 96, 4: 64}, num_layers=2, vocab_size=300)
CASES = [make_case(3, number, FACTS, timeout_s=2.0) for number in range(1500)]


def wire_form(case: Case) -> object:
    request = case.request
    return http_call(request) if request.door.startswith("HTTP") else grpc_message(request).SerializeToString()


def test_the_same_seed_and_number_make_the_same_request() -> None:
    again = [make_case(3, number, FACTS, timeout_s=2.0) for number in range(100)]
    assert [wire_form(case) for case in again] == [wire_form(case) for case in CASES[:100]]
    assert wire_form(make_case(4, 0, FACTS, timeout_s=2.0)) != wire_form(CASES[0])


def test_every_kind_comes_through_every_door() -> None:
    seen = Counter((case.kind, case.request.door) for case in CASES)
    assert set(seen) == {(kind, door) for kind in MUTATIONS for door in DOORS}


@pytest.mark.parametrize("is_valid", [False, True])
def test_the_inputs_of_versions_and_uses_are_sent(is_valid: bool) -> None:
    sent = {t.name for case in CASES if (case.kind == "nothing") == is_valid for t in case.request.tensors}
    assert {"lora_session", "lora_use", "default_inputs"} <= sent
    assert is_valid or "lora_expected_digest" in sent


def test_every_request_can_be_sent_whatever_is_wrong_with_it() -> None:
    assert all(wire_form(case) for case in CASES)


def test_what_nothing_was_done_to_fits_its_model() -> None:
    for case in CASES:
        if case.kind == "nothing":
            tensors = {tensor.name: tensor for tensor in case.request.tensors}
            assert len(tensors) == len(case.request.tensors)
            assert {name: tensor.datatype for name, tensor in tensors.items()} == {
                name: SPECS[name].datatype for name in tensors
            }
            assert all(len(t.shape) == 1 + len(SPECS[name].dims) for name, t in tensors.items())
            assert len(tensors.keys() & {"text_input", "messages", "input_ids"}) == 1


@pytest.mark.parametrize(
    ("status", "content", "word"),
    [
        (200, b'{"text_output": "x"}', ANSWERED),
        (200, b'data: {"text_output":"x"}\n\ndata: {"error":"[CANCELLED] stopped"}\n\n', "CANCELLED"),
        (400, b'{"error":"[INVALID_ARG] bad"}', "INVALID_ARG"),
        (400, b'{"error":"unexpected input"}', REFUSED_BY_TRITON),
        (500, b'{"error":"failed to parse the request JSON buffer"}', REFUSED_BY_TRITON),
        (500, b'{"error":"[INTERNAL] broken"}', "INTERNAL"),
        (500, b'{"error":"stub died"}', "status HTTP 500"),
    ],
)
def test_an_answer_over_http_is_told_in_a_word(status: int, content: bytes, word: str) -> None:
    outcome = http_outcome(status, content)
    assert outcome.word == word
    assert outcome.is_right == (status != 500 or word == REFUSED_BY_TRITON)
