"""Next tokens against transformers' own logits processors and against plain counting."""

from __future__ import annotations

from random import Random
from typing import cast

import pytest
import torch
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from multilora_engine.request import GenerationRequest, SamplingParams, Sequence
from multilora_engine.sampler import sample
from multilora_engine.text import TextStream

VOCAB = 37


def sequence(sampling: SamplingParams, num_output_tokens: int = 0) -> Sequence:
    request = GenerationRequest("r", [1], sampling)
    return Sequence(
        request, 0, None, cast(TextStream, None), Random(sampling.seed), output_token_ids=[0] * num_output_tokens
    )


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p"),
    [(1.0, 0, 1.0), (0.7, 5, 1.0), (1.5, 0, 0.6), (1.0, 8, 0.5), (2.0, 1000, 0.999), (1.0, 0, 1e-6), (0.3, 2, 0.99)],
)
def test_draws_follow_the_distribution_that_transformers_defines(temperature: float, top_k: int, top_p: float) -> None:
    scores = logits(1)
    expected = TemperatureLogitsWarper(temperature)(None, scores.clone())
    if top_k:
        expected = TopKLogitsWarper(top_k)(None, expected)
    probabilities = TopPLogitsWarper(top_p)(None, expected).softmax(-1)[0]
    parameters = SamplingParams(9, temperature=temperature, top_k=top_k, top_p=top_p, seed=11)
    drawer = sequence(parameters)
    num_draws = 4000
    drawn = sample(scores.repeat(num_draws, 1), [drawer] * num_draws, ())
    frequencies = torch.bincount(torch.tensor(drawn), minlength=VOCAB) / num_draws
    assert set(drawn) <= set(torch.nonzero(probabilities).flatten().tolist())
    torch.testing.assert_close(frequencies, probabilities, rtol=0, atol=0.035)


def test_greedy_is_the_argmax_whether_by_top_k_or_by_temperature() -> None:
    scores = logits(2)
    greedy = [sequence(SamplingParams(9, top_k=1)), sequence(SamplingParams(9, temperature=0.0, top_k=0))]
    assert sample(scores.clone(), greedy, ()) == scores.argmax(-1).tolist()


def test_a_seed_gives_the_same_tokens_whoever_shares_the_batch() -> None:
    def drawn(neighbours: list[SamplingParams]) -> list[int]:
        mine = sequence(SamplingParams(9, top_k=0, seed=5))
        others = [sequence(parameters) for parameters in neighbours]
        return [sample(logits(4, seed=step)[: 1 + len(others)], [mine, *others], ())[0] for step in range(20)]

    alone = drawn([])
    assert alone == drawn([SamplingParams(9), SamplingParams(9, top_k=3, seed=1), SamplingParams(9, top_k=0, seed=5)])
    assert len(set(alone)) > 3


def test_min_tokens_forbids_the_end_until_it_is_reached() -> None:
    scores = torch.zeros(3, VOCAB)
    scores[:, 4] = 9.0
    scores[:, 5] = 8.0
    parameters = SamplingParams(9, min_tokens=3)
    rows = [sequence(parameters, 2), sequence(parameters, 3), sequence(SamplingParams(9, min_tokens=3, end_id=5), 0)]
    assert sample(scores, rows, (4,)) == [5, 4, 4]
