"""Next tokens against transformers' own logits processors and against plain counting."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch
from support.gpu_path import make_device
from support.tensor_memory import peak_bytes
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from multilora_engine.guides.guided import GuideMatcher
from multilora_engine.request import GenerationRequest, SamplingParams
from multilora_engine.sampling import sampler
from multilora_engine.sampling.sampler import WORK_BYTES_PER_LOGIT, Choice
from multilora_engine.sampling.token_counts import DeviceTokens, TokenCounts
from multilora_engine.sequences.beam_search import BeamSearch
from multilora_engine.sequences.sequence import Sequence
from multilora_engine.text.text_stream import TextStream
from multilora_kernels import SamplingRule, sampling_reference

VOCAB = 37
CPU = torch.device("cpu")


def sequence(sampling: SamplingParams, answer: Iterable[int] = ()) -> Sequence:
    request = GenerationRequest("r", [1], sampling)
    text, random = cast(TextStream, None), Random(sampling.seed)
    return Sequence(request, 0, None, text, random, sampling.max_tokens, output_token_ids=list(answer))


def choose(logits: torch.Tensor, sequences: list[Sequence], end_token_ids: tuple[int, ...] = ()) -> list[int | None]:
    return [token.token_id for token in Choice(logits, sequences, end_token_ids).read()]


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.fixture(params=["compiled kernels", "operators of torch"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other one serves machines where nothing could be compiled."""
    if request.param == "operators of torch":
        monkeypatch.setattr(sampler, "sample_tokens", _by_reference)


def _by_reference(scores: torch.Tensor, rules: list[SamplingRule]) -> torch.Tensor:
    return sampling_reference.sample_tokens(scores, torch.tensor(rules, dtype=torch.float64))


def test_without_best_tokens_nobody_asks_whether_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU's steps have none."""
    asked: list[list[Sequence]] = []
    monkeypatch.setattr(sampler, "are_adjusted", lambda sequences: asked.append(sequences))
    rows = [sequence(SamplingParams(max_tokens=1))]
    Choice(logits(1), rows, ())
    assert asked == []
    Choice(logits(1), rows, (), best=sampler.Best.of(logits(1)))
    assert asked == [rows]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.7, 5, 1.0, 0.0),
        (1.5, 0, 0.6, 0.0),
        (1.0, 8, 0.5, 0.0),
        (2.0, 1000, 0.999, 0.0),
        (1.0, 0, 1e-6, 0.0),
        (0.3, 2, 0.99, 0.0),
        (1.0, 0, 1.0, 0.1),
        (1.8, 20, 0.9, 0.3),
        (1.0, 0, 1.0, 1.0),
    ],
)
def test_draws_follow_the_distribution_that_transformers_defines(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    scores = logits(1)
    expected = TemperatureLogitsWarper(temperature)(None, scores.clone())
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    expected = TopPLogitsWarper(top_p)(None, expected)
    probabilities = MinPLogitsWarper(min_p)(None, expected).softmax(-1)[0]
    parameters = SamplingParams(9, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=11)
    drawer = sequence(parameters)
    num_draws = 4000
    drawn = choose(scores.repeat(num_draws, 1), [drawer] * num_draws)
    frequencies = torch.bincount(torch.tensor(drawn), minlength=VOCAB) / num_draws
    assert set(drawn) <= set(torch.nonzero(probabilities).flatten().tolist())
    torch.testing.assert_close(frequencies, probabilities, rtol=0, atol=0.035)


def test_both_ways_draw_the_same_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    rules = [{}, {"top_k": 5}, {"top_p": 0.6}, {"min_p": 0.1}, {"top_k": 20, "top_p": 0.9, "min_p": 0.02}]
    parameters = [SamplingParams(9, seed=row, **{"top_k": 0, **rules[row % len(rules)]}) for row in range(500)]  # type: ignore[arg-type]
    scores = logits(len(parameters))
    compiled = choose(scores.clone(), [sequence(one) for one in parameters])
    monkeypatch.setattr(sampler, "sample_tokens", _by_reference)
    assert choose(scores.clone(), [sequence(one) for one in parameters]) == compiled
    assert len(set(compiled)) > 20


@pytest.mark.usefixtures("way")
def test_a_draw_never_falls_after_the_last_token_that_is_left() -> None:
    """A uniform number that rounds to 1 in float32."""
    scores = torch.tensor([[0.0, 0.0, -torch.inf, 0.0, -torch.inf]])

    class Largest(Random):
        def random(self) -> float:
            return 1 - 2**-53

    for parameters in (SamplingParams(9, top_k=0), SamplingParams(9, top_k=3), SamplingParams(9, top_k=0, top_p=0.99)):
        drawer = sequence(parameters)
        drawer.random = Largest()
        (token_id,) = choose(scores.clone(), [drawer])
        assert token_id in {0, 1, 3}


@pytest.mark.usefixtures("way")
def test_greedy_is_the_argmax_whether_by_top_k_or_by_temperature() -> None:
    scores = logits(2)
    greedy = [sequence(SamplingParams(9, top_k=1)), sequence(SamplingParams(9, temperature=0.0, top_k=0))]
    assert choose(scores.clone(), greedy) == scores.argmax(-1).tolist()


@pytest.mark.usefixtures("way")
def test_a_seed_gives_the_same_tokens_whoever_shares_the_batch() -> None:
    def drawn(neighbours: list[SamplingParams]) -> list[int | None]:
        mine = sequence(SamplingParams(9, top_k=0, seed=5))
        others = [sequence(parameters) for parameters in neighbours]
        return [choose(logits(4, seed=step)[: 1 + len(others)], [mine, *others])[0] for step in range(20)]

    alone = drawn([])
    assert alone == drawn([SamplingParams(9), SamplingParams(9, top_k=3, seed=1), SamplingParams(9, top_k=0, seed=5)])
    assert len(set(alone)) > 3


def test_min_tokens_forbids_the_end_until_it_is_reached() -> None:
    scores = torch.zeros(3, VOCAB)
    scores[:, 4] = 9.0
    scores[:, 5] = 8.0
    parameters = SamplingParams(9, min_tokens=3)
    other_end = SamplingParams(9, min_tokens=3, end_id=5)
    rows = [sequence(parameters, [0] * 2), sequence(parameters, [0] * 3), sequence(other_end)]
    assert choose(scores, rows, (4,)) == [5, 4, 4]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-6])
def test_the_smallest_temperatures_draw_the_most_probable_token(temperature: float) -> None:
    scores = logits(3) * 1e6
    rows = [sequence(SamplingParams(9, temperature=temperature, top_k=0)) for _ in range(3)]
    assert choose(scores.clone(), rows) == scores.argmax(-1).tolist()


@pytest.mark.usefixtures("way")
def test_top_p_decays_with_each_token_and_starts_again_at_the_reset_token() -> None:
    """Ten equally probable tokens: how many can be drawn tells top_p."""
    options = {"top_p": 0.8, "top_p_decay": 0.5, "top_p_min": 0.25, "top_p_reset_id": 3}
    parameters = SamplingParams(9, top_k=0, seed=2, **options)  # type: ignore[arg-type]
    scores = torch.full((300, 10), 2.0)
    answers: dict[tuple[int, ...], int] = {(): 8, (1,): 4, (1, 2): 3, (1, 2, 4): 3, (1, 2, 3): 8, (3, 1, 3, 7): 4}
    for answer, expected in answers.items():
        assert len({*choose(scores.clone(), [sequence(parameters, answer)] * 300)}) == expected, answer


def test_log_probs_are_those_of_the_models_own_logits_whatever_the_request_changes() -> None:
    scores = logits(4)
    changed = SamplingParams(
        9, temperature=0.3, top_k=3, seed=1, repetition_penalty=9.0, bad_token_sequences=((2,),), return_log_probs=True
    )
    rows = [
        sequence(SamplingParams(9, return_log_probs=True, num_top_log_probs=3)),
        sequence(SamplingParams(9)),
        sequence(changed, [4, 5]),
        sequence(SamplingParams(9, return_log_probs=True, num_top_log_probs=VOCAB)),
    ]
    tokens = Choice(scores.clone(), rows, ()).read()
    expected = scores.log_softmax(-1)
    assert tokens[1].log_prob is None
    for row, num_top in ((0, 3), (2, 0), (3, VOCAB)):
        (token_id, log_prob) = (tokens[row].token_id, tokens[row].log_prob)
        assert token_id is not None
        assert log_prob is not None
        assert log_prob.log_prob == pytest.approx(expected[row, token_id].item())
        values, token_ids = expected[row].sort(descending=True)
        assert [token_id for token_id, _ in log_prob.top] == token_ids[:num_top].tolist()
        assert [value for _, value in log_prob.top] == pytest.approx(values[:num_top].tolist())


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("top_k", [0, 1])
def test_a_request_that_forbids_every_token_gets_none_and_its_neighbour_its_own(top_k: int) -> None:
    everything = tuple((token_id,) for token_id in range(VOCAB))
    rows = [sequence(SamplingParams(9, top_k=top_k, bad_token_sequences=everything)), sequence(SamplingParams(9))]
    scores = logits(2)
    assert choose(scores.clone(), rows) == [None, int(scores[1].argmax())]


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("top_k", [0, 1])
def test_numbers_that_overflowed_are_told_of_in_their_own_rows_only(top_k: int) -> None:
    """NaN, an infinity and nothing but zeros; neither a largest logit that is zero nor a request that forbids all."""
    everything = tuple((token_id,) for token_id in range(VOCAB))
    rows = [sequence(SamplingParams(9, top_k=top_k, seed=row)) for row in range(6)]
    rows[5] = sequence(SamplingParams(9, top_k=top_k, bad_token_sequences=everything))
    scores = logits(len(rows))
    scores[1, 7], scores[2, 8], scores[3] = torch.nan, torch.inf, 0.0
    scores[4] = -100.0
    scores[4, 9] = 0.0
    tokens = Choice(scores, rows, ()).read()
    assert [token.is_finite for token in tokens] == [True, False, False, False, True, True]
    assert [token.token_id for token in tokens[4:]] == [9, None]


@pytest.mark.parametrize("is_search", [False, True])
def test_a_choice_takes_no_more_memory_than_is_kept_free_for_it(
    monkeypatch: pytest.MonkeyPatch, is_search: bool
) -> None:
    """By the operators of a GPU, in all requests with all that takes memory, beside the logits of the step before."""
    num_rows, vocab = 16, 4096
    make_device(monkeypatch).serve(monkeypatch)
    # A kernel that does not run leaves any numbers behind.
    token_ids, sample_tokens = torch.zeros(num_rows, dtype=torch.int64), sampler.sample_tokens
    monkeypatch.setattr(sampler, "sample_tokens", lambda *arguments: (sample_tokens(*arguments), token_ids)[1])
    own = {"beam_width": 2} if is_search else {"return_generation_logits": True, "temperature": 1.0, "top_k": 0}
    wanted = SamplingParams(9, return_log_probs=not is_search, num_top_log_probs=5, frequency_penalty=0.1, **own)  # type: ignore[arg-type]
    sequences = [sequence(wanted, [row]) for row in range(num_rows)]
    for each in sequences:
        if is_search:
            each.search = BeamSearch(wanted, (), 9, each.text)
        each.guide = cast(GuideMatcher, SimpleNamespace(allowed=np.full(vocab // 32, -1, np.int32)))
    # A row that wants nothing: the others are copied.
    sequences[0] = sequence(SamplingParams(9))
    tokens = DeviceTokens(
        TokenCounts(num_rows, vocab, CPU), torch.ones(num_rows, dtype=torch.int64), torch.arange(num_rows)
    )
    scores = torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(1))

    def choose_and_read() -> None:
        choice = Choice(scores, sequences, (), tokens)
        if is_search:
            choice.read()

    peak = peak_bytes(choose_and_read) + scores.nbytes
    assert 0.75 * WORK_BYTES_PER_LOGIT < peak / scores.numel() < WORK_BYTES_PER_LOGIT
