"""The examples of the documents, and the shell that they are run in."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
PAGES = [
    *(REPOSITORY / name for name in ("README.md", "SECURITY.md", "adapters/README.md", "docker/README.md")),
    *sorted((REPOSITORY / "docs").glob("*.md")),
]
_EXAMPLE = re.compile(r"<!-- example: (\w+) -->\n+```\w+\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def examples() -> dict[str, str]:
    """The code blocks after marks `<!-- example: NAME -->`, by name."""
    found = [match.groups() for page in PAGES for match in _EXAMPLE.finditer(page.read_text())]
    assert len(dict(found)) == len(found), "two examples have the same name"
    return dict(found)


def run(command: list[str], folder: Path = REPOSITORY) -> str:
    """The output of `command` in a folder, where the commands of the environment are at hand."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    result = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.strip(), result.stderr
    return result.stdout


def run_bash(script: str, folder: Path = REPOSITORY) -> str:
    return run(["bash", "-euo", "pipefail", "-c", script], folder)
