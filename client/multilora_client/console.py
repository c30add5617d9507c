"""What all commands share: how errors look."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from multilora_client.errors import MultiloraClientError


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn every error a user can cause into one line on standard error and exit status 1."""
    try:
        yield
    except (MultiloraClientError, OSError) as error:
        code = f"[{error.code}] " if isinstance(error, MultiloraClientError) else ""
        typer.echo(f"error: {code}{' '.join(str(error).split())}", err=True)
        raise typer.Exit(1) from error
