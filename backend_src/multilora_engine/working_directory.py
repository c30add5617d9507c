"""`working_directory`: where a directory is written before it takes its place with one rename."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from multilora_engine.errors import ConfigError


@contextmanager
def working_directory(target: Path, *, waits: bool = False) -> Iterator[Path]:
    """An empty directory beside `target`, on its file system, where a rename to `target` is atomic.

    It has the same name for each process that writes `target`, and one process at a time has it. At the end it is
    removed unless it was renamed; a process that is killed leaves it, and the next one removes it.

    waits: for another process that has it. Otherwise raises ConfigError.
    """
    target = target.absolute()
    target.parent.mkdir(parents=True, exist_ok=True)
    directory = target.with_name(f".{target.name}.unfinished")
    with _locked(target.with_name(f".{target.name}.lock"), target, waits):
        with suppress(FileNotFoundError):
            shutil.rmtree(directory)
        directory.mkdir()
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _locked(lock: Path, target: Path, waits: bool) -> Iterator[None]:
    """The block has the lock of the file `lock`, which is removed at the end. A killed process loses its lock."""
    while True:
        with lock.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
            except BlockingIOError:
                raise ConfigError(
                    f"another process is writing {target} now (it has the lock {lock}); wait for its end"
                ) from None
            if not _is_file_at(file.fileno(), lock):
                continue  # Its owner has removed it in the meantime, so that others lock a new file.
            try:
                yield
            finally:
                lock.unlink()
            return


def _is_file_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
