"""`ImmediateModel`: a Python model that answers each request at once, from the request and the tokenizer alone."""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from multilora_engine.errors import InternalError, RequestError
from multilora_engine.process.paths import socket_path
from multilora_engine.serving.engine_link import EngineLink
from multilora_engine.serving.inputs import InputTensors
from multilora_engine.serving.triton_api import (
    TritonRequest,
    backend_utils,
    error_response,
    prepare_stub,
    request_id_of,
)

logger = logging.getLogger(__name__)


class ImmediateModel(ABC):
    """Base of `preprocessing` and `postprocessing`."""

    def initialize(self, args: Mapping[str, str]) -> None:
        prepare_stub(args["model_name"])
        self._link = EngineLink(socket_path(os.getppid()))

    def execute(self, requests: list[TritonRequest]) -> list[Any]:
        return [self._respond(request) for request in requests]

    def finalize(self) -> None:
        self._link.close()

    def _respond(self, request: TritonRequest) -> Any:
        """An error of one request is its own answer: an exception would fail the batch, without a code."""
        try:
            return self._response(request)
        except RequestError as error:
            return error_response(error, request_id_of(request))
        except Exception as error:
            logger.exception("request %s failed", request_id_of(request))
            return error_response(InternalError(f"{type(error).__name__}: {error}"), request_id_of(request))

    def _response(self, request: TritonRequest) -> Any:
        self._link.rights(request)
        arrays = self.answer(InputTensors(request), self._link)
        pb, wanted = backend_utils(), request.requested_output_names()
        return pb.InferenceResponse([pb.Tensor(name, array) for name, array in arrays.items() if name in wanted])

    @abstractmethod
    def answer(self, inputs: InputTensors, link: EngineLink) -> dict[str, NDArray[Any]]:
        """The output tensors by name. Raises RequestError."""
