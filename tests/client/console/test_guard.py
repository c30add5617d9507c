"""Who may ask the console, and what browsers may do with its page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient

from multilora_client.console.settings import ConsoleSettings

JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize("host", ["localhost:9100", "127.0.0.1", "[::1]:9100", "192.168.1.7:80", "gpu7.example:9100"])
def test_the_console_is_reached_by_its_names_and_by_addresses(
    open_console: Callable[..., TestClient], host: str
) -> None:
    console = open_console(ConsoleSettings(hosts=("gpu7.example",)))
    assert console.get("/api/about", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["evil.example", "localhost.evil.example:9100", "127.0.0.1.evil.example", "", "[x]"])
@pytest.mark.parametrize("path", ["/", "/main.js", "/api/about"])
def test_a_name_that_leads_here_by_rebinding_gets_nothing(
    console: TestClient, server: Any, host: str, path: str
) -> None:
    refused = console.get(path, headers={"Host": host})

    assert refused.status_code == 421
    assert refused.json()["error"]["code"] == "unknown_host"
    assert server.operations == []


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Origin": "http://localhost:9101"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"X-Multilora-Console": None},
    ],
)
def test_a_page_of_another_origin_changes_and_reads_nothing(
    open_console: Callable[..., TestClient], server: Any, headers: dict[str, str | None]
) -> None:
    given = {"X-Multilora-Console": "1"} | headers
    console = open_console(headers={name: value for name, value in given.items() if value is not None})

    for refused in (
        console.post("/api/unload", json={"which": {"lora_task_id": "7"}}),
        console.post("/api/ask", json={"targets": [{"adapter": None, "prompt": "hi"}]}),
        console.get("/api/adapters"),
    ):
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "wrong_origin"
        assert "access-control-allow-origin" not in refused.headers
    assert server.operations == []


def test_the_page_itself_may_ask(console: TestClient) -> None:
    headers = {"Origin": "http://localhost:9100", "Sec-Fetch-Site": "same-origin"}
    assert console.get("/api/adapters", headers=headers).status_code == 200


@pytest.mark.parametrize("path", ["/", "/main.js", "/console.css", "/api/about", "/api/nothing", "/nothing"])
def test_browsers_run_nothing_but_the_pages_own_files(console: TestClient, path: str) -> None:
    headers = console.get(path).headers
    policy = dict(part.strip().partition(" ")[::2] for part in headers["content-security-policy"].split(";"))

    assert policy["default-src"] == "'none'"
    assert {policy[f"{kind}-src"] for kind in ("script", "style", "img", "connect")} == {"'self'"}
    assert policy["frame-ancestors"] == policy["base-uri"] == policy["form-action"] == "'none'"
    assert (policy["require-trusted-types-for"], policy["trusted-types"]) == ("'script'", "'none'")
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == ("no-store" if path.startswith("/api/") else "no-cache")


def test_nothing_outside_of_the_page_is_served(console: TestClient) -> None:
    for path in (
        "/../settings.py",
        "/..%2fsettings.py",
        "/%2e%2e/settings.py",
        "/static/main.js",
        "/docs",
        "/openapi.json",
    ):
        assert console.get(path).status_code == 404


def test_a_request_too_long_is_refused(console: TestClient, server: Any) -> None:
    refused = console.post("/api/ask", content=b"[" + b" " * (1 << 20) + b"]", headers=JSON)

    assert refused.status_code == 413
    assert server.requests == []


def test_the_root_leads_to_the_page(console: TestClient) -> None:
    page = console.get("http://localhost:9100/")

    assert page.status_code == 200
    assert page.url.path == "/console/"
    assert "<title>multilora console</title>" in page.text
