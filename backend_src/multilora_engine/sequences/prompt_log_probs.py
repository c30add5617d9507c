"""`PromptLogProbs`: how likely each token of a prompt is behind those before it, as far as it has been computed."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

NO_TOKEN = -1
"""The value in the place of an id where there is none."""


@cache
def row_type(num_top: int) -> np.dtype[Any]:
    """A row of a report: a token's log-prob, and log-probs and ids of the `num_top` likeliest in its place, best first.

    Rows of it, one a token, cross from the engine to the fronts as bytes.
    """
    return np.dtype(
        [("log_prob", np.float32), ("top_log_probs", np.float32, (num_top,)), ("top_ids", np.int32, (num_top,))]
    )


class PromptLogProbs:
    """The rows of a prompt's first `num_known` tokens. The first one has nothing before it: 0.0, and `NO_TOKEN`s.

    num_top: how many of the likeliest tokens each row has. Only `append` changes it, which the model runner calls.
    """

    def __init__(self, num_tokens: int, num_top: int) -> None:
        """num_tokens: of the prompt."""
        self._num_tokens = num_tokens
        self.num_top = num_top
        self.num_known = 0
        self._rows: list[bytes] = []
        self.append(np.zeros(1), np.zeros((1, num_top)), np.full((1, num_top), NO_TOKEN))

    @property
    def is_complete(self) -> bool:
        return self.num_known == self._num_tokens

    def missing(self, start: int, end: int) -> range:
        """The positions among start .. end - 1 behind which is a token of the prompt whose row is not known."""
        start = max(start, self.num_known - 1)
        return range(start, max(start, min(end, self._num_tokens - 1)))

    def append(self, log_probs: NDArray[Any], top_log_probs: NDArray[Any], top_ids: NDArray[Any]) -> None:
        """The rows of the next tokens: [n], [n, num_top], [n, num_top]."""
        rows = np.empty(len(log_probs), row_type(self.num_top))
        rows["log_prob"], rows["top_log_probs"], rows["top_ids"] = log_probs, top_log_probs, top_ids
        self._rows.append(rows.tobytes())
        self.num_known += len(rows)

    def to_bytes(self) -> bytes:
        """All rows, as of `row_type`."""
        assert self.is_complete, "log-probs of half a prompt"
        return b"".join(self._rows)
