"""`multilora-serve`: checks, starts a tritonserver, waits for a real inference, then watches over it until the end."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from multilora_engine.errors import MultiloraError
from multilora_engine.tritonserver import ServerOptions, ServerProcess
from multilora_engine.tritonserver.checkpoint import resolve_checkpoint
from multilora_engine.tritonserver.repository import parse_override
from multilora_engine.tritonserver.upstream_models import UpstreamModels

console = Console(stderr=True, highlight=False, emoji=False)
app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)

_DEFAULT = ServerOptions()


def main() -> None:
    """Entry point of the command."""
    app()


@app.command()
def serve(
    model: Annotated[
        str, typer.Option(envvar="MULTILORA_MODEL", metavar="DIR_OR_HF_ID", help="Hugging Face checkpoint to serve.")
    ],
    model_repository: Annotated[
        Path | None,
        typer.Option(help="Model repository (default: the one of this clone, else ./model_repository)."),
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Set a parameter of generation/config.pbtxt; repeatable."),
    ] = None,
    upstream_models: Annotated[
        UpstreamModels,
        typer.Option(
            help="Serve the engine as tensorrt_llm and tensorrt_llm_bls, too: decoupled for clients that stream, "
            "unary for HTTP infer and unary gRPC."
        ),
    ] = _DEFAULT.upstream_models,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = _DEFAULT.host,
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = _DEFAULT.http_port,
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = _DEFAULT.grpc_port,
    metrics_port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = _DEFAULT.metrics_port,
    shared_memory_api: Annotated[
        bool, typer.Option(help="Let clients send tensors by shared memory; only where all of them are trusted.")
    ] = _DEFAULT.shared_memory_api,
    log_verbose: Annotated[bool, typer.Option("--log-verbose", help="Every line of the server's log.")] = False,
    exit_timeout_secs: Annotated[
        int, typer.Option(min=0, help="What requests in flight get to finish on SIGTERM.")
    ] = _DEFAULT.exit_timeout_s,
    startup_timeout_secs: Annotated[
        float, typer.Option(min=1, help="Give up when no inference succeeded by then.")
    ] = _DEFAULT.startup_timeout_s,
    canary_interval_secs: Annotated[
        float, typer.Option(min=0, help="Try an inference this often, and end when it fails; 0: never.")
    ] = 15.0,
    tritonserver: Annotated[
        Path | None, typer.Option(help="Server executable (default: nvidia-pytriton's, else the one on PATH).")
    ] = None,
) -> None:
    """Serve a model and its LoRA adapters through a tritonserver."""
    with errors_as_one_line():
        options = ServerOptions(
            model=resolve_checkpoint(model),
            model_repository=model_repository,
            overrides=dict(parse_override(text) for text in override or []),
            upstream_models=upstream_models,
            host=host,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            shared_memory_api=shared_memory_api,
            log_verbose=log_verbose,
            exit_timeout_s=exit_timeout_secs,
            startup_timeout_s=startup_timeout_secs,
            tritonserver=tritonserver,
        )
        run(ServerProcess(options, on_log=_print_line), canary_interval_secs)


def run(server: ServerProcess, canary_interval_s: float) -> None:
    """Start `server` and stay until it ends or a signal ends it. Raises typer.Exit with its status, ServerFailed."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with server:
        try:
            wait_ready(server)
            announce(server)
            watch(server, canary_interval_s)
        except KeyboardInterrupt:
            raise typer.Exit(_shell_status(server.stop())) from None


def wait_ready(server: ServerProcess) -> None:
    """Wait for the first inference; on a terminal, with what the server is doing."""
    with console.status("starting tritonserver") as status:
        server.wait_ready(lambda progress: status.update(f"starting tritonserver: {progress}"))


def announce(server: ServerProcess) -> None:
    """Say that the server is ready, and where."""
    console.print(
        f"[bold green]ready[/]  HTTP [bold]{server.http_url}[/]  gRPC [bold]{server.grpc_url}[/]  "
        f"metrics [bold]{server.metrics_url}[/]  (Ctrl-C stops)",
        soft_wrap=True,
    )


def watch(server: ServerProcess, canary_interval_s: float) -> NoReturn:
    """Stay until the server ends by itself or a canary fails; either raises ServerFailed."""
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = server.wait(canary_interval_s or None)
            raise server.failure(status)
        server.check_alive()


@contextlib.contextmanager
def errors_as_one_line() -> Iterator[None]:
    """What an operator can cause is one line and exit status 1."""
    try:
        yield
    except MultiloraError as error:
        console.print(f"[bold red]error:[/] {escape(str(error))}", soft_wrap=True)
        raise typer.Exit(1) from None


def _shell_status(status: int) -> int:
    """The status a shell reports: 128 + N for a process that signal N ended."""
    return status if status >= 0 else 128 - status


def _print_line(line: str) -> None:
    console.print(line, markup=False, soft_wrap=True)


if __name__ == "__main__":
    main()
