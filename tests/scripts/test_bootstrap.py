"""What scripts/bootstrap refuses before it installs anything, on machines whose PATH each test makes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from multilora_engine.shared_python import libpython_directory
from repository import REPOSITORY

PROGRAMS = ("env", "bash", "cat", "df", "dirname", "sha256sum", "tail")


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A folder of programs without any Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in PROGRAMS:
        (folder / name).symlink_to(str(shutil.which(name)))
    return folder


def add_python(machine: Path, name: str, version: str) -> Path:
    """A Python that tells its version, and has no venv."""
    python = machine / name
    python.write_text(f"#!{machine}/bash\n[[ $2 == *print* ]] && echo {version}\n")
    python.chmod(0o755)
    return python


def bootstrap(clone: Path, machine: Path, environ: Mapping[str, str] | None = None) -> str:
    """The last line of scripts/bootstrap, which has to fail, in a clone that has the sources of both packages."""
    for part in ("scripts/bootstrap", "scripts/find_python", "constraints.txt", "backend_src/pyproject.toml"):
        (clone / part).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(REPOSITORY / part, clone / part)
    for package in ("backend_src/multilora_engine", "client/multilora_wire"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(REPOSITORY / package, clone / package, ignore=ignored, dirs_exist_ok=True)
    variables = {"PATH": str(machine), **(environ or {})}
    done = subprocess.run([clone / "scripts/bootstrap"], env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert not (clone / ".venv").exists()
    return done.stderr.splitlines()[-1]


def test_no_python_is_told_with_a_way_to_one(tmp_path: Path, machine: Path) -> None:
    said = bootstrap(tmp_path / "clone", machine)
    assert "needs Python 3.11 or 3.12 with venv (found no python3.11 python3.12 python3); install it: " in said


def test_a_python_that_does_is_taken_without_any_package_installed(tmp_path: Path, machine: Path) -> None:
    """The next thing that is asked is the disk."""
    (machine / "python3").symlink_to(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")
    (machine / "df").unlink()
    (machine / "df").write_text(f"#!{machine}/bash\necho 7\n")
    (machine / "df").chmod(0o755)
    assert "needs 4096 MiB of disk" in bootstrap(tmp_path / "clone", machine)


def test_pythons_that_do_not_do_are_named(tmp_path: Path, machine: Path) -> None:
    add_python(machine, "python3", "3.13.2")
    add_python(machine, "python3.12", "3.12.3")
    said = bootstrap(tmp_path / "clone", machine)
    assert "(python3.12 is 3.12.3 without venv, python3 is 3.13.2)" in said


def test_the_python_that_was_asked_for_is_the_only_one(tmp_path: Path, machine: Path) -> None:
    (machine / "python3").symlink_to(sys.executable)
    folder = tmp_path / "other pythons"
    folder.mkdir()
    python = add_python(folder, "python3.10", "3.10.1").rename(folder / "python")
    python.write_text(python.read_text().replace(str(folder), str(machine)))
    assert f"({python} is 3.10.1)" in bootstrap(tmp_path / "clone", machine, {"PYTHON": str(python)})


def test_a_clone_whose_path_triton_cannot_open_is_refused_before_anything_is_made(
    tmp_path: Path, machine: Path
) -> None:
    libpython = libpython_directory()
    environ = {"PYTHON": sys.executable, "LC_ALL": "C.UTF-8", "LD_LIBRARY_PATH": str(libpython or "")}
    said = bootstrap(tmp_path / "Téléchargements", machine, environ | {"HOME": os.environ.get("HOME", "/")})
    assert "Téléchargements" in said
    assert "only in paths of ASCII characters; clone or install into another folder" in said
