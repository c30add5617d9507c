"""Compiles request_guard.c, a library that tritonserver loads before its own: it refuses requests that would end it.

`python -m multilora_engine.tritonserver.request_guard` compiles it ahead, for images whose servers find no compiler.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from multilora_engine.errors import ConfigError

_SOURCE = Path(__file__).with_suffix(".c")
_BUILT_AHEAD = Path(__file__).with_suffix(".so")
_PRELOAD = "LD_PRELOAD"

logger = logging.getLogger(__name__)


def guarded(environment: Mapping[str, str], folder: Path) -> dict[str, str]:
    """The server's environment with the guard, compiled into `folder` unless it was ahead. Raises ConfigError.

    Where it cannot be made or loaded, the log says so.
    """
    library = _BUILT_AHEAD if _BUILT_AHEAD.exists() else folder / _BUILT_AHEAD.name
    compiler = shutil.which(environment.get("CC", "cc"), path=environment.get("PATH"))
    if any(character in " :" for character in str(library)):
        return _unguarded(environment, f"{library} has a space or a colon, at which {_PRELOAD} is cut")
    if library != _BUILT_AHEAD:
        if compiler is None:
            return _unguarded(environment, "there is no C compiler")
        _compile(compiler, library)
    return {**environment, _PRELOAD: " ".join(filter(None, [environment.get(_PRELOAD), str(library)]))}


def _unguarded(environment: Mapping[str, str], reason: str) -> dict[str, str]:
    logger.warning("the server goes without its guard (SECURITY.md, Running it in production): %s", reason)
    return dict(environment)


def _compile(compiler: str, library: Path) -> None:
    command = [compiler, "-O2", "-Wall", "-shared", "-fPIC", "-o", str(library), str(_SOURCE), "-ldl"]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise ConfigError(f"the server's guard cannot be compiled: {done.stdout.strip()}")


if __name__ == "__main__":
    _compile(os.environ.get("CC", "cc"), _BUILT_AHEAD)
