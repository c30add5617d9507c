"""A newcomer's first commands end well, or with a sentence that says what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from deployment import try_first_minutes
from deployment.try_first_minutes import MACHINES, PAGE, SCENES, TABLE, Ending, Scene, endings_table, main, play
from marked_tables import read_cells, read_table

FAILURE = Scene("disk", "bare", "script", r"needs \d+ MiB; free some")
HINT = Scene("a compiler", "bare", "script", r"No compiler: .+ apt-get install g\+\+", ends_well=True)


@pytest.mark.parametrize(
    ("scene", "status", "output", "seconds", "is_right"),
    [
        (FAILURE, 1, "==> Creating\nneeds 9 MiB; free\t some\n\n", 2, True),
        (FAILURE, 0, "needs 9 MiB; free some\n", 2, False),
        (FAILURE, 1, "needs 9 MiB; free some\nTraceback (most recent call last)\n", 2, False),
        (FAILURE, 1, "needs 9 MiB; free some\n", 301, False),
        (FAILURE, 1, "", 2, False),
        (HINT, 0, "No compiler: slower; apt-get install g++\nan answer\n", 2, True),
        (HINT, 1, "No compiler: slower; apt-get install g++\nan error\n", 2, False),
        (HINT, 0, "an answer\n", 2, False),
    ],
)
def test_an_end_is_right_by_its_status_its_sentence_and_its_time(
    scene: Scene, status: int, output: str, seconds: float, is_right: bool
) -> None:
    assert Ending(scene, status, output, seconds, 0).is_right is is_right


def test_each_machine_is_played_and_each_lack_once() -> None:
    assert {scene.machine for scene in SCENES} == MACHINES.keys()
    assert len({scene.lacks for scene in SCENES}) == len(SCENES)
    assert [scene.lacks for scene in SCENES if scene.has_network] == ["nothing", "a clone and a compiler"]


def test_the_page_tells_the_end_of_each_scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    endings = [
        Ending(FAILURE, 1, "==> Creating\nneeds 9 MiB; free some\n", 1.6, 4_000_000),
        Ending(HINT, 0, "==> No compiler: slower; apt-get install g++ (it helps)\nan answer\n", 70, 3_123_400_000),
    ]
    monkeypatch.setattr(try_first_minutes, "PAGE", page)
    monkeypatch.setattr(try_first_minutes, "measured_source", lambda: "By a test.")
    monkeypatch.setattr(try_first_minutes, "require_tools", lambda: None)
    monkeypatch.setattr(try_first_minutes, "play", lambda *_: iter(endings))
    with pytest.raises(try_first_minutes.typer.Exit) as ended:
        main(update_docs=True)
    assert ended.value.exit_code == 0
    assert [tuple(row.values()) for row in read_cells(page, TABLE)] == [
        ("disk", "2", "4", "`needs 9 MiB; free some`"),
        ("a compiler", "70", "3,123", "`No compiler: slower; apt-get install g++`"),
    ]
    assert read_table(page, TABLE).endswith("\n\nBy a test.\n")
    with pytest.raises(try_first_minutes.typer.BadParameter, match="leave --only out"):
        main(only=["disk"], update_docs=True)
    with pytest.raises(try_first_minutes.typer.BadParameter, match="the name of no scene has no-such; there are"):
        main(only=["no-such"])


def test_the_page_shows_every_scene_with_the_sentence_that_it_has_to_end_with() -> None:
    rows = read_cells(PAGE, TABLE)
    assert [row["a machine without"] for row in rows] == [scene.lacks for scene in SCENES]
    for row, scene in zip(rows, SCENES, strict=True):
        status, num_bytes = 0 if scene.ends_well else 1, int(row["MB"].replace(",", "")) * 10**6
        ending = Ending(scene, status, row["says"].strip("`"), float(row["seconds"]), num_bytes)
        assert ending.is_right, row
    assert endings_table([]).splitlines()[0] == read_table(PAGE, TABLE).splitlines()[0]


@pytest.mark.long(reason="makes a Debian, and another with Python")
def test_machines_without_python_or_its_library_are_told_what_to_install(tmp_path: Path) -> None:
    endings = list(play(tmp_path, ["Python"]))
    assert [ending.scene.lacks for ending in endings] == ["Python", "Python's shared library"]
    assert all(ending.is_right for ending in endings), [ending.output for ending in endings]
