"""A wall clock that is set while programs run, for them alone: wall_clock.c, preloaded."""

from __future__ import annotations

import mmap
import struct
import subprocess
from pathlib import Path

_SOURCE = Path(__file__).with_suffix(".c")
_OFFSET = struct.Struct("q")
_NS = 10**9


class WallClock:
    """The clock of the programs started with `environment`, and of their children. At first it is right."""

    def __init__(self, directory: Path) -> None:
        """directory: for the library and the clock's offset; must outlive the programs."""
        self._library = directory / "wall_clock.so"
        self.offset_file = directory / "wall_clock_offset"
        self.offset_file.write_bytes(_OFFSET.pack(0))
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", self._library, _SOURCE], check=True)

    @property
    def environment(self) -> dict[str, str]:
        return {"LD_PRELOAD": str(self._library), "WALL_CLOCK_OFFSET": str(self.offset_file)}

    def set(self, offset_s: int) -> None:
        """Run so many seconds ahead of the true time from now on."""
        with self.offset_file.open("r+b") as file, mmap.mmap(file.fileno(), _OFFSET.size) as page:
            # One store of eight bytes, so that no program sees half of it.
            memoryview(page).cast("q")[0] = offset_s * _NS

    def is_of(self, pid: int) -> bool:
        """Whether a process has this clock."""
        return str(self.offset_file) in Path(f"/proc/{pid}/maps").read_text()
