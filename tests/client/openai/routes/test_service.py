"""The paths for the people who run the front."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib.metadata import version
from typing import Any

import httpx2
import pytest
from fastapi.testclient import TestClient
from prometheus_client.parser import text_string_to_metric_families
from support.api_keys import OPERATORS_KEY, PIRATES_KEY

from multilora_client import Unavailable
from multilora_client.keys import KeyRing
from multilora_client.openai.catalogue import Catalogue
from multilora_client.openai.settings import FrontSettings

CHAT = {"model": "base", "messages": [{"role": "user", "content": "hi"}]}
SERVERS_METRICS = "# TYPE nv_inference_count gauge\nnv_inference_count 5\n"


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """As Prometheus' own parser reads them."""
    families = text_string_to_metric_families(text)
    return {(s.name, tuple(sorted(s.labels.items()))): s.value for family in families for s in family.samples}


@pytest.mark.parametrize("path", ["/health", "/ping"])
def test_the_front_is_as_healthy_as_the_server_behind(front: TestClient, server: Any, path: str) -> None:
    assert (front.get(path).status_code, front.head(path).status_code) == (200, 200)
    server.error = Unavailable("nobody answers")
    assert (front.get(path).status_code, front.head(path).status_code) == (503, 503)


def test_a_ping_may_be_posted(front: TestClient) -> None:
    assert front.post("/ping").status_code == 200


def test_the_version_is_that_of_the_package(front: TestClient) -> None:
    assert front.get("/version").json() == {"version": version("multilora-client")}


def test_requests_and_tokens_are_counted_by_route_and_status(front: TestClient, server: Any) -> None:
    server.outputs = {"num_cached_tokens": [3]}
    front.post("/v1/chat/completions", json=CHAT)
    front.post("/v1/chat/completions", json=CHAT | {"stream": True})
    front.post("/v1/chat/completions", json=CHAT | {"model": "nobody"})
    front.get("/v1/models/pirate")
    front.get("/made/up")
    told = samples(front.get("/metrics").text)

    def requests(route: str, status: str) -> float | None:
        return told.get(("multilora_openai_requests_total", (("route", route), ("status", status))))

    assert requests("/v1/chat/completions", "200") == 2
    assert requests("/v1/chat/completions", "404") == 1
    assert requests("/v1/models/{name:path}", "200") == 1
    assert requests("none", "404") == 1
    assert told["multilora_openai_prompt_tokens_total", ()] == 14
    assert told["multilora_openai_cached_prompt_tokens_total", ()] == 6
    assert told["multilora_openai_completion_tokens_total", ()] == 1 + 4
    assert told["multilora_openai_request_duration_seconds_count", (("route", "/v1/chat/completions"),)] == 3
    assert told["multilora_openai_requests_running", ()] == 1  # the one that asks


def test_an_answer_that_broke_counts_as_an_error(front: TestClient, server: Any) -> None:
    server.error = RuntimeError("broken")
    front.post("/v1/chat/completions", json=CHAT)
    told = samples(front.get("/metrics").text)

    labels = (("route", "/v1/chat/completions"), ("status", "500"))
    assert told["multilora_openai_requests_total", labels] == 1


def test_metrics_are_for_those_who_run_the_server(
    open_front: Callable[..., TestClient], catalogue: Catalogue, keys: KeyRing
) -> None:
    front = open_front(dataclasses.replace(catalogue, keys=keys))

    def status(key: str) -> int:
        return front.get("/metrics", headers={"Authorization": f"Bearer {key}".encode()}).status_code

    assert [status(key) for key in (OPERATORS_KEY, PIRATES_KEY, "nobody")] == [200, 403, 401]
    assert front.get("/health").status_code == 200


@pytest.fixture
def front_of_two(
    open_front: Callable[..., TestClient], catalogue: Catalogue, monkeypatch: pytest.MonkeyPatch
) -> TestClient:
    """A front that was told where the server's metrics are."""

    def handle(request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, text=SERVERS_METRICS) if request.url.port == 8002 else httpx2.Response(500)

    made = httpx2.AsyncClient
    monkeypatch.setattr(
        httpx2, "AsyncClient", lambda **options: made(transport=httpx2.MockTransport(handle), **options)
    )
    return open_front(catalogue, FrontSettings(server_metrics_url="http://server:8002/metrics"))


def test_the_servers_metrics_are_after_the_fronts(front_of_two: TestClient) -> None:
    told = samples(front_of_two.get("/metrics").text)

    assert told["nv_inference_count", ()] == 5
    assert ("multilora_openai_requests_running", ()) in told


def test_half_of_the_metrics_are_no_metrics(open_front: Callable[..., TestClient], catalogue: Catalogue) -> None:
    front = open_front(catalogue, FrontSettings(server_metrics_url="http://127.0.0.1:1/metrics"))
    assert front.get("/metrics").status_code == 502
