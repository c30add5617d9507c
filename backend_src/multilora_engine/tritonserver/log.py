"""Reads the server's log: tells progress from noise, and why a load failed."""

from __future__ import annotations

import json
import re
from collections import deque

from multilora_engine.tritonserver.repository import ENGINE_MODEL

_LINE = re.compile(r"^(?P<level>[IWEF])\d{4} \S+ \d+ [\w.]+:\d+\] (?P<message>.*)$")
_LOADED = re.compile(r"^successfully loaded '(?P<model>.+)'$")
_LOAD_FAILED = re.compile(r"^failed to load '(?P<model>.+)' version \d+: \w+: (?P<reason>.*)$", re.DOTALL)
_PYTHON_TRACE = re.compile(r"\n+At:\n.*", re.DOTALL)
_NOISE = (
    "CudaDriverHelper has not been initialized",
    "Failed to initialize NVML",
    "DCGM unable to start",
    "Unable to allocate pinned system memory",
    "failed to allocate pinned system memory: no pinned memory pool",
    "unable to create stream for",
    "CUDA memory pool disabled",
)
_WITHOUT_REASON = "failed to load all models"
"""The server's last word, after errors that say why."""
_COMPILING, _COMPILED = "Compiling the CPU kernels", "Compiled the CPU kernels"
_STUB_HAS_DIED = "is not healthy"
_NUM_LINES_OF_A_MODEL = 3
_TABLE_STARTS = ("+--", "| ")


class ServerLog:
    """The state that the lines so far tell. Only the thread that reads the log calls `feed`.

    loaded: the models that are, in order. is_compiling: whether the engine compiles the CPU kernels now.
    """

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.is_compiling = False
        self._load_failures: dict[str, str] = {}
        self._last_error = ""
        self._last_line = ""
        self._said: deque[str] = deque(maxlen=_NUM_LINES_OF_A_MODEL)

    def feed(self, line: str) -> bool:
        """Take one line; returns whether it is worth showing."""
        level, message = _split(line)
        if is_noise(line, message):
            return False
        self._last_line = line
        if _COMPILING in message:
            self.is_compiling = True
        elif _COMPILED in message:
            self.is_compiling = False
        if match := _LOADED.match(message):
            self.loaded.append(match["model"])
        elif match := _LOAD_FAILED.match(message):
            self._load_failures[match["model"]] = _PYTHON_TRACE.sub("", match["reason"]).strip()
        elif level in ("E", "F"):
            if not (self._last_error and _WITHOUT_REASON in message):
                self._last_error = message.strip()
        elif not level:
            self._said.append(message.strip())
        return True

    @property
    def failure(self) -> str:
        """The one line that says why the server ended: a failed load, else the last error or line.

        The other models only wait for the engine of `generation`, so its failure is the cause of theirs.
        """
        if failures := self._load_failures:
            model = ENGINE_MODEL if ENGINE_MODEL in failures else next(iter(failures))
            has_died = _STUB_HAS_DIED in failures[model]
            return f"{model}: {failures[model]}" + (self.last_words if has_died else "")
        return self._last_error or self._last_line or "it wrote no log"

    @property
    def last_words(self) -> str:
        """What the processes of models wrote last, for a message about one that died; empty when they wrote nothing."""
        return f" It wrote: {' / '.join(self._said)}" if self._said else ""


def is_noise(line: str, message: str) -> bool:
    """Lines that a healthy server also writes: GPU probing on a machine without one, and tables of its own options."""
    return not message.strip() or line.startswith(_TABLE_STARTS) or any(text in line for text in _NOISE)


def _split(line: str) -> tuple[str, str]:
    """(level, message); tritonserver's messages are quoted and escaped, an `error:` line is its last word."""
    if match := _LINE.match(line):
        return match["level"], _unquote(match["message"])
    return ("E" if line.startswith("error: ") else ""), line


def _unquote(message: str) -> str:
    try:
        return str(json.loads(message)) if message.startswith('"') else message
    except ValueError:
        return message.strip('"')
