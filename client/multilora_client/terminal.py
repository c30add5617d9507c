"""The parts that all commands share in a terminal: the server's address, and how errors, tables and progress look."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from multilora_client.errors import (
    AdapterConflict,
    AdapterNotFound,
    InvalidRequest,
    MultiloraClientError,
    Unauthenticated,
)
from multilora_client.keyed_transport import API_KEY_VARIABLE

_UNCUT_WIDTH = 1000
_NO_TEMPLATE = "has no chat template"

Url = Annotated[
    str,
    typer.Option(
        help="The server: grpc://host:port, http://host:port, or with TLS grpcs:// and https://. host:port alone is "
        "gRPC, whatever the port.",
        envvar="MULTILORA_URL",
    ),
]


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn every error a user can cause into one line on standard error and exit status 1.

    Output that nobody reads any more (`| head`) ends a command without a word: typer does that.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except (MultiloraClientError, OSError) as error:
        code = f"[{error.code}] " if isinstance(error, MultiloraClientError) else ""
        typer.echo(f"error: {code}{' '.join(str(error).split())}{_remedy(error)}", err=True)
        raise typer.Exit(1) from error


def _remedy(error: Exception) -> str:
    """What to do at the command line, where an error's own text speaks of tensors or of the server."""
    if isinstance(error, Unauthenticated):
        return f"; set {API_KEY_VARIABLE} to a key of this server"
    if isinstance(error, AdapterConflict) and "expected digest" in str(error):
        return "; `multilora adapters list --json` tells the digests"
    if isinstance(error, AdapterConflict):
        return "; here: --name OTHER, or `multilora adapters unload NAME` first"
    if isinstance(error, AdapterNotFound):
        return "; `multilora upload DIR` sends them"
    if isinstance(error, InvalidRequest) and _NO_TEMPLATE in str(error):
        return "; here: `multilora generate` without --chat"
    return ""


def print_table(table: Table) -> None:
    """Print a table. Nothing is cut: if the table is too wide for the terminal, it has no frame and its lines wrap."""
    width = Console(width=_UNCUT_WIDTH).measure(table).maximum
    if sys.stdout.isatty() and width > Console().width:
        table.box = None
    Console(width=_UNCUT_WIDTH).print(table, soft_wrap=True)


def progress_bars() -> Progress:
    """Progress bars on standard error, if it is a terminal. They vanish at the end."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
