"""Both gRPC transports against a fake Triton on loopback, and the bytes on the wire against tritonclient's own."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc

from multilora_client import (
    Adapter,
    AdapterNotFound,
    AdapterTensors,
    AsyncClient,
    Client,
    InferRequest,
    ServerUnreachable,
    TimedOut,
    Unavailable,
)
from multilora_client.grpc_transport import GrpcTransport
from multilora_client.tensors import Tensor, adapter_tensors, numeric_tensor, string_tensor


def test_a_whole_answer_and_a_stream_have_the_same_text(fake_triton: Any) -> None:
    with Client(fake_triton.url) as client:
        whole = client.generate("hi")
        chunks = list(client.stream("hi"))

    assert whole.text == "".join(chunk.text for chunk in chunks) == "Ahoy, café"
    assert [chunk.is_final for chunk in chunks] == [False, False, True]
    assert [model for model, _ in fake_triton.received] == ["generation_unary", "generation"]


def test_asyncio_gets_the_same(fake_triton: Any) -> None:
    async def ask() -> tuple[str, list[str]]:
        async with AsyncClient(fake_triton.url) as client:
            whole = await client.generate("hi")
            return whole.text, [chunk.text async for chunk in client.stream("hi")]

    assert asyncio.run(ask()) == ("Ahoy, café", ["Ahoy", ", ", "café"])


def test_an_adapter_arrives_as_it_was(fake_triton: Any, small_tensors: AdapterTensors) -> None:
    with Client(fake_triton.url) as client:
        answer = client.generate("hi", adapter=Adapter(2**64 - 1, small_tensors))

    _, inputs = fake_triton.received[0]
    assert answer.lora_task_id == 2**64 - 1
    assert answer.lora_digest == "ab" * 32
    assert inputs["lora_task_id"].shape == (1, 1)
    np.testing.assert_array_equal(inputs["lora_weights"], small_tensors.weights[np.newaxis])
    np.testing.assert_array_equal(inputs["lora_config"], small_tensors.config[np.newaxis])


def test_what_is_not_cached_is_sent_again_on_both_kinds_of_call(
    fake_triton: Any, small_tensors: AdapterTensors
) -> None:
    adapter = Adapter(7, small_tensors)
    with Client(fake_triton.url) as client:
        client.generate("hi", adapter=adapter)
        fake_triton.adapters.clear()
        client.generate("hi", adapter=adapter)
        fake_triton.adapters.clear()
        list(client.stream("hi", adapter=adapter))

    assert ["lora_config" in inputs for _, inputs in fake_triton.received] == [True, False, True, False, True]


def test_errors_arrive_typed_from_calls_and_from_streams(fake_triton: Any) -> None:
    with Client(fake_triton.url) as client:
        for ask in (client.generate, lambda *args, **options: list(client.stream(*args, **options))):
            with pytest.raises(AdapterNotFound, match=r"^LoRA task 9 not found in cache") as caught:
                ask("hi", adapter=9)
            assert (caught.value.code, caught.value.request_id) == ("NOT_FOUND", "r1")


def test_a_whole_stream_is_not_left_before_the_server_has_closed_it(fake_triton: Any) -> None:
    with Client(fake_triton.url) as client:
        list(client.stream("hi"))

    assert fake_triton.was_left_early is False


def test_leaving_a_stream_cancels_it_on_the_server(fake_triton: Any) -> None:
    fake_triton.endless = True
    with Client(fake_triton.url) as client:
        chunks = client.stream("hi")
        assert next(chunks).text == "more "
        chunks.close()

        assert fake_triton.cancelled.wait(timeout=10)


def test_leaving_an_asyncio_stream_cancels_it_on_the_server(fake_triton: Any) -> None:
    fake_triton.endless = True

    async def leave() -> bool:
        async with AsyncClient(fake_triton.url) as client:
            async with aclosing(client.stream("hi")) as chunks:
                await anext(chunks)
            return await asyncio.to_thread(fake_triton.cancelled.wait, 10)

    assert asyncio.run(leave())


def test_streams_of_one_client_run_at_the_same_time(fake_triton: Any) -> None:
    with Client(fake_triton.url) as client:
        first, second = client.stream("one"), client.stream("two")
        words = [chunk.text for pair in zip(first, second, strict=True) for chunk in pair]

    assert words == ["Ahoy", "Ahoy", ", ", ", ", "café", "café"]


def test_a_stop_request_is_answered_by_an_empty_final_response(fake_triton: Any) -> None:
    with Client(fake_triton.url) as client:
        client.stop("r1")

    model, inputs = fake_triton.received[0]
    assert model == "generation"
    assert inputs["stop"].tolist() == [[True]]


def test_a_deadline_that_passes_is_a_timeout(fake_triton: Any) -> None:
    fake_triton.endless = True

    with Client(fake_triton.url) as client, pytest.raises(TimedOut, match=r"no answer within 0\.01 s"):
        list(client.stream("hi", timeout_s=0.01))


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_a_server_that_is_not_there_is_unreachable(kind: Any) -> None:
    async def ask_asyncio() -> None:
        await AsyncClient("grpc://127.0.0.1:1").generate("hi")

    with pytest.raises(ServerUnreachable, match=r"no server answers at 127\.0\.0\.1:1") as caught:
        Client("grpc://127.0.0.1:1").generate("hi") if kind is Client else asyncio.run(ask_asyncio())

    assert caught.value.retryable


def test_a_stream_that_ends_without_its_last_response_is_an_error(fake_triton: Any) -> None:
    fake_triton.words = ()

    with Client(fake_triton.url) as client, pytest.raises(Unavailable, match="ended before its final response"):
        list(client.stream("hi"))


@pytest.mark.parametrize(
    ("tensor", "array"),
    [
        (numeric_tensor([3, -4], np.int32), np.array([[3, -4]], np.int32)),
        (numeric_tensor(2**64 - 1, np.uint64), np.array([[2**64 - 1]], np.uint64)),
        (numeric_tensor(True, np.bool_), np.array([[True]])),
        (string_tensor(["é", ""]), np.array([["é".encode(), b""]], object)),
        (
            adapter_tensors(
                AdapterTensors(np.array([[0x3F80, 0xC000]], np.uint16), np.zeros((1, 4), np.int32), "BF16")
            )["lora_weights_bf16"],
            np.array([[[1.0, -2.0]]], np.float32),
        ),
    ],
)
def test_bytes_are_those_of_tritonclient(fake_triton: Any, tensor: Tensor, array: np.ndarray) -> None:
    GrpcTransport(fake_triton.url.removeprefix("grpc://")).infer(InferRequest("m", "", {"stop": tensor}))
    official = tritonclient.grpc.InferInput("stop", array.shape, tensor.datatype).set_data_from_numpy(array)
    tritonclient.grpc.InferenceServerClient(fake_triton.url.removeprefix("grpc://")).infer("m", [official])

    (_, ours), (_, theirs) = fake_triton.received
    np.testing.assert_array_equal(ours["stop"], theirs["stop"])
