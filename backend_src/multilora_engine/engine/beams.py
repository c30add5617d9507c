"""`continue_beams`: the beams of a search after one more token."""

from __future__ import annotations

from typing import NamedTuple

from multilora_engine.engine.beam_search import Continuation
from multilora_engine.engine.sequence import Sequence
from multilora_engine.request import TokenLogProb
from multilora_engine.sampling.token_history import TokenHistory
from multilora_engine.text.text_stream import TextStream


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
