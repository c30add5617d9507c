"""A client that stops listening, or sends a stop, gives its place in the batch back at once.

The server of these tests runs at most 8 sequences: if any of 8 abandoned ones went on to its 4,000 tokens, the next
request would wait for minutes and miss its deadline.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import httpx2
import numpy as np
import pytest
from support.wire import GrpcClient, Stream, infer, stream, tensors, text_of
from tritonclient.utils import InferenceServerException

from multilora_client import Adapter
from multilora_engine.tritonserver import ServerProcess

MAX_NUM_SEQS = 8
LONG = tensors(text_input="Count: 1 2 3", max_tokens=4000, end_id=-1, exclude_input_in_output=True)
SHORT = tensors(text_input="The capital of France is", max_tokens=2, exclude_input_in_output=True)
DEADLINE_S = 60.0


def assert_places_are_free(server: ServerProcess) -> None:
    with GrpcClient(server.grpc_url) as client:
        assert text_of(infer(client, "generation_unary", SHORT, client_timeout=DEADLINE_S))


@pytest.fixture
def streams(server: ServerProcess, samples: dict[str, Adapter]) -> Iterator[list[Stream]]:
    """Eight long streams that have all begun to answer; half of them hold an adapter."""
    with ExitStack() as stack:
        opened = []
        for i in range(MAX_NUM_SEQS):
            task = tensors(lora_task_id=samples["json"].lora_task_id) if i % 2 else {}
            request = LONG | tensors(streaming=True) | task
            opened.append(stack.enter_context(stream(server.grpc_url, "generation", request, request_id=f"long-{i}")))
        for each in opened:
            each.next()
        yield opened


def test_closing_grpc_streams_frees_their_places(server: ServerProcess, streams: list[Stream]) -> None:
    for each in streams:
        each.client.stop_stream(cancel_requests=True)
    assert_places_are_free(server)


def test_a_stop_request_ends_the_original_with_what_it_has(server: ServerProcess, streams: list[Stream]) -> None:
    with GrpcClient(server.grpc_url) as client:
        for i in range(MAX_NUM_SEQS):
            stop = tensors(stop=True, input_ids=[0], input_lengths=1, request_output_len=1)
            infer(client, "generation_unary", stop, request_id=f"long-{i}")
    for each in streams:
        last = list(each)[-1]
        assert last.as_numpy("finish_reason").item() == b"cancelled"
        assert int(last.as_numpy("num_output_tokens").item()) < 4000
    assert_places_are_free(server)


def test_a_stop_request_reaches_what_came_through_the_ensemble(server: ServerProcess) -> None:
    request = LONG | tensors(stream=True)
    with stream(server.grpc_url, "ensemble", request, request_id="through") as responses:
        responses.next()
        stop = tensors(stop=True, input_ids=[0], input_lengths=1, request_output_len=1)
        with stream(server.grpc_url, "generation", stop, request_id="through") as answer:
            assert list(answer) == []
        last = list(responses)[-1]
    assert last.as_numpy("finish_reason").item() == b"cancelled"


def test_http_clients_that_hang_up_free_their_places(server: ServerProcess) -> None:
    url = f"http://{server.http_url}/v2/models/generation/generate_stream"
    body = {"text_input": "Count: 1 2 3", "max_tokens": 4000, "end_id": -1, "streaming": True}
    with ExitStack() as stack:
        for _ in range(MAX_NUM_SEQS):
            response = stack.enter_context(httpx2.stream("POST", url, json=body, timeout=DEADLINE_S))
            next(response.iter_lines())
    assert_places_are_free(server)


def test_a_killed_client_frees_its_place(server: ServerProcess) -> None:
    url = f"http://{server.http_url}/v2/models/generation/generate_stream"
    body = '{"text_input": "Count", "max_tokens": 4000, "end_id": -1, "streaming": true}'
    processes = [
        subprocess.Popen(["curl", "-sN", url, "-d", body], stdout=subprocess.PIPE) for _ in range(MAX_NUM_SEQS)
    ]
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline()
        process.kill()
        process.wait()
        process.stdout.close()
    assert_places_are_free(server)


def test_the_deadline_of_a_request_ends_it(server: ServerProcess) -> None:
    request = LONG | tensors(streaming=True)
    with (
        stream(server.grpc_url, "generation", request, timeout=500_000) as responses,
        pytest.raises(InferenceServerException, match=r"\[CANCELLED\] the request reached its deadline"),
    ):
        list(responses)


def test_a_stop_without_a_request_id_is_an_error(server: ServerProcess) -> None:
    stop: dict[str, np.ndarray] = tensors(stop=True)
    with (
        GrpcClient(server.grpc_url) as client,
        pytest.raises(InferenceServerException, match="stop needs the request id"),
    ):
        infer(client, "generation_unary", stop)
