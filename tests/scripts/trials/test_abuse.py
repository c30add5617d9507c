"""The table of abuse judges as it says, and its attacks are what they are called."""

from __future__ import annotations

import json
import pickle
from typing import Any

import numpy as np
import pytest
from tritonclient.utils import deserialize_bytes_tensor

from multilora_engine.sampling.guided import MAX_GUIDE_BYTES
from trials.abuse import ATTACKS, Gaps, Row, render
from trials.engine_attacks import _guided, _prompt, _schema, _word_list, infer_request

QUIET = Gaps([0.02] * 98 + [0.03, 0.04], [])


def row(under: Gaps, is_same_engine: bool = True) -> Row:
    return Row("an attack", QUIET, under, (100 << 20, 200 << 20), "INVALID_ARG", is_same_engine)


@pytest.mark.parametrize(
    ("under", "is_same_engine", "verdict"),
    [
        (Gaps([0.02] * 97 + [0.09] * 3, []), True, "fine"),
        (Gaps([0.02] * 97 + [0.2] * 3, []), True, "slow"),
        (Gaps([], []), True, "slow"),
        (Gaps([0.02] * 100, ["UNAVAILABLE", "ended after 3 of 64 tokens"]), True, "2 errors, first: UNAVAILABLE"),
        (Gaps([0.02] * 100, []), False, "engine lost"),
    ],
)
def test_a_row_is_judged_by_gaps_errors_and_the_engine(under: Gaps, is_same_engine: bool, verdict: str) -> None:
    assert row(under, is_same_engine).verdict == verdict


def test_gaps_are_told_by_percentiles() -> None:
    assert (QUIET.p50_ms, QUIET.p99_ms) == (20.0, 30.0)


def test_the_table_has_a_row_for_each_attack() -> None:
    assert render([row(QUIET), row(QUIET)]).row_count == 2


def test_every_attack_can_be_handed_to_a_process_of_its_own() -> None:
    assert all(pickle.loads(pickle.dumps(attack)) is attack for attack in ATTACKS.values())


def values_of(request: Any, name: str) -> Any:
    index = [tensor.name for tensor in request.inputs].index(name)
    tensor, data = request.inputs[index], request.raw_input_contents[index]
    flat = deserialize_bytes_tensor(data) if tensor.datatype == "BYTES" else np.frombuffer(data, np.int32)
    return flat.reshape(tensor.shape).tolist()


def test_a_request_has_what_it_was_given_for_each_row() -> None:
    request = _prompt(rows=2, stop_words=["é", "b"], beam_width=8)
    assert values_of(request, "stop_words") == [["é".encode(), b"b"]] * 2
    assert values_of(request, "beam_width") == [[8], [8]]
    assert values_of(_prompt(bad_words_list=_word_list(3)), "bad_words_list") == [[[0, 1, 2], [1, 2, 3]]]
    assert [tensor.datatype for tensor in infer_request("m", stop=[[True]], x=[[0.5]]).inputs] == ["BOOL", "FP32"]


def test_schemas_differ_and_are_as_large_as_one_may_be() -> None:
    schemas = {_schema(seed) for seed in range(3)}
    assert len(schemas) == 3
    assert all(50_000 < len(schema) <= MAX_GUIDE_BYTES and json.loads(schema) for schema in schemas)
    assert len(values_of(_guided(sorted(schemas)), "guided_decoding_guide")) == 3
