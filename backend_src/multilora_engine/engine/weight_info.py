"""`WeightInfo`: a quantised weight, as operators see it. Plain values: the fronts read them too."""

from __future__ import annotations

from typing import Literal

import msgspec

PathChoice = Literal["auto", "unpacked"]
"""How an unpacked weight is multiplied: by the measured faster path of each row count, or always as floats."""


def is_glob(name: str) -> bool:
    """Whether a name of weights may mean several."""
    return any(character in name for character in "*?[")


class WeightInfo(msgspec.Struct, frozen=True):
    """modules: of the checkpoint; several that lie together are packed and unpacked together. kind: of the codes.

    unpacked_bytes: of its floats, 0 without. needed_bytes: of its floats if it has or gets them. unpacked_rows: the
    measured row counts at which products take the floats; a step counts as the largest of them that it reaches.
    """

    modules: list[str]
    kind: str
    packed_bytes: int
    unpacked_bytes: int
    needed_bytes: int
    unpacked_rows: list[int]
