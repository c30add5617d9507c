from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from multilora_client import Client
from multilora_client.cli import app

REPORT = {
    "weights": [
        {
            "modules": ["a.q_proj", "a.k_proj"],
            "kind": "int4 in groups of 8",
            "packed_bytes": 10,
            "unpacked_bytes": 80,
            "needed_bytes": 80,
        }
    ],
    "stats": {"packed_bytes": 10, "unpacked_bytes": 80, "max_unpacked_bytes": 100},
}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    calls: list[tuple[Any, ...]] = []

    def switch_weights(self: Client, *arguments: Any) -> dict[str, Any]:
        calls.append(arguments)
        return REPORT

    monkeypatch.setattr(Client, "switch_weights", switch_weights)
    return calls


def test_commands_ask_for_modules_and_tell_of_both_forms(asked: list[tuple[Any, ...]]) -> None:
    for command in (["list"], ["unpack", "*.k_proj"], ["pack", "*"]):
        result = CliRunner().invoke(app, ["weights", *command])
        assert result.exit_code == 0
        assert "a.q_proj a.k_proj: int4 in groups of 8, 10 bytes; floats 80 of 80 bytes\n" in result.stdout
        assert "floats in all: 80 of 100 bytes" in result.stdout
    assert asked == [("list", ["*"]), ("unpack", ["*.k_proj"]), ("pack", ["*"])]


def test_json_is_the_answer_as_it_is(asked: list[tuple[Any, ...]]) -> None:
    assert json.loads(CliRunner().invoke(app, ["weights", "list", "--json"]).stdout) == REPORT
