"""The memory that is left: of the machine, and of control groups as Linux writes their files."""

from __future__ import annotations

from pathlib import Path

import pytest

from multilora_engine.engine.memory import available_memory, give_back_freed_memory


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    folder = tmp_path / "proc"
    (folder / "self").mkdir(parents=True)
    (folder / "meminfo").write_text("MemTotal:       9000 kB\nMemAvailable:    8000 kB\nHugePages_Total:       0\n")
    return folder


def make_group(folder: Path, limit: str, used: int, inactive: int) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {inactive}\nactive_file 9\n")


def test_without_control_groups_it_is_what_the_machine_has(proc: Path, tmp_path: Path) -> None:
    assert available_memory(proc, tmp_path / "none") == 8000 << 10


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        (("max", "max"), 8000 << 10),
        (("5000000", "max"), 5_000_000 - 3_000_000 + 1_000_000),
        (("max", "4000000"), 4_000_000 - 3_000_000 + 1_000_000),
        (("5000000", "4000000"), 2_000_000),
        (("1000000", "max"), 0),
    ],
)
def test_the_smallest_limit_of_all_groups_above_counts(
    proc: Path, tmp_path: Path, limits: tuple[str, str], expected: int
) -> None:
    groups = tmp_path / "groups"
    (proc / "self" / "cgroup").write_text("0::/outer/inner\n")
    for folder, limit in zip((groups / "outer", groups / "outer" / "inner"), limits, strict=True):
        make_group(folder, limit, 3_000_000, 1_000_000)
    assert available_memory(proc, groups) == expected


def test_the_group_of_a_container_is_the_root_that_it_sees(proc: Path, tmp_path: Path) -> None:
    (proc / "self" / "cgroup").write_text("0::/\n")
    make_group(tmp_path / "groups", "7000", 1000, 0)
    assert available_memory(proc, tmp_path / "groups") == 6000


def test_this_machine_has_some() -> None:
    assert available_memory() > 1 << 20


def test_freed_memory_between_memory_in_use_goes_back() -> None:
    """glibc gives the end of its heap back by itself, and nothing below memory that is in use."""
    blocks = [bytearray(b"x" * (64 << 10)) for _ in range(1600)]
    in_use = blocks[::100]
    blocks.clear()
    kept = resident_bytes()
    give_back_freed_memory()
    assert kept - resident_bytes() > 80 << 20
    assert all(block[0] == ord("x") for block in in_use)


def resident_bytes() -> int:
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon:")]
    return int(line.split()[1]) << 10
