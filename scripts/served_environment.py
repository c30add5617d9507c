"""Runs Python with the environment that `multilora-serve` gives its server.

The OpenMP runtime reads how its threads wait once, when torch is loaded, and that is a large part of a CPU step's time:
threads that are measured or tested in this process should wait as the server's do.
"""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from multilora_engine.tritonserver.installation import server_environment

app = typer.Typer(add_completion=False)


@app.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
def main(arguments: Annotated[list[str], typer.Argument(help="What `python` is called with.")]) -> None:
    """Run Python in the server's environment, in place of this process."""
    os.execve(sys.executable, [sys.executable, *arguments], server_environment({}))


if __name__ == "__main__":
    app()
