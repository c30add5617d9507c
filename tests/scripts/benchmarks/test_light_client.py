"""The benchmark's own client against a fake server: its requests, and its reading of the answers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2, service_pb2_grpc

from benchmarks.light_client import light_asks
from multilora_client import DIRECT, ENSEMBLE, Adapter, AdapterTensors
from multilora_client.bench.load import Sample
from multilora_client.bench.workload import Job, Target

WORDS = ("Ahoy", ", ", "café")


class FakeServer(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Says WORDS to the base model's requests, and knows no adapter."""

    def __init__(self) -> None:
        self.received: list[Any] = []

    def ModelStreamInfer(self, requests: Iterator[Any], context: grpc.ServicerContext) -> Iterator[Any]:
        (request,) = requests
        self.received.append(request)
        if any(tensor.name == "lora_task_id" for tensor in request.inputs):
            yield service_pb2.ModelStreamInferResponse(error_message="[NOT_FOUND] no such adapter (request -)")
            return
        for number, word in enumerate(WORDS, start=1):
            yield service_pb2.ModelStreamInferResponse(infer_response=piece(word.encode(), number))


def piece(text: bytes, num_output_tokens: int) -> Any:
    response = service_pb2.ModelInferResponse()
    for name, number in {"num_output_tokens_so_far": num_output_tokens, "num_input_tokens": 5}.items():
        response.outputs.add(name=name, datatype="INT32", shape=[1, 1])
        response.raw_output_contents.append(number.to_bytes(4, "little"))
    response.outputs.add(name="text_output", datatype="BYTES", shape=[1, 1])
    response.raw_output_contents.append(len(text).to_bytes(4, "little") + text)
    return response


@pytest.fixture
def server() -> Iterator[tuple[FakeServer, str]]:
    fake, grpc_server = FakeServer(), grpc.server(ThreadPoolExecutor(4))
    service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(fake, grpc_server)
    port = grpc_server.add_insecure_port("127.0.0.1:0")
    grpc_server.start()
    yield fake, f"127.0.0.1:{port}"
    grpc_server.stop(None).wait()


def ask_both(address: str, job: Job) -> list[Sample]:
    async def ask() -> list[Sample]:
        async with light_asks(address, (DIRECT, ENSEMBLE), 7) as asks:
            return [await ask(job, 0.0) for ask in asks]

    return asyncio.run(ask())


def test_a_stream_is_asked_for_by_each_doors_names_and_every_piece_is_timed(server: tuple[FakeServer, str]) -> None:
    fake, address = server
    for sample in ask_both(address, Job(Target(), "hi")):
        assert (sample.text, sample.num_input_tokens, sample.num_output_tokens) == ("Ahoy, café", 5, 3)
        assert len(sample.piece_times_s) == 3
        assert sample.sent_s <= sample.piece_times_s[0] <= sample.piece_times_s[-1] == sample.done_s
        assert sample.is_answered
    asked = {request.model_name: {tensor.name for tensor in request.inputs} for request in fake.received}
    assert {"text_input", "max_tokens", "end_id", "streaming"} <= asked["generation"]
    assert {"text_input", "max_tokens", "end_id", "stream"} <= asked["ensemble"]


def test_an_error_is_told_by_its_code(server: tuple[FakeServer, str]) -> None:
    adapter = Adapter(9, AdapterTensors(np.zeros((1, 4), np.float16), np.zeros((1, 4), np.int32), "FP16"))
    for sample in ask_both(server[1], Job(Target(adapter, "random"), "hi")):
        assert (sample.error, sample.piece_times_s, sample.text) == ("NOT_FOUND", (), "")
