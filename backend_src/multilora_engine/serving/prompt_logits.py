"""`PromptLogits`: the logits of a prompt's tokens, which come in pieces and leave in one tensor."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class PromptLogits:
    """A piece is copied to its place when it comes: copying all at once would hold up the thread of all answers."""

    def __init__(self, num_tokens: int, vocab_size: int) -> None:
        """num_tokens: of the prompt."""
        self._rows = np.empty((num_tokens, vocab_size), np.float32)
        self._num_known = 0

    def append(self, values: bytes) -> None:
        """values: float32 [n, vocab] of the next tokens."""
        rows = np.frombuffer(values, np.float32).reshape(-1, self._rows.shape[1])
        start, self._num_known = self._num_known, self._num_known + len(rows)
        self._rows[start : self._num_known] = rows

    @property
    def rows(self) -> NDArray[np.float32]:
        """Logits of the tokens so far, which are all of the prompt's unless its request was ended: [tokens, vocab]."""
        return self._rows[: self._num_known]
