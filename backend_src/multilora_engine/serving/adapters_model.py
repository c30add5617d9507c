"""The Python model `adapters`: what an operator may ask about adapters, as JSON in and JSON out.

{"operation": "list"}, {"operation": "pin", "lora_task_id": 7}, ...: see `multilora_engine.process.operations`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from multilora_engine.errors import InvalidRequest
from multilora_engine.process.operations import parse_operation
from multilora_engine.process.paths import socket_path
from multilora_engine.serving.engine_link import EngineLink
from multilora_engine.serving.front import Front, new_id
from multilora_engine.serving.inputs import InputTensors
from multilora_engine.serving.replies import Responder, TextReply
from multilora_engine.serving.triton_api import TritonRequest, prepare_stub

_FIRST_CONTACT_S = 5.0


class AdaptersFront(Front):
    """The operator's door to the engine."""

    def _submit(self, request: TritonRequest, responder: Responder) -> None:
        text = InputTensors(request).text("request", row=0)
        if text is None:
            raise InvalidRequest("the tensor request is missing; it holds an operation in JSON")
        operation = parse_operation(text)
        self._link.client.wait_until_ready(_FIRST_CONTACT_S)
        self._link.client.operate(TextReply(responder, "response"), new_id(), operation)


class AdaptersModel:
    """One response a request, sent when the engine has answered."""

    def initialize(self, args: Mapping[str, str]) -> None:
        prepare_stub(args["model_name"])
        self._link = EngineLink(socket_path(os.getppid()))
        self._front = AdaptersFront(self._link)

    def execute(self, requests: list[TritonRequest]) -> None:
        for request in requests:
            self._front.accept(request)

    def finalize(self) -> None:
        self._link.close()
