"""A client that takes little of the machine it measures: it notes when each response of a stream comes, and reads them
when the stream has ended.

Through `multilora_client` a response takes twice the CPU, for the values that a person's program wants of each.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2

from multilora_client.bench.load import Ask, Sample
from multilora_client.bench.workload import Job
from multilora_client.doors import Door
from multilora_client.errors import parse_error
from multilora_client.generation_inputs import generation_inputs, task_id_input
from multilora_client.tensors import flat_values

_METHOD = "/inference.GRPCInferenceService/ModelStreamInfer"


@asynccontextmanager
async def light_asks(address: str, doors: Sequence[Door], output_tokens: int) -> AsyncIterator[list[Ask]]:
    """For each door an `Ask` for greedy streams of exactly so many tokens. Adapters go by id: the server has them.

    address: `host:port` of gRPC.
    """
    async with grpc.aio.insecure_channel(address) as channel:
        open_stream = channel.stream_stream(_METHOD, request_serializer=service_pb2.ModelInferRequest.SerializeToString)
        yield [_make_ask(open_stream, door, output_tokens) for door in doors]


def _make_ask(open_stream: Any, door: Door, output_tokens: int) -> Ask:
    async def ask(job: Job, due_s: float) -> Sample:
        clock = asyncio.get_running_loop().time
        request = _request(job, door, output_tokens)
        sent_s = clock()
        times: list[float] = []
        messages: list[bytes] = []
        async for message in open_stream(iter([request])):
            times.append(clock())
            messages.append(message)
        return _read(job, due_s, sent_s, times, [service_pb2.ModelStreamInferResponse.FromString(m) for m in messages])

    return ask


def _request(job: Job, door: Door, output_tokens: int) -> Any:
    inputs = generation_inputs(job.prompt, True, door, max_tokens=output_tokens, end_id=-1)
    if job.target.lora_task_id is not None:
        inputs |= task_id_input(job.target.lora_task_id)
    request = service_pb2.ModelInferRequest(model_name=door.stream_model)
    for name, tensor in inputs.items():
        request.inputs.add(name=name, datatype=tensor.datatype, shape=tensor.shape)
        request.raw_input_contents.append(tensor.data)
    return request


def _read(job: Job, due_s: float, sent_s: float, times: Sequence[float], messages: Sequence[Any]) -> Sample:
    """messages: at least one, as the server answers every request."""
    errors = [parse_error(message.error_message).code for message in messages if message.error_message]
    pieces = [message.infer_response for message in messages if not message.error_message]
    return Sample(
        job=job,
        due_s=due_s,
        sent_s=sent_s,
        piece_times_s=tuple(times[: len(pieces)]),
        done_s=times[-1],
        text="".join(_first(piece, "text_output") for piece in pieces),
        num_input_tokens=_first(pieces[-1], "num_input_tokens") if pieces else 0,
        num_output_tokens=_first(pieces[-1], "num_output_tokens_so_far") if pieces else 0,
        error=errors[0] if errors else "",
    )


def _first(response: Any, name: str) -> Any:
    """The first value of an output."""
    index = [output.name for output in response.outputs].index(name)
    return flat_values(response.outputs[index].datatype, response.raw_output_contents[index])[0]
