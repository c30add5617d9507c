"""What a command needs is compared with what the machine has, and said with both numbers."""

from __future__ import annotations

from pathlib import Path

import pytest

from multilora_engine.errors import ConfigError
from multilora_engine.quickstart.machine_room import check_disk, check_memory


def test_memory_is_what_the_kernel_calls_available(tmp_path: Path) -> None:
    report = tmp_path / "meminfo"
    report.write_text("MemTotal:       16384000 kB\nMemFree:          100000 kB\nMemAvailable:    1048576 kB\n")
    check_memory(1 << 30, "a server", report)
    with pytest.raises(ConfigError, match=r"^a server needs 1025 MiB of memory, and 1024 are available; end other"):
        check_memory(1025 << 20, "a server", report)


def test_disk_is_that_of_the_nearest_folder_that_is_there(tmp_path: Path) -> None:
    check_disk(tmp_path / "new" / "folder", 1, "a model")
    with pytest.raises(ConfigError, match=r"^a model needs 1073741824 MiB of disk in .*/new, which has \d+ free; free"):
        check_disk(tmp_path / "new", 1 << 50, "a model")
