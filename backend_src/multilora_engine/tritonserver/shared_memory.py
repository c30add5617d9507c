"""The server's files in /dev/shm: one name per server, and removal of the files that a crashed one left behind.

A server killed outright leaves its regions, which can hold hundreds of megabytes. Each of our servers therefore holds
an flock on `multilora_<token>.lock`. The kernel drops it with the last process that has it open, so a lock that can be
taken marks regions nobody uses; unlike a pid this is also right between containers that share /dev/shm.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from multilora_engine.tritonserver.installation import SHARED_MEMORY

_REGION_PREFIX = "triton_python_backend_shm_region_multilora_"
"""Newer servers refuse clients that register a region whose name starts with Triton's own prefix, so ours does."""

_LOCK_PREFIX = "multilora_"


@dataclass(frozen=True)
class RegionClaim:
    """The regions of one server. `lock_fd` is to be inherited by it."""

    token: str
    lock_fd: int

    @property
    def region_prefix(self) -> str:
        return f"{_REGION_PREFIX}{self.token}_"


@contextlib.contextmanager
def claim_regions() -> Iterator[RegionClaim]:
    """Take a name that no other server has; its regions are removed at the end."""
    token = secrets.token_hex(8)
    lock_fd = _create_lock(token)
    try:
        yield RegionClaim(token, lock_fd)
    finally:
        _remove(token)
        os.close(lock_fd)


def remove_leftovers() -> list[str]:
    """Remove the regions of our servers that no longer run; returns their names."""
    removed = []
    for lock in SHARED_MEMORY.glob(f"{_LOCK_PREFIX}*.lock"):
        with contextlib.suppress(FileNotFoundError, BlockingIOError, PermissionError), lock.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            removed += _remove(lock.stem.removeprefix(_LOCK_PREFIX))
    return removed


def _create_lock(token: str) -> int:
    # Locked before it gets the name that remove_leftovers looks for, so that no one takes it for a leftover.
    draft = SHARED_MEMORY / f"{_LOCK_PREFIX}{token}.draft"
    lock_fd = os.open(draft, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
    fcntl.flock(lock_fd, fcntl.LOCK_EX)
    draft.rename(_lock_path(token))
    return lock_fd


def _remove(token: str) -> list[str]:
    regions = list(SHARED_MEMORY.glob(f"{_REGION_PREFIX}{token}_*"))
    for path in (*regions, _lock_path(token)):
        path.unlink(missing_ok=True)
    return [region.name for region in regions]


def _lock_path(token: str) -> Path:
    return SHARED_MEMORY / f"{_LOCK_PREFIX}{token}.lock"
