"""Mixed batches of biases, penalties and bans against transformers' logits processors, one request at a time."""

from __future__ import annotations

from random import Random
from typing import cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    ForcedBOSTokenLogitsProcessor,
    LogitsProcessor,
    LogitsProcessorList,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    SuppressTokensLogitsProcessor,
)

from multilora_engine.request import GenerationRequest, SamplingParams
from multilora_engine.sampling.logits import adjust_logits, bias_tensors
from multilora_engine.sampling.token_counts import DeviceTokens, TokenCounts
from multilora_engine.sequences.sequence import Sequence
from multilora_engine.text.text_stream import TextStream

VOCAB = 11
END = (10,)

token_ids = st.integers(0, VOCAB - 1)
penalties = st.sampled_from([-1.5, 0.0, 0.0, 0.7, 2.0])


@st.composite
def params(draw: st.DrawFn) -> SamplingParams:
    bias = draw(st.dictionaries(token_ids, st.sampled_from([-3.0, 0.5, 100.0]), max_size=3))
    bad = st.lists(token_ids, min_size=1, max_size=3).map(tuple)
    return SamplingParams(
        max_tokens=99,
        min_tokens=draw(st.integers(0, 4)),
        min_tokens_holds_stops=draw(st.booleans()),
        stop_token_sequences=((3,), (4, 5), (10,)),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.5, 1.3, 4.0])),
        presence_penalty=draw(penalties),
        frequency_penalty=draw(penalties),
        embedding_bias=tuple(bias.items()),
        bad_token_sequences=tuple(draw(st.lists(bad, max_size=3))),
        forced_first_id=draw(st.none() | token_ids),
    )


@st.composite
def sequences(draw: st.DrawFn) -> Sequence:
    # Bad sequences longer than the context are no matter of transformers', which asks for one token more than we do.
    prompt = draw(st.lists(token_ids, min_size=3, max_size=6))
    sampling = draw(params())
    answer = draw(st.lists(token_ids, max_size=6))
    return sequence(prompt, sampling, answer)


def sequence(prompt: list[int], sampling: SamplingParams, answer: list[int], arrival: int = 0) -> Sequence:
    return Sequence(
        GenerationRequest("r", prompt, sampling),
        arrival=arrival,
        adapter=None,
        text=cast(TextStream, None),
        random=Random(0),
        max_output_tokens=sampling.max_tokens,
        output_token_ids=answer,
        bias=bias_tensors(sampling, torch.device("cpu")),
    )


class OpenAIPenalties(LogitsProcessor):
    """mu[j] - c[j] * frequency - (c[j] > 0) * presence, as OpenAI's API reference defines it; transformers has none."""

    def __init__(self, answer: list[int], frequency: float, presence: float) -> None:
        counts = torch.bincount(torch.tensor(answer, dtype=torch.int64), minlength=VOCAB)
        self._penalties = counts * frequency + (counts > 0) * presence

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores - self._penalties


def expected(row: torch.Tensor, sequence: Sequence) -> torch.Tensor:
    sampling, answer = sequence.request.sampling, sequence.output_token_ids
    processors = LogitsProcessorList()
    if sampling.embedding_bias:
        processors.append(SequenceBiasLogitsProcessor([[[token], bias] for token, bias in sampling.embedding_bias]))
    processors.append(RepetitionPenaltyLogitsProcessor(sampling.repetition_penalty))
    processors.append(OpenAIPenalties(answer, sampling.frequency_penalty, sampling.presence_penalty))
    token_ids = torch.tensor([sequence.request.prompt_token_ids + answer])
    if sampling.forced_first_id is not None and not answer:
        row = processors(token_ids, row[None])[0]
        forced = ForcedBOSTokenLogitsProcessor(sampling.forced_first_id)(token_ids[:, :1], row[None])[0]
        # transformers gives it the logit 0: the same log-probs.
        wanted = torch.full_like(row, -torch.inf).index_copy(0, forced.isfinite().nonzero()[0], row[forced == 0])
        torch.testing.assert_close(wanted.log_softmax(0), forced.log_softmax(0))
        return wanted
    if sampling.bad_token_sequences:
        processors.append(NoBadWordsLogitsProcessor([list(bad) for bad in sampling.bad_token_sequences]))
    if len(answer) < sampling.min_tokens:
        stops = [3] if sampling.min_tokens_holds_stops else []
        processors.append(SuppressTokensLogitsProcessor([*END, *stops]))
    return cast(torch.Tensor, processors(token_ids, row[None])[0])


@settings(max_examples=150, deadline=None)
@given(st.lists(sequences(), min_size=1, max_size=4), st.integers(0, 2**32))
def test_every_row_of_a_mixed_batch_is_what_transformers_makes_of_it_alone(batch: list[Sequence], seed: int) -> None:
    logits = torch.randn(len(batch), VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    wanted = torch.stack([expected(row.clone(), sequence) for row, sequence in zip(logits, batch, strict=True)])
    restricted = adjust_logits(logits, batch, END)
    torch.testing.assert_close(logits, wanted)
    are_forced = [s.forced_token_id is not None for s in batch]
    assert restricted == [row for row in range(len(batch)) if torch.isinf(wanted[row]).any() and not are_forced[row]]


@settings(max_examples=100, deadline=None)
@given(sequences(), st.integers(0, 2**32))
def test_token_by_token_is_what_all_tokens_at_once_are(whole: Sequence, seed: int) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    growing = sequence(whole.request.prompt_token_ids, whole.request.sampling, [])
    for num_tokens in range(len(whole.output_token_ids) + 1):
        growing.output_token_ids = whole.output_token_ids[:num_tokens]
        changed = logits.clone()
        adjust_logits(changed, [growing], END)
        torch.testing.assert_close(changed[0], expected(logits[0].clone(), growing))


def device_tokens(counts: TokenCounts, last_token_ids: list[int]) -> DeviceTokens:
    return DeviceTokens(counts, torch.tensor(last_token_ids), torch.arange(len(last_token_ids)))


@settings(max_examples=150, deadline=None)
@given(
    batch=st.lists(st.tuples(sequences(), st.booleans(), st.integers(0, 3)), min_size=3, max_size=3),
    steps=st.lists(st.lists(st.integers(0, 2), unique=True, min_size=1, max_size=2), max_size=20),
    seed=st.integers(0, 2**32),
)
def test_counted_on_the_device_a_row_is_the_same_before_the_host_knows_its_last_token(
    batch: list[tuple[Sequence, bool, int]], steps: list[list[int]], seed: int
) -> None:
    """Three sequences that share the places of two. One whose turn it is gets one more token of its answer."""
    counts = TokenCounts(2, VOCAB, torch.device("cpu"))
    logits = torch.randn(2, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    growing, whole, num_known = [], [], [0] * len(batch)
    for arrival, (one, is_pending, num_tokens) in enumerate(batch):
        prompt, sampling = one.request.prompt_token_ids, one.request.sampling
        growing.append(sequence(prompt, sampling, [], arrival))
        whole.append((one.output_token_ids, is_pending))
        num_known[arrival] = min(num_tokens, len(one.output_token_ids))
    for step in steps:
        rows, last_token_ids = [], []
        for i in step:
            answer, is_pending = whole[i]
            n = num_known[i] = min(num_known[i] + 1, len(answer))
            growing[i].num_pending_tokens = int(is_pending and n > 0)
            growing[i].output_token_ids = answer[: n - growing[i].num_pending_tokens]
            last_token_ids.append([*growing[i].request.prompt_token_ids, *answer[:n]][-1])
            rows.append(sequence(growing[i].request.prompt_token_ids, growing[i].request.sampling, answer[:n]))
        changed, wanted = logits[: len(step)].clone(), logits[: len(step)].clone()
        restricted = adjust_logits(changed, [growing[i] for i in step], END, device_tokens(counts, last_token_ids))
        on_host = adjust_logits(wanted, rows, END)
        assert torch.equal(changed, wanted)
        assert set(on_host) <= set(restricted)


def test_a_bad_sequence_as_long_as_the_context_is_forbidden_too() -> None:
    logits = torch.zeros(1, VOCAB)
    adjust_logits(logits, [sequence([4], SamplingParams(9, bad_token_sequences=((4, 5), (3, 4, 6))), [])], END)
    assert torch.nonzero(torch.isinf(logits[0])).flatten().tolist() == [5]


@pytest.mark.parametrize(
    "extreme",
    [
        {"repetition_penalty": 1e-38},
        {"repetition_penalty": 3e38},
        {"presence_penalty": 3e38, "frequency_penalty": 3e38},
        {"embedding_bias": ((1, 3e38), (2, -3e38)), "repetition_penalty": 1e-38},
    ],
)
def test_no_penalty_makes_an_infinity(extreme: dict[str, object]) -> None:
    sampling = SamplingParams(9, **extreme)  # type: ignore[arg-type]
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(1))
    adjust_logits(logits, [sequence([1, 2], sampling, [3, 3])], END)
    assert logits.isfinite().all()
