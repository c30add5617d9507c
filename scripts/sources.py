"""The line below a table that a command wrote: the command, the machine, and the commit that gave its figures."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import typer

from repository import REPOSITORY

_INSTRUCTIONS = {"amx_bf16": "AMX", "avx512_bf16": "AVX512_BF16", "avx512f": "AVX-512", "avx2": "AVX2"}
"""Processor flags that the speed depends on, and their usual names."""

_FOLDERS = ("--output", "--folder", "--environments")
"""Options of our commands whose value is a folder for their files."""


def measured_source() -> str:
    """A sentence for figures that this process measures, to be asked for before it does.

    Raises typer.BadParameter outside a clone of the repository, where the commit is not known.
    """
    return f"{command_source()[:-1]} on {machine()}, commit {commit()}."


def command_source() -> str:
    """A sentence for figures that follow from the code by arithmetic: the command that this process was started by.

    It leaves out the folders in which this machine keeps files: no figure depends on them.
    """
    program, *arguments = sys.argv
    for option in _FOLDERS:
        while option in arguments:
            place = arguments.index(option)
            del arguments[place : place + 2]
    return f"By `{' '.join([program, *map(shlex.quote, arguments)])}`."


def machine(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The processor and the GPU, if there is one: `2 cores of AMD EPYC (family 25, model 17; AVX512_BF16, AVX-512)`."""
    processor = dict(re.findall(r"^([^\t\n]+)\t*: (.*)$", cpuinfo.read_text().partition("\n\n")[0], re.MULTILINE))
    name = re.sub(r"\((R|TM)\)", "", processor.get("model name", os.uname().machine))
    flags = processor.get("flags", "").split()
    instructions = [text for flag, text in _INSTRUCTIONS.items() if flag in flags]
    if "AVX-512" in instructions:
        instructions.remove("AVX2")  # All that have the one have the other.
    model = [f"{key.removeprefix('cpu ')} {processor[key]}" for key in ("cpu family", "model") if key in processor]
    details = "; ".join(filter(None, (", ".join(model), ", ".join(instructions))))
    return f"{len(os.sched_getaffinity(0))} cores of {name}{f' ({details})' if details else ''}{_gpu()}"


def commit() -> str:
    """The commit of the code; documents may have changed since. Raises as `measured_source` does."""
    try:
        name = _git("rev-parse", "--short=9", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs", ":!*.md")
    except (OSError, subprocess.CalledProcessError):
        raise typer.BadParameter(
            f"--docs writes the commit beside the figures, and git knows none of {REPOSITORY}; run it in a clone"
        ) from None
    return f"{name}, with changes that are not committed" if changed else name


def _gpu() -> str:
    import torch

    return f" and {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", REPOSITORY, *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()
