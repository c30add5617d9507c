"""The parts that all commands share in a terminal: the server's address, and how errors and progress look."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from multilora_client.errors import MultiloraClientError

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
    """Turn every error a user can cause into one line on standard error and exit status 1."""
    try:
        yield
    except (MultiloraClientError, OSError) as error:
        code = f"[{error.code}] " if isinstance(error, MultiloraClientError) else ""
        typer.echo(f"error: {code}{' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from error


def progress_bars() -> Progress:
    """Bars on standard error, where that is a terminal; they leave nothing behind."""
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
