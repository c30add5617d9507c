"""What travels between the fronts and the engine process.

A message is one ZeroMQ frame of msgpack. `Add` and `PutAdapter` carry the packed weights of an adapter in a second
frame, as they lie in memory. Everything the engine says about a request, refusals included, is a `TokenOutput`: a
request has ended with the first of its outputs that is final.
"""

from __future__ import annotations

import msgspec

from multilora_engine.engine_info import EngineInfo
from multilora_engine.errors import RequestError
from multilora_engine.lora.layout import PackedAdapter, PackedRow
from multilora_engine.process.operations import Operation
from multilora_engine.request import GenerationRequest, TokenOutput

PROTOCOL_VERSION = 5
"""Raised with every change to this file that an older peer would misread."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a front; nothing else is accepted before it."""

    protocol_version: int


class AdapterHeader(msgspec.Struct, frozen=True):
    """A `PackedAdapter` without its pages, which are the frame that follows: uint8 [num_pages, page_bytes]."""

    lora_task_id: int
    digest: str
    rows: list[PackedRow]
    page_bytes: int


class Add(msgspec.Struct, frozen=True, tag=True):
    """Accept all of `requests`, or none. The adapter is put first, so that nothing can evict it in between.

    client_request_id: the client's own id, which a later `Stop` names; need not be unique, may be empty.
    trace_id: of the trace that they are part of, for the log; empty if of none.
    """

    requests: list[GenerationRequest]
    client_request_id: str = ""
    adapter: AdapterHeader | None = None
    trace_id: str = ""


class PutAdapter(msgspec.Struct, frozen=True, tag=True):
    """Put an adapter and answer with an empty final output that has its digest."""

    request_id: str
    adapter: AdapterHeader
    lora_name: str = ""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End every request of a client's id (they finish as `cancelled`), then answer with an empty final output."""

    request_id: str
    client_request_id: str


class Operate(msgspec.Struct, frozen=True, tag=True):
    """Carry out an operation on adapters and answer with a final output whose text is the report, in JSON."""

    request_id: str
    operation: Operation


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Forget requests nobody waits for. There is no answer."""

    request_ids: list[str]


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The answer to a `Hello`."""

    info: EngineInfo


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The peers do not understand each other; the text is for the operator."""

    reason: str


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Everything one step of the engine had for one front."""

    outputs: list[TokenOutput]


class Launch(msgspec.Struct, frozen=True):
    """The line the supervisor writes to the engine's stdin.

    heartbeat_fd, heartbeat_interval_s: of the engine's `Heartbeat`; the file is inherited.
    """

    parameters: dict[str, str]
    socket_path: str
    heartbeat_fd: int
    heartbeat_interval_s: float | None


class Started(msgspec.Struct, frozen=True, tag=True):
    """The line the engine writes to its stdout once fronts can connect."""


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The line the engine writes to its stdout when it cannot start."""

    reason: str


ToEngine = Hello | Add | PutAdapter | Stop | Operate | Abort
FromEngine = Welcome | Refused | Outputs
StartReport = Started | StartFailed

_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    return msgspec.msgpack.encode(message)


def decode_to_engine(frame: memoryview) -> ToEngine:
    """Raises msgspec.MsgspecError for what is no message of this version."""
    return _to_engine.decode(frame)


def decode_from_engine(frame: memoryview) -> FromEngine:
    """Raises msgspec.MsgspecError for what is no message of this version."""
    return _from_engine.decode(frame)


def adapter_header(lora_task_id: int, adapter: PackedAdapter) -> AdapterHeader:
    return AdapterHeader(lora_task_id, adapter.digest, adapter.rows, adapter.pages.shape[1])


def adapter_payload(adapter: PackedAdapter) -> memoryview:
    """The bytes of the pages, not copied."""
    return adapter.pages.numpy().data.cast("B")


def read_adapter(header: AdapterHeader, payload: memoryview) -> PackedAdapter:
    """The adapter of a message; its pages are the payload itself, not a copy."""
    import torch  # the engine has it; some fronts, which only send, do without

    pages = torch.frombuffer(payload, dtype=torch.uint8).view(-1, header.page_bytes)
    return PackedAdapter(header.digest, header.rows, pages)


def error_output(request_id: str, error: RequestError) -> TokenOutput:
    """The final output of a request that failed."""
    return TokenOutput(request_id, [], "", error_code=error.code, error_message=str(error))
