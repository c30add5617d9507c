"""The console's application with a handler in the place of the server."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import pytest
from fastapi.testclient import TestClient

from multilora_client import AsyncClient, AsyncMockTransport, InferRequest, Response
from multilora_client.console.app import make_app
from multilora_client.console.settings import ConsoleSettings
from multilora_client.errors import Unauthenticated
from multilora_client.tensors import flat_values

from ..conftest import SAVED_SITES

MODEL = {
    "model": "tiny",
    "max_model_len": 4096,
    "vocab_size": 11,
    "version": "1",
    "model_implementation": "transformers",
    "has_encoder": False,
}
PAGE = {"X-Multilora-Console": "1"}
"""The header that the page sends with every request."""

DIGEST = "ab" * 32


def adapter(**fields: Any) -> dict[str, Any]:
    return {
        "lora_task_id": 7,
        "name": "",
        "digest": DIGEST,
        "status": "DOWNLOADED",
        "location": "HOST",
        "bytes": 100,
        "ranks": [4],
        "num_pins": 0,
        "is_pinned": False,
        "last_used_s": 1.0,
        "num_hits": 0,
        **fields,
    }


class Server:
    """Answers operations with `reports` and questions in `pieces`, and keeps what it was asked.

    key: the one API key that it takes, empty for none. errors: instead of the answers to an operation, or to questions
    about a task id, or to those about `base`.
    """

    def __init__(self) -> None:
        self.requests: list[InferRequest] = []
        self.operations: list[dict[str, Any]] = []
        self.key = ""
        self.pieces = ["Ahoy", ", ", "café"]
        self.outputs: list[dict[str, list[Any]]] = []
        self.errors: dict[str | int, Exception] = {}
        self.reports: dict[str, dict[str, Any]] = {
            "describe": MODEL,
            "layout": {"layout": {"sites": asdict(SAVED_SITES)}},
            "list": {"adapters": [adapter()]},
            "events": {"events": [], "last": 0, "num_missed": 0},
            "stats": {"tiers": {}},
            **{name: {"adapter": adapter()} for name in ("load", "unload", "pin", "unpin")},
        }

    def __call__(self, request: InferRequest) -> Iterable[Response]:
        if self.key and request.api_key != self.key:
            raise Unauthenticated("no valid API key")
        if request.model == "adapters":
            return [self._operate(request)]
        return self._answer(request)

    def inputs(self, index: int = -1) -> dict[str, list[Any]]:
        """The inputs of a request, each as the list of its values."""
        return {
            name: list(flat_values(tensor.datatype, tensor.data))
            for name, tensor in self.requests[index].inputs.items()
            if tensor.datatype != "BF16"
        }

    def _operate(self, request: InferRequest) -> Response:
        tensor = request.inputs["request"]
        operation = json.loads(flat_values(tensor.datatype, tensor.data)[0])
        self.operations.append(operation)
        if error := self.errors.get(operation["operation"]):
            raise error
        return Response({"response": [json.dumps(self.reports[operation["operation"]])]})

    def _answer(self, request: InferRequest) -> Iterable[Response]:
        self.requests.append(request)
        task = self.inputs().get("lora_task_id", [None])[0]
        if error := self.errors.get(task if task is not None else "base"):
            raise error
        told: dict[str, list[Any]] = {"lora_digest": [DIGEST]} if task is not None else {}
        if "text_input" not in request.inputs and "messages" not in request.inputs:
            yield Response({"lora_task_id_out": [task], **told}, is_final=True)
            return
        if task is not None:
            told["lora_task_id_out"] = [task]
        for i, piece in enumerate(self.pieces):
            is_last = i == len(self.pieces) - 1
            outputs: dict[str, list[Any]] = {
                "text_output": [piece],
                "num_input_tokens": [7],
                "num_cached_tokens": [4],
                "num_output_tokens_so_far": [i + 1],
                "finish_reason": ["stop" if is_last else ""],
            }
            yield Response(outputs | told | (self.outputs[i] if self.outputs else {}), is_final=is_last)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def open_console(server: Server) -> Iterator[Callable[..., TestClient]]:
    """Opens a console of settings, asked as its page asks."""
    with ExitStack() as stack:

        def open_console(settings: ConsoleSettings | None = None, headers: dict[str, str] = PAGE) -> TestClient:
            transport = AsyncMockTransport(server)
            app = make_app(lambda: AsyncClient(transport=transport, api_key=""), settings or ConsoleSettings())
            console = TestClient(
                app, base_url="http://localhost:9100/console", headers=headers, raise_server_exceptions=False
            )
            return stack.enter_context(console)

        yield open_console


@pytest.fixture
def console(open_console: Callable[..., TestClient]) -> TestClient:
    return open_console()
