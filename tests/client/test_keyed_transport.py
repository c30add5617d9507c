from __future__ import annotations

import asyncio
import json

import httpx2
import pytest

from multilora_client import AsyncClient, AsyncMockTransport, Client, InferRequest, MockTransport, Response
from multilora_client.errors import PermissionDenied, RateExceeded, Unauthenticated, parse_error
from multilora_client.http_transport import HttpTransport

KEY = "a key of sixteen"


class Recorder:
    """Answers everything, and keeps the keys that requests came with."""

    def __init__(self) -> None:
        self.keys: list[str] = []

    def __call__(self, request: InferRequest) -> list[Response]:
        self.keys.append(request.api_key)
        return [Response({"text_output": ["hello"]}, is_final=True)]


def test_every_request_of_a_client_has_its_key() -> None:
    recorder = Recorder()
    with Client(api_key=KEY, transport=MockTransport(recorder)) as client:
        client.generate("hi")
        list(client.stream("hi"))
        client.stop("ab12")
    assert recorder.keys == [KEY] * 3


def test_without_a_key_the_environments_counts_unless_it_is_declined(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setenv("MULTILORA_API_KEY", KEY)
    Client(transport=MockTransport(recorder)).generate("hi")
    Client(api_key="", transport=MockTransport(recorder)).generate("hi")
    monkeypatch.delenv("MULTILORA_API_KEY")
    Client(transport=MockTransport(recorder)).generate("hi")
    assert recorder.keys == [KEY, "", ""]


def test_another_key_goes_over_the_same_connection() -> None:
    recorder = Recorder()

    async def ask() -> None:
        async with AsyncClient(api_key=KEY, transport=AsyncMockTransport(recorder)) as client:
            other = client.with_api_key("another key of theirs")
            await other.generate("hi")
            await client.generate("hi")
            async for _ in other.with_api_key("").stream("hi"):
                pass

    asyncio.run(ask())
    client = Client(api_key=KEY, transport=MockTransport(recorder))
    client.with_api_key("a blocking one").generate("hi")
    assert recorder.keys == ["another key of theirs", KEY, "", "a blocking one"]


def test_over_http_a_key_is_a_header_and_in_the_body_of_streams_which_triton_passes_no_header_of() -> None:
    seen: list[tuple[str | None, str | None]] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        is_stream = request.url.path.endswith("generate_stream")
        body = json.loads(request.content) if is_stream else {}
        seen.append((request.headers.get("authorization"), body.get("authorization")))
        return httpx2.Response(200, text='data: {"text_output": "a"}\n\n' if is_stream else '{"outputs": []}')

    transport = HttpTransport("http://nowhere", http_transport=httpx2.MockTransport(answer))
    request = InferRequest("generation", "ab12", {}, api_key=KEY)
    transport.infer(request)
    list(transport.stream(request))
    assert seen == [(f"Bearer {KEY}", None), (f"Bearer {KEY}", f"Bearer {KEY}")]
    assert KEY not in repr(request)


def test_what_a_key_may_not_do_has_errors_of_its_own() -> None:
    assert isinstance(parse_error("[UNAUTHENTICATED] no valid API key (request ab12)"), Unauthenticated)
    assert isinstance(parse_error("in ensemble 'ensemble', [PERMISSION_DENIED] no (request -)"), PermissionDenied)
    error = parse_error("[RESOURCE_EXHAUSTED] used up; come back in 12.5 s (request a)")
    assert isinstance(error, RateExceeded)
    assert (error.retry_after_s, error.retryable) == (12.5, True)
