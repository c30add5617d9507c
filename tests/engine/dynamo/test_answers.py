"""Outputs of the engine as the chunks of Dynamo's front."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from multilora_engine.dynamo.answers import Answer
from multilora_engine.request import GenerationRequest, SamplingParams, TokenLogProb, TokenOutput
from multilora_engine.sequences.prompt_log_probs import NO_TOKEN, row_type


class LettersTokenizer:
    """Token 0 is `a`, token 1 is `b`; token 26 is half of a character."""

    def spell(self, token_id: int) -> bytes:
        return b"\xc3" if token_id == 26 else bytes([ord("a") + token_id])


def answer(prompt: list[int] | None = None, **sampling: int | bool) -> Answer:
    request = GenerationRequest("r", prompt or [1], SamplingParams(max_tokens=9, **sampling))  # type: ignore[arg-type]
    return Answer(request, LettersTokenizer())  # type: ignore[arg-type]


def test_tokens_come_piece_by_piece_and_the_end_counts_them() -> None:
    chunks = answer()
    assert chunks.chunk(TokenOutput("r", [3, 4], "de")) == {"token_ids": [3, 4], "index": 0}
    end = TokenOutput("r", [], "", "length", num_prompt_tokens=7, num_output_tokens=2, num_cached_tokens=5)
    assert chunks.chunk(end) == {
        "token_ids": [],
        "index": 0,
        "finish_reason": "length",
        "completion_usage": {
            "prompt_tokens": 7,
            "completion_tokens": 2,
            "total_tokens": 9,
            "prompt_tokens_details": {"cached_tokens": 5},
        },
    }


def test_log_probs_without_others_are_those_of_the_tokens() -> None:
    told = [TokenLogProb(-0.5), TokenLogProb(-math.inf)]
    chunk = answer(return_log_probs=True).chunk(TokenOutput("r", [3, 4], "de", log_probs=told))
    assert chunk["log_probs"] == [-0.5, -9999.0]
    assert "top_logprobs" not in chunk
    json.dumps(chunk, allow_nan=False)


@pytest.mark.parametrize(("chosen", "ranks"), [(3, [(1, 3), (2, 26)]), (5, [(1, 3), (2, 26), (3, 5)])])
def test_the_chosen_token_is_among_the_likeliest_or_after_them(chosen: int, ranks: list[tuple[int, int]]) -> None:
    told = TokenLogProb(-0.5, top=((3, -0.25), (26, -math.inf)))
    chunk = answer(return_log_probs=True, num_top_log_probs=2).chunk(TokenOutput("r", [chosen], "", log_probs=[told]))
    ((*entries,),) = chunk["top_logprobs"]
    assert [(entry["rank"], entry["token_id"]) for entry in entries] == ranks
    assert entries[0] == {"rank": 1, "token_id": 3, "token": "d", "logprob": -0.25, "bytes": [100]}
    assert entries[1] == {"rank": 2, "token_id": 26, "token": "\ufffd", "logprob": -9999.0, "bytes": [0xC3]}


@pytest.mark.parametrize("num_top", [0, 2])
def test_the_first_token_of_a_prompt_has_nothing_before_it(num_top: int) -> None:
    rows = np.zeros(3, row_type(num_top))
    rows["log_prob"] = [0, -1, -2]
    if num_top:
        rows["top_ids"] = [[NO_TOKEN, NO_TOKEN], [4, 8], [8, NO_TOKEN]]
        rows["top_log_probs"] = [[0, 0], [-1, -3], [-0.5, 0]]
    chunk = answer([9, 4, 5], return_prompt_log_probs=True, num_prompt_top_log_probs=num_top).chunk(
        TokenOutput("r", [], "", prompt_log_probs=rows.tobytes())
    )
    told = chunk["engine_data"]["prompt_logprobs"]
    assert told[0] is None
    if num_top:
        assert [set(entry) for entry in told[1:]] == [{"4", "8"}, {"8", "5"}]
        assert told[1]["4"] == {"logprob": -1.0, "rank": 1, "decoded_token": "e"}
    else:
        assert told[1:] == [
            {"4": {"logprob": -1.0, "decoded_token": "e"}},
            {"5": {"logprob": -2.0, "decoded_token": "f"}},
        ]
