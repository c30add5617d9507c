"""`multilora-serve`: checks, starts a tritonserver, waits for a real inference, then watches over it until the end.

A server that ends, or no longer answers, is started again. `multilora-serve probe` asks a running one, for containers.
"""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperCommand, TyperGroup

from multilora_engine.errors import ConfigError, MultiloraError
from multilora_engine.process.supervisor import keep_alive
from multilora_engine.tritonserver import ServerFailed, ServerOptions, ServerProcess
from multilora_engine.tritonserver.checkpoint import resolve_checkpoint
from multilora_engine.tritonserver.probe import (
    Busy,
    NotReady,
    OverGrpc,
    OverHttp,
    ProbeFailed,
    Transport,
    probe_generation,
)
from multilora_engine.tritonserver.repository import parse_override, with_absolute_paths
from multilora_engine.tritonserver.upstream_models import UpstreamModels

console = Console(stderr=True, highlight=False, emoji=False)


class _ServeByDefault(TyperGroup):
    """`multilora-serve --model ...` is `multilora-serve serve --model ...`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, args if args and args[0] in self.commands else ["serve", *args])


class _DefaultCommand(TyperCommand):
    """The command whose name is left out, in its usage, too."""

    def format_usage(self, ctx: Any, formatter: Any) -> None:
        assert ctx.parent is not None
        formatter.write_usage(ctx.parent.command_path, " ".join(self.collect_usage_pieces(ctx)))


app = typer.Typer(cls=_ServeByDefault, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)

_DEFAULT = ServerOptions()


def main() -> None:
    """Entry point of the command."""
    app()


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(f"multilora-serve {version('multilora-engine')}")
        raise typer.Exit


@app.command(cls=_DefaultCommand)
def serve(
    model: Annotated[
        str,
        typer.Option(
            envvar="MULTILORA_MODEL", metavar="DIR_OR_HF_ID", help="Hugging Face checkpoint, or GGUF file, to serve."
        ),
    ],
    model_repository: Annotated[
        Path | None,
        typer.Option(help="Model repository (default: the one of this clone or package, else ./model_repository)."),
    ] = None,
    override: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Set a parameter of generation/config.pbtxt; repeatable."),
    ] = None,
    upstream_models: Annotated[
        UpstreamModels,
        typer.Option(
            help="Serve clients of other Triton backends, too. TensorRT-LLM's inflight_batcher_llm (tensorrt_llm, "
            "tensorrt_llm_bls): decoupled for clients that stream, unary for HTTP infer and unary gRPC; the ensemble "
            "is decoupled unless this is unary. NVIDIA's llmapi (tensorrt_llm): llmapi for one response, "
            "llmapi-decoupled for streams. Triton's vLLM backend (vllm_model): vllm."
        ),
    ] = _DEFAULT.upstream_models,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = _DEFAULT.host,
    http_port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = _DEFAULT.http_port,
    grpc_port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = _DEFAULT.grpc_port,
    metrics_port: Annotated[int, typer.Option(min=0, max=65535, help="0: any free one.")] = _DEFAULT.metrics_port,
    http_host: Annotated[
        str | None,
        typer.Option(
            help="Address for HTTP, for which tritonserver has no TLS: 127.0.0.1 keeps it to this machine, and to a "
            "proxy or gateway that ends TLS (default: --host)."
        ),
    ] = None,
    has_http: Annotated[
        bool,
        typer.Option("--http/--no-http", help="Without HTTP there are gRPC, which the canary uses, and metrics."),
    ] = _DEFAULT.has_http,
    grpc_certificate: Annotated[Path | None, typer.Option(help="PEM file: gRPC takes TLS only, with this.")] = None,
    grpc_key: Annotated[Path | None, typer.Option(help="PEM file: the certificate's key.")] = None,
    grpc_client_ca: Annotated[
        Path | None, typer.Option(help="PEM file: gRPC clients need a certificate that this authority signed.")
    ] = None,
    max_http_bytes: Annotated[
        int | None, typer.Option(min=1, help="Largest HTTP request (default: the server's own limit, if it has one).")
    ] = None,
    shared_memory_api: Annotated[
        bool, typer.Option(help="Let clients send tensors by shared memory; only where all of them are trusted.")
    ] = _DEFAULT.shared_memory_api,
    trace_config: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SETTING",
            help="Handed to tritonserver as it is; repeatable. To export a span of every request: mode=opentelemetry, "
            "rate=1, level=TIMESTAMPS, opentelemetry,url=http://COLLECTOR:4318/v1/traces. A client's traceparent is "
            "taken over.",
        ),
    ] = None,
    log_verbose: Annotated[bool, typer.Option("--log-verbose", help="Every line of the server's log.")] = False,
    exit_timeout_secs: Annotated[
        int, typer.Option(min=0, help="Time for requests in flight to finish on SIGTERM.")
    ] = _DEFAULT.exit_timeout_s,
    startup_timeout_secs: Annotated[
        float, typer.Option(min=1, help="Give up when no inference succeeded by then.")
    ] = _DEFAULT.startup_timeout_s,
    canary_interval_secs: Annotated[
        float, typer.Option(min=0, help="Try an inference this often, and restart the server when it fails; 0: never.")
    ] = 15.0,
    max_restarts: Annotated[
        int, typer.Option(min=0, help="Of a server that fails within a minute, in a row; one more ends the command.")
    ] = 5,
    tritonserver: Annotated[
        Path | None, typer.Option(help="Server executable (default: nvidia-pytriton's, else the one on PATH).")
    ] = None,
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Serve a model and its LoRA adapters through a tritonserver, and start it again when it dies or hangs.

    `multilora-serve probe` tells whether a running server answers.
    """
    with errors_as_one_line():
        options = ServerOptions(
            model=resolve_checkpoint(model),
            model_repository=model_repository,
            overrides=with_absolute_paths(dict(parse_override(text) for text in override or [])),
            upstream_models=upstream_models,
            host=host,
            http_port=http_port,
            grpc_port=grpc_port,
            metrics_port=metrics_port,
            http_host=http_host,
            has_http=has_http,
            grpc_certificate=grpc_certificate,
            grpc_key=grpc_key,
            grpc_client_ca=grpc_client_ca,
            max_http_bytes=max_http_bytes,
            shared_memory_api=shared_memory_api,
            trace_config=trace_config or (),
            log_verbose=log_verbose,
            exit_timeout_s=exit_timeout_secs,
            startup_timeout_s=startup_timeout_secs,
            tritonserver=tritonserver,
        )
        run(options, canary_interval_secs, max_restarts)


@app.command()
def probe(
    host: Annotated[str, typer.Option(help="Address of the server.")] = _DEFAULT.host,
    http_port: Annotated[int, typer.Option(min=1, max=65535, help="Its HTTP port.")] = _DEFAULT.http_port,
    grpc_port: Annotated[
        int | None, typer.Option(min=1, max=65535, help="Ask over gRPC, at this port: for a server without HTTP.")
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(metavar="[http://]HOST:PORT", help="Its HTTP address, instead of the options above."),
    ] = None,
    timeout_secs: Annotated[float, typer.Option(min=0.1, help="Time for each of two inferences.")] = 10.0,
    live: Annotated[
        bool, typer.Option("--live", help="Only ask whether it is worth waiting for: starting or busy is good enough.")
    ] = False,
    api_key: Annotated[
        str, typer.Option(envvar="MULTILORA_API_KEY", help="For a server that has API keys: one for the base model.")
    ] = "",
) -> None:
    """Get a token from a running server, by a real inference. Status 0: it answers; 1: it does not, with the reason."""
    if url is not None and grpc_port is not None:
        raise typer.BadParameter("--url is an address of HTTP, and --grpc-port one of gRPC; give one of them")
    http_address = f"{host}:{http_port}" if url is None else _http_address(url)
    server: Transport = OverHttp(http_address) if grpc_port is None else OverGrpc(f"{host}:{grpc_port}")
    try:
        probe_generation(server, timeout_secs, api_key)
    except (NotReady, Busy, ProbeFailed) as error:
        console.print(str(error), markup=False, soft_wrap=True)
        if isinstance(error, ProbeFailed) or not live:
            raise typer.Exit(1) from None


def _http_address(url: str) -> str:
    """`http://host:8000/` -> `host:8000`. Raises typer.BadParameter."""
    address = url.removeprefix("http://").rstrip("/")
    if re.fullmatch(r"[^/@?#]+:\d+", address) is None:
        raise typer.BadParameter(
            f"--url is {url!r}; write host:8000 or http://host:8000: the probe asks over plain HTTP"
        )
    return address


def run(options: ServerOptions, canary_interval_s: float, max_restarts: int) -> NoReturn:
    """Keep a server running until a signal ends it; raises typer.Exit with its status then.

    Raises ServerFailed or ConfigError when it cannot start the first time, or has failed too often in a row.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as it is for a shell's background jobs
        signal.signal(signal.SIGINT, _interrupt)
    lives = _Lives(options, canary_interval_s)
    keep_alive(lives.live, lives.pause, max_restarts)
    assert lives.failure is not None, "the last life ended with a failure"
    raise lives.failure


def _interrupt(*_: object) -> NoReturn:
    """Once: a further signal, such as `timeout` and impatient fingers send, would cut short how the server is ended."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


class _Lives:
    """Servers one after the other, each at the address of the first.

    failure: of the last one.
    """

    def __init__(self, options: ServerOptions, canary_interval_s: float) -> None:
        self._options = options
        self._canary_interval_s = canary_interval_s
        self._was_ready = False
        self.failure: MultiloraError | None = None

    def live(self) -> float:
        """One life of a server; the seconds for which it was ready.

        Raises typer.Exit when a signal ends the server, and its failure if no server has been ready yet.
        """
        ready_since: float | None = None
        try:
            with ServerProcess(self._options, on_log=_print_line) as server:
                self._options = server.successor_options
                try:
                    wait_ready(server)
                    announce(server)
                    self._was_ready, ready_since = True, time.monotonic()
                    watch(server, self._canary_interval_s)
                except KeyboardInterrupt:
                    left_s = self._options.exit_timeout_s
                    console.print(f"stopping; requests in flight have {left_s} s to end", soft_wrap=True)
                    raise typer.Exit(_shell_status(server.stop())) from None
                except ServerFailed:
                    server.kill()
                    raise
        except (ServerFailed, ConfigError) as failure:
            if not self._was_ready:
                raise
            self.failure = failure
        return 0.0 if ready_since is None else time.monotonic() - ready_since

    def pause(self, seconds: float) -> bool:
        """Tell of the failure and wait. False: another server follows. Raises typer.Exit when a signal ends it."""
        console.print(f"[bold yellow]restarting[/] in {seconds:g} s: {escape(str(self.failure))}", soft_wrap=True)
        try:
            time.sleep(seconds)
        except KeyboardInterrupt:
            raise typer.Exit from None
        return False


def wait_ready(server: ServerProcess) -> None:
    """Wait for the first inference; on a terminal, with the server's progress."""
    with console.status("starting tritonserver") as status:
        server.wait_ready(lambda progress: status.update(f"starting tritonserver: {progress}"))


def announce(server: ServerProcess) -> None:
    """Say that the server is ready, and where."""
    http = server.http_url if server.options.has_http else "off"
    console.print(
        f"[bold green]ready[/]  HTTP [bold]{http}[/]  gRPC [bold]{server.grpc_url}[/]  "
        f"metrics [bold]{server.metrics_url}[/]  (Ctrl-C stops)",
        soft_wrap=True,
    )


def watch(server: ServerProcess, canary_interval_s: float) -> NoReturn:
    """Stay until the server ends, is broken, or does not come back. Any of them raises ServerFailed."""
    patience_s = server.options.startup_timeout_s
    answered = time.monotonic()
    while True:
        with contextlib.suppress(subprocess.TimeoutExpired):
            status = server.wait(canary_interval_s or None)
            raise server.failure(status)
        try:
            server.ask()
        except NotReady as error:
            if time.monotonic() - answered > patience_s:
                raise ServerFailed(f"not ready for {patience_s:g} s: {error}") from None
            continue
        except Busy:
            pass
        answered = time.monotonic()


@contextlib.contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt, so that open resources are closed. For the main thread.

    Only once: a second signal, such as `timeout` sends, would cut the closing short.
    """

    def interrupt(*_: object) -> NoReturn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def errors_as_one_line() -> Iterator[None]:
    """Turn an error that an operator can cause into one line and exit status 1."""
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
