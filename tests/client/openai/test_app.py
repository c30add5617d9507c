"""Both endpoints, whole and streamed; errors, keys, and clients that hang up."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient
from support.api_keys import ENTRIES, OPERATORS_KEY, PIRATES_KEY, TENANTS_KEY, write_keys

from multilora_client import (
    Adapter,
    AdapterTensors,
    AsyncClient,
    AsyncMockTransport,
    InferRequest,
    InvalidRequest,
    NotFound,
    Response,
    parse_error,
)
from multilora_client.keys import KeyRing
from multilora_client.openai.app import make_app
from multilora_client.openai.catalogue import Catalogue
from multilora_client.openai.settings import FrontSettings
from multilora_wire.adapter_origin import AdaptedLinear, AdapterOrigin
from multilora_wire.sites import decoder_sites

CHAT = {"model": "base", "messages": [{"role": "user", "content": "Who are you?"}]}
COMPLETION = {"model": "base", "prompt": "I am"}
CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
both = pytest.mark.parametrize(("path", "body"), [(CHAT_PATH, CHAT), (COMPLETION_PATH, COMPLETION)])


def events(text: str) -> list[Any]:
    assert text.endswith("\n\n")
    data = [event.removeprefix("data: ") for event in text.removesuffix("\n\n").split("\n\n")]
    return [event if event == "[DONE]" else json.loads(event) for event in data]


def without_identity(body: dict[str, Any], prefix: str) -> dict[str, Any]:
    """A body without the fields that differ from one to the next."""
    assert body["id"].startswith(prefix)
    assert body["created"] > 0
    return {name: value for name, value in body.items() if name not in ("id", "created")}


def test_a_whole_chat_answer(front: TestClient, server: Any) -> None:
    answer = front.post(CHAT_PATH, json=CHAT)

    assert answer.status_code == 200
    assert without_identity(answer.json(), "chatcmpl-") == {
        "object": "chat.completion",
        "model": "base",
        "system_fingerprint": None,
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Ahoy, café", "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8},
    }
    assert json.loads(server.value("messages")) == CHAT["messages"]
    assert answer.json()["id"] == f"chatcmpl-{server.requests[0].request_id}"


def test_a_whole_completion(front: TestClient, server: Any) -> None:
    answer = front.post(COMPLETION_PATH, json=COMPLETION)

    assert without_identity(answer.json(), "cmpl-") == {
        "object": "text_completion",
        "model": "base",
        "system_fingerprint": None,
        "choices": [{"index": 0, "text": "Ahoy, café", "logprobs": None, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 7, "completion_tokens": 1, "total_tokens": 8},
    }
    assert (server.value("text_input"), server.value("max_tokens")) == ("I am", 16)


@both
def test_several_choices_are_told_apart_by_their_index_and_counted_together(
    front: TestClient, server: Any, path: str, body: dict[str, Any]
) -> None:
    server.outputs = {
        "text_output": ["Ahoy", "Aye", "Avast"],
        "num_output_tokens_so_far": [2, 1, 3],
        "finish_reason": ["stop", "length", "stop"],
    }

    answer = front.post(path, json=body | {"n": 3}).json()

    texts = [choice["message"]["content"] if path == CHAT_PATH else choice["text"] for choice in answer["choices"]]
    assert texts == ["Ahoy", "Aye", "Avast"]
    assert [(c["index"], c["finish_reason"]) for c in answer["choices"]] == [(0, "stop"), (1, "length"), (2, "stop")]
    assert answer["usage"] == {"prompt_tokens": 7, "completion_tokens": 6, "total_tokens": 13}


@pytest.mark.parametrize("stream", [False, True])
def test_the_trace_of_the_caller_goes_on_and_a_malformed_one_counts_as_none(
    front: TestClient, server: Any, stream: bool
) -> None:
    good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for given, passed_on in ((good, good), ("00-nonsense", "")):
        answer = front.post(CHAT_PATH, json=CHAT | {"stream": stream}, headers={"traceparent": given})
        assert answer.status_code == 200
        assert server.requests[-1].traceparent == passed_on


def test_the_server_learns_whose_a_request_is_by_address_or_by_key_but_not_where_it_has_the_keys_itself(
    open_front: Callable[..., TestClient], server: Any, tmp_path: Path
) -> None:
    settings = FrontSettings(client_header_secret="theSecretOfBoth16")
    keys = KeyRing(write_keys(tmp_path / "keys.json", *ENTRIES))
    authorization = {"authorization": f"Bearer {TENANTS_KEY}"}
    caller = keys.caller(TENANTS_KEY)
    assert caller is not None
    for catalogue, named in (
        (Catalogue("base", {}), "theSecretOfBoth16 testclient"),
        (Catalogue("base", {}, keys), f"theSecretOfBoth16 {caller.id}"),
        (Catalogue("base", {}, keys, is_forwarding=True), None),
    ):
        for stream in (False, True):
            body = CHAT | {"model": "base", "stream": stream}
            answer = open_front(catalogue, settings).post(CHAT_PATH, json=body, headers=authorization)
            assert answer.status_code == 200
            assert server.requests[-1].headers.get("x-multilora-client") == named
    assert open_front(Catalogue("base", {})).post(CHAT_PATH, json=CHAT | {"model": "base"}).status_code == 200
    assert "x-multilora-client" not in server.requests[-1].headers


def test_a_streamed_chat_opens_with_the_role_and_ends_with_usage_and_done(front: TestClient) -> None:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = front.post(CHAT_PATH, json=CHAT | options)

    *bodies, done = events(answer.text)
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert done == "[DONE]"
    assert {body["object"] for body in bodies} == {"chat.completion.chunk"}
    assert len({body["id"] for body in bodies}) == 1
    assert [body["choices"][0]["delta"] for body in bodies[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "Ahoy"},
        {"content": ", "},
        {"content": "café"},
        {},
    ]
    assert [body["choices"][0]["finish_reason"] for body in bodies[:-1]] == [None] * 4 + ["stop"]
    assert [body["usage"] for body in bodies[:-1]] == [None] * 5
    assert bodies[-1]["choices"] == []
    assert bodies[-1]["usage"] == {"prompt_tokens": 7, "completion_tokens": 4, "total_tokens": 11}


def test_a_streamed_completion_says_no_usage_unasked(front: TestClient, server: Any) -> None:
    server.finish_reason = "length"
    *bodies, done = events(front.post(COMPLETION_PATH, json=COMPLETION | {"stream": True}).text)

    assert done == "[DONE]"
    assert [body["choices"][0]["text"] for body in bodies] == ["Ahoy", ", ", "café", ""]
    assert bodies[-1]["choices"][0]["finish_reason"] == "length"
    assert all("usage" not in body for body in bodies)


@both
@pytest.mark.parametrize("stream", [False, True])
def test_a_model_name_picks_its_adapter(
    front: TestClient, server: Any, path: str, body: dict[str, Any], stream: bool
) -> None:
    for model, task in (("pirate", 7), ("base", None), ("poet", 8), ("pirate", 7)):
        answer = front.post(path, json=body | {"model": model, "stream": stream})
        first = events(answer.text)[0] if stream else answer.json()
        assert server.value("lora_task_id") == task
        assert first["model"] == model
        assert first["system_fingerprint"] == (None if task is None else "ab" * 32)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (
            "stop_words has 20 words; a request may have 16",
            "stop has 20 words; a request may have 16",
        ),
        ("text_input has 9 bytes; a prompt may have 8", "prompt has 9 bytes; a prompt may have 8"),
        ("bad_words_list, embedding_bias and min_tokens forbid", "bad_words, logit_bias and min_tokens forbid"),
        ("LoRA task 7 of my_input_ids", "LoRA task 7 of my_input_ids"),
    ],
)
def test_the_servers_refusals_have_the_names_of_the_protocol(
    front: TestClient, server: Any, error: str, told: str
) -> None:
    server.error = InvalidRequest(error)
    for given in ({}, {"stream": True}):
        answer = front.post(CHAT_PATH, json=CHAT | given)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, told)


@pytest.mark.parametrize("path", [CHAT_PATH, "/v1/completions"])
def test_lora_path_names_the_adapter_of_the_model(front: TestClient, server: Any, path: str) -> None:
    prompt = {"messages": CHAT["messages"]} if path == CHAT_PATH else {"prompt": "hi"}
    for model, lora_path, task in (
        ("pirate", "pirate", 7),
        ("base", "poet", 8),
        ("base", "base", None),
        ("poet", None, 8),
    ):
        answer = front.post(path, json={"model": model, "lora_path": lora_path, **prompt})

        assert answer.status_code == 200, answer.text
        assert server.value("lora_task_id") == task
    server.requests.clear()
    for model, lora_path, status in (("pirate", "poet", 400), ("pirate", "base", 400), ("base", "/a/b", 404)):
        error = front.post(path, json={"model": model, "lora_path": lora_path, **prompt})
        assert (error.status_code, error.json()["error"]["param"]) == (status, "lora_path")
    assert front.post(path, json={"model": "base", "lora_path": ["pirate"], **prompt}).status_code == 400
    assert server.requests == []


@both
@pytest.mark.parametrize("model", ["Base", "nobody", ""])
def test_an_unknown_model_is_never_the_base_model(
    front: TestClient, server: Any, path: str, body: dict[str, Any], model: str
) -> None:
    answer = front.post(path, json=body | {"model": model})

    error = {"type": "invalid_request_error", "param": "model", "code": "model_not_found"}
    assert answer.status_code == 404
    assert answer.json() == {"error": error | {"message": f"there is no model {model!r}"}}
    assert server.requests == []


@both
@pytest.mark.parametrize("stream", [False, True])
def test_without_named_adapters_and_keys_a_name_is_an_adapter_of_the_server(
    server: Any, path: str, body: dict[str, Any], stream: bool
) -> None:
    app = make_app(Catalogue("base", {}), lambda: AsyncClient(transport=AsyncMockTransport(server)), FrontSettings())
    with TestClient(app) as front:
        assert front.post(path, json=body | {"model": "acme/pirate", "stream": stream}).status_code == 200
        assert server.value("lora_name") == "acme/pirate"
        for model in ("", "a b", "../x"):
            answer = front.post(path, json=body | {"model": model, "stream": stream})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        server.error = parse_error("[NOT_FOUND] LoRA adapter 'nobody' not found in cache. Please send LoRA weights")
        answer = front.post(path, json=body | {"model": "nobody", "stream": stream})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


def test_the_models_are_listed_and_found(front: TestClient) -> None:
    listing = front.get("/v1/models").json()

    assert [model["id"] for model in listing["data"]] == ["base", "pirate", "poet"]
    assert front.get("/v1/models/pirate").json() == listing["data"][1]
    assert front.get("/v1/models/nobody").status_code == 404


@pytest.fixture
def locked(open_front: Callable[[Catalogue], TestClient], catalogue: Catalogue, keys: KeyRing) -> TestClient:
    return open_front(dataclasses.replace(catalogue, keys=keys))


@pytest.fixture
def forwarding(open_front: Callable[[Catalogue], TestClient], catalogue: Catalogue, keys: KeyRing) -> TestClient:
    """Before a server with the same keys."""
    return open_front(dataclasses.replace(catalogue, keys=keys, is_forwarding=True))


@pytest.mark.parametrize(
    "header",
    [
        None,
        PIRATES_KEY,
        "Bearer",
        "Bearer ",
        f"Bearer {PIRATES_KEY[:-1]}",
        f"Bearer {PIRATES_KEY}2",
        f"Basic {PIRATES_KEY}",
    ],
)
@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/base"])
def test_without_a_valid_key_there_is_nothing(locked: TestClient, path: str, header: str | None) -> None:
    answer = locked.get(path, headers={} if header is None else {"Authorization": header})

    assert answer.status_code == 401
    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert answer.headers["www-authenticate"] == "Bearer"


def test_a_key_opens_its_own_models_only(locked: TestClient, server: Any) -> None:
    locked.headers["Authorization"] = f"Bearer {PIRATES_KEY}"

    assert [model["id"] for model in locked.get("/v1/models").json()["data"]] == ["pirate"]
    assert locked.post(CHAT_PATH, json=CHAT | {"model": "pirate"}).status_code == 200
    assert server.value("lora_task_id") == 7
    for model in ("base", "poet"):
        answer = locked.post(CHAT_PATH, json=CHAT | {"model": model})
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "model_not_allowed")
    assert len(server.requests) == 1


def test_a_star_opens_every_model(locked: TestClient) -> None:
    listing = locked.get("/v1/models", headers={b"Authorization": f"bearer {OPERATORS_KEY}".encode()})

    assert len(listing.json()["data"]) == 3


def test_a_tenant_may_use_of_the_fronts_adapters_those_that_its_key_names(locked: TestClient, server: Any) -> None:
    locked.headers["Authorization"] = f"Bearer {TENANTS_KEY}"

    assert [model["id"] for model in locked.get("/v1/models").json()["data"]] == ["base", "poet"]
    assert locked.post(CHAT_PATH, json=CHAT | {"model": "pirate"}).status_code == 403
    assert locked.post(CHAT_PATH, json=CHAT | {"model": "mine"}).status_code == 403
    assert locked.post(CHAT_PATH, json=CHAT | {"model": "poet"}).status_code == 200
    assert [request.api_key for request in server.requests] == [""]


def test_each_callers_key_goes_on_and_names_beyond_the_catalogue_mean_the_servers_adapters(
    forwarding: TestClient, server: Any
) -> None:
    forwarding.headers["Authorization"] = f"Bearer {TENANTS_KEY}"
    assert forwarding.post(CHAT_PATH, json=CHAT | {"model": "mine"}).status_code == 200
    assert (server.value("lora_name"), server.requests[-1].api_key) == ("mine", TENANTS_KEY)
    assert forwarding.post(CHAT_PATH, json=CHAT | {"model": "base", "stream": True}).status_code == 200
    assert server.requests[-1].api_key == TENANTS_KEY

    forwarding.headers["Authorization"] = f"Bearer {PIRATES_KEY}"
    assert forwarding.post(CHAT_PATH, json=CHAT | {"model": "mine"}).status_code == 403
    assert forwarding.post(CHAT_PATH, json=CHAT | {"model": "pirate"}).status_code == 200
    assert server.requests[-1].api_key == PIRATES_KEY


def test_a_model_that_nobody_has_is_not_found(forwarding: TestClient, server: Any) -> None:
    server.report |= {"adapters": []}
    forwarding.headers["Authorization"] = f"Bearer {TENANTS_KEY}"
    answer = forwarding.get("/v1/models/secret")
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
    assert forwarding.get("/v1/models/base").status_code == 200


def test_the_models_of_a_forwarded_key_are_what_the_server_lists_for_it_too(
    forwarding: TestClient, server: Any
) -> None:
    info = dict.fromkeys(("lora_task_id", "bytes", "num_pins", "num_hits", "last_used_s"), 0)
    texts = dict.fromkeys(("digest", "status", "location"), "")
    listed = [{**info, **texts, "name": name, "ranks": [], "is_pinned": False} for name in ("mine", "", "poet")]
    server.report |= {"adapters": listed}
    models = forwarding.get("/v1/models", headers={"Authorization": f"Bearer {TENANTS_KEY}"}).json()["data"]

    assert [model["id"] for model in models] == ["base", "poet", "mine"]
    assert {operation["operation"] for operation in server.operations} == {"describe", "list"}


def test_a_rate_that_is_used_up_tells_when_to_come_back(front: TestClient, server: Any) -> None:
    server.error = parse_error("[RESOURCE_EXHAUSTED] 5 requests a minute are used up; come back in 12.3 s")
    answer = front.post(CHAT_PATH, json=CHAT)

    assert (answer.status_code, answer.headers["retry-after"]) == (429, "13")
    assert answer.json()["error"]["code"] == "resource_exhausted"


def test_a_key_comes_before_the_fields_of_the_body(locked: TestClient) -> None:
    assert locked.post(CHAT_PATH, json={}).status_code == 401


@pytest.mark.parametrize(
    ("message", "status", "kind", "code"),
    [
        ("[INVALID_ARG] bad", 400, "invalid_request_error", "invalid_arg"),
        ("[UNSUPPORTED] no", 400, "invalid_request_error", "unsupported"),
        ("[NOT_FOUND] no model", 404, "invalid_request_error", "not_found"),
        ("[ALREADY_EXISTS] other weights", 409, "invalid_request_error", "already_exists"),
        ("[CANCELLED] ended", 499, "invalid_request_error", "cancelled"),
        ("[UNAUTHENTICATED] no key", 401, "invalid_request_error", "unauthenticated"),
        ("[PERMISSION_DENIED] not yours", 403, "invalid_request_error", "permission_denied"),
        ("[UNAVAILABLE] 4096 wait", 503, "server_error", "unavailable"),
        ("[DEADLINE] late", 504, "server_error", "deadline"),
        ("[INTERNAL] broken", 500, "server_error", "internal"),
        ("no code at all", 500, "server_error", "unknown"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_an_error_of_the_server_has_a_status_that_says_the_same(
    front: TestClient, server: Any, message: str, status: int, kind: str, code: str, stream: bool
) -> None:
    server.error = parse_error(message)
    answer = front.post(CHAT_PATH, json=CHAT | {"stream": stream})

    text = message.rpartition("] ")[2]
    assert answer.status_code == status
    assert answer.json() == {"error": {"message": text, "type": kind, "param": None, "code": code}}


def test_an_error_in_the_midst_of_a_stream_is_its_last_event(front: TestClient, server: Any) -> None:
    server.error, server.error_at = parse_error("[UNAVAILABLE] the engine died"), 2
    answer = front.post(CHAT_PATH, json=CHAT | {"stream": True})

    *_, text, error = events(answer.text)
    assert answer.status_code == 200
    assert text["choices"][0]["delta"] == {"content": "Ahoy"}
    assert error["error"]["code"] == "unavailable"


def test_an_answer_that_was_cancelled_does_not_look_complete(front: TestClient, server: Any) -> None:
    server.finish_reason = "cancelled"

    assert front.post(CHAT_PATH, json=CHAT).status_code == 499
    assert events(front.post(CHAT_PATH, json=CHAT | {"stream": True}).text)[-1]["error"]["code"] == "cancelled"


def test_an_unexpected_error_is_an_error_without_details(front: TestClient, server: Any) -> None:
    server.error = RuntimeError("secret")
    answer = front.post(CHAT_PATH, json=CHAT)

    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "internal"
    assert "secret" not in answer.text


def test_broken_json_is_told_with_its_place(front: TestClient) -> None:
    answer = front.post(CHAT_PATH, content=b'{"model": }', headers={"Content-Type": "application/json"})

    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "invalid_json", None)
    assert error["message"] == "the body is not valid JSON: Expecting value (character 10)"


@pytest.mark.parametrize("content_type", [None, "text/plain", "application/x-www-form-urlencoded"])
def test_a_body_that_is_not_declared_as_json_gets_a_hint(front: TestClient, content_type: str | None) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    answer = front.post(CHAT_PATH, content=json.dumps(CHAT).encode(), headers=headers)

    assert (answer.status_code, answer.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert "send the header `Content-Type: application/json`" in answer.json()["error"]["message"]


@pytest.mark.parametrize("body", [b"[]", b'"text"', b"3", b"null", b""])
def test_json_that_is_no_object_is_refused(front: TestClient, body: bytes) -> None:
    answer = front.post(CHAT_PATH, content=body, headers={"Content-Type": "application/json"})

    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")


@pytest.mark.parametrize("depth", [200, 480, 5000, 100_000])
def test_a_body_of_any_depth_is_answered(front: TestClient, depth: int) -> None:
    parameters = '{"items": ' * depth + "{}" + "}" * depth
    tool = f'{{"type": "function", "function": {{"name": "sky", "parameters": {parameters}}}}}'
    body = f'{json.dumps(CHAT)[:-1]}, "tools": [{tool}], "tool_choice": "required"}}'
    answer = front.post(CHAT_PATH, content=body.encode(), headers={"Content-Type": "application/json"})

    assert answer.status_code in (200, 400)


@both
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_is_too_long_is_refused_in_openais_words(
    front: TestClient, server: Any, path: str, body: dict[str, Any], stream: bool
) -> None:
    """SDKs look for the code, and cut the conversation."""
    server.error = parse_error("[INVALID_ARG] the prompt has 9000 tokens and max_model_len is 8192: no room to answer")
    answer = front.post(path, json=body | {"stream": stream})

    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "context_length_exceeded")
    assert error["message"].startswith(
        "This model's maximum context length is 8192 tokens. However, your prompt has 9000"
    )


def test_a_prompt_of_too_many_bytes_is_too_long_as_well(front: TestClient, server: Any) -> None:
    server.error = parse_error("[INVALID_ARG] text_input has 99 bytes; a prompt may have 9")
    error = front.post(COMPLETION_PATH, json=COMPLETION).json()["error"]

    assert (error["code"], error["message"]) == (
        "context_length_exceeded",
        "prompt has 99 bytes; a prompt may have 9",
    )


def test_web_pages_of_named_origins_may_ask(open_front: Callable[..., TestClient], catalogue: Catalogue) -> None:
    asking = {"Origin": "https://chat.example", "Access-Control-Request-Method": "POST"}

    def allowed(*origins: str) -> str | None:
        front = open_front(catalogue, FrontSettings(cors_origins=origins))
        asked = front.options(CHAT_PATH, headers=asking | {"Access-Control-Request-Headers": "authorization"})
        answered = front.post(CHAT_PATH, json=CHAT, headers={"Origin": "https://chat.example"})
        told = asked.headers.get("access-control-allow-origin")
        assert answered.headers.get("access-control-allow-origin") == told
        return told

    assert allowed() is None
    assert allowed("https://other.example") is None
    assert allowed("https://chat.example") == "https://chat.example"
    assert allowed("*") == "*"


class Patient(AsyncMockTransport):
    """Never comes to an end; tells when it was asked, and when it was left."""

    def __init__(self, num_pieces: int) -> None:
        super().__init__(lambda request: [])
        self.num_pieces, self.asked, self.left = num_pieces, asyncio.Event(), asyncio.Event()

    async def infer(self, request: InferRequest) -> Response:
        return await anext(self.stream(request))

    async def stream(self, request: InferRequest) -> AsyncGenerator[Response, None]:
        try:
            for _ in range(self.num_pieces):
                yield Response({"text_output": ["more"]})
            self.asked.set()
            await asyncio.Event().wait()
        finally:
            self.left.set()


@pytest.mark.parametrize(("stream", "num_pieces"), [(False, 0), (True, 0), (True, 2)])
def test_a_client_that_hangs_up_ends_its_generation(catalogue: Catalogue, stream: bool, num_pieces: int) -> None:
    asyncio.run(asyncio.wait_for(hang_up(catalogue, stream, num_pieces), timeout=20))


async def hang_up(catalogue: Catalogue, stream: bool, num_pieces: int) -> None:
    """The application as uvicorn calls it: one message with the body, then nothing until the client leaves."""
    transport = Patient(num_pieces)
    messages = [{"type": "http.request", "body": json.dumps(CHAT | {"stream": stream}).encode(), "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        if messages:
            return messages.pop()
        await transport.asked.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    app = make_app(catalogue, lambda: AsyncClient(transport=transport))
    async with app.router.lifespan_context(app) as state:
        await app(http_scope(state), receive, send)
        assert transport.left.is_set()
    assert sent[0]["status"] == (200 if num_pieces else 499)


def http_scope(state: Any) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "method": "POST",
        "scheme": "http",
        "path": CHAT_PATH,
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "state": state,
    }


def test_an_adapter_may_not_be_called_like_the_base_model(catalogue: Catalogue) -> None:
    with pytest.raises(InvalidRequest, match="like the base model"):
        dataclasses.replace(catalogue, base="pirate")


def test_a_body_too_long_is_refused_with_413(server: Any) -> None:
    app = make_app(
        Catalogue("base", {}),
        lambda: AsyncClient(transport=AsyncMockTransport(server)),
        FrontSettings(max_body_bytes=1000),
    )
    with TestClient(app) as front:
        fits = front.post(COMPLETION_PATH, json=COMPLETION | {"prompt": "x" * 900})
        too_long = front.post(COMPLETION_PATH, json=COMPLETION | {"prompt": "x" * 1000})
        in_chunks = front.post(COMPLETION_PATH, content=iter([b"x" * 500] * 3))
    assert fits.status_code == 200
    for answer in (too_long, in_chunks):
        assert answer.status_code == 413
        assert answer.json()["error"]["message"] == "the request's body has more than 1000 bytes"


@pytest.mark.parametrize("path", ["/docs", "/openapi.json"])
def test_it_does_not_describe_itself_unless_told_to(server: Any, path: str) -> None:
    def status(has_docs: bool) -> int:
        transport = AsyncMockTransport(server)
        app = make_app(
            Catalogue("base", {}), lambda: AsyncClient(transport=transport), FrontSettings(has_docs=has_docs)
        )
        with TestClient(app) as front:
            return front.get(path).status_code

    assert (status(has_docs=False), status(has_docs=True)) == (404, 200)


@pytest.mark.parametrize("stream", [False, True])
def test_an_adapter_of_another_model_is_an_error_of_the_request(
    open_front: Callable[..., TestClient], server: Any, small_tensors: AdapterTensors, stream: bool
) -> None:
    linears = (AdaptedLinear("model.layers.0.self_attn.q_proj", 1, 0, 2, 1), AdaptedLinear("v_proj", 3, 1, 3, 4))
    tensors = dataclasses.replace(small_tensors, origin=AdapterOrigin(linears, "acme/other"))
    server.report = server.report | {"layout": {"sites": dataclasses.asdict(decoder_sites(2, 64, 64, 32, 96))}}
    front = open_front(Catalogue("base", {"pirate": Adapter(7, tensors)}))
    body = {"model": "pirate", "prompt": "hi", "stream": stream}
    answer = front.post("/v1/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "invalid_adapter"
    assert "q_proj has 2 inputs and 1 outputs there, 64 inputs and 64 outputs here" in answer.json()["error"]["message"]
    assert server.requests == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/responses"])
def test_a_request_may_demand_the_version_of_its_adapter(front: TestClient, server: Any, path: str) -> None:
    prompt = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": "hi"}
    field = {"/v1/chat/completions": "messages", "/v1/completions": "prompt", "/v1/responses": "input"}[path]
    body = {"model": "pirate", field: prompt[field]}
    assert front.post(path, json=body | {"lora_expected_digest": "ab" * 16}).status_code == 200
    assert server.value("lora_expected_digest") == "ab" * 16
    assert front.post(path, json=body).status_code == 200
    assert server.value("lora_expected_digest") is None
    refused = front.post(path, json=body | {"lora_expected_digest": "AB" * 16})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "lora_expected_digest")
    server.error = NotFound("LoRA task 7 has the digest x and lora_expected_digest is y")
    assert front.post(path, json=body | {"lora_expected_digest": "ab" * 16}).status_code == 404
