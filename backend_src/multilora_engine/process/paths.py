"""The path at which the processes of one server meet: `<tempdir>/multilora-<uid>/<pid of the server>/engine.sock`."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from multilora_engine.errors import ConfigError

ENGINE_MODULE = "multilora_engine.process.main"
"""The module that the engine process runs. It identifies the engine among the processes of its server."""

RELAY_MODULE = "multilora_engine.dynamo.relay_process"
"""The module that runs in its place if a fleet generates."""

_MAX_SOCKET_PATH = 107
"""Bytes of `sun_path` in sockaddr_un, less the terminating zero."""

_PLAIN_PATH = re.compile(r"[A-Za-z0-9/._-]+")


def socket_path(server_pid: int) -> Path:
    """The socket of the engine of the server with this pid, in a directory of this user alone. Raises ConfigError."""
    root = temporary_folder() / f"multilora-{os.getuid()}"
    _make_private(root)
    path = root / str(server_pid) / "engine.sock"
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        raise ConfigError(f"{path} is too long for a socket; set TMPDIR to a shorter directory")
    return path


def temporary_folder() -> Path:
    """A folder for temporary files whose path the server's Python backend can pass to a shell. Raises ConfigError.

    The backend starts the process of a model by a shell, without quotes. The start fails if the path of the model or of
    the backend's own files has a space, a sign of the shell, or a character beyond ASCII.
    """
    candidates = [Path(tempfile.gettempdir()).absolute(), *map(Path, ("/tmp", "/var/tmp", "/dev/shm"))]
    for folder in candidates:
        if _PLAIN_PATH.fullmatch(str(folder)) and os.access(folder, os.W_OK | os.X_OK):
            return folder
    raise ConfigError(
        f"{candidates[0]}: Triton's Python backend starts no models from paths with other characters than ASCII "
        "letters, digits and ._-; set TMPDIR to another folder"
    )


@contextmanager
def owned_socket_path(server_pid: int) -> Iterator[Path]:
    """`socket_path` for the process that starts the engine; its directory is removed at the end. Raises ConfigError."""
    path = socket_path(server_pid)
    _make_private(path.parent)
    with path.with_name("owner.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                "this server has an engine already; give the model generation one instance (instance_group count 1, "
                "at most one GPU), and unload it before loading it again"
            ) from None
        try:
            yield path
        finally:
            shutil.rmtree(path.parent, ignore_errors=True)


def _make_private(directory: Path) -> None:
    directory.mkdir(mode=0o700, exist_ok=True)
    status = directory.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise ConfigError(f"{directory} is not a directory of this user alone; remove it or set TMPDIR to another one")
