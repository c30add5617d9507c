"""`PromptLogProbs`: how likely each token of a prompt is after the tokens before it, as far as computed."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

NO_TOKEN = -1
"""Stands in the place of a token id if there is no token."""


@cache
def row_type(num_top: int) -> np.dtype[Any]:
    """The type of a row, one row for each token of the prompt.

    A row has the token's log-prob, and the log-probs and ids of the `num_top` likeliest tokens in its place, best
    first. Rows go from the engine to the fronts as bytes.
    """
    return np.dtype(
        [("log_prob", np.float32), ("top_log_probs", np.float32, (num_top,)), ("top_ids", np.int32, (num_top,))]
    )


class PromptLogProbs:
    """The rows of a prompt's first `num_known` tokens. The first token has nothing before it: its row has 0.0 and
    `NO_TOKEN`.

    Only the model runner adds rows, by `append`.

    num_top: the number of likeliest tokens in each row.
    """

    def __init__(self, num_tokens: int, num_top: int) -> None:
        """num_tokens: the length of the prompt."""
        self._num_tokens = num_tokens
        self.num_top = num_top
        self.num_known = 0
        self._rows: list[bytes] = []
        self.append(np.zeros(1), np.zeros((1, num_top)), np.full((1, num_top), NO_TOKEN))

    @property
    def is_complete(self) -> bool:
        return self.num_known == self._num_tokens

    def missing(self, start: int, end: int) -> range:
        """The positions from start to end - 1 after which comes a token of the prompt with an unknown row."""
        start = max(start, self.num_known - 1)
        return range(start, max(start, min(end, self._num_tokens - 1)))

    def append(self, log_probs: NDArray[Any], top_log_probs: NDArray[Any], top_ids: NDArray[Any]) -> None:
        """Add the rows of the next n tokens: [n], [n, num_top], [n, num_top]."""
        rows = np.empty(len(log_probs), row_type(self.num_top))
        rows["log_prob"], rows["top_log_probs"], rows["top_ids"] = log_probs, top_log_probs, top_ids
        self._rows.append(rows.tobytes())
        self.num_known += len(rows)

    def to_bytes(self) -> bytes:
        """All rows, each of `row_type`."""
        assert self.is_complete, "log-probs of half a prompt"
        return b"".join(self._rows)
