"""Both HTTP transports against a handler that speaks Triton's HTTP by hand, requests against tritonclient's own."""

from __future__ import annotations

import asyncio
import json
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx2
import numpy as np
import pytest
import tritonclient.http

from multilora_client import (
    Adapter,
    AdapterNotFound,
    AdapterTensors,
    AsyncClient,
    Client,
    InferRequest,
    InvalidRequest,
    ServerFault,
    ServerUnreachable,
    TimedOut,
    Unavailable,
)
from multilora_client.http_transport import AsyncHttpTransport, HttpTransport
from multilora_client.tensors import Tensor, numeric_tensor, string_tensor

Handler = Callable[[httpx2.Request], httpx2.Response]
NOT_CACHED = "[NOT_FOUND] LoRA task 7 not found in cache. Please send LoRA weights with request (request ab)"


def infer_answer(text: str) -> httpx2.Response:
    """One binary output between two JSON ones."""
    data = struct.pack("<I", len(text.encode())) + text.encode()
    header = {
        "outputs": [
            {"name": "num_output_tokens_so_far", "datatype": "INT32", "shape": [1, 1], "data": [3]},
            {
                "name": "text_output",
                "datatype": "BYTES",
                "shape": [1, 1],
                "parameters": {"binary_data_size": len(data)},
            },
            {"name": "finish_reason", "datatype": "BYTES", "shape": [1, 1], "data": ["stop"]},
        ]
    }
    encoded = json.dumps(header).encode()
    return httpx2.Response(200, headers={"Inference-Header-Content-Length": str(len(encoded))}, content=encoded + data)


END = {"text_output": "", "finish_reason": "stop"}


def event_stream(*events: dict[str, Any]) -> httpx2.Response:
    return httpx2.Response(200, text="".join(f"data: {json.dumps(event)}\n\n" for event in events))


def generate_blocking(handler: Handler, **options: Any) -> Any:
    transport = HttpTransport("http://triton", http_transport=httpx2.MockTransport(handler))
    with Client(transport=transport) as client:
        return client.generate("hi", **options)


def generate_asyncio(handler: Handler, **options: Any) -> Any:
    async def ask() -> Any:
        transport = AsyncHttpTransport("http://triton", http_transport=httpx2.MockTransport(handler))
        async with AsyncClient(transport=transport) as client:
            return await client.generate("hi", **options)

    return asyncio.run(ask())


def stream_blocking(handler: Handler, **options: Any) -> Any:
    transport = HttpTransport("http://triton", http_transport=httpx2.MockTransport(handler))
    with Client(transport=transport) as client:
        return list(client.stream("hi", **options))


def stream_asyncio(handler: Handler, **options: Any) -> Any:
    async def ask() -> Any:
        transport = AsyncHttpTransport("http://triton", http_transport=httpx2.MockTransport(handler))
        async with AsyncClient(transport=transport) as client:
            return [chunk async for chunk in client.stream("hi", **options)]

    return asyncio.run(ask())


generating = pytest.mark.parametrize("ask", [generate_blocking, generate_asyncio])
streaming = pytest.mark.parametrize("ask", [stream_blocking, stream_asyncio])
asking = pytest.mark.parametrize("ask", [generate_blocking, generate_asyncio, stream_blocking, stream_asyncio])


@generating
def test_binary_and_json_outputs_are_read(ask: Any) -> None:
    answer = ask(lambda _: infer_answer("café"))

    assert (answer.text, answer.num_output_tokens, answer.finish_reason) == ("café", 3, "stop")


@generating
def test_an_answer_in_json_alone_is_read(ask: Any) -> None:
    outputs = [{"name": "text_output", "datatype": "BYTES", "shape": [1, 1], "data": ["hello"]}]

    assert ask(lambda _: httpx2.Response(200, json={"outputs": outputs})).text == "hello"


@streaming
def test_events_become_chunks(ask: Any) -> None:
    events = ({"text_output": "Ah", "output_ids": [1, 2]}, {"text_output": "oy", "finish_reason": "stop"})

    chunks = ask(lambda _: event_stream(*events))

    assert [(chunk.text, chunk.token_ids, chunk.is_final) for chunk in chunks] == [
        ("Ah", [1, 2], False),
        ("oy", [], True),
    ]


@streaming
@pytest.mark.parametrize("events", [[], [{"text_output": "Ah"}], [{"text_output": "Ah", "finish_reason": ""}]])
def test_a_stream_that_ends_before_its_answer_is_no_answer(ask: Any, events: list[dict[str, str]]) -> None:
    with pytest.raises(Unavailable, match="ended before its final response"):
        ask(lambda _: event_stream(*events))


@streaming
def test_a_stream_of_two_answers_has_ended_with_both(ask: Any) -> None:
    assert [chunk.is_final for chunk in ask(lambda _: event_stream(END, END), num_return_sequences=2)] == [False, True]
    with pytest.raises(Unavailable, match="ended before its final response"):
        ask(lambda _: event_stream(END), num_return_sequences=2)


@streaming
def test_a_stream_is_asked_for_in_plain_json(ask: Any) -> None:
    requests: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        requests.append(request)
        return event_stream(END)

    ask(
        answer,
        adapter=7,
        request_id="mine",
        stop_words=["x", "y"],
        max_tokens=5,
        temperature=0.5,
        stop_token_ids=[8, 9],
    )

    body = json.loads(requests[0].content)
    assert requests[0].url == "http://triton/v2/models/generation/generate_stream"
    assert body["id"] == "mine"
    assert (body["text_input"], body["max_tokens"], body["lora_task_id"]) == ("hi", 5, 7)
    assert (body["stop_words"], body["streaming"], body["temperature"]) == (["x", "y"], True, 0.5)
    # Triton gives a list the shape that the model declares, and knows one of its two sizes.
    assert body["stop_words_list"] == [8, 9, 1, 2]


@streaming
def test_biases_are_plain_json_too(ask: Any) -> None:
    requests: list[httpx2.Request] = []
    ask(lambda request: requests.append(request) or event_stream(END), logit_bias={5: 1.5, 6: -0.5})
    body = json.loads(requests[0].content)
    assert (body["embedding_bias_ids"], body["embedding_bias_weights"]) == ([5, 6], [1.5, -0.5])


@streaming
def test_weights_go_ahead_of_a_stream_in_a_request_of_their_own(ask: Any, small_tensors: AdapterTensors) -> None:
    requests: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        requests.append(request)
        return infer_answer("") if request.url.path.endswith("/infer") else event_stream(END)

    ask(answer, adapter=Adapter(7, small_tensors))

    assert [request.url.path for request in requests] == [
        "/v2/models/generation_unary/infer",
        "/v2/models/generation/generate_stream",
    ]
    assert small_tensors.weights.tobytes() in requests[0].content
    assert "lora_weights" not in json.loads(requests[1].content)


@asking
@pytest.mark.parametrize(
    ("status", "error", "kind"),
    [
        (400, NOT_CACHED, AdapterNotFound),
        (404, NOT_CACHED, AdapterNotFound),
        (400, "unexpected shape for input", InvalidRequest),
        (500, "the engine fell over", ServerFault),
        (503, "loading", Unavailable),
    ],
)
def test_refusals_arrive_typed(ask: Any, status: int, error: str, kind: type[Exception]) -> None:
    with pytest.raises(kind) as caught:
        ask(lambda _: httpx2.Response(status, json={"error": error}))

    assert type(caught.value) is kind


@streaming
def test_a_stream_that_is_refused_by_its_first_event_is_refused(ask: Any) -> None:
    """Triton answers with status 400 then, and the body is an event all the same."""
    text = "[UNAVAILABLE] the engine is starting; try again (request ab)"
    with pytest.raises(Unavailable) as caught:
        ask(lambda _: httpx2.Response(400, text=f"data: {json.dumps({'error': text})}\n\n"))
    assert (caught.value.code, str(caught.value)) == ("UNAVAILABLE", "the engine is starting; try again")


@asking
def test_a_refusal_that_is_not_tritons_is_shown_as_it_is(ask: Any) -> None:
    with pytest.raises(Unavailable, match="<h1>gateway</h1>"):
        ask(lambda _: httpx2.Response(503, text="<h1>gateway</h1>"))


@streaming
def test_an_error_within_a_stream_comes_after_the_text_before_it(ask: Any) -> None:
    def answer(_: httpx2.Request) -> httpx2.Response:
        return event_stream({"text_output": "Ah"}, {"error": "[INTERNAL] step failed (request ab)"})

    with pytest.raises(ServerFault, match=r"^step failed$") as caught:
        ask(answer)
    assert caught.value.request_id == "ab"


@asking
@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (httpx2.ConnectError("refused"), ServerUnreachable),
        (httpx2.ReadTimeout("slow"), TimedOut),
        (httpx2.RemoteProtocolError("cut off"), Unavailable),
    ],
)
def test_failures_of_the_network_arrive_typed(ask: Any, failure: Exception, kind: type[Exception]) -> None:
    def fail(_: httpx2.Request) -> httpx2.Response:
        raise failure

    with pytest.raises(kind) as caught:
        ask(fail, timeout_s=2.0)
    assert type(caught.value) is kind


EVENT = b'data: {"text_output": "more "}\n\n'


def endless_events() -> Iterator[bytes]:
    while True:
        yield EVENT


async def endless_events_asyncio() -> AsyncIterator[bytes]:
    while True:
        await asyncio.sleep(0)
        yield EVENT


@pytest.mark.parametrize(
    ("ask", "events"), [(stream_blocking, endless_events), (stream_asyncio, endless_events_asyncio)]
)
def test_a_stream_that_goes_on_and_on_ends_at_its_deadline(ask: Any, events: Any) -> None:
    with pytest.raises(TimedOut, match=r"no answer within 0\.05 s"):
        ask(lambda _: httpx2.Response(200, content=events()), timeout_s=0.05)


def test_the_body_of_a_request_is_that_of_tritonclient() -> None:
    arrays = {
        "input_ids": np.array([[3, -4]], np.int32),
        "seed": np.array([[2**64 - 1]], np.uint64),
        "text_input": np.array([["é".encode()]], object),
        "lora_weights_bf16": np.array([[[1.0, -2.0]]], np.float32),
    }
    ours = {
        "input_ids": numeric_tensor([3, -4], np.int32),
        "seed": numeric_tensor(2**64 - 1, np.uint64),
        "text_input": string_tensor(["é"]),
        "lora_weights_bf16": Tensor("BF16", (1, 1, 2), np.array([0x3F80, 0xC000], np.uint16).tobytes()),
    }
    requests: list[httpx2.Request] = []

    def answer(request: httpx2.Request) -> httpx2.Response:
        requests.append(request)
        return infer_answer("")

    HttpTransport("http://triton", http_transport=httpx2.MockTransport(answer)).infer(
        InferRequest("m", "mine", ours, timeout_s=1.5)
    )
    official, official_length = tritonclient.http.InferenceServerClient.generate_request_body(
        [
            tritonclient.http.InferInput(name, array.shape, ours[name].datatype).set_data_from_numpy(array)
            for name, array in arrays.items()
        ],
        request_id="mine",
        timeout=1_500_000,
    )

    length = int(requests[0].headers["Inference-Header-Content-Length"])
    assert requests[0].content[length:] == official[official_length:]
    assert json.loads(requests[0].content[:length]) == json.loads(official[:official_length])
