"""`multilora weights`: keep quantised weights of a running server also as floats."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from multilora_client.client import DEFAULT_URL, Client
from multilora_client.terminal import Url, one_line_errors

app = typer.Typer(
    help="See quantised weights of a running server, and keep some also as floats.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")]
Modules = Annotated[list[str], typer.Argument(help="Names of modules, or globs.", show_default=False)]


@app.command("list")
def list_weights(
    ctx: typer.Context,
    modules: Annotated[list[str] | None, typer.Argument(help="Names or globs.", show_default="all")] = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Show the quantised weights: their bytes as codes, and as floats where they are kept.

    \b
    Example:
      multilora weights list 'model.layers.0.*'
    """
    with one_line_errors(), Client(url, tls=ctx.obj) as client:
        _print(client.switch_weights("list", modules or ["*"]), as_json)


@app.command()
def unpack(ctx: typer.Context, modules: Modules, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Keep weights also as floats, and multiply these. Answers may differ in their last bits.

    \b
    Example:
      multilora weights unpack '*.down_proj'
    """
    with one_line_errors(), Client(url, tls=ctx.obj) as client:
        _print(client.switch_weights("unpack", modules), as_json)


@app.command()
def pack(ctx: typer.Context, modules: Modules, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Drop the floats of weights, and multiply the codes.

    \b
    Example:
      multilora weights pack '*'
    """
    with one_line_errors(), Client(url, tls=ctx.obj) as client:
        _print(client.switch_weights("pack", modules), as_json)


def _print(report: dict[str, Any], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    for weight in report["weights"]:
        typer.echo(
            f"{' '.join(weight['modules'])}: {weight['kind']}, {weight['packed_bytes']} bytes; floats "
            f"{weight['unpacked_bytes']} of {weight['needed_bytes']} bytes"
        )
    stats = report["stats"]
    typer.echo(f"floats in all: {stats['unpacked_bytes']} of {stats['max_unpacked_bytes']} bytes")
