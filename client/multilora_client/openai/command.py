"""`multilora openai`: read the catalogue, then run the application. Imports the extra only when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from multilora_client.client import DEFAULT_URL, AsyncClient
from multilora_client.console.settings import ConsoleSettings
from multilora_client.errors import InvalidRequest
from multilora_client.openai.serving import (
    AllowHosts,
    Certificate,
    Key,
    check_certificate,
    check_extra,
    forwarding_options,
    listen,
    listening_url,
    tell_unreachable,
)
from multilora_client.openai.settings import (
    MAX_BODY_BYTES,
    MAX_CONNECTIONS,
    MAX_CONNECTIONS_PER_ADDRESS,
    REQUEST_TIMEOUT_S,
    FrontSettings,
)
from multilora_client.openai.tools.formats import ParserName
from multilora_client.openai.tools.reasoning import ReasoningName
from multilora_client.terminal import Url, one_line_errors

if TYPE_CHECKING:
    from multilora_client.openai.catalogue import Catalogue


def _refuse_server(value: str | None) -> None:
    if value is not None:
        raise typer.BadParameter("the option is --url")


Server = Annotated[str | None, typer.Option("--server", hidden=True, callback=_refuse_server)]
"""Otherwise the refusal proposes --server-metrics."""

Host = Annotated[str, typer.Option(help="Address to listen at; beyond loopback, use --api-keys and TLS.")]
Port = Annotated[int, typer.Option(min=0, max=65535, help="Port to listen at.")]
Base = Annotated[str, typer.Option(help="The clients' name for the base model.")]
Adapters = Annotated[
    Path | None,
    typer.Option(
        "--adapters", help='JSON file {"name": "directory"}, directories relative to the file.', show_default=False
    ),
]
NamedAdapters = Annotated[
    list[str] | None,
    typer.Option(
        "--adapter",
        metavar="NAME=DIR",
        help="One adapter, PEFT or converted; may be repeated. Without any, all of the server's are models.",
    ),
]
ApiKeys = Annotated[
    Path | None,
    typer.Option(
        help="JSON file of keys and the models that each may use, see SECURITY.md; without it, all may use all.",
        show_default=False,
    ),
]
ForwardKeys = Annotated[
    bool,
    typer.Option(
        "--forward-keys",
        help="The server has the same keys (its api_keys_file): each caller's goes with its requests, and the adapters "
        "that the key may use there are models by their names.",
    ),
]

MaxBodyBytes = Annotated[int, typer.Option(min=1, help="Longest request; a longer one is refused with status 413.")]
MaxConnections = Annotated[int, typer.Option(min=1, help="At once; one more is refused with status 503.")]
MaxConnectionsPerAddress = Annotated[
    int,
    typer.Option(min=1, help="One more is closed at once; a proxy's clients have one address."),
]
RequestTimeoutSecs = Annotated[
    float, typer.Option(min=0.1, help="A connection that has not sent a whole request by then is closed.")
]
AllowLoading = Annotated[
    bool,
    typer.Option(
        "--allow-lora-loading",
        help="Clients may have the server load adapters from its sources (/v1/load_lora_adapter); with --api-keys, "
        "those who run the server.",
    ),
]
Parser = Annotated[
    ParserName, typer.Option(help="How the model writes calls of functions; none leaves them in the text.")
]
Reasoning = Annotated[
    ReasoningName,
    typer.Option(
        help="Text in <think> and </think> before an answer is reasoning. auto: if the answer begins with <think>, or "
        "the chat template has written it; none: it stays in the text."
    ),
]
CorsOrigins = Annotated[
    list[str] | None,
    typer.Option("--cors-origin", metavar="ORIGIN", help="Web pages of it may ask, * for all; may be repeated."),
]
ServerMetrics = Annotated[
    str, typer.Option(metavar="URL", help="The server's metrics, to be at /metrics, too: http://host:8002/metrics")
]
SecretFile = Annotated[
    Path | None,
    typer.Option(
        help="The server's client_header_secret_file: tells the server whose each request is, by API key or address.",
        show_default=False,
    ),
]
WithConsole = Annotated[
    bool,
    typer.Option(
        "--console",
        help="Serve the console at / too, see `multilora console`; with --api-keys, to those who run the server, or "
        "with --forward-keys to everybody for what is theirs.",
    ),
]
TrustedProxies = Annotated[
    list[str] | None,
    typer.Option(
        "--trusted-proxy",
        metavar="ADDRESS",
        help="Take the client's address from the X-Forwarded-For of this proxy, an address or a network "
        "(10.0.0.0/24); may be repeated. Nobody else's is believed.",
    ),
]
Docs = Annotated[bool, typer.Option("--docs", help="Describe the interface at /docs and /openapi.json.")]


def openai(
    ctx: typer.Context,
    url: Url = DEFAULT_URL,
    host: Host = "127.0.0.1",
    port: Port = 9000,
    base_model: Base = "base",
    adapters: Adapters = None,
    adapter: NamedAdapters = None,
    api_keys: ApiKeys = None,
    forward_keys: ForwardKeys = False,
    max_body_bytes: MaxBodyBytes = MAX_BODY_BYTES,
    max_connections: MaxConnections = MAX_CONNECTIONS,
    max_connections_per_address: MaxConnectionsPerAddress = MAX_CONNECTIONS_PER_ADDRESS,
    request_timeout_secs: RequestTimeoutSecs = REQUEST_TIMEOUT_S,
    certificate: Certificate = None,
    key: Key = None,
    allow_loading: AllowLoading = False,
    tool_call_parser: Parser = "auto",
    reasoning_parser: Reasoning = "auto",
    cors_origin: CorsOrigins = None,
    server_metrics: ServerMetrics = "",
    client_header_secret_file: SecretFile = None,
    trusted_proxy: TrustedProxies = None,
    docs: Docs = False,
    console: WithConsole = False,
    allow_host: AllowHosts = None,
    _server: Server = None,
) -> None:
    """Serve OpenAI's HTTP interface: chats, completions, responses, models. `model` picks an adapter by its name.

    \b
    Examples:
      multilora openai --adapter pirate=adapters/pirate --adapter json=adapters/json
      multilora openai --url grpc://host:8001 --adapters adapters.json --api-keys keys.json --port 9000
    """
    with one_line_errors():
        check_extra()
        import uvicorn

        from multilora_client.openai.app import make_app
        from multilora_client.openai.connections import guarded_protocol

        check_certificate(certificate, key)
        forwarding = forwarding_options(trusted_proxy or ())
        if allow_host and not console:
            raise InvalidRequest("--allow-host names the console to browsers; give --console, too, or leave it out")
        catalogue = _read_catalogue(base_model, adapters, adapter or [], api_keys, forward_keys, allow_loading)
        hosts = (host, *(allow_host or ()))
        page = ConsoleSettings(hosts=hosts, server_url=url, openai_url="/v1") if console else None
        settings = FrontSettings(
            max_body_bytes,
            docs,
            tool_call_parser,
            reasoning_parser,
            tuple(cors_origin or ()),
            server_metrics,
            page,
            _read_secret(client_header_secret_file) if client_header_secret_file else "",
        )
        with listen(host, port) as listener:
            tell_unreachable(url, ctx.obj)
            config = uvicorn.Config(
                make_app(catalogue, lambda: AsyncClient(url, tls=ctx.obj), settings),
                server_header=False,
                limit_concurrency=max_connections,
                http=guarded_protocol(max_connections_per_address, request_timeout_secs),
                ssl_certfile=certificate,
                ssl_keyfile=key,
                **forwarding,
            )
            address = listening_url(listener, certificate)
            typer.echo(f"serving {address}/v1, from {url}", err=True)
            if console:
                typer.echo(f"console: {address}/", err=True)
            uvicorn.Server(config).run(sockets=[listener])


def _read_secret(path: Path) -> str:
    secret = path.read_text(encoding="latin-1").strip()
    if not secret.isalnum() or not secret.isascii():
        raise InvalidRequest(f"{path} holds no secret of letters and digits, unlike the server's file")
    return secret


def _read_catalogue(
    base: str, file: Path | None, named: list[str], api_keys: Path | None, forwards_keys: bool, allows_loading: bool
) -> Catalogue:
    from multilora_client.keys import KeyRing
    from multilora_client.openai.catalogue import Catalogue, load_adapters, read_directories

    directories = read_directories(file) if file else {}
    for entry in named:
        name, equals, directory = entry.partition("=")
        if not equals:
            raise InvalidRequest(f"--adapter is {entry!r}; write NAME=DIR")
        if name in directories:
            raise InvalidRequest(f"adapter {name!r} is given twice")
        directories[name] = Path(directory)
    keys = KeyRing(api_keys) if api_keys else None
    if keys is not None and not forwards_keys and (limited := keys.limited_ids()):
        raise InvalidRequest(
            f"the keys {', '.join(limited)} of {api_keys} have limits, a priority or a weight, which the server keeps: "
            "give the server the same file (api_keys_file) and this command --forward-keys, or leave them out"
        )
    if forwards_keys and keys is None:
        raise InvalidRequest("--forward-keys needs --api-keys, the same file as the server's api_keys_file")
    return Catalogue(base, load_adapters(directories), keys, forwards_keys, allows_loading)
