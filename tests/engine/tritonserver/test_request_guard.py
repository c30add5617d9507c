"""The real tritonserver with its guard: requests that would end it, or stop a model's process for minutes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import httpx2
import numpy as np
import pytest
import tritonclient.grpc
import tritonclient.http
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub
from tritonclient.utils import InferenceServerException

from multilora_engine.tritonserver import ServerOptions, ServerProcess
from multilora_engine.tritonserver.request_guard import guarded

LIBRARIES = [tritonclient.http, tritonclient.grpc]


@pytest.fixture
def server(echo_repository: Path) -> Iterator[ServerProcess]:
    options = ServerOptions(model_repository=echo_repository, http_port=0, grpc_port=0, metrics_port=0)
    with ServerProcess(options, probe=lambda url: None) as server:
        server.wait_ready()
        yield server


def echo(server: ServerProcess, library: Any, **output: Any) -> bytes:
    tensor = library.InferInput("IN", [1], "BYTES")
    tensor.set_data_from_numpy(np.array([b"hello"], dtype=object))
    url = server.http_url if library is tritonclient.http else server.grpc_url
    with library.InferenceServerClient(url) as client:
        answer = client.infer("echo", [tensor], outputs=[library.InferRequestedOutput("OUT", **output)])
    text: bytes = answer.as_numpy("OUT")[0]
    return text


def test_what_ends_the_server_is_refused_and_others_are_answered(server: ServerProcess) -> None:
    for library in LIBRARIES:
        with pytest.raises(InferenceServerException, match="outputs are not classified here"):
            echo(server, library, class_count=1)
        assert echo(server, library) == b"hello"
    for shape in ([1 << 33], [1 << 62], [1 << 32, 1 << 32], [1 << 63 - 1, 4]):
        values = {"name": "IN", "shape": shape, "datatype": "FP32", "data": [1.0]}
        answer = httpx2.post(f"http://{server.http_url}/v2/models/echo/infer", json={"inputs": [values]})
        assert (answer.status_code, answer.json()["error"]) == (400, "[INVALID_ARG] IN has more than 536870912 values")
    assert echo(server, tritonclient.http) == b"hello"


def test_strings_are_few_enough_for_the_python_backend(server: ServerProcess) -> None:
    num_strings = (1 << 16) + 1
    request = service_pb2.ModelInferRequest(model_name="echo")
    request.inputs.add(name="IN", datatype="BYTES", shape=[num_strings])
    request.raw_input_contents.append(bytes(4 * num_strings))
    with grpc.insecure_channel(server.grpc_url) as channel, pytest.raises(grpc.RpcError) as refused:
        GRPCInferenceServiceStub(channel).ModelInfer(request)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert refused.value.details() == "[INVALID_ARG] IN has more than 65536 strings"


def test_where_there_can_be_no_guard_the_log_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    assert guarded({"PATH": str(tmp_path)}, tmp_path) == {"PATH": str(tmp_path)}
    assert "without its guard" in caplog.text
    assert "there is no C compiler" in caplog.text


def test_a_library_that_is_preloaded_already_stays(tmp_path: Path) -> None:
    environment = guarded({"LD_PRELOAD": "/lib/other.so", "PATH": "/usr/bin:/bin"}, tmp_path)
    assert environment["LD_PRELOAD"] == f"/lib/other.so {tmp_path}/request_guard.so"
