"""`self_test`: compares the GPU operators with the reference, on the device that will serve. It takes some seconds.

A compiler or a chip that we have not seen may round, order or load differently from ours. Nobody would notice that the
tokens are wrong. So the operators run once with the model's shapes, on random inputs, before any request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass

import torch

from multilora_kernels.comparisons import TOLERANCES, Comparison, ExpertShapes, OperatorShapes, comparisons

__all__ = [
    "TOLERANCES",
    "CheckedOperator",
    "ExpertShapes",
    "OperatorFault",
    "OperatorShapes",
    "checked_operators",
    "device_name",
    "self_test",
]

OnComparison = Callable[[int, int, str], None]
"""Called before each comparison with the number of comparisons done, the number of all, and the operator's name."""


@dataclass(frozen=True)
class CheckedOperator:
    """One comparison.

    error: the largest error, in units of the tolerance: 1 is the most that is allowed. Infinite if a result is NaN.
    failure: the exception that the operator raised; empty for none.
    """

    operator: str
    shapes: str
    error: float
    seconds: float
    failure: str = ""

    @property
    def is_right(self) -> bool:
        return not self.failure and self.error <= 1

    def __str__(self) -> str:
        result = self.failure or f"the largest error is {self.error:.3g} times the one that is allowed"
        return f"{self.operator} of {self.shapes}: {result}"


class OperatorFault(Exception):
    """An operator gives wrong results on this device."""


def self_test(
    shapes: OperatorShapes,
    device: torch.device,
    on_comparison: OnComparison = lambda done, total, operator: None,
) -> int:
    """Compare every operator with its reference. Returns how many comparisons there are.

    Raises OperatorFault, which names the first operator that is wrong, and its shapes.
    """
    planned = comparisons(shapes)
    for number, comparison in enumerate(planned):
        on_comparison(number, len(planned), comparison.operator)
        checked = _checked(comparison, device, number)
        if not checked.is_right:
            raise OperatorFault(f"the self-test on {device_name(device)} failed: {checked}")
    return len(planned)


def checked_operators(
    shapes: OperatorShapes,
    device: torch.device,
    first: int = 0,
    stride: int = 1,
    operators: Container[str] | None = None,
) -> Iterator[CheckedOperator]:
    """Make the comparisons one by one, right or wrong.

    first, stride: make only each `stride`-th comparison from `first` on, to share the work among processes.
    operators: the names of the operators to compare; None for all.
    """
    for number, comparison in enumerate(comparisons(shapes)):
        if number % stride == first and (operators is None or comparison.operator in operators):
            yield _checked(comparison, device, number)


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else str(device)


def _checked(comparison: Comparison, device: torch.device, seed: int) -> CheckedOperator:
    started = time.perf_counter()
    try:
        error, failure = _error(*comparison.compare(torch.Generator(device).manual_seed(seed))), ""
    except Exception as raised:  # of the compiler, the launch or the device: whichever, the operator does not serve
        error, failure = float("inf"), f"{type(raised).__name__}: {raised}"
    seconds = time.perf_counter() - started
    return CheckedOperator(comparison.operator, comparison.shapes, error, seconds, failure)


def _error(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> float:
    assert actual.shape == expected.shape
    errors = (actual.double() - expected.double()).abs() / (tolerance * (1 + expected.double().abs()))
    largest = float(errors.max())
    return float("inf") if largest != largest else largest
