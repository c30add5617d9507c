"""Tokenizing on the server: the requests of either client, and how it reads the answers."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from multilora_client import (
    AsyncClient,
    AsyncMockTransport,
    Client,
    InferRequest,
    InvalidRequest,
    MockTransport,
    Response,
)
from multilora_client.tensors import flat_values

CHAT = [{"role": "user", "content": "¿qué?"}]
CHAT_JSON = json.dumps(CHAT, ensure_ascii=False)
Ask = Callable[[Any], Any]


def sent(ask: Ask, outputs: dict[str, Any], *, is_async: bool) -> tuple[InferRequest, Any]:
    """(the request that the server got, what the client made of `outputs`)."""
    received: list[InferRequest] = []

    def handler(request: InferRequest) -> list[Response]:
        received.append(request)
        return [Response(outputs)]

    result = ask(
        AsyncClient(transport=AsyncMockTransport(handler)) if is_async else Client(transport=MockTransport(handler))
    )
    if inspect.isawaitable(result):
        result = asyncio.run(_wait(result))
    (request,) = received
    return request, result


async def _wait(result: Any) -> Any:
    return await result


def tensors(request: InferRequest) -> dict[str, Any]:
    return {name: (t.shape, list(flat_values(t.datatype, t.data))) for name, t in request.inputs.items()}


both = pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "asyncio"])


@both
@pytest.mark.parametrize(
    ("ask", "inputs"),
    [
        (lambda client: client.tokenize("¿qué?"), {"QUERY": ((1, 1), ["¿qué?"])}),
        (
            lambda client: client.tokenize("", add_special_tokens=False),
            {"QUERY": ((1, 1), [""]), "ADD_SPECIAL_TOKENS": ((1, 1), [False])},
        ),
        (
            lambda client: client.tokenize(messages=CHAT, add_generation_prompt=False),
            {
                "MESSAGES": (
                    (1, 1),
                    [json.dumps({"messages": CHAT, "add_generation_prompt": False}, ensure_ascii=False)],
                )
            },
        ),
    ],
)
def test_a_text_and_a_chat_become_token_ids(ask: Ask, inputs: dict[str, Any], is_async: bool) -> None:
    outputs = {"INPUT_ID": [5, 6], "REQUEST_INPUT_LEN": [2], "OUT_END_ID": [2]}

    request, token_ids = sent(ask, outputs, is_async=is_async)

    assert (request.model, tensors(request), token_ids) == ("preprocessing", inputs, [5, 6])


@both
@pytest.mark.parametrize("token_ids", [[5, 6, 7], []])
def test_token_ids_become_text(token_ids: list[int], is_async: bool) -> None:
    request, text = sent(lambda client: client.detokenize(token_ids), {"OUTPUT": ["¿qué?"]}, is_async=is_async)

    assert (request.model, text) == ("postprocessing", "¿qué?")
    assert tensors(request) == {
        "TOKENS_BATCH": ((1, 1, len(token_ids)), token_ids),
        "SEQUENCE_LENGTH": ((1, 1), [len(token_ids)]),
    }
    assert np.prod(request.inputs["TOKENS_BATCH"].shape) == len(token_ids)


@pytest.mark.parametrize("options", [{}, {"prompt": "hi", "messages": CHAT}])
def test_a_text_or_a_chat_is_required(options: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match="exactly one of prompt and messages"):
        sent(lambda client: client.tokenize(**options), {}, is_async=False)


def test_a_misspelt_option_is_not_passed_over() -> None:
    with pytest.raises(TypeError, match="no option message"):
        sent(lambda client: client.tokenize("hi", message=[]), {}, is_async=False)


def test_a_token_id_that_no_tensor_can_hold_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="token_ids"):
        sent(lambda client: client.detokenize([2**31]), {}, is_async=False)
