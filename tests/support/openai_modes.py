"""What scripts/clients/openai_clients has, read from the source: most of its packages are not in this environment."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGES = Path(__file__).parents[2] / "scripts" / "clients" / "openai_clients"


def modules() -> list[str]:
    """The modules for packages, by name."""
    return sorted(path.stem for path in PACKAGES.glob("*.py") if path.stem not in ("__init__", "front"))


def modes(module: str) -> list[str]:
    """The modes of a module."""
    functions = ast.parse((PACKAGES / f"{module}.py").read_text()).body
    return [node.name for node in functions if isinstance(node, ast.FunctionDef) and not node.name.startswith("_")]
