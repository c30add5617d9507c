"""Rows of the table of abuse, and the table as Markdown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trials.victim import Gaps

MAX_GAP_RATIO = 3.0
"""How much longer the victim's longest gaps may become."""

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
    """One attack. quiet, under: what the victim met before and during it.

    num_bytes: of all processes of the server, before and after. met: what the attacker was told. loss: what makes the
    verdict, whatever the victim met; empty if nothing does.
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
        return "fine" if self.under.p99_ms <= MAX_GAP_RATIO * self.quiet.p99_ms else "slow"

    @property
    def cells(self) -> tuple[str, ...]:
        gaps = (f"{met.p50_ms:.0f}, {met.p99_ms:.0f}" for met in (self.quiet, self.under))
        memory = ", ".join(f"{num // _MIB:,}" for num in self.num_bytes)
        return (self.name, self.door, *gaps, str(len(self.under.errors)), memory, self.met, self.verdict)

    @property
    def description(self) -> str:
        """One line, for a person who watches."""
        gaps = f"{self.quiet.p99_ms:.0f} -> {self.under.p99_ms:.0f} ms"
        return f"{self.door}, {self.name}: {self.verdict}, longest gaps {gaps}; attacker: {self.met}"


def markdown(rows: Sequence[Row]) -> str:
    """The table of README.md and SECURITY.md."""
    lines = [_HEADER, _RULE, *(row.cells for row in rows)]
    return "".join(f"| {' | '.join(_plain(cell) for cell in line)} |\n" for line in lines)


def _plain(cell: str) -> str:
    """As a cell may have it."""
    return " ".join(cell.replace("|", "\\|").split())
