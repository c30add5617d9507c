"""Runs a command by its name, or lists the commands.

A command is a module with a function `main`, in this folder or in one of those beside it. typer makes its command line
of that function; `EPILOG` of the module, if there is one, ends its help.
"""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

SCRIPTS = Path(__file__).resolve().parent
_NOT_COMMANDS = ("run", "served_environment")


def find_commands() -> dict[str, Path]:
    """The file of each command, by the command's name."""
    files = sorted(SCRIPTS.glob("*.py")) + sorted(SCRIPTS.glob("*/*.py"))
    return {file.stem: file for file in files if file.stem not in _NOT_COMMANDS and _has_main(file)}


def describe(file: Path) -> str:
    """The first sentence of a module's docstring. Raises ValueError when there is none."""
    text = ast.get_docstring(ast.parse(file.read_text()))
    if not text:
        raise ValueError(f"{file} does not say what it does")
    return " ".join(text.split("\n\n")[0].split()).split(". ")[0].removesuffix(".")


def run(name: str, file: Path, arguments: list[str]) -> None:
    """Import the command, and call it as typer does."""
    module = importlib.import_module(".".join(file.relative_to(SCRIPTS).with_suffix("").parts))
    sys.argv = [f"scripts/run {name}", *arguments]
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    app.command(help=module.main.__doc__ or module.__doc__, epilog=getattr(module, "EPILOG", None))(module.main)
    app()


def list_commands(commands: dict[str, Path], console: Console) -> None:
    """One row a command; `scripts/run NAME --help` tells more."""
    table = Table("command", "folder", "", box=None)
    for name, file in commands.items():
        table.add_row(name, file.parent.name, escape(describe(file)))
    console.print(table)


def main() -> None:
    commands = find_commands()
    name = sys.argv[1] if len(sys.argv) > 1 else ""
    if name in commands:
        run(name, commands[name], sys.argv[2:])
    else:
        list_commands(commands, Console())
        sys.exit(0 if name in ("", "--help") else f"there is no command {name!r}")


def _has_main(file: Path) -> bool:
    statements = ast.parse(file.read_text()).body
    return any(isinstance(statement, ast.FunctionDef) and statement.name == "main" for statement in statements)


if __name__ == "__main__":
    main()
