"""Measures the harm that a hostile client does, with servers of its own, a victim that streams, and attacks.

The victim streams 64 greedy tokens over gRPC again and again and notes the time between them: right before each attack,
when no other client asks, and during the attack. The attack runs in a process of its own. It did harm when the 99th
percentile of these times is more than three times the quiet one, when a request of the victim ended with an error or
too early, when the engine or the server was started again, or when the attacker learnt of another client. Everything
stays on the loopback; attacks are bounded in number and time. Without the proxy, some attacks end the server of PyPI:
these rows show it.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from marked_tables import markdown_table, write_table
from multilora_engine.errors import MultiloraError
from multilora_engine.quickstart.default_model import ensure_default_checkpoint
from repository import REPOSITORY
from sources import measured_source
from trials.attacker import Attacker
from trials.doors import Attack
from trials.scenes import SCENES, Scene, Stage
from trials.victim import Gaps, Victim

PAGE = REPOSITORY / "docs" / "attacks.md"
TABLE = "abuse"
COLUMNS = (
    "attack",
    "before the server",
    "p99 before, during (ms)",
    "memory (MiB)",
    "attacker met",
    "harm",
)
_NUMBERS = range(2, 4)

MAX_GAP_RATIO = 3.0
"""The largest factor by which the victim's longest gaps may grow."""

MAX_GROWTH_BYTES = (1 << 30) + (256 << 20)
"""The most memory that the server may gain: its host tier and its bound on logits in flight, as they are by default."""

_SETTLE_S = 1.5
_QUIET_S = 5.0
_MIN_ATTACK_S = 5.0


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
        """The row in `COLUMNS`: answers without their numbers; without harm the last cell is empty."""
        gaps = f"{self.quiet.p99_ms:.0f}, {self.under.p99_ms:.0f}"
        harm = "" if self.verdict == "fine" else self.verdict
        before, after = (num // (1 << 20) for num in self.num_bytes)
        met = re.sub(r"\b\d+ x ", "", self.met)
        return self.name, self.door, gaps, f"{after - before:+,}", met, harm


def main(
    attack: Annotated[list[str] | None, typer.Option(help="Only attacks whose names have this; repeatable.")] = None,
    door: Annotated[list[str] | None, typer.Option(help="Only servers behind this: proxy, API keys, none.")] = None,
    model: Annotated[Path | None, typer.Option(help="Checkpoint (default: the default model).")] = None,
    update_docs: Annotated[
        bool, typer.Option("--docs", help="Write the table into docs/attacks.md, with any result.")
    ] = False,
) -> None:
    if update_docs and (attack or door):
        raise typer.BadParameter("--docs is for a run of every row; leave out --attack and --door")
    titles, attacks = [scene.title for scene in SCENES], [name for scene in SCENES for name in scene.attacks]
    if unknown := [title for title in door or () if title not in titles]:
        raise typer.BadParameter(f"there is no door {', '.join(unknown)}; there are {', '.join(titles)}")
    if unknown := [part for part in attack or () if not any(part in name for name in attacks)]:
        raise typer.BadParameter(f"the name of no attack has {', '.join(unknown)}")
    source = measured_source() if update_docs else ""
    console = Console()
    checkpoint = model or ensure_default_checkpoint()
    scenes = [chosen(scene, attack) for scene in SCENES if not door or scene.title in door]
    num_rows, rows = sum(len(scene.attacks) for scene in scenes), []
    for scene in scenes:
        for row in play(scene, checkpoint):
            rows.append(row)
            console.print(
                f"{len(rows)} of {num_rows} | {' | '.join(row.cells)} |", markup=False, highlight=False, soft_wrap=True
            )
    if update_docs:
        write_table(PAGE, TABLE, markdown_table(COLUMNS, (row.cells for row in rows), _NUMBERS), source)
    raise typer.Exit(int(any(row.verdict != "fine" for row in rows if row.door != "none")))


def chosen(scene: Scene, parts: list[str] | None) -> Scene:
    """The attacks of a scene whose names have one of `parts`."""
    attacks = {name: each for name, each in scene.attacks.items() if not parts or any(part in name for part in parts)}
    return replace(scene, attacks=attacks)


def play(scene: Scene, model: Path) -> Iterator[Row]:
    """A row for each attack. After an attack that ended the server, a new server takes its place."""
    left = [*scene.attacks.items()]
    while left:
        try:
            with scene.open(model) as stage:
                while left and stage.is_alive:
                    yield try_attack(scene.title, *left.pop(0), stage)
        except MultiloraError as error:
            name, _ = left.pop(0)
            yield Row(scene.title, name, Gaps([], []), Gaps([], []), (0, 0), "", f"not tried: {error}")


def try_attack(door: str, name: str, attack: Attack, stage: Stage) -> Row:
    """Watch the victim for some time, then during the attack."""
    with Attacker(attack, stage.attackers) as attacker, Victim(stage.victims) as victim:
        attacker.wait_ready()
        time.sleep(_SETTLE_S)
        victim.take()
        time.sleep(_QUIET_S)
        quiet, engine, before = victim.take(), stage.engine_pid, stage.num_bytes
        start = time.monotonic()
        met, leak = attacker.carry_out()
        time.sleep(max(0.0, start + _MIN_ATTACK_S - time.monotonic()))
        under, after = victim.take(), stage.num_bytes
        loss = leak or _loss(stage, engine)
    if stage.is_alive:
        stage.server.wait_ready()
    return Row(door, name, quiet, under, (before, after), met, loss)


def _loss(stage: Stage, engine: int | None) -> str:
    """The things that are gone after an attack; empty if nothing is."""
    if not stage.is_alive:
        return "server lost"
    return "" if stage.engine_pid == engine else "engine lost"
