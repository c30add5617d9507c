"""SIGTERM to a server whose clients keep their streams open."""

from __future__ import annotations

import os
import queue
import signal

import grpc
import psutil
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from multilora_engine.process.paths import ENGINE_MODULE
from multilora_engine.tritonserver import ServerProcess
from multilora_engine.tritonserver.marked_processes import marked_processes
from servers.tiny_server import tiny_server
from trials.doors import infer_request


def engine_of(server: ServerProcess) -> psutil.Process:
    processes = map(psutil.Process, marked_processes(server.token))
    return next(process for process in processes if ENGINE_MODULE in process.cmdline())


def has_ended(process: psutil.Process) -> bool:
    """Whoever is the parent of orphans on this machine may leave a zombie of it."""
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_server_ends_in_order_though_a_stream_is_open_and_its_engine_was_restarted() -> None:
    request = infer_request("generation", text_input=[["Hello"]], max_tokens=[[100]], end_id=[[-1]], streaming=[[True]])
    with tiny_server() as (server, _):
        os.kill(engine_of(server).pid, signal.SIGKILL)
        server.wait_ready()
        engine = engine_of(server)
        requests: queue.SimpleQueue[service_pb2.ModelInferRequest] = queue.SimpleQueue()
        with grpc.insecure_channel(server.grpc_url) as channel:
            answers = GRPCInferenceServiceStub(channel).ModelStreamInfer(iter(requests.get, None))
            requests.put(request)
            assert next(answers).error_message == ""
            assert server.stop() == 0
            assert has_ended(engine)
            requests.put(None)
