"""`Thinking`: the place of an answer in what a model thinks before it, which no guide holds for."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from multilora_engine.text.tokenizer import Tokenizer

_BEGIN, _END = "<think>", "</think>"
"""The marks of Qwen 3, SmolLM3, GLM and DeepSeek-R1."""

_NUM_LAST_TOKENS = 16
"""More than a mark and the white space after it have."""


class Thinking:
    """begin_id: the token by which the model begins to think, None where no single token does.

    end_id: the token that ends the thinking, None where several tokens spell the mark.
    has_begun: whether the answer is inside the thinking.
    """

    def __init__(
        self, begin_id: int | None, end_id: int | None, has_begun: bool, spell: Callable[[int], bytes]
    ) -> None:
        """spell: the bytes of a token, of a special one its name."""
        self.begin_id = begin_id
        self.end_id = end_id
        self.has_begun = has_begun
        self._spell = spell
        self._tail = b""

    def is_ended_by(self, token_id: int) -> bool:
        """Take a token of the thinking. Returns whether the mark at the end is complete."""
        self._tail += self._spell(token_id)
        is_ended = _END.encode() in self._tail
        self._tail = self._tail[1 - len(_END) :]
        return is_ended


def thinking_of(prompt: Sequence[int], tokenizer: Tokenizer) -> Thinking | None:
    """The thinking that may come before the answer to a prompt; None for a model that does not think, and for a prompt
    that has ended the thinking.
    """
    if _ends_with(prompt, _END, tokenizer):
        return None
    begin_id, end_id = (_single_token(mark, tokenizer) for mark in (_BEGIN, _END))
    is_open = opens_thinking(prompt, tokenizer)
    return Thinking(begin_id, end_id, is_open, tokenizer.spell) if is_open or begin_id is not None else None


def opens_thinking(prompt: Sequence[int], tokenizer: Tokenizer) -> bool:
    """Whether a prompt ends where the model's thinking begins, as chat templates such as DeepSeek-R1's have it."""
    return _ends_with(prompt, _BEGIN, tokenizer)


def _ends_with(prompt: Sequence[int], mark: str, tokenizer: Tokenizer) -> bool:
    end = b"".join(map(tokenizer.spell, prompt[-_NUM_LAST_TOKENS:]))
    return end.rstrip().endswith(mark.encode())


def _single_token(mark: str, tokenizer: Tokenizer) -> int | None:
    token_ids = tokenizer.encode(mark, add_special_tokens=False)
    return token_ids[0] if len(token_ids) == 1 else None
