"""An attack in a process of its own, whose interpreter the victim's clock does not share."""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Self

from trials.doors import Attack, Doors, Leak

TIMEOUT_S = 180.0

_NICENESS = 19
"""A real attacker computes on its own machine: here its computing shall cost server and victim nothing."""

_AUTOGROUP = Path("/proc/self/autogroup")
"""The niceness of a session. Linux may share its time among sessions first: a nice process that is alone in a session
gets as much time as a whole server's session."""


class Attacker:
    """Waits with all modules loaded until it is told to attack. Ends with the context, even during an attack."""

    def __init__(self, attack: Attack, doors: Doors) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._connection, self._theirs = spawn.Pipe()
        self._process = spawn.Process(target=_attack, args=(attack, doors, self._theirs), daemon=True)

    def __enter__(self) -> Self:
        self._process.start()
        self._theirs.close()  # so that this process sees the other one end
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.join()

    def wait_ready(self) -> None:
        self._connection.recv()

    def carry_out(self) -> tuple[str, str]:
        """The answers that the attacker got, and the verdict of a leak; empty if it learnt of no other client."""
        try:
            self._connection.send("attack")
            if not self._connection.poll(TIMEOUT_S):
                return f"not over after {TIMEOUT_S:.0f} s", "not over"
            met, leak = self._connection.recv()
        except (BrokenPipeError, EOFError):
            self._process.join()
            return f"its process ended with status {self._process.exitcode}", "not tried"
        return met, leak


def _attack(attack: Attack, doors: Doors, connection: Connection) -> None:
    _step_back()
    connection.send("ready")
    connection.recv()
    connection.send(_carried_out(attack, doors))


def _step_back() -> None:
    """Let all other processes go first: those of this session, and those of the server's sessions."""
    os.nice(_NICENESS)
    os.setsid()
    if _AUTOGROUP.exists():
        _AUTOGROUP.write_text(str(_NICENESS))


def _carried_out(attack: Attack, doors: Doors) -> tuple[str, str]:
    try:
        return attack(doors), ""
    except Leak as leak:
        return str(leak), "tells"
    except Exception as error:  # an error becomes the text of the attack's row
        return f"{type(error).__name__}: {error}"[:200], "not tried"
