"""Tests that stand for rows of a protocol's contract; `scripts/conformance` runs them and tells how each went."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

PROMPT = "The capital of France is"
IDS = [504, 3575, 282, 4649, 314]
"""`PROMPT`, as the default model's tokenizer has it."""
NUM_TOKENS = 8
"""Length of the answers that are compared."""

Test = TypeVar("Test", bound=Callable[..., None])


def row(section: str, requirement: str, answer: str = "works") -> Callable[[Test], Test]:
    """Marks a test as a row of the table, which is read from the source: all three must be literals.

    section: of the contract, by what it is about. answer: what this server does, `works` or `refused`.
    """
    assert answer in ("works", "refused")
    assert section
    assert requirement
    return lambda test: test
