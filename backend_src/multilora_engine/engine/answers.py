"""`Answers`: the outputs of each request from the chosen tokens of a step."""

from __future__ import annotations

import time
from typing import NamedTuple

from multilora_engine.engine.accounts import Accounts
from multilora_engine.engine.outputs import (
    beams_output,
    error_output,
    failure_output,
    no_token_left,
    overflow,
    token_output,
)
from multilora_engine.engine.scheduler import Scheduler
from multilora_engine.errors import InvalidRequest, TooMuchHostWork
from multilora_engine.request import FinishReason, TokenLogProb, TokenOutput
from multilora_engine.sampling.logits import end_tokens
from multilora_engine.sampling.sampler import SampledToken
from multilora_engine.sequences.beam_search import BeamSearch, Continuation, Continuations
from multilora_engine.sequences.sequence import BlockCopy, Sequence
from multilora_engine.sequences.token_history import TokenHistory
from multilora_engine.text.text_stream import TextDelta, TextStream


class _State(NamedTuple):
    """A beam's own state: its parent's, and one more token."""

    token_ids: list[int]
    log_probs: list[TokenLogProb]
    text: TextStream
    history: TokenHistory | None
    score: float


def continue_beams(root: Sequence, continuations: list[Continuation]) -> None:
    """Make the beams of a search as many as there are continuations, each after its parent.

    The scheduler hands the parents' KV cache on.
    """
    states = [_continued(root.beams[continuation.parent], continuation) for continuation in continuations]
    missing = len(continuations) - len(root.beams)
    root.siblings = [*root.siblings, *(root.sibling() for _ in range(missing))][: len(continuations) - 1]
    for beam, state in zip(root.beams, states, strict=True):
        beam.output_token_ids, beam.held.log_probs, beam.text, beam.history, beam.score = state


def _continued(parent: Sequence, continuation: Continuation) -> _State:
    text = parent.text.fork()
    text.push(continuation.token_id)
    return _State(
        [*parent.output_token_ids, continuation.token_id],
        [*parent.log_probs, TokenLogProb(continuation.score - parent.score)],
        text,
        None if parent.history is None else parent.history.fork(),
        continuation.score,
    )


_NOTHING = TextDelta([], "")


class Answers:
    """Extends answers by tokens. The output of an answer that ends is final; the caller then removes the sequence.

    A sequence without host work is only extended. One with words, a guide or beams is timed, and fails when it has
    taken too much of the engine's thread.
    """

    def __init__(self, end_token_ids: tuple[int, ...], accounts: Accounts, scheduler: Scheduler) -> None:
        """end_token_ids: the checkpoint's. scheduler: hands the KV cache of beams on."""
        self._end_token_ids = end_token_ids
        self._accounts = accounts
        self._scheduler = scheduler

    def extend(self, sequence: Sequence, token: SampledToken) -> TokenOutput | None:
        """The output that one more token gives a request that is no beam search. Raises its `failure`, if any."""
        if sequence.failure is not None:
            raise sequence.failure
        if not token.is_finite:
            return error_output(sequence.request, overflow(sequence))
        if sequence.max_output_tokens == 0:
            return self.finish(sequence, "length")
        if (token_id := token.token_id) is None:
            return error_output(sequence.request, no_token_left(sequence))
        is_forced = sequence.forced_token(len(sequence.output_token_ids)) is not None
        try:
            is_complete = sequence.guide is not None and not is_forced and sequence.guide.advance(token_id)
        except InvalidRequest as error:
            return error_output(sequence.request, error)
        sequence.output_token_ids.append(token_id)
        if token.log_prob is not None:
            sequence.held.log_probs.append(token.log_prob)
        if token.logits is not None:
            sequence.held.logits.append(token.logits)
        is_forced_end = sequence.request.sampling.forced_last_id is not None and sequence.is_full
        if not is_forced_end and token_id in end_tokens(sequence.request.sampling, self._end_token_ids):
            return self.finish(sequence, "stop", sequence.text.end(token_id))
        delta = sequence.text.push(token_id)
        if is_complete:
            return self.finish(sequence, "stop", delta)
        if delta.stopped or sequence.is_full:
            return self.finish(sequence, "length", delta)
        return token_output(sequence, delta) if delta.token_ids or delta.text else None

    def extend_charged(
        self, sequence: Sequence, chosen: dict[Sequence, SampledToken], copies: list[BlockCopy], num_charged: int
    ) -> TokenOutput | None:
        """The output that a step gives a request with host work; the request fails when its work costs too much.

        chosen: the token of each sequence or beam. copies: takes the blocks that are to be copied for beams, unless the
        request ends. num_charged: requests with host work in this step. Raises: as of `extend`.
        """
        started = time.thread_time()
        own_copies: list[BlockCopy] = []
        if sequence.search is None:
            output = self.extend(sequence, chosen[sequence])
        else:
            output = self._advance(sequence, sequence.search, chosen, own_copies)
        if output is not None and output.is_final:
            return output
        try:
            self._accounts.charge_host_work(sequence, time.thread_time() - started, num_charged)
        except TooMuchHostWork as error:
            return error_output(sequence.request, error)
        copies += own_copies
        return output

    def finish(self, sequence: Sequence, reason: FinishReason, delta: TextDelta = _NOTHING) -> TokenOutput:
        """The last output of an answer: `delta`, and the tokens and text that its stream still held.

        A stop word is the reason whenever it was completed, even by the last token that was allowed.
        """
        held = _NOTHING if delta.stopped else sequence.text.finish()
        last = held.after(delta, stopped=delta.stopped or held.stopped)
        return token_output(sequence, last, "stop" if last.stopped else reason)

    def finish_search(self, sequence: Sequence, search: BeamSearch, reason: FinishReason | None = None) -> TokenOutput:
        """The only output of a search. reason: why it was ended, None when it came to its end."""
        beams = search.answers(sequence.beams, reason)
        if not beams and reason is None:
            return error_output(sequence.request, no_token_left(sequence))
        return beams_output(sequence, beams, reason or beams[0].finish_reason)

    def cancel(self, sequence: Sequence) -> TokenOutput:
        """The last output of a request that is ended now, with the tokens and text that were held back; an error when
        those cannot be had."""
        try:
            if sequence.search is not None:
                return self.finish_search(sequence, sequence.search, "cancelled")
            return self.finish(sequence, "cancelled")
        except Exception as error:
            return failure_output(sequence, error)

    def _advance(
        self, sequence: Sequence, search: BeamSearch, chosen: dict[Sequence, SampledToken], copies: list[BlockCopy]
    ) -> TokenOutput | None:
        """One step of a beam search."""
        before = sequence.beams
        for beam in before:
            if beam.failure is not None:
                raise beam.failure
        if not all(chosen[beam].is_finite for beam in before):
            return error_output(sequence.request, overflow(sequence))
        continuations = search.advance(before, [chosen[beam].continuations or Continuations([], []) for beam in before])
        if not continuations:
            return self.finish_search(sequence, search)
        try:
            continue_beams(sequence, continuations)
            copies += self._scheduler.branch(sequence, before, [continuation.parent for continuation in continuations])
        except Exception:
            # The beams that have blocks must be there when the request ends.
            sequence.siblings = before[1:]
            raise
        return None
