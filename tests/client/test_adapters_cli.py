"""`multilora adapters` as an operator runs it, against a fake Triton on loopback."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import termios
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from multilora_client.cli import app
from multilora_engine.engine.memory import _check_tier
from multilora_engine.errors import ConfigError
from multilora_wire.layout import AdapterLayout, adapter_layout, header_pages
from multilora_wire.sites import decoder_sites

PIRATE = {
    "lora_task_id": 7,
    "name": "pirate [v2]",
    "digest": "ab" * 32,
    "status": "READY_FOR_USE",
    "location": "DEVICE",
    "bytes": 2_500_000,
    "ranks": [4, 8],
    "num_pins": 1,
    "is_pinned": True,
    "last_used_s": 12.5,
    "num_hits": 3,
    "tenant": "",
    "module_ids": [1, 6],
    "is_dora": False,
    "kinds": ["LoRA"],
    "members": [],
    "use": [],
}
EVENTS = [
    {"kind": "uploaded", "lora_task_id": 7, "digest": "ab" * 32, "time_ns": 10**18, "instance": "h:1", "tenant": ""},
    {"kind": "evicted", "lora_task_id": 8, "digest": "cd" * 32, "time_ns": 10**18, "instance": "h:2", "tenant": ""},
]
TIER = {"bytes_used": 10, "bytes_total": 20, "copy_seconds": 0.1234}
STATS = {
    "tiers": {"device": TIER, "host": TIER, "waits": 3},
    "usage": {"7": {"requests": 5}},
    "other_usage": {"requests": 11},
}


def run(fake_triton: Any, *arguments: object) -> Result:
    return CliRunner().invoke(app, ["adapters", *map(str, arguments), "--url", fake_triton.url])


def operations(fake_triton: Any) -> list[dict[str, Any]]:
    assert {model for model, _ in fake_triton.received} == {"adapters"}
    return [json.loads(inputs["request"][0]) for _, inputs in fake_triton.received]


def cells(result: Result, row: int) -> list[str]:
    """The texts of a table's row, the first one below the header being 1."""
    assert result.exit_code == 0, result.stderr
    lines = [line for line in result.stdout.splitlines() if "│" in line]
    return [cell.strip() for cell in lines[row - 1].strip("│ ").split("│")]


def test_list_is_a_table_of_the_adapters(fake_triton: Any) -> None:
    fake_triton.report = {"adapters": [PIRATE]}
    row = cells(run(fake_triton, "list"), 1)
    assert row[:10] == ["7", "pirate [v2]", "abababababab", "READY_FOR_USE", "DEVICE", "2.5", "4,8", "LoRA", "1", "yes"]
    assert row[-1] == "3"


def test_a_terminal_that_is_too_narrow_cuts_nothing(fake_triton: Any) -> None:
    name = "a-name-of-a-customer/" + "long" * 20
    fake_triton.report = {"adapters": [PIRATE | {"name": name, "lora_task_id": 2**63 - 1}]}
    reader, terminal = pty.openpty()
    termios.tcsetwinsize(terminal, (24, 80))
    command = [Path(sys.executable).with_name("multilora"), "adapters", "list", "--url", fake_triton.url]
    environment = {name: value for name, value in os.environ.items() if name != "COLUMNS"}
    subprocess.run(command, stdout=terminal, env=environment, check=True, timeout=60)
    shown = os.read(reader, 1 << 16).decode()
    assert name in shown
    assert str(2**63 - 1) in shown
    assert "…" not in shown


def test_kinds_are_named_where_they_are_known(fake_triton: Any) -> None:
    remote = {"status": "NOT_DOWNLOADED", "location": "REMOTE", "ranks": [], "kinds": []}
    fake_triton.report = {"adapters": [PIRATE | {"kinds": ["DoRA", "activated"]}, PIRATE | remote]}
    listed = run(fake_triton, "list")
    assert cells(listed, 1)[7] == "DoRA, activated"
    assert cells(listed, 2)[6:8] == ["", ""]


def test_a_set_is_listed_as_the_sum_that_it_is(fake_triton: Any) -> None:
    members = [
        {"lora_task_id": 8, "weight": 0.699999988079071, "digest": "cd" * 16, "name": "pirate"},
        {"lora_task_id": 9, "weight": -0.25, "digest": "ef" * 16, "name": "", "a later server's": 1},
    ]
    fake_triton.report = {"adapters": [PIRATE | {"members": members}]}
    assert cells(run(fake_triton, "list"), 1)[7] == "0.7 pirate + -0.25 9"


def test_a_set_is_made_of_names_and_ids_with_weights(fake_triton: Any) -> None:
    fake_triton.report = {"adapter": PIRATE}
    assert cells(run(fake_triton, "combine", "both", "pirate=0.7", "9=-.2", "@9=1e-1"), 1)[0] == "7"
    assert operations(fake_triton) == [
        {
            "operation": "combine",
            "name": "both",
            "members": [
                {"name": "pirate", "weight": 0.7},
                {"lora_task_id": 9, "weight": -0.2},
                {"name": "9", "weight": 0.1},
            ],
        }
    ]


@pytest.mark.parametrize("member", ["pirate", "pirate=", "=1", "pirate=much", "pirate=nan", "pirate=inf"])
def test_what_is_no_member_of_a_set_is_refused_before_it_is_sent(fake_triton: Any, member: str) -> None:
    result = run(fake_triton, "combine", "both", member)
    assert (result.exit_code, f"{member!r} is no member of a set" in result.stderr) == (1, True)
    assert fake_triton.received == []


def test_a_member_is_named_once(fake_triton: Any) -> None:
    result = run(fake_triton, "combine", "both", "pirate=1", "pirate=2")
    assert (result.exit_code, "pirate is in the set twice" in result.stderr) == (1, True)


ALIAS = {
    "name": "chat",
    "members": [{"name": "chat-v7", "weight": 90}, {"name": "chat-v8", "weight": 10, "a later server's": 1}],
    "tenant": "",
}


def test_a_name_stands_for_adapters_by_weight(fake_triton: Any) -> None:
    fake_triton.report = {"alias": ALIAS}
    result = run(fake_triton, "alias", "chat=chat-v7:90,chat-v8:10", "talk=chat-v8", "acme/x=a:0,b/c:7")
    assert [cells(result, row) for row in (1, 2)] == [["chat", "", "chat-v7", "90"], ["chat", "", "chat-v8", "10"]]
    sent = [(one["operation"], one["name"], one["members"]) for one in operations(fake_triton)]
    assert sent == [
        ("alias", "chat", [{"name": "chat-v7", "weight": 90}, {"name": "chat-v8", "weight": 10}]),
        ("alias", "talk", [{"name": "chat-v8", "weight": 1}]),
        ("alias", "acme/x", [{"name": "a", "weight": 0}, {"name": "b/c", "weight": 7}]),
    ]


def test_who_runs_the_server_names_the_tenant_of_an_alias(fake_triton: Any) -> None:
    fake_triton.report = {"adapters": [PIRATE], "alias": ALIAS, "aliases": [ALIAS, ALIAS | {"tenant": "acme"}]}
    run(fake_triton, "alias", "chat=chat-v8", "--tenant", "acme")
    run(fake_triton, "unalias", "chat", "--tenant", "acme")
    assert [(one["operation"], one["tenant"]) for one in operations(fake_triton)] == [
        ("alias", "acme"),
        ("unalias", "acme"),
    ]
    shown = json.loads(run(fake_triton, "alias", "--tenant", "acme", "--json").stdout)
    assert [alias["tenant"] for alias in shown] == ["acme"]
    assert [cells(run(fake_triton, "alias"), row)[1] for row in range(1, 5)] == ["", "", "acme", "acme"]


def test_aliases_are_shown_and_removed(fake_triton: Any) -> None:
    fake_triton.report = {"adapters": [PIRATE], "aliases": [ALIAS], "alias": ALIAS}
    assert cells(run(fake_triton, "alias"), 2) == ["chat", "", "chat-v8", "10"]
    (shown,) = json.loads(run(fake_triton, "alias", "--json").stdout)
    assert (shown["name"], shown["members"][0]) == ("chat", {"name": "chat-v7", "weight": 90})
    assert cells(run(fake_triton, "unalias", "chat", "talk"), 4) == ["chat", "", "chat-v8", "10"]
    assert operations(fake_triton)[2:] == [{"operation": "unalias", "name": name} for name in ("chat", "talk")]
    fake_triton.report = {"adapters": [PIRATE]}
    assert json.loads(run(fake_triton, "alias", "--json").stdout) == []


@pytest.mark.parametrize(
    "text", ["chat", "chat=", "=v7", "chat=v7,v8", "chat=v7:", "chat=v7:1,", "chat=v7:0.5", "chat=v7:-1", "chat=:1"]
)
def test_what_is_no_alias_is_refused_before_it_is_sent(fake_triton: Any, text: str) -> None:
    result = run(fake_triton, "alias", "talk=v7", text)
    assert (result.exit_code, f"{text!r} is no alias: write" in result.stderr) == (1, True)
    assert fake_triton.received == []
    assert "v7 is in the alias chat twice" in run(fake_triton, "alias", "chat=v7:1,v7:2").stderr


@pytest.mark.parametrize("command", ["alias", "unalias"])
def test_the_help_of_the_commands_about_aliases_has_an_example(command: str) -> None:
    result = CliRunner().invoke(app, ["adapters", command, "--help"])
    assert result.exit_code == 0
    assert f"multilora adapters {command} chat" in result.stdout


def test_list_as_json_is_whole(fake_triton: Any) -> None:
    fake_triton.report = {"adapters": [PIRATE]}
    assert json.loads(run(fake_triton, "list", "--json").stdout) == [PIRATE]


@pytest.mark.parametrize("operation", ["pin", "unpin", "unload"])
def test_several_adapters_are_changed_one_after_the_other(fake_triton: Any, operation: str) -> None:
    fake_triton.report = {"adapter": PIRATE}
    result = run(fake_triton, operation, 7, "json", "@8")
    assert operations(fake_triton) == [
        {"operation": operation, "lora_task_id": 7},
        {"operation": operation, "name": "json"},
        {"operation": operation, "name": "8"},
    ]
    assert cells(result, 3)[0] == "7"


@pytest.mark.parametrize("operation", ["load", "pin", "unpin", "unload"])
def test_an_operation_may_name_the_version_that_it_is_on(fake_triton: Any, operation: str) -> None:
    fake_triton.report = {"adapter": PIRATE}
    run(fake_triton, operation, 7, "--expected-digest", "ab")
    (sent,) = operations(fake_triton)
    assert (sent["operation"], sent["lora_task_id"], sent["expected_digest"]) == (operation, 7, "ab")
    result = run(fake_triton, operation, 7, 8, "--expected-digest", "ab")
    assert (result.exit_code, "--expected-digest is of one adapter" in result.stderr) == (1, True)
    assert len(operations(fake_triton)) == 1


def test_a_set_may_replace_a_version_that_is_named(fake_triton: Any) -> None:
    fake_triton.report = {"adapter": PIRATE}
    run(fake_triton, "combine", "both", "pirate=1", "--expected-digest", "ab")
    assert operations(fake_triton)[0]["expected_digest"] == "ab"


def test_adapters_are_loaded_from_the_source_that_is_asked_for(fake_triton: Any) -> None:
    fake_triton.report = {"adapter": PIRATE}
    assert cells(run(fake_triton, "load", "acme/pirate", "--source", "hub"), 1)[0] == "7"
    run(fake_triton, "load", 7)
    assert operations(fake_triton) == [
        {"operation": "load", "name": "acme/pirate", "source": "hub"},
        {"operation": "load", "lora_task_id": 7, "source": ""},
    ]


def test_what_was_never_used_has_no_time_of_it(fake_triton: Any) -> None:
    remote = {"status": "NOT_DOWNLOADED", "location": "REMOTE", "last_used_s": 0.0, "num_hits": 0}
    fake_triton.report = {"adapters": [PIRATE | remote]}
    assert cells(run(fake_triton, "list"), 1)[-2:] == ["", "0"]


def test_events_are_numbered_and_lost_ones_are_told(fake_triton: Any) -> None:
    fake_triton.report = {"events": EVENTS, "last": 12, "num_missed": 3}
    result = run(fake_triton, "events", "--since", 7)
    assert operations(fake_triton) == [{"operation": "events", "since": 7}]
    assert [cells(result, 1)[i] for i in (0, 2, 3)] == ["11", "uploaded", "7"]
    assert [cells(result, 2)[i] for i in (0, 2, 3, 5)] == ["12", "evicted", "8", "h:2"]
    assert result.stderr == "3 earlier events are forgotten\n"
    assert json.loads(run(fake_triton, "events", "--json").stdout) == fake_triton.report


def test_stats_are_a_table_of_the_tiers_and_one_of_the_adapters(fake_triton: Any) -> None:
    fake_triton.report = STATS
    result = run(fake_triton, "stats")
    assert cells(result, 1) == ["device", "10", "20", "0.123"]
    assert cells(result, 2) == ["host", "10", "20", "0.123"]
    assert cells(result, 3) == ["3"]
    assert cells(result, 4) == ["7", "5"]
    assert cells(result, 5) == ["other", "11"]
    assert json.loads(run(fake_triton, "stats", "--json").stdout) == STATS


LAYOUT = asdict(AdapterLayout(decoder_sites(30, 576, 576, 192, 1536), 64, "float32", page_bytes=393216))


def test_size_tells_what_adapters_take_of_the_server_that_is_asked(fake_triton: Any) -> None:
    fake_triton.report = {"layout": LAYOUT}
    sizes = json.loads(run(fake_triton, "size", "--rank", 16, "--num", 2000, "--json").stdout)
    values = 30 * 16 * ((576 + 576) * 2 + (576 + 192) * 2 + (576 + 1536) * 3)
    assert sizes["page_bytes"] == 393216
    assert 4 * values <= sizes["bytes_per_adapter"] <= 4 * values + 393216
    assert sizes["lora_cache_host_memory_bytes"] == 2000 * sizes["bytes_per_adapter"]
    assert sizes["lora_cache_disk_bytes"] == 2000 * (sizes["bytes_per_adapter"] + 393216)
    assert operations(fake_triton) == [{"operation": "layout"}]
    assert cells(run(fake_triton, "size", "--num", 10), 3)[0] == "lora_cache_host_memory_bytes"


def test_size_needs_no_server_with_a_checkpoint(tmp_path: Path) -> None:
    config = {"num_hidden_layers": 1, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    arguments = ["size", "--checkpoint", tmp_path, "--linears", "v,q", "--num", 3, "--json"]
    result = CliRunner().invoke(app, ["adapters", *map(str, arguments)])
    assert json.loads(result.stdout)["lora_cache_host_memory_bytes"] == 3 * 256 * 1024


def test_size_never_tells_less_than_a_server_starts_with(fake_triton: Any) -> None:
    layout = adapter_layout(decoder_sites(30, 576, 576, 192, 1536), 64, "float32")
    fake_triton.report = {"layout": asdict(layout)}
    result = run(fake_triton, "size", "--rank", 4, "--num", 3, "--json")
    sizes = json.loads(result.stdout)
    _check_tier(layout, sizes["lora_cache_host_memory_bytes"] // layout.page_bytes, "host", "")
    _check_tier(layout, sizes["lora_cache_disk_bytes"] // layout.page_bytes - header_pages(layout), "disk", "")
    with pytest.raises(ConfigError, match="to hold 1 max sized LoRA"):
        _check_tier(layout, sizes["lora_cache_host_memory_bytes"] // layout.page_bytes - 1, "host", "")
    assert "a server starts only with room for one adapter of max_lora_rank (64)" in result.stderr
    assert "starts only" not in run(fake_triton, "size", "--rank", 4, "--num", 300).stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [(["--rank", "65"], "rank 65 is more than max_lora_rank, 64"), (["--linears", "q,z"], "--linears is 'q,z'")],
)
def test_size_refuses_what_the_server_would_refuse(fake_triton: Any, arguments: list[str], message: str) -> None:
    fake_triton.report = {"layout": LAYOUT}
    result = run(fake_triton, "size", *arguments)
    assert result.exit_code == 1
    assert message in result.stderr


def test_an_adapter_is_loaded_by_its_path(fake_triton: Any) -> None:
    fake_triton.report = {"adapter": PIRATE}
    assert run(fake_triton, "load", "pirate", "--path", "/adapters/pirate-v2").exit_code == 0
    (operation,) = operations(fake_triton)
    assert operation == {"operation": "load", "name": "pirate", "source": "", "path": "/adapters/pirate-v2"}


@pytest.mark.parametrize("path", ["/nope", "./nope", "../nope", "~/nope", "a/b/nope"])
def test_who_takes_a_path_for_a_name_hears_of_what_takes_paths(fake_triton: Any, path: str) -> None:
    result = run(fake_triton, "load", path)
    assert result.exit_code == 1
    for command in (f"multilora upload {path}", f"multilora adapters load NAME --path {path}"):
        assert command in result.stderr
    assert fake_triton.received == []


def test_a_path_is_that_of_one_adapter(fake_triton: Any) -> None:
    result = run(fake_triton, "load", "a", "b", "--path", "/adapters/a")
    assert (result.exit_code, "--path is where one adapter is" in result.stderr) == (1, True)
    assert fake_triton.received == []


def test_an_error_is_one_line_and_exit_status_1() -> None:
    result = CliRunner().invoke(app, ["adapters", "list", "--url", "grpc://127.0.0.1:1"])
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr.startswith("error: [UNAVAILABLE] no server answers at 127.0.0.1:1")
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("command", ["list", "load", "combine", "unload", "pin", "unpin", "events", "stats", "size"])
def test_every_command_has_help_with_an_example(command: str) -> None:
    result = CliRunner().invoke(app, ["adapters", command, "--help"])
    assert f"multilora adapters {command}" in result.stdout.partition("Example")[2]
