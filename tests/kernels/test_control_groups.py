"""How many processors a process may use, by files that are as Linux writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from multilora_kernels import control_groups
from multilora_kernels.control_groups import usable_processors


@pytest.mark.parametrize(
    ("inner", "outer", "expected"),
    [
        ("max 100000", "max 100000", 8),
        ("200000 100000", "max 100000", 2),
        ("max 100000", "350000 100000", 4),
        ("10000 100000", "350000 100000", 1),
        ("6400000 100000", "max 100000", 8),
        ("no such format", None, 8),
        (None, None, 8),
    ],
)
def test_the_least_limit_of_time_counts_where_there_are_more_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inner: str | None, outer: str | None, expected: int
) -> None:
    monkeypatch.setattr(control_groups.os, "sched_getaffinity", lambda _: range(8))
    proc, groups = tmp_path / "proc", tmp_path / "cgroup"
    (proc / "self").mkdir(parents=True)
    (groups / "outer" / "inner").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text("1:cpu:/elsewhere\n0::/outer/inner\n")
    for folder, limit in ((groups / "outer" / "inner", inner), (groups / "outer", outer)):
        if limit is not None:
            (folder / "cpu.max").write_text(f"{limit}\n")
    assert usable_processors(proc, groups) == expected


def test_a_machine_without_control_groups_has_the_processors_that_it_may_run_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_groups.os, "sched_getaffinity", lambda _: {3, 5})
    assert usable_processors(tmp_path, tmp_path) == 2
