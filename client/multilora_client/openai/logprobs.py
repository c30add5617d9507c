"""How likely an answer's tokens were, in the two shapes that OpenAI has for it.

Tokens that stand for no text, such as the one that ends an answer, are left out. A token that is only part of a
character is spelled as OpenAI does it: `bytes:` and the bytes in hexadecimal.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from multilora_client.messages import Alternative, Answer

_LEAST = -9999.0
"""What OpenAI says for a token that is all but impossible; JSON knows no infinity."""


@dataclass(frozen=True)
class _Token:
    """A token of an answer. top: the likeliest tokens in its place, best first, each with its log-prob."""

    text: bytes
    log_prob: float
    top: list[tuple[bytes, float]]


class TextOffsets:
    """Where the tokens of one answer begin in its text, in characters."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def advance(self, token: bytes) -> int:
        """The place of the next token."""
        place = self._num_characters
        self._num_characters += len(self._utf8.decode(token))
        return place


def chat_logprobs(answer: Alternative | Answer) -> dict[str, Any]:
    content = [
        _entry(token.text, token.log_prob) | {"top_logprobs": [_entry(*top) for top in token.top]}
        for token in _tokens(answer)
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(answer: Alternative | Answer, offsets: TextOffsets) -> dict[str, Any]:
    tokens = list(_tokens(answer))
    # Of tokens that are spelled alike, the likeliest is told.
    top = [{_spelled(text): _finite(log_prob) for text, log_prob in reversed(token.top)} for token in tokens]
    return {
        "tokens": [_spelled(token.text) for token in tokens],
        "token_logprobs": [_finite(token.log_prob) for token in tokens],
        "top_logprobs": top if any(top) else None,
        "text_offset": [offsets.advance(token.text) for token in tokens],
    }


def _tokens(answer: Alternative | Answer) -> Iterator[_Token]:
    tops = answer.top_log_probs or [[]] * len(answer.tokens)
    for (text, *top_texts), log_prob, top in zip(answer.tokens, answer.log_probs, tops, strict=True):
        if text:
            yield _Token(text, log_prob, list(zip(top_texts, (value for _, value in top), strict=True)))


def _entry(text: bytes, log_prob: float) -> dict[str, Any]:
    return {"token": _spelled(text), "logprob": _finite(log_prob), "bytes": list(text)}


def _spelled(text: bytes) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in text)


def _finite(log_prob: float) -> float:
    return max(log_prob, _LEAST)
