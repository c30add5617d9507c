"""The log-probs of tokens, in the shapes that OpenAI and vLLM give them.

A token that is only part of a character is spelled as OpenAI does it: `bytes:` and the bytes in hexadecimal.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from multilora_client.generation import Alternative, Answer, PromptTokens

_LEAST = -9999.0
"""OpenAI's value for a token that is all but impossible; JSON knows no infinity."""


@dataclass(frozen=True)
class Token:
    """text: empty for special tokens of an answer; a prompt's are spelled by their names."""

    token_id: int
    text: bytes
    log_prob: float


@dataclass(frozen=True)
class _Place:
    """A token, and the likeliest tokens in its place, best first."""

    token: Token
    top: list[Token]


Spelling = Callable[[Token], str]
"""How a token is written."""


def spell_text(token: Token) -> str:
    try:
        return token.text.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.text)


def spell_id(token: Token) -> str:
    """vLLM's spelling, with `return_tokens_as_token_ids`."""
    return f"token_id:{token.token_id}"


class TextOffsets:
    """Where the tokens of one choice begin in its text, in characters."""

    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._num_characters = 0

    def advance(self, token: bytes) -> int:
        """The place of the next token."""
        place = self._num_characters
        self._num_characters += len(self._utf8.decode(token))
        return place


def chat_logprobs(answer: Alternative | Answer, spelling: Spelling) -> dict[str, Any]:
    """Tokens without text, such as an end token, are left out, so that the bytes add up to the content."""
    content = [
        _entry(place.token, spelling) | {"top_logprobs": [_entry(token, spelling) for token in place.top]}
        for place in _places(answer)
        if place.token.text
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(
    answer: Alternative | Answer | PromptTokens, offsets: TextOffsets, num_top: int, spelling: Spelling
) -> dict[str, Any]:
    """The log-probs of every token, in the order of the token ids. A prompt's first token has nothing before it."""
    places = list(_places(answer))
    num_nulls = 1 if isinstance(answer, PromptTokens) else 0
    log_probs = [_finite(place.token.log_prob) for place in places]
    tops = [_top_by_text(place, num_top, spelling) for place in places]
    return {
        "tokens": [spelling(place.token) for place in places],
        "token_logprobs": [None] * num_nulls + log_probs[num_nulls:],
        "top_logprobs": [None] * num_nulls + tops[num_nulls:] if num_top else None,
        "text_offset": [offsets.advance(place.token.text) for place in places],
    }


def joined_logprobs(first: dict[str, Any] | None, second: dict[str, Any] | None) -> dict[str, Any] | None:
    """The log-probs of two parts of a text, as one."""
    if first is None or second is None:
        return first or second
    return {name: None if values is None else values + second[name] for name, values in first.items()}


def prompt_logprobs(prompt: PromptTokens, num_top: int) -> list[dict[str, Any] | None]:
    """vLLM's log-probs of each token and of the likeliest ones in its place, by token id; None for the first token.

    `rank` counts from 1 for the likeliest; None for a token that is not among them.
    """
    _, *places = _places(prompt)
    return [None, *(_ranked(place, num_top) for place in places)]


def _ranked(place: _Place, num_top: int) -> dict[str, Any]:
    ranks = {token.token_id: rank for rank, token in enumerate(place.top, start=1)}
    told = {token.token_id: token for token in [place.token, *place.top[:num_top]]}
    return {
        str(token_id): {
            "logprob": _finite(token.log_prob),
            "rank": ranks.get(token_id),
            "decoded_token": token.text.decode(errors="replace"),
        }
        for token_id, token in told.items()
    }


def _top_by_text(place: _Place, num_top: int, spelling: Spelling) -> dict[str, float]:
    """The likeliest tokens and the token itself, as OpenAI has it. Of tokens spelled alike, the likeliest is told."""
    told = [place.token, *place.top[:num_top]]
    return {spelling(token): _finite(token.log_prob) for token in sorted(told, key=lambda token: token.log_prob)}


def _places(answer: Alternative | Answer | PromptTokens) -> Iterator[_Place]:
    tops = answer.top_log_probs or [[]] * len(answer.tokens)
    told = zip(answer.token_ids, answer.tokens, answer.log_probs, tops, strict=True)
    for token_id, (text, *top_texts), log_prob, top in told:
        likeliest = [Token(rival, name, value) for name, (rival, value) in zip(top_texts, top, strict=True)]
        yield _Place(Token(token_id, text, log_prob), likeliest)


def _entry(token: Token, spelling: Spelling) -> dict[str, Any]:
    return {"token": spelling(token), "logprob": _finite(token.log_prob), "bytes": list(token.text)}


def _finite(log_prob: float) -> float:
    return max(log_prob, _LEAST)
