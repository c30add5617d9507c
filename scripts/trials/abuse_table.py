"""Rows of the table of abuse, and the table as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trials.victim import Gaps

MAX_GAP_RATIO = 3.0
"""The largest factor by which the victim's longest gaps may grow."""

MAX_GROWTH_BYTES = (1 << 30) + (256 << 20)
"""The most memory that the server may gain: its host tier and its bound on logits in flight, as they are by default."""

_MIB = 1 << 20
_HEADER = (
    "attack",
    "before the server",
    "quiet p50, p99 (ms)",
    "under it",
    "errors",
    "MiB before, after",
    "attacker met",
    "verdict",
)
_RULE = ("---", "---", "---:", "---:", "---:", "---:", "---", "---")


@dataclass(frozen=True)
class Row:
    """One attack. quiet, under: the gaps of the victim before and during it.

    num_bytes: of all processes of the server, before and after. met: the answers that the attacker got. loss: a verdict
    that stands without regard to the victim's gaps; empty if there is none.
    """

    door: str
    name: str
    quiet: Gaps
    under: Gaps
    num_bytes: tuple[int, int]
    met: str
    loss: str

    @property
    def verdict(self) -> str:
        if self.loss:
            return self.loss
        if self.under.errors:
            return f"errors: {self.under.errors[0]}"
        if self.num_bytes[1] - self.num_bytes[0] > MAX_GROWTH_BYTES:
            return "memory"
        return "fine" if self.under.p99_ms <= MAX_GAP_RATIO * self.quiet.p99_ms else "slow"

    @property
    def cells(self) -> tuple[str, ...]:
        gaps = (f"{met.p50_ms:.0f}, {met.p99_ms:.0f}" for met in (self.quiet, self.under))
        memory = ", ".join(f"{num // _MIB:,}" for num in self.num_bytes)
        return (self.name, self.door, *gaps, str(len(self.under.errors)), memory, self.met, self.verdict)

    @property
    def line(self) -> str:
        """The line of the table in Markdown."""
        return _line(self.cells)


def markdown(rows: Sequence[Row]) -> str:
    """The table of docs/attacks.md."""
    return "".join(f"{line}\n" for line in (_line(_HEADER), _line(_RULE), *(row.line for row in rows)))


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_plain, cells))} |"


def _plain(cell: str) -> str:
    """The text with the escapes that a cell needs."""
    return " ".join(cell.replace("|", "\\|").split())
