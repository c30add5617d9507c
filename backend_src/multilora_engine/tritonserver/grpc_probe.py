"""The canaries of `probe.py` over gRPC, for a server without HTTP. Slow to import, as gRPC is: do so when needed."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import NoReturn

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from multilora_engine.client_header import bearer
from multilora_engine.tritonserver.probe import (
    CANARIES,
    LIVE_TIMEOUT_S,
    PROBE_TIMEOUT_S,
    Busy,
    NotReady,
    ProbeFailed,
    connect,
    raise_for,
)


def probe_generation_over_grpc(grpc_url: str, timeout_s: float = PROBE_TIMEOUT_S, api_key: str = "") -> None:
    """Get a token from every canary. Raises ProbeFailed, NotReady or Busy.

    grpc_url: `host:port`, without TLS. timeout_s: of each. api_key: for a server that has keys.
    """
    with grpc.insecure_channel(grpc_url) as channel:
        stub = GRPCInferenceServiceStub(channel)
        for model, request in CANARIES.items():
            _ask(stub, model, request, timeout_s, api_key)


def is_ready_over_grpc(grpc_url: str) -> bool:
    """Whether a server listens at `host:port`, and says that its models are loaded."""
    host, _, port = grpc_url.rpartition(":")
    try:
        # gRPC would connect to itself, see there.
        connect((host, int(port)), LIVE_TIMEOUT_S).close()
    except OSError:
        return False
    with grpc.insecure_channel(grpc_url) as channel:
        stub = GRPCInferenceServiceStub(channel)
        try:
            ready: bool = stub.ServerReady(service_pb2.ServerReadyRequest(), timeout=LIVE_TIMEOUT_S).ready
        except grpc.RpcError:
            return False
        return ready


def _ask(
    stub: GRPCInferenceServiceStub, model: str, request: Mapping[str, object], timeout_s: float, api_key: str
) -> None:
    metadata = tuple(bearer(api_key).items())
    try:
        # Of a stream, which takes models with one response and with many, and to its end: nothing is cancelled.
        responses = list(stub.ModelStreamInfer(iter([_message(model, request)]), timeout=timeout_s, metadata=metadata))
    except grpc.RpcError as error:
        if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            _check_live(stub)
            raise Busy(f"{model} did not answer in {timeout_s:g} s") from None
        _raise_for_status(model, error)
    for response in responses:
        if response.error_message:
            raise_for(model, response.error_message)


def _raise_for_status(model: str, error: grpc.RpcError) -> NoReturn:
    if error.code() is grpc.StatusCode.UNAVAILABLE:
        raise NotReady(error.details()) from None
    raise_for(model, error.details())


def _check_live(stub: GRPCInferenceServiceStub) -> None:
    """Tells a busy server, which answers this at once, from one that hangs. Raises ProbeFailed."""
    try:
        stub.ServerLive(service_pb2.ServerLiveRequest(), timeout=LIVE_TIMEOUT_S)
    except grpc.RpcError as error:
        raise ProbeFailed(f"the server hangs: {error.details()}") from None


def _message(model: str, request: Mapping[str, object]) -> service_pb2.ModelInferRequest:
    message = service_pb2.ModelInferRequest(model_name=model)
    for name, value in request.items():
        datatype, data = _tensor(value)
        message.inputs.add(name=name, datatype=datatype, shape=[1, 1])
        message.raw_input_contents.append(data)
    return message


def _tensor(value: object) -> tuple[str, bytes]:
    if isinstance(value, str):
        return "BYTES", struct.pack("<I", len(value.encode())) + value.encode()
    return "INT32", struct.pack("<i", value)
