"""Room in /dev/shm, through which every request and response passes between the server and its Python models."""

from __future__ import annotations

import shutil
from pathlib import Path

from multilora_engine.errors import ConfigError

SHARED_MEMORY = Path("/dev/shm")

_MINIMUM_FREE_BYTES = 32 << 20


def check_free_space(largest_request_bytes: int = 0) -> None:
    """Raises ConfigError when /dev/shm is too small for the stubs' regions and one request of that size.

    Without the check the first large adapter would fail instead, in a container with the usual 64 MiB.
    """
    free = shutil.disk_usage(SHARED_MEMORY).free
    needed = _MINIMUM_FREE_BYTES + largest_request_bytes
    if free < needed:
        largest = f", {largest_request_bytes >> 20} MiB of it for the largest adapter" if largest_request_bytes else ""
        raise ConfigError(
            f"{SHARED_MEMORY} has {free >> 20} MiB free and the server needs {needed >> 20} MiB at least{largest}; "
            f"in a container give --shm-size=1g, or more, or lower max_lora_rank"
        )
