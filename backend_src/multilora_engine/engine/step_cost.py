"""`StepCost`: how long a step takes, by its work, as measured on the steps so far."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

_FORGETTING = 0.93
"""The weight that a measured step leaves to all earlier steps like it: some hundred steps of all kinds tell that the
machine has become slower."""

_LEAST_SQUARE = 1e-9
"""Nothing beside a sum of squares: it keeps numbers finite where all steps so far were alike."""

_RIDGE = 1e-4
"""The weight of a sum of squares: it decides where the measured steps do not tell two kinds of work apart."""

_RIDGE_OF_KEYS = 1e-2
"""The same for keys: short contexts, which do not tell keys and tokens apart, must not make long ones seem dear."""

_FAR_KEYS = 4000
"""Steps of contexts that are much shorter than a tenth of this say next to nothing of how much a key costs: chance
would be multiplied where a context is so long."""

_MAX_SURPRISE = 3.0
"""A step counts as no longer than so many times the expected time: garbage may have been collected in it. A step that
is so many times shorter tells that the steps before it were the odd ones: a machine's first steps touch all memory."""

_WEIGHT_OF_ODD_STEPS = 0.01
"""The weight that all steps before such a step keep."""


@dataclass(frozen=True, slots=True)
class StepWork:
    """The work of a step.

    num_decodes: sequences that compute one token. num_beams: those of them that are beams of a search.
    has_prompts: 1 if other sequences compute more than one, else 0. num_prompt_tokens: of all these.
    num_prompt_rows: those of them whose logits are wanted.
    num_decode_keys, num_prompt_keys: that these tokens attend to, summed over the tokens.
    """

    num_decodes: int = 0
    num_beams: int = 0
    has_prompts: int = 0
    num_prompt_tokens: int = 0
    num_prompt_rows: int = 0
    num_decode_keys: int = 0
    num_prompt_keys: int = 0


_KINDS = tuple(field.name for field in fields(StepWork))
_SIZE = 1 + len(_KINDS)
_PROMPT_ROWS = 1 + _KINDS.index("num_prompt_rows")
_IS_KEYS = np.array([False, *(kind.endswith("keys") for kind in _KINDS)])
_RIDGES = np.where(_IS_KEYS, _RIDGE_OF_KEYS, _RIDGE)
_FAR = np.where(_IS_KEYS, float(_FAR_KEYS) ** 2, 0.0)


class StepCost:
    """seconds = fixed + a * num_decodes + b * num_beams + c * has_prompts + d * num_prompt_tokens + e * num_prompt_rows
    + f * num_decode_keys + g * num_prompt_keys.

    A step's first tokens of prompts cost more than further ones, since a few rows hardly take longer than one; c keeps
    that apart from the time of the answers' own tokens.

    The factors are at least 0. They are those of least squares over the steps so far. A step takes the place of older
    ones as far as it is like them (directional forgetting: R. Kulhavy, 1987, Automatica 23). While every step has
    tokens of prompts, no step tells the time of the answers' own tokens: with all older steps forgotten, its estimate
    would only grow.
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
        if expected := float(features @ self._solved()):
            seconds = min(seconds, _MAX_SURPRISE * expected)
            if _MAX_SURPRISE * seconds < expected:
                self._squares *= _WEIGHT_OF_ODD_STEPS
                self._products *= _WEIGHT_OF_ODD_STEPS
        num_alike, seconds_alike = self._steps_like(features)
        num_forgotten = (1 - _FORGETTING) * num_alike
        self._squares += (1 - num_forgotten) * np.outer(features, features)
        self._products += (seconds - num_forgotten * seconds_alike) * features
        self._is_solved = False

    def seconds(self, work: StepWork) -> float:
        """How long a step with this work is expected to take."""
        return float(_features(work) @ self._solved())

    def seconds_added(self, work: StepWork) -> float:
        """How much longer a step is expected to take with this work, too."""
        return float(_features(work)[1:] @ self._solved()[1:])

    def _steps_like(self, features: NDArray[np.float64]) -> tuple[float, float]:
        """How many steps like x are known, 1 / (x' S^-1 x), and how long they took, x' S^-1 p, with the sums S of
        squares and p of products. No step is like x while x has a kind of work that none had."""
        kept = np.flatnonzero(self._squares.diagonal() > 0)
        if not len(kept) or np.delete(features, kept).any():
            return 0.0, 0.0
        scales = np.sqrt(self._squares.diagonal()[kept])
        squares = self._squares[np.ix_(kept, kept)] / np.outer(scales, scales)
        scaled = features[kept] / scales
        weights = np.linalg.solve(squares + _LEAST_SQUARE * np.eye(len(kept)), scaled)
        return 1 / float(weights @ scaled), float(weights @ (self._products[kept] / scales))

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
        ridges = _RIDGES[kept] * part.diagonal() + _RIDGE_OF_KEYS * squares[0, 0] * _FAR[kept]
        found = np.linalg.solve(part + np.diag(ridges), products[kept])
        if (found >= 0).all():
            factors[kept] = found
            break
        kept = kept[found > 0]
    return factors
