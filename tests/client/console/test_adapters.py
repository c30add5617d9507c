"""What the page sees of adapters, and does to them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from multilora_client.console.routes.live import MAX_EVENTS
from multilora_client.console.settings import ConsoleSettings
from multilora_client.errors import NotFound, PermissionDenied, ServerUnreachable

from .conftest import DIGEST, adapter

LARGEST = 2**64 - 1


def rows(console: TestClient) -> list[dict[str, Any]]:
    listing = console.get("/api/adapters").json()
    return [dict(zip(listing["columns"], row, strict=True)) for row in listing["rows"]]


def test_the_list_is_the_servers_with_ids_that_javascript_can_hold(console: TestClient, server: Any) -> None:
    hostile = "<img src=x onerror=alert(1)>"
    server.reports["list"] = {"adapters": [adapter(lora_task_id=LARGEST, name=hostile), adapter(tenant="acme")]}
    first, second = rows(console)

    assert (first["lora_task_id"], first["name"], first["digest"]) == (str(LARGEST), hostile, DIGEST)
    assert (second["lora_task_id"], second["tenant"], second["ranks"]) == ("7", "acme", [4])


def test_aliases_come_with_the_list(console: TestClient, server: Any) -> None:
    alias = {"name": "chat", "members": [{"name": "chat-v7", "weight": 90}, {"name": "chat-v8", "weight": 10}]}
    server.reports["list"] = {"adapters": [adapter()], "aliases": [alias]}
    assert console.get("/api/adapters").json()["aliases"] == [alias]
    assert len(server.operations) == 1


def test_two_thousand_adapters_are_a_short_answer(console: TestClient, server: Any) -> None:
    server.reports["list"] = {
        "adapters": [adapter(lora_task_id=2**62 + 977 * i, digest=f"{i * 7919:064x}") for i in range(2000)]
    }
    answer = console.get("/api/adapters")

    assert len(answer.json()["rows"]) == 2000
    assert int(answer.headers["content-length"]) < 100_000


@pytest.mark.parametrize("operation", ["pin", "unpin", "unload"])
@pytest.mark.parametrize(
    ("body", "fields"),
    [
        ({"which": {"lora_task_id": str(LARGEST)}}, {"lora_task_id": LARGEST}),
        ({"which": {"lora_name": "7"}}, {"name": "7"}),
        ({"which": {"lora_task_id": "7"}, "tenant": "acme"}, {"lora_task_id": 7, "tenant": "acme"}),
        ({"which": {"lora_name": "a"}, "expected_digest": "ab"}, {"name": "a", "expected_digest": "ab"}),
    ],
)
def test_an_operation_reaches_the_adapter_that_is_meant(
    console: TestClient, server: Any, operation: str, body: dict[str, Any], fields: dict[str, Any]
) -> None:
    answer = console.post(f"/api/{operation}", json=body)

    assert answer.json()["lora_task_id"] == "7"
    assert server.operations == [{"operation": operation, **fields}]


def test_an_adapter_is_loaded_from_the_servers_sources(console: TestClient, server: Any) -> None:
    console.post("/api/load", json={"which": {"lora_name": "acme/pirate"}, "source": "hub", "path": "/adapters/p"})
    assert server.operations == [{"operation": "load", "name": "acme/pirate", "source": "hub", "path": "/adapters/p"}]


@pytest.mark.parametrize(
    "which",
    [
        {},
        {"lora_task_id": "-1"},
        {"lora_task_id": str(2**64)},
        {"lora_name": ""},
        {"lora_task_id": "7", "more": 1},
        None,
    ],
)
def test_an_adapter_that_nobody_can_mean_is_refused(console: TestClient, server: Any, which: Any) -> None:
    assert console.post("/api/unload", json={"which": which}).status_code == 400
    assert server.operations == []


def test_an_error_of_the_server_is_the_pages_to_show(console: TestClient, server: Any) -> None:
    server.errors["pin"] = NotFound("LoRA task 7 is not here")
    refused = console.post("/api/pin", json={"which": {"lora_task_id": "7"}})

    assert (refused.status_code, refused.json()["error"]["message"]) == (404, "LoRA task 7 is not here")


def test_a_read_only_console_looks_and_asks_and_changes_nothing(
    open_console: Callable[..., TestClient], server: Any
) -> None:
    console = open_console(ConsoleSettings(is_read_only=True))
    which = {"which": {"lora_task_id": "7"}}
    refused = [console.post(f"/api/{name}", json=which) for name in ("load", "unload", "pin", "unpin")]
    refused.append(console.post("/api/uploads?file=adapter_config.json:1", content=b"x"))

    assert {(answer.status_code, answer.json()["error"]["code"]) for answer in refused} == {(403, "read_only")}
    assert server.operations == []
    assert console.get("/api/about").json()["is_read_only"] is True
    assert rows(console)
    assert console.post("/api/ask", json={"targets": [{"adapter": None, "prompt": "hi"}]}).status_code == 200


def test_the_live_figures_are_the_servers_statistics_and_its_latest_events(console: TestClient, server: Any) -> None:
    events = [
        {"kind": "uploaded", "lora_task_id": 2**63 + i, "digest": "d", "time_ns": i, "instance": "i"}
        for i in range(500)
    ]
    server.reports["events"] = {"events": events, "last": 512, "num_missed": 12}
    live = console.get("/api/live?since=3").json()

    assert {"operation": "events", "since": 3} in server.operations
    assert live["stats"] == {"tiers": {}}
    assert (live["last"], len(live["events"]), live["num_missed"]) == (512, MAX_EVENTS, 12 + 500 - MAX_EVENTS)
    assert live["events"][-1]["lora_task_id"] == str(2**63 + 499)


def test_a_key_that_may_not_see_statistics_sees_its_own_events(console: TestClient, server: Any) -> None:
    server.errors["stats"] = PermissionDenied("stats tell what all do")
    assert console.get("/api/live").json() == {"events": [], "last": 0, "num_missed": 0, "stats": None}


def test_a_server_that_is_away_is_said_so(console: TestClient, server: Any) -> None:
    server.errors["describe"] = ServerUnreachable("no server answers at host:8001")
    refused = console.get("/api/about")

    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
