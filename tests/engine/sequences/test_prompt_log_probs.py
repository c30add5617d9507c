"""A prompt's log-probs while its chunks are computed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from multilora_engine.sequences.prompt_log_probs import NO_TOKEN, PromptLogProbs, row_type


def append_positions(log_probs: PromptLogProbs, positions: range) -> None:
    """As if the token after position p had a log-prob of -p, and tokens p and p + 1 were the likeliest there."""
    values = -np.array(positions, np.float32)
    tops = np.array([[p, p + 1] for p in positions], np.int64).reshape(-1, 2)[:, : log_probs.num_top]
    log_probs.append(values, np.repeat(values[:, None], log_probs.num_top, axis=1), tops)


@given(num_tokens=st.integers(1, 40), chunks=st.lists(st.integers(1, 9)), restart=st.integers(0, 8))
def test_each_row_is_asked_for_once_whatever_the_chunks_and_the_restarts(
    num_tokens: int, chunks: list[int], restart: int
) -> None:
    log_probs = PromptLogProbs(num_tokens, num_top=2)
    start = 0
    for i, chunk in enumerate([*chunks, *[1] * (num_tokens + 1), num_tokens]):
        end = min(start + chunk, num_tokens)
        append_positions(log_probs, log_probs.missing(start, end))
        assert log_probs.num_known == max(log_probs.num_known, min(end + 1, num_tokens))
        # A preempted sequence starts again from its first token.
        start = 0 if i == restart or end == num_tokens else end
    assert log_probs.is_complete
    rows = np.frombuffer(log_probs.to_bytes(), row_type(2))
    assert rows["log_prob"].tolist() == [0.0, *(-float(p) for p in range(num_tokens - 1))]
    assert rows["top_ids"].tolist() == [[NO_TOKEN] * 2, *([p, p + 1] for p in range(num_tokens - 1))]


def test_the_first_token_has_no_log_prob_and_no_likelier_ones() -> None:
    log_probs = PromptLogProbs(1, num_top=3)
    assert log_probs.is_complete
    assert not log_probs.missing(0, 1)
    (row,) = np.frombuffer(log_probs.to_bytes(), row_type(3))
    assert (row["log_prob"], row["top_ids"].tolist()) == (0.0, [NO_TOKEN] * 3)


def test_half_a_prompt_is_never_told() -> None:
    log_probs = PromptLogProbs(3, num_top=0)
    append_positions(log_probs, log_probs.missing(0, 1))
    with pytest.raises(AssertionError, match="half a prompt"):
        log_probs.to_bytes()
