"""API keys: those of the server, and those of an OpenAI front that serves the console."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from support.api_keys import ENTRIES, OPERATORS_KEY, PIRATES_KEY, TENANTS_KEY, write_keys

from multilora_client import AsyncClient, AsyncMockTransport
from multilora_client.console.settings import ConsoleSettings
from multilora_client.keyed_transport import API_KEY_VARIABLE
from multilora_client.keys import KeyRing
from multilora_client.openai.app import make_app
from multilora_client.openai.catalogue import Catalogue
from multilora_client.openai.settings import FrontSettings

from .conftest import PAGE


def bearer(key: str) -> Any:
    """As the page sends it: the bytes of UTF-8."""
    return {"Authorization": f"Bearer {key}".encode()}


def test_each_callers_key_goes_to_the_server_and_the_console_lends_none(
    open_console: Callable[..., TestClient], server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, OPERATORS_KEY)
    server.key = OPERATORS_KEY
    console = open_console()
    question = {"targets": [{"adapter": None, "prompt": "hi"}]}

    assert console.get("/api/adapters").status_code == 401
    assert console.get("/api/adapters", headers=bearer("another key")).status_code == 401
    assert console.get("/api/adapters", headers=bearer(OPERATORS_KEY)).status_code == 200
    assert '"UNAUTHENTICATED"' in console.post("/api/ask", json=question).text
    assert "Ahoy" in console.post("/api/ask", json=question, headers=bearer(OPERATORS_KEY)).text


@pytest.fixture
def open_front(server: Any, tmp_path: Path) -> Iterator[Callable[..., TestClient]]:
    """Opens an OpenAI front with the console, asked as its page asks."""
    keys = KeyRing(write_keys(tmp_path / "keys.json", *ENTRIES))
    with ExitStack() as stack:

        def open_front(has_keys: bool = True, is_forwarding: bool = False, **settings: Any) -> TestClient:
            catalogue = Catalogue("base", {}, keys if has_keys else None, is_forwarding)
            transport = AsyncMockTransport(server)
            front = make_app(
                catalogue,
                lambda: AsyncClient(transport=transport),
                FrontSettings(console=ConsoleSettings(), **settings),
            )
            return stack.enter_context(TestClient(front, headers=PAGE, base_url="http://localhost:9000"))

        yield open_front


def test_the_openai_front_serves_the_console_at_its_root(open_front: Callable[..., TestClient]) -> None:
    front = open_front(has_keys=False)

    assert "<title>multilora console</title>" in front.get("/").text
    assert front.get("/console/api/adapters").json()["rows"]
    assert front.get("/v1/models").json()["data"][0]["id"] == "base"
    assert front.get("/nothing").json()["error"]["code"] != "invalid_request"


def test_without_the_flag_there_is_no_console(server: Any) -> None:
    transport = AsyncMockTransport(server)
    with TestClient(make_app(Catalogue("base", {}), lambda: AsyncClient(transport=transport))) as front:
        assert front.get("/").status_code == 404
        assert front.get("/console/", headers=PAGE).status_code == 404


def test_keys_that_the_server_does_not_know_open_the_console_to_those_who_run_it(
    open_front: Callable[..., TestClient],
) -> None:
    front = open_front()
    statuses = {
        key: front.get("/console/api/adapters", headers=bearer(key)).status_code
        for key in (OPERATORS_KEY, PIRATES_KEY, TENANTS_KEY, "a key of nobody")
    }
    assert statuses == {OPERATORS_KEY: 200, PIRATES_KEY: 403, TENANTS_KEY: 403, "a key of nobody": 401}
    assert front.get("/console/api/adapters").status_code == 401


def test_keys_that_the_server_knows_too_go_on_to_it(open_front: Callable[..., TestClient], server: Any) -> None:
    server.key = TENANTS_KEY
    front = open_front(is_forwarding=True)

    assert front.get("/console/api/adapters", headers=bearer(TENANTS_KEY)).status_code == 200
    assert front.get("/console/api/adapters", headers=bearer(PIRATES_KEY)).status_code == 401


def test_a_front_without_keys_lends_its_own_to_nobody(
    open_front: Callable[..., TestClient], server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(API_KEY_VARIABLE, OPERATORS_KEY)
    server.key = OPERATORS_KEY
    front = open_front(has_keys=False)

    assert front.get("/console/api/adapters").status_code == 401
    assert front.get("/console/api/adapters", headers=bearer(OPERATORS_KEY)).status_code == 200


def test_pages_that_may_ask_the_front_may_not_ask_its_console(open_front: Callable[..., TestClient]) -> None:
    front = open_front(has_keys=False, cors_origins=("*",))
    other = {"Origin": "https://chat.example"}

    assert front.get("/v1/models", headers=other).status_code == 200
    assert front.get("/console/api/adapters", headers=other).status_code == 403


def test_the_fronts_limit_of_bodies_is_not_the_consoles(open_front: Callable[..., TestClient]) -> None:
    front = open_front(has_keys=False, max_body_bytes=100)
    question = {"targets": [{"adapter": None, "prompt": "sea " * 100}]}

    assert front.post("/console/api/ask", json=question).status_code == 200
    assert front.post("/v1/completions", json={"model": "base", "prompt": "sea " * 100}).status_code == 413
