"""Dockerfiles as lists of instructions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dockerfile_parse import DockerfileParser


@dataclass(frozen=True)
class Instruction:
    """One instruction of a Dockerfile, such as RUN, with its arguments as written."""

    name: str
    arguments: str


def read_dockerfile(path: Path) -> list[Instruction]:
    """The instructions of a Dockerfile, without comments."""
    parser = DockerfileParser(fileobj=path.open("rb"))
    return [
        Instruction(entry["instruction"], entry["value"])
        for entry in parser.structure
        if entry["instruction"] != "COMMENT"
    ]
