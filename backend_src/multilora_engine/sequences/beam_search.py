"""`BeamSearch`: finds the likeliest whole answers. Greedy decoding misses an answer that begins with an unlikely token.

A search keeps `beam_width` unfinished answers, its beams. In every step the likeliest continuations of all beams
together become the next beams. A continuation that ends an answer goes to the finished answers, and the search keeps
the best of these. The rules (which candidates count, when to stop) are those of transformers' `generate`, which
TensorRT-LLM follows, too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from multilora_engine.errors import InvalidRequest, Unsupported
from multilora_engine.request import BeamOutput, FinishReason, SamplingParams, TokenLogProb
from multilora_engine.text.text_stream import TextStream


@dataclass(frozen=True, slots=True)
class Continuations:
    """The likeliest next tokens of a beam, best first. scores: for each, the log-prob of the whole answer up to it."""

    token_ids: list[int]
    scores: list[float]


@dataclass(frozen=True, slots=True)
class Continuation:
    """One more token for a beam. parent: the beam's place among the beams."""

    parent: int
    token_id: int
    score: float


Rank = tuple[float, float]
"""Orders answers as cum_log_prob / length ** length_penalty does, but by logarithms, which large penalties do not
overflow."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An answer that ended by itself or was ended.

    cum_log_prob: the sum of its tokens' log-probs. rank: its place by length penalty; the largest rank wins.
    """

    token_ids: list[int]
    log_probs: list[TokenLogProb]
    cum_log_prob: float
    rank: Rank
    finish_reason: FinishReason


class Beam(Protocol):
    """The part of an unfinished answer that a search reads. The engine's `Sequence` has it.

    log_probs: one for each token of the answer. score: their sum.
    """

    @property
    def output_token_ids(self) -> list[int]: ...
    @property
    def log_probs(self) -> list[TokenLogProb]: ...
    @property
    def score(self) -> float: ...
    @property
    def text(self) -> TextStream: ...


class BeamSearch:
    """The rules of one search, and its finished answers. The caller keeps the beams."""

    def __init__(
        self, sampling: SamplingParams, end_token_ids: tuple[int, ...], max_tokens: int, text: TextStream
    ) -> None:
        """end_token_ids: the tokens that end an answer. max_tokens: the length at which every answer ends.

        text: the request's stream, still empty.
        """
        self._sampling = sampling
        self._text = text
        self._end_token_ids = frozenset(end_token_ids)
        self._max_tokens = max_tokens
        self._finished: list[Hypothesis] = []

    @property
    def num_candidates(self) -> int:
        """The number of candidates in a step. If all end tokens of each beam are among them, `beam_width` remain."""
        return max(2, 1 + len(self._end_token_ids)) * self._sampling.beam_width

    def advance(self, beams: Sequence[Beam], ranked: list[Continuations]) -> list[Continuation]:
        """The continuations that become the next beams, likeliest first. None are left when the search has ended.

        A candidate that ends counts as an answer only if it is among the first `beam_width`.

        ranked: each beam's likeliest continuations.
        """
        width = self._sampling.beam_width
        going_on: list[Continuation] = []
        for place, candidate in enumerate(self._candidates(ranked)):
            reason = self._end_of(beams[candidate.parent], candidate.token_id)
            if reason is None:
                going_on.append(candidate)
            elif place < width:
                self._finished.append(self._hypothesis(beams[candidate.parent], candidate, reason))
        self._finished = _best_first(self._finished)[:width]
        num_tokens = len(beams[0].output_token_ids) + 1
        return [] if not going_on or self._is_over(going_on[0].score, num_tokens) else going_on[:width]

    def answers(self, beams: Sequence[Beam], reason: FinishReason | None = None) -> list[BeamOutput]:
        """The answers, best first, at most `beam_width`.

        reason: why the search was ended early. Its unfinished beams count as answers then.
        """
        cut_off = [self._cut_off(beam, reason) for beam in beams if beam.output_token_ids] if reason else []
        best = _best_first([*self._finished, *cut_off])
        return [self._output(hypothesis) for hypothesis in best[: self._sampling.beam_width]]

    def _candidates(self, ranked: list[Continuations]) -> list[Continuation]:
        """The best continuations over all beams, without continuations by a forbidden token."""
        candidates = [
            Continuation(parent, token_id, score)
            for parent, continuations in enumerate(ranked)
            for token_id, score in zip(continuations.token_ids, continuations.scores, strict=True)
            if score > -float("inf")
        ]
        rate = self._sampling.beam_search_diversity_rate
        return sorted(candidates, key=lambda c: -(c.score + rate * c.parent))[: self.num_candidates]

    def _end_of(self, beam: Beam, token_id: int) -> FinishReason | None:
        is_last = len(beam.output_token_ids) + 1 == self._max_tokens
        if is_last and self._sampling.forced_last_id is not None:
            return "length"
        if token_id in self._end_token_ids:
            return "stop"
        if self._has_stops and beam.text.fork().push(token_id).stopped:
            return "stop"
        return "length" if is_last else None

    @property
    def _has_stops(self) -> bool:
        return bool(self._sampling.stop_words or self._sampling.stop_token_sequences)

    def _is_over(self, best_score: float, num_tokens: int) -> bool:
        """Whether the search ends: no beam can be expected to beat the worst answer, or `early_stopping` does not ask.

        best_score: the score of the best beam, which has `num_tokens` tokens.
        """
        if len(self._finished) < self._sampling.beam_width:
            return False
        if self._sampling.early_stopping == 1:
            return True
        if self._sampling.early_stopping != 0 and self._sampling.length_penalty > 0:
            num_tokens = self._max_tokens
        return self._rank(best_score, num_tokens) <= self._finished[-1].rank

    def _hypothesis(self, beam: Beam, last: Continuation, reason: FinishReason) -> Hypothesis:
        token_ids = [*beam.output_token_ids, last.token_id]
        log_probs = [*beam.log_probs, TokenLogProb(last.score - beam.score)]
        return Hypothesis(token_ids, log_probs, last.score, self._rank(last.score, len(token_ids)), reason)

    def _cut_off(self, beam: Beam, reason: FinishReason) -> Hypothesis:
        rank = self._rank(beam.score, len(beam.output_token_ids))
        return Hypothesis(beam.output_token_ids, beam.log_probs, beam.score, rank, reason)

    def _output(self, hypothesis: Hypothesis) -> BeamOutput:
        text, (*token_ids, last) = self._text.fork(), hypothesis.token_ids
        deltas = [text.push(token_id) for token_id in token_ids]
        has_ended = hypothesis.finish_reason == "stop" and last in self._end_token_ids
        deltas.append(text.end(last) if has_ended else text.push(last))
        if not deltas[-1].stopped:
            deltas.append(text.finish())
        return BeamOutput(
            token_ids=hypothesis.token_ids,
            text="".join(delta.text for delta in deltas),
            finish_reason="stop" if deltas[-1].stopped else hypothesis.finish_reason,
            log_probs=hypothesis.log_probs,
            cum_log_prob=hypothesis.cum_log_prob,
        )

    def _rank(self, cum_log_prob: float, num_tokens: int) -> Rank:
        if cum_log_prob >= 0:
            return math.inf, cum_log_prob
        # A large penalty rounds the second logarithm away. Answers of one length keep their order by cum_log_prob.
        return self._sampling.length_penalty * math.log(num_tokens) - math.log(-cum_log_prob), cum_log_prob


def _best_first(hypotheses: list[Hypothesis]) -> list[Hypothesis]:
    return sorted(hypotheses, key=lambda hypothesis: hypothesis.rank, reverse=True)


def check_beam_sampling(sampling: SamplingParams) -> None:
    """Raises InvalidRequest for a number that no search can use, Unsupported for an option that excludes beams."""
    if sampling.max_tokens == 0:
        raise InvalidRequest("max_tokens is 0 with beam_width > 1: answers without tokens are all the same")
    if sampling.temperature == 0:
        raise InvalidRequest(
            "temperature is 0 with beam_width > 1: beams are ranked by probability, which needs a temperature above 0"
        )
    drawing = {
        "runtime_top_k": sampling.top_k > 1,
        "runtime_top_p": sampling.top_p < 1 or sampling.top_p_decay != 1,
        "min_p": sampling.min_p > 0,
    }
    others = {
        "guided decoding": sampling.guide is not None,
        "num_top_log_probs": sampling.num_top_log_probs > 0,
        "return_context_logits": sampling.return_context_logits,
        "return_prompt_log_probs": sampling.return_prompt_log_probs,
        "return_generation_logits": sampling.return_generation_logits,
    }
    if names := [name for name, is_given in (drawing | others).items() if is_given]:
        raise Unsupported(f"beam_width {sampling.beam_width} together with {' and '.join(names)}")
