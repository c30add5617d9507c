"""Pushing tokens through a `TextStream`."""

from __future__ import annotations

from collections.abc import Sequence

from multilora_engine.text.text_stream import TextDelta, TextStream
from multilora_engine.text.tokenizer import Tokenizer


def stream(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    stop_words: tuple[str, ...] = (),
    stop_token_sequences: tuple[tuple[int, ...], ...] = (),
    includes_stop: bool = False,
    is_start: bool = False,
    num_tokens_without_stops: int = 0,
) -> list[TextDelta]:
    """Push until a stop word or the end."""
    text_stream = TextStream(
        tokenizer, stop_words, stop_token_sequences, includes_stop, is_start, num_tokens_without_stops
    )
    deltas: list[TextDelta] = []
    for token_id in token_ids:
        deltas.append(text_stream.push(token_id))
        if deltas[-1].stopped:
            return deltas
    return [*deltas, text_stream.finish()]


def joined(deltas: list[TextDelta]) -> str:
    return "".join(delta.text for delta in deltas)


def tokens(deltas: list[TextDelta]) -> list[int]:
    return [token_id for delta in deltas for token_id in delta.token_ids]
