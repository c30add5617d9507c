"""Makes wheels of the three distributions. The wheel of the kernels has the C++ operators compiled for every x86-64
processor, Python and torch that its metadata allows: the operators choose the widest instructions at run time.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from repository import REPOSITORY

DISTRIBUTIONS = ("client", "kernels", "backend_src")
"""The folders of the three, in the order in which they need each other."""

console = Console(stderr=True, highlight=False)


def main(
    output: Annotated[Path, typer.Option(help="Folder for the wheels.")] = REPOSITORY / "dist",
) -> None:
    for folder in DISTRIBUTIONS:
        with console.status(f"{folder}: building"):
            wheel = build_wheel(folder, output, is_binary=folder == "kernels")
        console.print(f"{wheel}  {wheel.stat().st_size / 1e6:.1f} MB")


def build_wheel(folder: str, output: Path, is_binary: bool) -> Path:
    """Make the wheel of the distribution in `folder` from its tracked files. is_binary: with compiled operators.

    Raises subprocess.CalledProcessError when it cannot be built; the output says why.
    """
    with tempfile.TemporaryDirectory() as copy:
        source = copy_tracked((folder, "model_repository"), Path(copy)) / folder
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
    listed = subprocess.run(
        ["git", "ls-files", "-z", *folders], cwd=REPOSITORY, capture_output=True, text=True, check=True
    ).stdout
    for name in filter(None, listed.split("\0")):
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
