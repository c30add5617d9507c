"""Beam search: the likeliest answers as a whole, which greedy decoding misses where one begins with an unlikely token.

A search keeps `beam_width` unfinished answers, its beams. In every step the likeliest continuations of all beams
together become the next beams; a continuation that ends goes to the finished answers, of which the best are kept. The
rules (which candidates count, when to stop) are those of transformers' `generate`, which TensorRT-LLM follows, too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from multilora_engine.engine.sequence import Sequence
from multilora_engine.errors import InvalidRequest, Unsupported
from multilora_engine.execution.transfer import to_device
from multilora_engine.request import BeamOutput, FinishReason, SamplingParams, TokenLogProb
from multilora_engine.text.text_stream import TextStream


@dataclass(frozen=True, slots=True)
class Continuations:
    """The likeliest next tokens of a beam, best first. scores: sums of log-probs of the answers that end with them."""

    token_ids: list[int]
    scores: list[float]


@dataclass(frozen=True, slots=True)
class Continuation:
    """One more token for a beam. parent: the beam's place among the beams."""

    parent: int
    token_id: int
    score: float


@dataclass(frozen=True, slots=True)
class Hypothesis:
    """An answer that ended, or was ended.

    cum_log_prob: the sum of its tokens' log-probs. score: the same by the length penalty; the largest wins.
    """

    token_ids: list[int]
    log_probs: list[TokenLogProb]
    cum_log_prob: float
    score: float
    finish_reason: FinishReason


class BeamSearch:
    """What a search knows beside its beams, which are `Sequence`s: the rules, and what has ended."""

    def __init__(
        self, sampling: SamplingParams, end_token_ids: tuple[int, ...], max_tokens: int, text: TextStream
    ) -> None:
        """end_token_ids: what ends an answer. max_tokens: where every answer ends. text: the request's, still empty."""
        self._sampling = sampling
        self._text = text
        self._end_token_ids = frozenset(end_token_ids)
        self._max_tokens = max_tokens
        self._finished: list[Hypothesis] = []

    @property
    def num_candidates(self) -> int:
        """So many that enough are left to go on with when every end token of every beam is among them."""
        return max(2, 1 + len(self._end_token_ids)) * self._sampling.beam_width

    def advance(self, beams: list[Sequence], ranked: list[Continuations]) -> list[Continuation]:
        """What the beams go on with, likeliest first, by each beam's continuations. Empty: the search has ended.

        Only those among the first `beam_width` candidates that end count as answers; the others stand by.
        """
        width = self._sampling.beam_width
        going_on: list[Continuation] = []
        for place, candidate in enumerate(self._candidates(ranked)):
            reason = self._end_of(beams[candidate.parent], candidate.token_id)
            if reason is None:
                going_on.append(candidate)
            elif place < width:
                self._finished.append(self._hypothesis(beams[candidate.parent], candidate, reason))
        self._finished = sorted(self._finished, key=lambda hypothesis: -hypothesis.score)[:width]
        num_tokens = len(beams[0].output_token_ids) + 1
        return [] if not going_on or self._is_over(going_on[0].score, num_tokens) else going_on[:width]

    def answers(self, beams: list[Sequence], reason: FinishReason | None = None) -> list[BeamOutput]:
        """The answers, best first, at most `beam_width`. With a `reason`, the beams are ended for it and count, too."""
        cut_off = [self._cut_off(beam, reason) for beam in beams if beam.output_token_ids] if reason else []
        best = sorted([*self._finished, *cut_off], key=lambda hypothesis: -hypothesis.score)
        return [self._output(hypothesis) for hypothesis in best[: self._sampling.beam_width]]

    def _candidates(self, ranked: list[Continuations]) -> list[Continuation]:
        """The best over all beams. A forbidden token is none."""
        candidates = [
            Continuation(parent, token_id, score)
            for parent, continuations in enumerate(ranked)
            for token_id, score in zip(continuations.token_ids, continuations.scores, strict=True)
            if score > -float("inf")
        ]
        rate = self._sampling.beam_search_diversity_rate
        return sorted(candidates, key=lambda c: -(c.score + rate * c.parent))[: self.num_candidates]

    def _end_of(self, beam: Sequence, token_id: int) -> FinishReason | None:
        if token_id in self._end_token_ids:
            return "stop"
        if self._has_stops and beam.text.fork().push(token_id).stopped:
            return "stop"
        return "length" if len(beam.output_token_ids) + 1 == self._max_tokens else None

    @property
    def _has_stops(self) -> bool:
        return bool(self._sampling.stop_words or self._sampling.stop_token_sequences)

    def _is_over(self, best_score: float, num_tokens: int) -> bool:
        """Whether no beam is expected to beat the worst answer, or `early_stopping` does not ask for that.

        best_score: of the best beam, `num_tokens` long.
        """
        if len(self._finished) < self._sampling.beam_width:
            return False
        if self._sampling.early_stopping == 1:
            return True
        if self._sampling.early_stopping != 0 and self._sampling.length_penalty > 0:
            num_tokens = self._max_tokens
        return self._penalised(best_score, num_tokens) <= self._finished[-1].score

    def _hypothesis(self, beam: Sequence, last: Continuation, reason: FinishReason) -> Hypothesis:
        token_ids = [*beam.output_token_ids, last.token_id]
        log_probs = [*beam.held_log_probs, TokenLogProb(last.score - beam.score)]
        return Hypothesis(token_ids, log_probs, last.score, self._penalised(last.score, len(token_ids)), reason)

    def _cut_off(self, beam: Sequence, reason: FinishReason) -> Hypothesis:
        score = self._penalised(beam.score, len(beam.output_token_ids))
        return Hypothesis(beam.output_token_ids, beam.held_log_probs, beam.score, score, reason)

    def _output(self, hypothesis: Hypothesis) -> BeamOutput:
        text = self._text.fork()
        deltas = [text.push(token_id) for token_id in hypothesis.token_ids if token_id not in self._end_token_ids]
        if not deltas or not deltas[-1].stopped:
            deltas.append(text.finish())
        return BeamOutput(
            token_ids=hypothesis.token_ids,
            text="".join(delta.text for delta in deltas),
            finish_reason="stop" if deltas[-1].stopped else hypothesis.finish_reason,
            log_probs=hypothesis.log_probs,
            cum_log_prob=hypothesis.cum_log_prob,
        )

    def _penalised(self, cum_log_prob: float, num_tokens: int) -> float:
        return float(cum_log_prob / num_tokens**self._sampling.length_penalty)


def check_beam_sampling(sampling: SamplingParams) -> None:
    """Raises InvalidRequest for a number no search can use, Unsupported for an option that does not go with beams."""
    for name in ("length_penalty", "beam_search_diversity_rate"):
        if not math.isfinite(getattr(sampling, name)):
            raise InvalidRequest(f"{name} is {getattr(sampling, name)}, expected a finite number")
    if sampling.max_tokens == 0:
        raise InvalidRequest("max_tokens is 0 with beam_width > 1: answers without tokens are all the same")
    if sampling.temperature == 0:
        raise InvalidRequest(
            "temperature is 0 with beam_width > 1: beams are ranked by probability, which it leaves none"
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


def rank_continuations(logits: torch.Tensor, beams: list[Sequence]) -> list[Continuations]:
    """The likeliest continuations of each beam, of any number of searches.

    logits: [len(beams), vocab], float32, with biases, penalties and bans in them.
    """
    count = min(max(beam.search.num_candidates for beam in beams if beam.search is not None), logits.shape[1])
    temperatures = [[beam.request.sampling.temperature] for beam in beams]
    scores = [[beam.score] for beam in beams]
    log_probs = (logits / to_device(torch.tensor(temperatures), logits.device)).log_softmax(dim=-1)
    best = (log_probs + to_device(torch.tensor(scores), logits.device)).topk(count, dim=-1)
    return [Continuations(*row) for row in zip(best.indices.tolist(), best.values.tolist(), strict=True)]


def continue_beams(root: Sequence, continuations: list[Continuation]) -> None:
    """Let the beams of a search go on: as many as there are continuations, each after its parent.

    The parents' KV cache is the scheduler's to hand on.
    """
    parents = [root.beams[continuation.parent] for continuation in continuations]
    states = [
        (
            [*parent.output_token_ids, continuation.token_id],
            [*parent.held_log_probs, TokenLogProb(continuation.score - parent.score)],
            parent.text.fork(),
            None if parent.history is None else parent.history.fork(),
            continuation.score,
        )
        for parent, continuation in zip(parents, continuations, strict=True)
    ]
    missing = len(continuations) - len(root.beams)
    root.siblings = [*root.siblings, *(root.sibling() for _ in range(missing))][: len(continuations) - 1]
    for beam, (token_ids, log_probs, text, history, score) in zip(root.beams, states, strict=True):
        beam.output_token_ids, beam.held_log_probs, beam.score = token_ids, log_probs, score
        beam.text, beam.history = text, history
        beam.text.push(token_ids[-1])
