"""The application with a handler in the place of the server."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient
from support.api_keys import ENTRIES, write_keys

from multilora_client import (
    Adapter,
    AdapterTensors,
    AsyncClient,
    AsyncMockTransport,
    InferRequest,
    InvalidRequest,
    Response,
)
from multilora_client.keys import KeyRing
from multilora_client.openai.app import make_app
from multilora_client.openai.catalogue import Catalogue
from multilora_client.openai.settings import FrontSettings
from multilora_client.tensors import flat_values

PIECES = ["Ahoy", "", ", ", "café"]
MODEL = {"model": "tiny", "max_model_len": 4096, "vocab_size": 11, "version": "1"}


class Server:
    """Answers in `pieces` and keeps what it was asked. `finish_reason` is how it ends. outputs: what it says instead.

    requests: those for an answer. operations: those of the model `adapters`, which answers with `report`.
    refuses_tools: whether the chat template has no place for tools, calls and results. token_ids: of every text.
    """

    def __init__(self) -> None:
        self.requests: list[InferRequest] = []
        self.operations: list[dict[str, Any]] = []
        self.pieces = PIECES
        self.finish_reason = "stop"
        self.outputs: dict[str, list[Any]] = {}
        self.report: dict[str, Any] = {**MODEL, "adapters": []}
        self.token_ids = [5, 6, 7]
        self.refuses_tools = False
        self.error: Exception | None = None
        self.error_at = 0

    def __call__(self, request: InferRequest) -> Iterable[Response]:
        match request.model:
            case "adapters":
                return [self._operate(request)]
            case "preprocessing":
                self.requests.append(request)
                self._check_tools("MESSAGES")
                return [Response({"INPUT_ID": self.token_ids, "REQUEST_INPUT_LEN": [len(self.token_ids)]})]
            case "postprocessing":
                self.requests.append(request)
                return [Response({"OUTPUT": ["Ahoy"]})]
            case _:
                return self._answer(request)

    def value(self, name: str) -> Any:
        """The value of an input of the last request, None when it was not sent."""
        values = self.values(name)
        return None if values is None else values[0]

    def values(self, name: str) -> Any:
        """All of them."""
        tensor = self.requests[-1].inputs.get(name)
        return None if tensor is None else flat_values(tensor.datatype, tensor.data)

    def chat(self) -> Any:
        """The chat of the last request."""
        return json.loads(self.value("messages"))

    def _operate(self, request: InferRequest) -> Response:
        tensor = request.inputs["request"]
        self.operations.append(json.loads(flat_values(tensor.datatype, tensor.data)[0]))
        if self.error:
            raise self.error
        return Response({"response": [json.dumps(self.report)]})

    def _answer(self, request: InferRequest) -> Iterable[Response]:
        self.requests.append(request)
        self._check_tools("messages")
        pieces = self.pieces if self.value("streaming") else ["".join(self.pieces)]
        count = self.value("num_return_sequences") or 1
        if not self.value("streaming"):
            self._fail_at(0)
            yield Response(self._outputs(pieces[0], 1, count, is_last=True) | self.outputs, is_final=True)
            return
        for i, piece in enumerate(pieces):
            self._fail_at(i)
            for sequence in range(count):
                is_last = i == len(pieces) - 1
                outputs = self._outputs(piece, i + 1, 1, is_last=is_last) | {"sequence_index": [sequence]}
                yield Response(outputs | self.outputs, is_final=is_last and sequence == count - 1)

    def _check_tools(self, name: str) -> None:
        if self.refuses_tools and re.search('"tools"|"tool_calls"|"role": "tool"', self.value(name) or ""):
            raise InvalidRequest("the chat template has no place for tools")

    def _fail_at(self, place: int) -> None:
        if self.error and place == self.error_at:
            raise self.error

    def _outputs(self, text: str, num_tokens: int, count: int, *, is_last: bool) -> dict[str, list[Any]]:
        outputs: dict[str, list[Any]] = {
            "text_output": [text] * count,
            "num_input_tokens": [7],
            "num_output_tokens_so_far": [num_tokens] * count,
            "finish_reason": [self.finish_reason if is_last else ""] * count,
        }
        if (task := self.value("lora_task_id")) is not None:
            outputs |= {"lora_task_id_out": [task], "lora_digest": ["ab" * 32]}
        return outputs


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def keys(tmp_path: Path) -> KeyRing:
    return KeyRing(write_keys(tmp_path / "keys.json", *ENTRIES))


@pytest.fixture
def catalogue(small_tensors: AdapterTensors) -> Catalogue:
    return Catalogue("base", {"pirate": Adapter(7, small_tensors), "poet": Adapter(8, small_tensors)})


@pytest.fixture
def open_front(server: Server) -> Iterator[Callable[..., TestClient]]:
    """Opens an application of a catalogue and settings."""
    with ExitStack() as stack:

        def open_front(catalogue: Catalogue, settings: FrontSettings | None = None) -> TestClient:
            transport = AsyncMockTransport(server)
            app = make_app(catalogue, lambda: AsyncClient(transport=transport), settings or FrontSettings())
            return stack.enter_context(TestClient(app, raise_server_exceptions=False))

        yield open_front


@pytest.fixture
def front(open_front: Callable[[Catalogue], TestClient], catalogue: Catalogue) -> TestClient:
    return open_front(catalogue)


@pytest.fixture
def user(front: TestClient) -> openai.OpenAI:
    """OpenAI's own package, before the application."""
    return openai.OpenAI(base_url=f"{front.base_url}/v1", api_key="none", http_client=front, max_retries=0)
