"""The application with a handler in the place of the server."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from fastapi.testclient import TestClient

from multilora_client import Adapter, AdapterTensors, AsyncClient, AsyncMockTransport, InferRequest, Response
from multilora_client.openai.app import make_app
from multilora_client.openai.catalogue import Catalogue
from multilora_client.tensors import flat_values

PIECES = ["Ahoy", "", ", ", "café"]


class Server:
    """Answers in PIECES and keeps what it was asked. `finish_reason` is how it ends. outputs: what it says instead."""

    def __init__(self) -> None:
        self.requests: list[InferRequest] = []
        self.finish_reason = "stop"
        self.outputs: dict[str, list[Any]] = {}
        self.error: Exception | None = None
        self.error_at = 0

    def __call__(self, request: InferRequest) -> Iterable[Response]:
        self.requests.append(request)
        pieces = PIECES if self.value("streaming") else ["".join(PIECES)]
        for i, piece in enumerate(pieces):
            if self.error and i == self.error_at:
                raise self.error
            yield self._response(piece, i + 1, is_last=i == len(pieces) - 1)

    def value(self, name: str) -> Any:
        """The value of an input of the last request, None when it was not sent."""
        tensor = self.requests[-1].inputs.get(name)
        return None if tensor is None else flat_values(tensor.datatype, tensor.data)[0]

    def _response(self, text: str, num_tokens: int, *, is_last: bool) -> Response:
        outputs: dict[str, list[Any]] = {
            "text_output": [text],
            "num_input_tokens": [7],
            "num_output_tokens_so_far": [num_tokens],
        }
        outputs["finish_reason"] = [self.finish_reason if is_last else ""]
        if (task := self.value("lora_task_id")) is not None:
            outputs |= {"lora_task_id_out": [task], "lora_digest": ["ab" * 32]}
        return Response(outputs | self.outputs, is_final=is_last)


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def catalogue(small_tensors: AdapterTensors) -> Catalogue:
    return Catalogue("base", {"pirate": Adapter(7, small_tensors), "poet": Adapter(8, small_tensors)})


@pytest.fixture
def open_front(server: Server) -> Iterator[Callable[[Catalogue], TestClient]]:
    with ExitStack() as stack:

        def open_front(catalogue: Catalogue) -> TestClient:
            app = make_app(catalogue, lambda: AsyncClient(transport=AsyncMockTransport(server)))
            return stack.enter_context(TestClient(app, raise_server_exceptions=False))

        yield open_front


@pytest.fixture
def front(open_front: Callable[[Catalogue], TestClient], catalogue: Catalogue) -> TestClient:
    return open_front(catalogue)
