"""The bytes of each tier over the time of a soak: what the engines of soak_adapters note, as a table of documents."""

from __future__ import annotations

from collections.abc import Sequence

from marked_tables import figure, markdown_table
from multilora_engine.lora.life_cycle import LoRAStats
from trials.soak_engine import TierBytes

TABLE = "soak tiers"
TIERS = ("device", "host", "disk")
LIMIT = "limit"
"""The first cell of the row that has the tiers' budgets."""

_ROWS_AN_ENGINE = 7


def markdown(engines: Sequence[tuple[Sequence[TierBytes], LoRAStats]]) -> str:
    """The table. engines: of each engine what it noted and its last statistics, which have the budgets.

    An engine's rows lie evenly between its first and its last moment, both of which have a row of their own.
    """
    started = engines[0][0][0].seconds
    rows = [
        [f"{moment.seconds - started:.1f}", *(_mebibytes(getattr(moment, tier)) for tier in TIERS)]
        for noted, _ in engines
        for moment in evenly(noted)
    ]
    budgets = [_mebibytes(getattr(engines[-1][1], tier).bytes_total) for tier in TIERS]
    return markdown_table(("seconds", *TIERS), [*rows, [LIMIT, *budgets]])


def evenly(noted: Sequence[TierBytes]) -> list[TierBytes]:
    """The moments nearest to points in even distances, first and last among them; each once."""
    first, last = noted[0].seconds, noted[-1].seconds
    points = [first + (last - first) * place / (_ROWS_AN_ENGINE - 1) for place in range(_ROWS_AN_ENGINE)]
    nearest = [min(noted, key=lambda moment: abs(moment.seconds - point)) for point in points]
    return sorted({moment.seconds: moment for moment in nearest}.values(), key=lambda moment: moment.seconds)


def _mebibytes(num_bytes: int) -> str:
    return f"{figure(num_bytes / (1 << 20))} MiB"
