"""`PromptAnswer`: the part of a response about the tokens of a prompt."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from multilora_engine.sequences.prompt_log_probs import NO_TOKEN, row_type


class PromptTokens(msgspec.Struct, frozen=True):
    """The prompt of a request that wants to know how likely its tokens were.

    num_top: of how many of the likeliest tokens. spell: the bytes of a token, of a special one its name.
    """

    token_ids: list[int]
    num_top: int
    spell: Callable[[int], bytes]

    def answer(self, log_probs: bytes) -> PromptAnswer:
        """log_probs: of an engine's output."""
        return PromptAnswer(self, np.frombuffer(log_probs, row_type(self.num_top)))


class PromptAnswer(msgspec.Struct, frozen=True):
    """The values of the outputs of that name, without their dimension of rows; None where there are none."""

    prompt: PromptTokens
    rows: NDArray[Any]

    @property
    def prompt_ids(self) -> NDArray[np.int32]:
        return np.array(self.prompt.token_ids, np.int32)

    @property
    def prompt_log_probs(self) -> NDArray[np.float32]:
        return self._column("log_prob")

    @property
    def prompt_top_log_prob_ids(self) -> NDArray[np.int32] | None:
        return self._column("top_ids") if self.prompt.num_top else None

    @property
    def prompt_top_log_probs(self) -> NDArray[np.float32] | None:
        return self._column("top_log_probs") if self.prompt.num_top else None

    @property
    def prompt_tokens(self) -> NDArray[np.object_]:
        """[tokens, 1 + num_top], each token and then the likeliest ones in its place."""
        token_ids = np.column_stack([self.prompt_ids, self._column("top_ids")])
        texts = [
            [b"" if i == NO_TOKEN else characters_of(self.prompt.spell(i)) for i in row] for row in token_ids.tolist()
        ]
        return np.array(texts, np.object_)

    def _column(self, field: str) -> NDArray[Any]:
        """A copy that lies close together, as a tensor must."""
        column: NDArray[Any] = np.ascontiguousarray(self.rows[field])
        return column


def characters_of(token: bytes) -> bytes:
    """Text in UTF-8 whose characters are the bytes of a token, so that JSON can carry a part of a character."""
    return token.decode("latin-1").encode()
