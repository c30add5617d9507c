"""Makes a folder from which `pip install` serves without a clone: wheels, source, requirements, checksums and notes.

The wheel of the kernels has the C++ operators compiled for every x86-64 processor, Python and torch that its metadata
allows: the operators choose the widest instructions at run time. The wheel of the engine has the model repository and
the sample adapters. All files are of the last commit.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from repository import REPOSITORY

DISTRIBUTIONS = ("client", "kernels", "backend_src")
"""The folders of the three, in the order in which they need each other."""
CHANGES = REPOSITORY / "CHANGELOG.md"
CHECKSUMS = "SHA256SUMS"
NOTES = "NOTES.md"
REQUIREMENTS = "requirements.txt"
_PINS = REPOSITORY / "constraints.txt"

console = Console(stderr=True, highlight=False)


def main(
    output: Annotated[Path, typer.Option(help="Folder for the release; it must not be there yet.")] = REPOSITORY
    / "dist",
) -> None:
    if output.exists():
        raise typer.BadParameter(f"{output} exists; remove it, or name another folder with --output")
    if changed := git("status", "--porcelain", "--untracked-files=no"):
        raise typer.BadParameter(f"a release is of a commit; commit or revert:\n{changed}")
    for file in build_release(output):
        console.print(f"{file}  {file.stat().st_size / 1e6:.1f} MB")


def build_release(output: Path) -> list[Path]:
    """Fill the folder `output` with a release of the last commit; its files.

    Raises subprocess.CalledProcessError when a wheel cannot be built; the output says why.
    """
    version = released_version()
    output.mkdir(parents=True)
    for folder in DISTRIBUTIONS:
        with console.status(f"{folder}: building"):
            build_wheel(folder, output, is_binary=folder == "kernels")
    name = f"multilora-{version}"
    git("archive", f"--prefix={name}/", f"--output={(output / name).absolute()}.tar.gz", "HEAD")
    shutil.copy2(_PINS, output)
    (output / REQUIREMENTS).write_text(requirements(version))
    (output / NOTES).write_text(notes(version))
    (output / CHECKSUMS).write_text(checksums(output.iterdir()))
    return sorted(output.iterdir())


def released_version() -> str:
    """The version of the three distributions."""
    settings = (tomllib.loads((REPOSITORY / folder / "pyproject.toml").read_text()) for folder in DISTRIBUTIONS)
    (version,) = {str(each["project"]["version"]) for each in settings}
    return version


def requirements(version: str) -> str:
    """What `pip install -r` takes: the three wheels beside the file, and the versions that are known to go together."""
    return (
        f"--find-links .\n-c {_PINS.name}\nmultilora-client=={version}\nmultilora-kernels=={version}\n"
        f"multilora-engine[quickstart]=={version}\n"
    )


def notes(version: str) -> str:
    """The changes that CHANGELOG.md tells of this version, the commits since the last tag, and how to install."""
    section = re.search(
        rf"^## {re.escape(version)}\b.*?$(.*?)(?=^## |\Z)", CHANGES.read_text(), re.DOTALL | re.MULTILINE
    )
    assert section is not None, f"{CHANGES.name} says nothing of {version}"
    tag = git("tag", "--merged", "HEAD", "--sort=-creatordate").partition("\n")[0]
    commits = git("log", "--format=- %s", f"{tag}..HEAD") if tag else ""
    since = f"\n## Commits since {tag}\n\n{commits}\n" if commits else ""
    return (
        f"# multilora {version}\n\n{section[1].strip()}\n{since}\n## Install\n\n"
        f"    sha256sum --check {CHECKSUMS}\n    python3 -m venv multilora\n"
        f"    multilora/bin/pip install -r {REQUIREMENTS}\n    multilora/bin/multilora-quickstart\n\n"
        f"Commit {git('rev-parse', 'HEAD')}.\n"
    )


def checksums(files: Iterable[Path]) -> str:
    """Lines that `sha256sum --check` reads."""
    return "".join(f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n" for file in sorted(files))


def build_wheel(folder: str, output: Path, is_binary: bool) -> Path:
    """Make the wheel of the distribution in `folder` from its tracked files. is_binary: with compiled operators.

    Raises subprocess.CalledProcessError when it cannot be built; the output says why.
    """
    with tempfile.TemporaryDirectory() as copy:
        source = copy_tracked((folder, "model_repository", "adapters"), Path(copy)) / folder
        if is_binary:
            add_prebuilt(source)
        made = Path(copy) / "wheels"
        pip = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
        subprocess.run([*pip, "--wheel-dir", str(made), str(source)], check=True)
        (wheel,) = made.iterdir()
        output.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy2(wheel, output))


def copy_tracked(folders: tuple[str, ...], target: Path) -> Path:
    """Copy the tracked files of these folders of the repository, as they are now, to `target`."""
    for name in filter(None, git("ls-files", "-z", *folders).split("\0")):
        if (REPOSITORY / name).exists():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, target / name)
    return target


def add_prebuilt(source: Path) -> None:
    """Put the operators of the copy at `source`, compiled now or before, into the place where a wheel has them."""
    package = source / "multilora_kernels" / "cpu"
    build = "from multilora_kernels.cpu.build import load_library; print(load_library().__file__)"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, stdout=subprocess.PIPE, text=True, check=True)
    library = Path(done.stdout.strip())
    target = package / "prebuilt" / library.parent.name
    target.mkdir(parents=True)
    shutil.copy2(library, target)


def git(*arguments: str) -> str:
    """What git says about this repository."""
    command = ["git", "-C", str(REPOSITORY), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
