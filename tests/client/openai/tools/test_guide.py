"""The schemas of answers that have to be calls, judged by the library that knows JSON schemas."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from multilora_client.openai.tools.guide import arguments_schema, calls_or_answer_schema, calls_schema

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
FUNCTIONS: dict[str, Any] = {
    "draw": {
        "type": "object",
        "properties": {"points": {"type": "array", "items": {"$ref": "#/$defs/point"}}},
        "required": ["points"],
        "$defs": {"point": POINT},
    },
    "tree": {"type": "object", "properties": {"child": {"$ref": "#"}}, "additionalProperties": False},
    "stop": None,
}
ANSWER = {"type": "object", "properties": {"$ref": {"$ref": "#/$defs/n"}}, "$defs": {"n": {"type": "integer"}}}


def call(name: str, parameters: Any) -> dict[str, Any]:
    return {"name": name, "parameters": parameters}


def fits(schema: Any, answer: Any) -> bool:
    jsonschema.Draft202012Validator.check_schema(schema)
    return bool(jsonschema.Draft202012Validator(schema).is_valid(answer))


@pytest.mark.parametrize(
    "calls",
    [
        [call("draw", {"points": [{"x": 1}]})],
        [call("tree", {"child": {"child": {}}}), call("stop", {"now": True}), call("draw", {"points": []})],
    ],
)
def test_calls_of_the_functions_fit(calls: Any) -> None:
    assert fits(calls_schema(FUNCTIONS, None), calls)
    assert fits(calls_or_answer_schema(FUNCTIONS, None, ANSWER), calls)


@pytest.mark.parametrize(
    "calls",
    [
        [],
        {},
        [call("draw", {})],
        [call("draw", {"points": [{"x": "1"}]})],
        [call("tree", {"child": {"leaf": {}}})],
        [call("fly", {})],
        [{"name": "stop"}],
        [call("stop", {}) | {"id": 1}],
    ],
)
def test_nothing_else_fits(calls: Any) -> None:
    assert not fits(calls_schema(FUNCTIONS, None), calls)


def test_no_more_calls_fit_than_are_wanted() -> None:
    assert fits(calls_schema(FUNCTIONS, 1), [call("stop", {})])
    assert not fits(calls_schema(FUNCTIONS, 1), [call("stop", {})] * 2)


def test_an_answer_fits_by_its_own_schema() -> None:
    schema = calls_or_answer_schema(FUNCTIONS, 1, ANSWER)
    assert fits(schema, {"$ref": 1})
    assert not fits(schema, {"$ref": "1"})


def test_data_and_names_stay_as_they_are() -> None:
    parameters = {
        "type": "object",
        "properties": {
            "at": {"const": {"$ref": "#/x"}},
            "one": {"enum": [{"$ref": "#"}], "examples": [{"$ref": "#"}], "default": {"$ref": "#"}},
            "const": {"$ref": "#/$defs/n"},
            "by name": {"$ref": "#here"},
        },
        "$defs": {"n": {"type": "integer"}, "const": {"$anchor": "here", "type": "boolean"}},
    }
    schema = calls_schema({"f": parameters}, None)
    assert fits(schema, [call("f", {"at": {"$ref": "#/x"}, "one": {"$ref": "#"}, "const": 3, "by name": True})])
    assert not fits(schema, [call("f", {"const": "3"})])
    assert not fits(schema, [call("f", {"by name": 3})])


def test_a_function_without_parameters_takes_any() -> None:
    assert fits(arguments_schema(None), {"a": 1})
    assert arguments_schema(POINT) == POINT
