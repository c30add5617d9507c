"""The words of refusals: every member of every request, with every wrong value."""

from __future__ import annotations

import copy
import inspect
import pkgutil
import re
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import pydantic
import pydantic_core
import pytest
from fastapi.testclient import TestClient

from multilora_client.openai import schemas
from multilora_client.openai.errors import invalid_body, quoted
from multilora_client.openai.schemas.adapters import LoadRequest, UnloadRequest
from multilora_client.openai.schemas.base import Strict
from multilora_client.openai.schemas.chat import ChatRequest
from multilora_client.openai.schemas.completion import CompletionRequest
from multilora_client.openai.schemas.responses import ResponsesRequest
from multilora_client.openai.schemas.tokenization import DetokenizeRequest, TokenizeRequest

FUNCTION = {"name": "sky", "description": "d", "parameters": {}, "strict": True}
SCHEMA = {"name": "s", "description": "d", "schema": {"type": "object"}, "strict": True}
MESSAGE = {
    "role": "assistant",
    "content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "a"}],
    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "sky", "arguments": "{}"}}],
}
RESPONSES: dict[str, Any] = {
    "model": "base",
    "text": {"format": {"type": "json_schema", **SCHEMA}, "verbosity": "low"},
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": {"type": "function", "name": "sky"},
    "reasoning": {"effort": "low"},
    "stream_options": {},
    "include": ["message.output_text.logprobs"],
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "function_call", "call_id": "c", "name": "sky", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": [{"type": "text", "text": "a"}]},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "a"}]},
    ],
}
BODIES: list[tuple[type[Strict], dict[str, Any]]] = [
    (
        ChatRequest,
        {
            "model": "base",
            "messages": [MESSAGE],
            "tools": [{"type": "function", "function": FUNCTION}],
            "tool_choice": {"type": "function", "function": {"name": "sky"}},
            "response_format": {"type": "json_schema", "json_schema": SCHEMA},
            "stream": True,
            "stream_options": {"include_usage": True},
            "logit_bias": {"5": 1.0},
            "reasoning": {"effort": "low"},
        },
    ),
    (
        CompletionRequest,
        {"model": "base", "prompt": ["a", [5]], "stop": ["a"], "structured_outputs": {"choice": ["a"]}},
    ),
    (ResponsesRequest, RESPONSES),
    (TokenizeRequest, {"messages": [MESSAGE], "tools": [{"type": "function", "function": FUNCTION}]}),
    (DetokenizeRequest, {"tokens": [1]}),
    (LoadRequest, {"lora_name": "a", "lora_path": "a"}),
    (UnloadRequest, {"lora_name": "a"}),
]
WRONG: list[Any] = [
    *(True, 0, -1, 2**40, 1.5, 1e300, float("nan"), "", "a", "x" * 5000, "\ud800"),
    *([], [[]], [{}], ["a"], [5], [None], ["a", 5], [1, 2] * 2000),
    *({}, {"a": 1}, {"type": "a"}, {"type": []}, {"type": {}}, {"type": "x" * 5000}, {"x" * 5000: 1}, {"function": 5}),
]
OURS = {
    name
    for module in pkgutil.iter_modules(schemas.__path__)
    for name, member in inspect.getmembers(import_module(f"{schemas.__name__}.{module.name}"), inspect.isclass)
    if issubclass(member, Strict)
}
TYPES = re.compile(
    rf"\b({'|'.join(OURS)})\b|constrained|\blist\[|\[\w*(str|int|float|bool|dict|list|Any)|function-\w+|literal\[|pydantic|"
    r"Input should|valid dictionary|valid list|valid string|instance of|Value error|_type_of|numpy|int32|Traceback"
)


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """The paths of all values in a body."""
    members = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, member in members:
        yield (name,)
        yield from ((name, *rest) for rest in places(member))


def changed(body: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    body = copy.deepcopy(body)
    place: Any = body
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value
    return body


def failures(request_type: type[Strict], body: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str, dict[str, Any]]]:
    """The bodies that are refused, the member that was changed in each, and the error."""
    paths = [*places(body), *((name,) for name in request_type.model_fields if name not in body)]
    for path in paths:
        for value in WRONG:
            wrong = changed(body, path, value)
            try:
                request_type.model_validate(wrong)
            except pydantic.ValidationError as error:
                placed = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
                yield wrong, str(path[0]), invalid_body(placed, wrong, "application/json").body["error"]


@pytest.mark.parametrize(("request_type", "body"), BODIES, ids=lambda part: getattr(part, "__name__", ""))
def test_every_wrong_value_is_refused_in_the_words_of_the_protocol(
    request_type: type[Strict], body: dict[str, Any]
) -> None:
    request_type.model_validate(body)
    num_refused = 0
    for _, member, error in failures(request_type, body):
        num_refused += 1
        message = error["message"]
        assert not TYPES.search(message), message
        assert len(message) < 400, message
        assert "\n" not in message, message
        assert error["param"] is not None, (member, message)
        assert error["code"] in ("invalid_value", "unsupported_value", "unknown_parameter"), message
    assert num_refused > 10


def test_the_walk_meets_every_member_of_the_schemas() -> None:
    met: set[type[pydantic.BaseModel]] = set()

    def walk(model: type[pydantic.BaseModel]) -> None:
        met.add(model)
        for field in model.model_fields.values():
            for found in classes(field.annotation):
                if found not in met:
                    walk(found)

    def classes(annotation: Any) -> Iterator[type[pydantic.BaseModel]]:
        if inspect.isclass(annotation) and issubclass(annotation, pydantic.BaseModel):
            yield annotation
        for part in getattr(annotation, "__args__", ()):
            yield from classes(part)

    for request_type, _ in BODIES:
        walk(request_type)
    assert {model.__name__ for model in met} | {"Strict", "Told", "TokenChoice", "Sampling"} == OURS


def test_words_for_types_are_of_errors_that_pydantic_has() -> None:
    from multilora_client.openai import errors

    known = set(pydantic_core.core_schema.ErrorType.__args__)  # type: ignore[attr-defined]
    assert set(errors._TYPE_WORDS) <= known


@pytest.mark.parametrize(
    ("value", "text"), [("a", '"a"'), (None, "null"), ({"a": 1}, '{"a": 1}'), ("x" * 99, '"' + "x" * 59 + "...")]
)
def test_a_quoted_value_fits_a_line(value: Any, text: str) -> None:
    assert quoted(value) == text


def test_a_wrong_body_is_refused_by_the_application_alike(front: TestClient) -> None:
    body = {"model": "base", "messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}
    answer = front.post("/v1/chat/completions", json=body)

    assert (answer.status_code, answer.json()["error"]) == (
        400,
        {
            "message": "messages.0.content.0.text: must be a string",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "invalid_value",
        },
    )
