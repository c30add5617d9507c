"""The one line that an engine process writes to its stdout, for the supervisor that started it."""

from __future__ import annotations

import os
import sys
from typing import TextIO

import msgspec

from multilora_engine.process.messages import StartReport


def take_stdout() -> TextIO:
    """The stream of the report. The output of libraries goes to stderr from here on."""
    stream = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return stream


def report(stream: TextIO, outcome: StartReport) -> None:
    """Tell the supervisor how the start went; nothing more is told then."""
    stream.write(msgspec.json.encode(outcome).decode() + "\n")
    stream.close()
