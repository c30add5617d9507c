"""`ImmediateModel`: a Python model that answers each request by itself, from the request and the tokenizer alone."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any

from numpy.typing import NDArray

from multilora_engine.errors import InternalError, RequestError
from multilora_engine.free_memory import give_back_free_memory
from multilora_engine.process.paths import socket_path
from multilora_engine.serving.engine_link import EngineLink
from multilora_engine.serving.inputs import InputTensors
from multilora_engine.serving.ordered_jobs import LONG_JOB_THREADS, LONG_REQUEST_BYTES, MANY_BYTES, OrderedJobs
from multilora_engine.serving.triton_api import (
    ResponseSender,
    TritonRequest,
    backend_utils,
    error_response,
    prepare_stub,
    request_id_of,
)

logger = logging.getLogger(__name__)


class ImmediateModel(ABC):
    """Base of `preprocessing` and `postprocessing`. One response a request; none waits for a long one of another."""

    def initialize(self, args: Mapping[str, str]) -> None:
        prepare_stub(args["model_name"])
        self._link = EngineLink(socket_path(os.getppid()))
        self._jobs = OrderedJobs(LONG_JOB_THREADS, "long-requests")

    def execute(self, requests: list[TritonRequest]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                owner = self._link.rights(request).sender.name
                inputs = InputTensors(request)
                answer = partial(self._send_answer, request, inputs, sender)
                self._jobs.submit((), answer, inputs.num_bytes > LONG_REQUEST_BYTES, owner)
            except Exception as error:
                self._send(sender, _failure(error, request))

    def finalize(self) -> None:
        self._jobs.close()
        self._link.close()

    def _send_answer(self, request: TritonRequest, inputs: InputTensors, sender: ResponseSender) -> None:
        """An error of one request is its own answer: an exception would fail the batch, without a code."""
        self._answer(request, inputs, sender)
        if inputs.num_bytes > MANY_BYTES:
            give_back_free_memory()

    def _answer(self, request: TritonRequest, inputs: InputTensors, sender: ResponseSender) -> None:
        try:
            arrays = self.answer(inputs, self._link)
            pb, wanted = backend_utils(), request.requested_output_names()
            tensors = [pb.Tensor(name, array) for name, array in arrays.items() if name in wanted]
            self._send(sender, pb.InferenceResponse(tensors))
        except Exception as error:
            self._send(sender, _failure(error, request))

    def _send(self, sender: ResponseSender, response: Any) -> None:
        """Only one thread of a stub may send: the client's."""
        final = backend_utils().TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self._link.client.call_soon(partial(sender.send, response, final))

    @abstractmethod
    def answer(self, inputs: InputTensors, link: EngineLink) -> dict[str, NDArray[Any]]:
        """The output tensors by name. Raises RequestError."""


def _failure(error: Exception, request: TritonRequest) -> Any:
    """The response to a request that went wrong."""
    if isinstance(error, RequestError):
        return error_response(error, request_id_of(request))
    logger.exception("request %s failed", request_id_of(request), exc_info=error)
    return error_response(InternalError(f"{type(error).__name__}: {error}"), request_id_of(request))
