"""A client that streams again and again beside attacks, and notes delays and errors."""

from __future__ import annotations

import statistics
import threading
import time
from dataclasses import dataclass

import grpc  # type: ignore[import-untyped]
import numpy as np
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from trials.door_attacks import VICTIM_REQUEST_ID
from trials.doors import Doors, infer_request

_NUM_TOKENS = 64


@dataclass(frozen=True)
class Gaps:
    """The experience of a victim in some time: seconds between its tokens, and errors."""

    seconds: list[float]
    errors: list[str]

    @property
    def p50_ms(self) -> float:
        return 1e3 * statistics.median(self.seconds) if self.seconds else float("nan")

    @property
    def p99_ms(self) -> float:
        ordered = sorted(self.seconds)
        return 1e3 * ordered[int(0.99 * (len(ordered) - 1))] if ordered else float("nan")


class Victim:
    """Streams 64 greedy tokens over gRPC, in a thread of its own, until the context ends."""

    def __init__(self, doors: Doors) -> None:
        self._doors = doors
        self._lock = threading.Lock()
        self._gaps = Gaps([], [])
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="victim")

    def __enter__(self) -> Victim:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def take(self) -> Gaps:
        """The victim's experience since the last call."""
        with self._lock:
            gaps, self._gaps = self._gaps, Gaps([], [])
        return gaps

    def _run(self) -> None:
        with grpc.insecure_channel(self._doors.grpc_url) as channel:
            stub = GRPCInferenceServiceStub(channel)
            while not self._is_over.is_set():
                self._stream(stub)

    def _stream(self, stub: GRPCInferenceServiceStub) -> None:
        num_tokens, last_s, metadata = 0, None, [*self._doors.headers.items()]
        try:
            for answer in stub.ModelStreamInfer(iter([_request()]), metadata=metadata, timeout=_PATIENCE_S):
                now_s = time.perf_counter()
                self._note(None if last_s is None else now_s - last_s, answer.error_message)
                last_s = now_s
                num_tokens = num_tokens if answer.error_message else num_tokens_of(answer.infer_response)
        except grpc.RpcError as error:
            self._note(None, str(error.code().name))
            self._is_over.wait(1.0)
            return
        if num_tokens < _NUM_TOKENS:
            self._note(None, f"ended after {num_tokens} of {_NUM_TOKENS} tokens")

    def _note(self, gap_s: float | None, error: str) -> None:
        with self._lock:
            if gap_s is not None:
                self._gaps.seconds.append(gap_s)
            if error:
                self._gaps.errors.append(error)


def num_tokens_of(response: service_pb2.ModelInferResponse) -> int:
    """The number of tokens in a stream so far; a response has several if the server was faster than the client."""
    place = [output.name for output in response.outputs].index("num_output_tokens_so_far")
    return int(np.frombuffer(response.raw_output_contents[place], np.int32)[0])


_PATIENCE_S = 60.0
"""The time limit of a whole stream."""


def _request() -> service_pb2.ModelInferRequest:
    return infer_request(
        "generation",
        VICTIM_REQUEST_ID,
        text_input=[["Tell me about the sea."]],
        max_tokens=[[_NUM_TOKENS]],
        end_id=[[-1]],
        streaming=[[True]],
    )
