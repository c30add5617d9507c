"""Where the processes of one server meet: `<tempdir>/multilora-<uid>/<pid of the server>/engine.sock`."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from multilora_engine.errors import ConfigError

_MAX_SOCKET_PATH = 107
"""Bytes of `sun_path` in sockaddr_un, less the terminating zero."""


def socket_path(server_pid: int) -> Path:
    """The engine's socket of the server with this pid, in a directory that only we can enter. Raises ConfigError."""
    root = Path(tempfile.gettempdir()) / f"multilora-{os.getuid()}"
    directory = root / str(server_pid)
    _make_private(root)
    _make_private(directory)
    path = directory / "engine.sock"
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise ConfigError(f"{path} is too long for a socket; set TMPDIR to a shorter directory")
    return path


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(f"{directory} is not a directory of this user alone; remove it or set TMPDIR to another one")
