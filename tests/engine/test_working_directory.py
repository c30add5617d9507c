"""A directory that is being written, by processes that end well, that are killed, and that meet."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from multilora_engine.errors import ConfigError
from multilora_engine.working_directory import working_directory

WRITER = """
import sys
from pathlib import Path
from multilora_engine.working_directory import working_directory
with working_directory(Path(sys.argv[1])) as directory:
    (directory / "half").write_text("half of a file")
    print(directory, flush=True)
    sys.stdin.read()
"""


@contextmanager
def writer(target: Path) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Another process that has begun to write `target`, and its directory. It ends when its input does."""
    command = [sys.executable, "-c", WRITER, str(target)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process, Path(process.stdout.readline().rstrip("\n"))
        process.kill()


def test_a_directory_takes_its_place_with_a_rename_and_nothing_else_stays(tmp_path: Path) -> None:
    with working_directory(tmp_path / "models" / "out") as directory:
        (directory / "file").write_text("whole")
        directory.rename(tmp_path / "models" / "out")

    assert [path.name for path in (tmp_path / "models").iterdir()] == ["out"]
    assert (tmp_path / "models/out/file").read_text() == "whole"


def test_an_error_leaves_nothing(tmp_path: Path) -> None:
    def write() -> None:
        with working_directory(tmp_path / "out") as directory:
            (directory / "file").write_text("half")
            raise OSError("the disk is full")

    with pytest.raises(OSError, match="disk is full"):
        write()
    assert list(tmp_path.iterdir()) == []


def test_the_next_process_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    with writer(tmp_path / "out") as (process, left):
        process.kill()
    assert (left / "half").is_file()

    with working_directory(tmp_path / "out") as directory:
        assert list(directory.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_a_process_is_writing_stays_as_it_is(tmp_path: Path) -> None:
    with writer(tmp_path / "out") as (_, used):
        with (
            pytest.raises(ConfigError, match=r"another process is writing .*/out now"),
            working_directory(tmp_path / "out"),
        ):
            pass
        assert (used / "half").is_file()
        with working_directory(tmp_path / "other") as directory:
            assert directory != used


def test_a_process_may_wait_for_the_one_before_it(tmp_path: Path) -> None:
    with writer(tmp_path / "out") as (process, used):
        assert process.stdin is not None
        process.stdin.close()
        with working_directory(tmp_path / "out", waits=True) as directory:
            assert directory == used
            assert list(directory.iterdir()) == []
    assert list(tmp_path.iterdir()) == []
