"""`multilora adapters`: see and steer the adapters of a running server."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.table import Table
from rich.text import Text

from multilora_client.client import DEFAULT_URL, Client
from multilora_client.errors import InvalidRequest
from multilora_client.sizing import choose_linears, read_layout, tier_bytes, token_rows_shape
from multilora_client.terminal import Url, one_line_errors, print_table
from multilora_client.tls import Tls
from multilora_wire.adapter_event import AdapterEvent
from multilora_wire.adapter_info import AdapterInfo, Alias
from multilora_wire.layout import AdapterLayout
from multilora_wire.pieces import StoredDtype

app = typer.Typer(help="See and steer the adapters of a running server.", no_args_is_help=True, rich_markup_mode=None)

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
Which = Annotated[
    list[str],
    typer.Argument(metavar="ADAPTER...", help="Task ids, or names; @7 is the name 7.", show_default=False),
]
Tenant = Annotated[
    str, typer.Option(help="Owner of the aliases, for who runs the server.", show_default="the server, or your tenant")
]
ExpectedDigest = Annotated[
    str | None,
    typer.Option(
        help="Digest of the version that is meant: with another one on the server nothing changes. For one adapter. "
        "`list --json` tells digests.",
        show_default=False,
    ),
]


@app.command("list")
def list_adapters(ctx: typer.Context, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show every adapter: where it is, its size, who uses it.

    \b
    Example:
      multilora adapters list --json
    """
    with one_line_errors(), Client(url, tls=ctx.obj) as client:
        _print_adapters(client.list_adapters(), as_json)


@app.command()
def load(
    ctx: typer.Context,
    which: Which,
    source: Annotated[str, typer.Option(help="Name of the only source to ask.", show_default="all of them")] = "",
    path: Annotated[
        str,
        typer.Option(
            help="Where its files are, within what the server's lora_sources cover: a directory of the server's "
            "machine, a repository, or a URL. For one adapter.",
            show_default="where the sources look for its name",
        ),
    ] = "",
    expected_digest: ExpectedDigest = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Have the server fetch adapters from its sources, or read them from disk, before any request needs them.

    \b
    Examples:
      multilora adapters load acme/pirate --source huggingface
      multilora adapters load pirate --path /adapters/pirate-v2
    """
    with one_line_errors(), Client(url, tls=ctx.obj) as client:
        _check_names(which, path)
        _check_one(which, expected_digest)
        loaded = [client.load_adapter(_which(adapter), source, path, expected_digest) for adapter in which]
        _print_adapters(loaded, as_json)


@app.command()
def combine(
    ctx: typer.Context,
    adapter: Annotated[str, typer.Argument(metavar="NAME", help="Name or task id of the set.", show_default=False)],
    members: Annotated[
        list[str],
        typer.Argument(
            metavar="ADAPTER=WEIGHT...", help="Up to 8 adapters, each with its weight in the sum.", show_default=False
        ),
    ],
    expected_digest: ExpectedDigest = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Have the server make an adapter that is a weighted sum of others that it has.

    \b
    Example:
      multilora adapters combine polite-pirate pirate=0.7 polite=0.4
    """
    with one_line_errors(), Client(url, tls=ctx.obj) as client:
        _print_adapters([client.combine_adapters(_which(adapter), _weights(members), expected_digest)], as_json)


@app.command("alias")
def set_aliases(
    ctx: typer.Context,
    named: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME=ADAPTER:WEIGHT,...]...",
            help="A name, and the adapters that answer requests by it, each as often as its weight is of all weights.",
            show_default=False,
        ),
    ] = None,
    tenant: Tenant = "",
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Have a name stand for adapters by weight, or show all aliases. Requests of one session keep their adapter.

    \b
    Examples:
      multilora adapters alias chat=chat-v7:90,chat-v8:10
      multilora adapters alias chat=chat-v8
      multilora adapters alias
    """
    with one_line_errors(), Client(url, tls=ctx.obj) as client:
        wanted = [_alias(text) for text in named or ()]
        made = [client.set_alias(name, members, tenant) for name, members in wanted]
        shown = made if named else [alias for alias in client.list_aliases() if tenant in ("", alias.tenant)]
        _print_aliases(shown, as_json)


@app.command("unalias")
def remove_aliases(
    ctx: typer.Context,
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="Names of aliases.", show_default=False)],
    tenant: Tenant = "",
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Make the server forget aliases. Requests by their names are refused from then on; the adapters stay.

    \b
    Example:
      multilora adapters unalias chat
    """
    with one_line_errors(), Client(url, tls=ctx.obj) as client:
        _print_aliases([client.remove_alias(name, tenant) for name in names], as_json)


@app.command()
def unload(
    ctx: typer.Context,
    which: Which,
    expected_digest: ExpectedDigest = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Make the server forget adapters. Requests that use one keep it until they have finished.

    \b
    Example:
      multilora adapters unload 7
    """
    with one_line_errors(), Client(url, tls=ctx.obj) as client:
        _check_one(which, expected_digest)
        done = [client.unload_adapter(_which(adapter), expected_digest=expected_digest) for adapter in which]
        _print_adapters(done, as_json)


@app.command()
def pin(
    ctx: typer.Context,
    which: Which,
    expected_digest: ExpectedDigest = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Keep adapters in host memory: no other adapter evicts them.

    \b
    Example:
      multilora adapters pin 7 8
    """
    with one_line_errors(), Client(url, tls=ctx.obj) as client:
        _check_one(which, expected_digest)
        done = [client.pin_adapter(_which(adapter), expected_digest=expected_digest) for adapter in which]
        _print_adapters(done, as_json)


@app.command()
def unpin(
    ctx: typer.Context,
    which: Which,
    expected_digest: ExpectedDigest = None,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Let adapters be evicted again.

    \b
    Example:
      multilora adapters unpin 7
    """
    with one_line_errors(), Client(url, tls=ctx.obj) as client:
        _check_one(which, expected_digest)
        done = [client.unpin_adapter(_which(adapter), expected_digest=expected_digest) for adapter in which]
        _print_adapters(done, as_json)


@app.command()
def events(
    ctx: typer.Context,
    since: Annotated[int, typer.Option(min=0, help="Number of the last event you have seen.")] = 0,
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Show the latest events of adapters: uploaded, evicted, replaced, ...

    \b
    Example:
      multilora adapters events --since 120
    """
    with one_line_errors(), Client(url, tls=ctx.obj) as client:
        answer = client.adapter_events(since)
    if as_json:
        _print_json(msgspec.to_builtins(answer))
        return
    first = answer.last - len(answer.events) + 1
    rows = ([str(number), *_event_row(event)] for number, event in enumerate(answer.events, first))
    _print_table(("number", "time", "event", "task id", "digest", "instance"), rows)
    if answer.num_missed:
        typer.echo(f"{answer.num_missed} earlier events are forgotten", err=True)


@app.command()
def stats(ctx: typer.Context, url: Url = DEFAULT_URL, as_json: AsJson = False) -> None:
    """Show sizes and counts of every tier, and the adapters most asked for.

    \b
    Example:
      multilora adapters stats
    """
    with one_line_errors(), Client(url, tls=ctx.obj) as client:
        report = client.adapter_stats()
    if as_json:
        _print_json(report)
        return
    tiers = {name: tier for name, tier in report["tiers"].items() if isinstance(tier, dict)}
    columns = list(next(iter(tiers.values()), {}))
    _print_table(("tier", *columns), ([name, *(_number(tier[key]) for key in columns)] for name, tier in tiers.items()))
    counts = {name: value for name, value in report["tiers"].items() if not isinstance(value, dict | None)}
    _print_table(tuple(counts), [[_number(value) for value in counts.values()]])
    usage = {**report["usage"], "other": report["other_usage"]}
    rows = ([name, *map(str, counted.values())] for name, counted in usage.items())
    _print_table(("task id", *report["other_usage"]), rows)


@app.command()
def size(
    ctx: typer.Context,
    rank: Annotated[int, typer.Option(min=1, help="Rank of the adapters.")] = 16,
    num: Annotated[int, typer.Option(min=1, help="Adapters to keep.")] = 1000,
    linears: Annotated[
        str | None,
        typer.Option(
            help="Linears of every layer that they adapt, embed_tokens and lm_head, with commas between; by default "
            "all linears of layers.",
            show_default=False,
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Tokens with trained rows of each adapter.")] = 0,
    dora: Annotated[bool, typer.Option("--dora", help="They are DoRA adapters.")] = False,
    checkpoint: Annotated[
        Path | None, typer.Option(help="Compute for this checkpoint instead of asking a server.", show_default=False)
    ] = None,
    max_rank: Annotated[int, typer.Option(min=1, help="With --checkpoint: max_lora_rank of the server.")] = 64,
    dtype: Annotated[
        StoredDtype, typer.Option(help="With --checkpoint: type adapters are stored in, float32 on a CPU.")
    ] = "float32",
    url: Url = DEFAULT_URL,
    as_json: AsJson = False,
) -> None:
    """Compute how much memory adapters take, and the parameters that give them this memory.

    \b
    Examples:
      multilora adapters size --rank 16 --num 2000
      multilora adapters size --rank 8 --linears q,v --num 5000 --checkpoint DIR --dtype bfloat16
    """
    with one_line_errors():
        layout = read_layout(checkpoint, max_rank, dtype) if checkpoint else _served_layout(url, ctx.obj)
        if rank > layout.max_rank:
            raise InvalidRequest(f"rank {rank} is more than max_lora_rank, {layout.max_rank}")
        modules = choose_linears(layout, linears) if linears else layout.sites.plain_modules
        pages = token_rows_shape(layout, rank, dora, modules, tokens).num_pages
    host_bytes, disk_bytes = tier_bytes(layout, num, pages)
    sizes = {
        "page_bytes": layout.page_bytes,
        "bytes_per_adapter": pages * layout.page_bytes,
        "lora_cache_host_memory_bytes": host_bytes,
        "lora_cache_disk_bytes": disk_bytes,
    }
    if as_json:
        _print_json(sizes)
    else:
        _print_table(
            ("what", "bytes", "MiB"), ([name, str(value), f"{value / 2**20:,.1f}"] for name, value in sizes.items())
        )
    if host_bytes > num * pages * layout.page_bytes:
        typer.echo(
            "these adapters need less, but a server starts only with room for one adapter of max_lora_rank "
            f"({layout.max_rank})",
            err=True,
        )


def _served_layout(url: str, tls: Tls | None) -> AdapterLayout:
    with Client(url, tls=tls) as client:
        return client.adapter_layout()


def _which(adapter: str) -> int | str:
    """`7` is a task id, `pirate` a name; `@7` is the name 7."""
    if adapter.startswith("@"):
        return adapter[1:]
    return int(adapter) if adapter.isdecimal() else adapter


def _weights(members: Sequence[str]) -> dict[int | str, float]:
    """The weights of the members of a set. Raises InvalidRequest."""
    weights: dict[int | str, float] = {}
    for member in members:
        adapter, _, text = member.rpartition("=")
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        if not adapter or not math.isfinite(weight):
            raise InvalidRequest(f"{member!r} is no member of a set: write ADAPTER=WEIGHT, such as pirate=0.7")
        if (which := _which(adapter)) in weights:
            raise InvalidRequest(f"{adapter} is in the set twice; name it once, with the sum of its weights")
        weights[which] = weight
    return weights


def _check_one(which: Sequence[str], expected_digest: str | None) -> None:
    """Raises InvalidRequest for one digest with several adapters."""
    if expected_digest is not None and len(which) > 1:
        raise InvalidRequest("--expected-digest is of one adapter; name several in several commands")


def _alias(text: str) -> tuple[str, dict[str, int]]:
    """The name of an alias, and the weights of its members. Raises InvalidRequest."""
    name, _, listed = text.partition("=")
    weights: dict[str, int] = {}
    members = listed.split(",")
    for named in members:
        member, _, weight = named.partition(":")
        if not (name and member) or not (weight.isdecimal() or (len(members) == 1 and named == member)):
            raise InvalidRequest(
                f"{text!r} is no alias: write NAME=ADAPTER:WEIGHT,ADAPTER:WEIGHT with whole numbers, such as "
                "chat=chat-v7:90,chat-v8:10, or NAME=ADAPTER"
            )
        if member in weights:
            raise InvalidRequest(f"{member} is in the alias {name} twice; name it once, with one weight")
        weights[member] = int(weight or 1)
    return name, weights


def _check_names(which: Sequence[str], path: str) -> None:
    """Raises InvalidRequest for a path instead of a name, and for one `path` with several adapters."""
    if path and len(which) > 1:
        raise InvalidRequest("--path is where one adapter is; load several in several commands")
    for adapter in which:
        if adapter.startswith(("/", ".", "~")) or adapter.count("/") > 1:
            raise InvalidRequest(
                f"{adapter!r} is a path, and adapters are loaded by their names. For a directory of this machine: "
                f"multilora upload {adapter}. For one of the server's machine, which its lora_sources must cover: "
                f"multilora adapters load NAME --path {adapter}"
            )


def _print_adapters(adapters: Sequence[AdapterInfo], as_json: bool) -> None:
    if as_json:
        _print_json([msgspec.structs.asdict(adapter) for adapter in adapters])
    else:
        columns = (
            "task id",
            "name",
            "digest",
            "status",
            "location",
            "MB",
            "ranks",
            "kind",
            "in use",
            "pinned",
            "last used",
        )
        _print_table((*columns, "hits"), map(_adapter_row, adapters))


def _print_aliases(aliases: Sequence[Alias], as_json: bool) -> None:
    if as_json:
        _print_json(msgspec.to_builtins(aliases))
    else:
        rows = (
            [alias.name, alias.tenant, member.name, str(member.weight)] for alias in aliases for member in alias.members
        )
        _print_table(("name", "tenant", "adapter", "weight"), rows)


def _adapter_row(adapter: AdapterInfo) -> list[str]:
    return [
        str(adapter.lora_task_id),
        adapter.name,
        adapter.digest[:12],
        adapter.status,
        adapter.location,
        f"{adapter.bytes / 1e6:.1f}",
        ",".join(map(str, adapter.ranks)),
        _kind(adapter),
        str(adapter.num_pins),
        "yes" if adapter.is_pinned else "",
        _time(adapter.last_used_s) if adapter.last_used_s else "",
        str(adapter.num_hits),
    ]


def _kind(adapter: AdapterInfo) -> str:
    """`LoRA, head`, or the sum that a set is: `0.7 pirate + -0.2 8`."""
    if adapter.members:
        return " + ".join(f"{member.weight:.4g} {member.name or member.lora_task_id}" for member in adapter.members)
    return ", ".join(adapter.kinds)


def _event_row(event: AdapterEvent) -> list[str]:
    return [_time(event.time_ns / 1e9), event.kind, str(event.lora_task_id), event.digest[:12], event.instance]


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds).isoformat(" ", "seconds")


def _number(value: float) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def _print_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(*columns)
    for row in rows:
        table.add_row(*map(Text, row))
    print_table(table)


def _print_json(value: Any) -> None:
    typer.echo(json.dumps(value, indent=2))
