"""Traces over the wire: the real tritonserver, a model of ten lines, and a collector of spans."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from support.fronts import TIMEOUT_S

from multilora_client import InferRequest, Transport
from multilora_client.grpc_transport import GrpcTransport
from multilora_client.http_transport import HttpTransport
from multilora_client.tensors import string_tensor
from multilora_engine.errors import ConfigError
from multilora_engine.tritonserver import ServerOptions, ServerProcess
from multilora_engine.tritonserver.arguments import tracing_arguments

TRACE_IDS = ("0af7651916cd43dd8448eb211c80319c", "4bf92f3577b34da6a3ce929d0e0e4736")
SPAN_ID = "b7ad6b7169203331"
MAX_GRPC_REQUESTS = 20
MODEL = """
import numpy as np
import triton_python_backend_utils as pb_utils

from multilora_engine.serving.triton_api import trace_id_of


class TritonPythonModel:
    def execute(self, requests):
        seen = [np.array([trace_id_of(request).encode()], dtype=object) for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", trace_id)]) for trace_id in seen]
"""
"""Answers with the trace that the request is part of."""


class Collector:
    """Takes spans as OTLP over HTTP has them."""

    def __init__(self) -> None:
        self._spans: list[dict[str, Any]] = []
        self._changed = threading.Condition()

    def take(self, body: bytes) -> None:
        scopes = [scope for resource in json.loads(body)["resourceSpans"] for scope in resource["scopeSpans"]]
        with self._changed:
            self._spans += [span for scope in scopes for span in scope["spans"]]
            self._changed.notify_all()

    def wait_for(self, trace_id: str, name: str) -> dict[str, Any]:
        """Raises TimeoutError."""

        def matching() -> list[dict[str, Any]]:
            return [span for span in self._spans if (span["traceId"], span["name"]) == (trace_id, name)]

        with self._changed:
            if not self._changed.wait_for(matching, TIMEOUT_S):
                raise TimeoutError(f"no span {name} of trace {trace_id} among {self._spans}")
            return matching()[0]


@contextmanager
def collecting(collector: Collector) -> Iterator[str]:
    """Yields the URL for `opentelemetry,url`."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            collector.take(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/traces"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def repository(echo_repository: Path) -> Path:
    (echo_repository / "echo" / "1" / "model.py").write_text(MODEL)
    return echo_repository


def ask(transport: Transport, trace_id: str) -> str:
    """The trace id that the model saw."""
    inputs = {"IN": dataclasses.replace(string_tensor(["hello"]), shape=(1,))}
    request = InferRequest("echo", "", inputs, TIMEOUT_S, traceparent=f"00-{trace_id}-{SPAN_ID}-01")
    try:
        return str(transport.infer(request).first("OUT"))
    finally:
        transport.close()


def test_spans_and_the_model_continue_the_trace_of_the_client(repository: Path) -> None:
    collector = Collector()
    with collecting(collector) as url:
        options = ServerOptions(
            model_repository=repository,
            http_port=0,
            grpc_port=0,
            metrics_port=0,
            trace_config=(
                "mode=opentelemetry",
                "rate=1",
                "level=TIMESTAMPS",
                f"opentelemetry,url={url}",
                "opentelemetry,bsp_schedule_delay=100",
            ),
        )
        with ServerProcess(options, probe=lambda http_url: None) as server:
            server.wait_ready()
            http_trace_id, grpc_trace_id = TRACE_IDS
            assert ask(HttpTransport(f"http://{server.http_url}"), http_trace_id) == http_trace_id
            # tritonserver reads a header of gRPC up to the first zero byte in memory, which may lie after the header's
            # end. It then finds no trace, and begins one of its own.
            grpc_answers = (ask(GrpcTransport(server.grpc_url), grpc_trace_id) for _ in range(MAX_GRPC_REQUESTS))
            assert grpc_trace_id in grpc_answers
            for trace_id in TRACE_IDS:
                assert collector.wait_for(trace_id, "InferRequest")["parentSpanId"] == SPAN_ID
                assert collector.wait_for(trace_id, "echo")


def test_a_server_that_was_built_without_tracing_is_named(tmp_path: Path) -> None:
    executable = tmp_path / "tritonserver"
    executable.write_text("#!/bin/sh\necho '  --http-port <integer>' >&2\n")
    executable.chmod(0o755)
    assert tracing_arguments([], executable) == []
    with pytest.raises(ConfigError, match="--trace-config: this tritonserver was built without tracing"):
        tracing_arguments(["mode=opentelemetry"], executable)
