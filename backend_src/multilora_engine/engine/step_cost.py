"""`StepCost`: how long a step takes, by its work, as measured on the steps so far."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

_FORGETTING = 0.99
"""A step's weight beside the next one: after some hundred steps a machine that has become slower is known to be."""

_RIDGE = 1e-4
"""The weight of a sum of squares: it decides where the measured steps do not tell two kinds of work apart."""

_RIDGE_OF_KEYS = 1e-2
"""The same for keys: short contexts, which do not tell keys and tokens apart, must not make long ones seem dear."""

_MAX_SURPRISE = 3.0
"""A step counts as no longer than so many times the expected time: garbage may have been collected in it."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a step.

    num_decodes: sequences that compute one token. num_beams: those of them that are beams of a search.
    num_prompt_tokens: of all other sequences. num_prompt_rows: those of them whose logits are wanted.
    num_decode_keys, num_prompt_keys: that these tokens attend to, summed over the tokens.
    """

    num_decodes: int = 0
    num_beams: int = 0
    num_prompt_tokens: int = 0
    num_prompt_rows: int = 0
    num_decode_keys: int = 0
    num_prompt_keys: int = 0


_KINDS = tuple(field.name for field in fields(StepWork))
_SIZE = 1 + len(_KINDS)
_PROMPT_ROWS = 1 + _KINDS.index("num_prompt_rows")
_RIDGES = np.array([_RIDGE, *(_RIDGE_OF_KEYS if kind.endswith("keys") else _RIDGE for kind in _KINDS)])


class StepCost:
    """seconds = fixed + a * num_decodes + b * num_beams + c * num_prompt_tokens + d * num_prompt_rows
    + e * num_decode_keys + f * num_prompt_keys.

    The factors are at least 0. They are those of least squares over the steps so far, of which older ones count less.
    """

    def __init__(self) -> None:
        self._squares = np.zeros((_SIZE, _SIZE))
        self._products = np.zeros(_SIZE)
        self._factors = np.zeros(_SIZE)
        self._is_solved = False

    @property
    def is_known(self) -> bool:
        """Whether any step was measured."""
        return bool(self._squares[0, 0])

    @property
    def knows_rows(self) -> bool:
        """Whether any step was measured with tokens of prompts whose logits are wanted."""
        return bool(self._squares[_PROMPT_ROWS, _PROMPT_ROWS])

    def observe(self, work: StepWork, seconds: float) -> None:
        """A step took so long."""
        features = _features(work)
        if expected := float(features @ self._factors):
            seconds = min(seconds, _MAX_SURPRISE * expected)
        self._squares *= _FORGETTING
        self._squares += np.outer(features, features)
        self._products *= _FORGETTING
        self._products += seconds * features
        self._is_solved = False

    def seconds(self, work: StepWork) -> float:
        """How long a step with this work is expected to take."""
        return float(_features(work) @ self._solved())

    def seconds_added(self, work: StepWork) -> float:
        """How much longer a step is expected to take with this work, too."""
        return float(_features(work)[1:] @ self._solved()[1:])

    def _solved(self) -> NDArray[np.float64]:
        if not self._is_solved:
            self._factors = _least_squares(self._squares, self._products)
            self._is_solved = True
        return self._factors


def num_keys(start: int, num_tokens: int) -> int:
    """The keys that a sequence's tokens start .. start + num_tokens - 1 attend to, each its own and all before it."""
    return num_tokens * start + num_tokens * (num_tokens + 1) // 2


def _features(work: StepWork) -> NDArray[np.float64]:
    return np.array([1.0, *(getattr(work, name) for name in _KINDS)])


def _least_squares(squares: NDArray[np.float64], products: NDArray[np.float64]) -> NDArray[np.float64]:
    """The factors f >= 0 with squares @ f = products, nearly: factors that would be negative are 0."""
    factors = np.zeros(len(products))
    kept = np.flatnonzero(squares.diagonal() > 0)
    while len(kept):
        part = squares[np.ix_(kept, kept)]
        found = np.linalg.solve(part + np.diag(_RIDGES[kept] * part.diagonal()), products[kept])
        if (found >= 0).all():
            factors[kept] = found
            break
        kept = kept[found > 0]
    return factors
