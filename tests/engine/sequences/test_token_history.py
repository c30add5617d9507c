"""Histories of tokens against counting and searching all tokens again."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from multilora_engine.request import GenerationRequest, SamplingParams
from multilora_engine.sequences.token_history import ANY_TOKEN, TokenHistory

TOKENS = st.lists(st.integers(0, 3), max_size=12)
BAD = st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple), max_size=5).map(tuple)
PENALTIES = {"repetition_penalty": 2.0, "presence_penalty": 1.0}


def check(history: TokenHistory, prompt: list[int], answer: list[int], bad: tuple[tuple[int, ...], ...]) -> None:
    tokens = prompt + answer
    assert Counter(dict(zip(history.seen.token_ids, history.seen.counts, strict=True))) == Counter(tokens)
    assert Counter(dict(zip(history.answered.token_ids, history.answered.counts, strict=True))) == Counter(answer)
    completions = {last for *prefix, last in bad if tokens[len(tokens) - len(prefix) :] == prefix}
    assert set(history.forbidden()) == completions
    assert {last for last, _ in history.bans(is_token_pending=False).T} == completions
    bans = history.bans(is_token_pending=True).T.tolist()
    for token_id in range(4):
        longer = [*tokens, token_id]
        completions = {last for *prefix, last in bad if longer[len(longer) - len(prefix) :] == prefix}
        assert {last for last, trigger in bans if trigger in (ANY_TOKEN, token_id)} == completions
    assert history.num_tokens == len(tokens)


@settings(max_examples=500, deadline=None)
@given(prompt=TOKENS, answer=TOKENS, bad=BAD)
def test_a_history_that_grows_is_that_of_all_tokens(
    prompt: list[int], answer: list[int], bad: tuple[tuple[int, ...], ...]
) -> None:
    history = TokenHistory(GenerationRequest("r", prompt, SamplingParams(9, bad_token_sequences=bad, **PENALTIES)))
    check(history, prompt, [], bad)
    for num_tokens, token_id in enumerate(answer, start=1):
        history.extend([token_id])
        check(history, prompt, answer[:num_tokens], bad)


@settings(max_examples=200, deadline=None)
@given(prompt=TOKENS, common=TOKENS, left=TOKENS, right=TOKENS, bad=BAD)
def test_a_fork_goes_on_alone(
    prompt: list[int], common: list[int], left: list[int], right: list[int], bad: tuple[tuple[int, ...], ...]
) -> None:
    history = TokenHistory(GenerationRequest("r", prompt, SamplingParams(9, bad_token_sequences=bad, **PENALTIES)))
    history.extend(common)
    fork = history.fork()
    history.extend(left)
    fork.extend(right)
    check(history, prompt, common + left, bad)
    check(fork, prompt, common + right, bad)


def test_what_no_option_asks_for_is_not_counted() -> None:
    history = TokenHistory(GenerationRequest("r", [1, 2], SamplingParams(9, bad_token_sequences=((2, 3),))))
    history.extend([2])
    assert len(history.seen.token_ids) == len(history.answered.token_ids) == 0
    assert history.forbidden().tolist() == [3]
