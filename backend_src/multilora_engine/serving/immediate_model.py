"""`ImmediateModel`: a Python model that answers each request at once, from the request and the tokenizer alone."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from multilora_engine.errors import RequestError
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
        try:
            arrays = self.answer(InputTensors(request), self._link)
        except RequestError as error:
            return error_response(error, request_id_of(request))
        pb, wanted = backend_utils(), request.requested_output_names()
        return pb.InferenceResponse([pb.Tensor(name, array) for name, array in arrays.items() if name in wanted])

    @abstractmethod
    def answer(self, inputs: InputTensors, link: EngineLink) -> dict[str, NDArray[Any]]:
        """The output tensors by name. Raises RequestError."""
