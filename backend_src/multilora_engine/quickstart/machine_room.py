"""Whether this machine has room for what a command is about to do, said before it begins."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from multilora_engine.errors import ConfigError

_MEMORY = Path("/proc/meminfo")


def check_disk(folder: Path, needed_bytes: int, purpose: str) -> None:
    """Raises ConfigError when the disk of `folder`, which need not be there yet, has less free than is needed."""
    existing = next(parent for parent in [folder, *folder.parents] if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed_bytes:
        raise ConfigError(
            f"{purpose} needs {needed_bytes >> 20} MiB of disk in {folder}, which has {free >> 20} free; free some, or "
            "name another folder with MULTILORA_CACHE"
        )


def check_memory(needed_bytes: int, purpose: str, memory: Path = _MEMORY) -> None:
    """Raises ConfigError when less memory is available than is needed. memory: the kernel's report of it."""
    available = re.search(r"^MemAvailable: +(\d+) kB$", memory.read_text(), re.MULTILINE)
    if available is None:
        return
    free = int(available[1]) << 10
    if free < needed_bytes:
        raise ConfigError(
            f"{purpose} needs {needed_bytes >> 20} MiB of memory, and {free >> 20} are available; end other programs"
        )
