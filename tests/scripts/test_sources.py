"""The sentence below a table tells the command, the machine and the commit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer

import sources

CPUINFO = """processor\t: 0
vendor_id\t: AuthenticAMD
cpu family\t: 25
model\t\t: 17
model name\t: AMD EPYC(TM) 9R14
flags\t\t: fpu avx2 avx512f avx512_bf16

processor\t: 1
model name\t: another
"""


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository of one commit, in the place of ours."""
    (tmp_path / "docs").mkdir()
    for name in ("code.py", "docs/page.md"):
        (tmp_path / name).write_text("first")
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", ".")
    git(tmp_path, "-c", "user.name=test", "-c", "user.email=test@localhost", "commit", "--quiet", "--message", "first")
    monkeypatch.setattr(sources, "REPOSITORY", tmp_path)
    monkeypatch.setattr(sys, "argv", ["scripts/run bench_engine", "--part", "decode", "--docs"])
    return tmp_path


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", "-C", folder, *arguments], check=True, capture_output=True, text=True).stdout.strip()


def test_a_machine_is_its_processor_with_the_instructions_that_matter(tmp_path: Path) -> None:
    path = tmp_path / "cpuinfo"
    path.write_text(CPUINFO)
    told = sources.machine(path)
    assert " cores of AMD EPYC 9R14 (family 25, model 17; AVX512_BF16, AVX-512)" in told
    path.write_text(CPUINFO.replace("avx512f avx512_bf16", ""))
    assert sources.machine(path).partition("; ")[2].startswith("AVX2)")
    path.write_text("processor\t: 0\n")
    assert " cores of " in sources.machine(path)


def test_figures_are_of_the_commit_that_ran_whatever_documents_say_meanwhile(clone: Path) -> None:
    commit = git(clone, "rev-parse", "HEAD")[:9]
    (clone / "docs/page.md").write_text("another table")
    told = sources.measured_source()
    assert told.startswith("By `scripts/run bench_engine --part decode --docs` on ")
    assert told.endswith(f", commit {commit}.")


def test_changed_code_is_said(clone: Path) -> None:
    (clone / "code.py").write_text("second")
    assert sources.measured_source().endswith(", with changes that are not committed.")


def test_figures_without_a_commit_are_refused_before_they_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "REPOSITORY", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    with pytest.raises(typer.BadParameter, match="run it in a clone"):
        sources.measured_source()


def test_the_command_does_not_tell_where_this_machine_keeps_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["scripts/run try_images", "cpu", "--folder", "/srv/images", "--docs"])
    assert sources.command_source() == "By `scripts/run try_images cpu --docs`."
