"""The schemas of answers that have to be calls, judged by the library that knows JSON schemas."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from multilora_client.openai.tools.guide import arguments_schema, calls_or_answer_schema, calls_schema, strict_schema

POINT = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": False}
FUNCTIONS: dict[str, Any] = {
    "draw": {
        "type": "object",
        "properties": {"points": {"type": "array", "items": {"$ref": "#/$defs/point"}}},
        "required": ["points"],
        "$defs": {"point": POINT},
    },
    "tree": {"type": "object", "properties": {"child": {"$ref": "#"}}, "additionalProperties": False},
    "stop": {"type": "object"},
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


@pytest.mark.parametrize(
    "parameters", [None, {}, {"type": "object"}, {"properties": {}}, {"type": "object", "title": ""}]
)
@pytest.mark.parametrize("is_strict", [False, True])
def test_a_function_without_parameters_takes_none(parameters: Any, is_strict: bool) -> None:
    schema = arguments_schema(parameters, is_strict)

    assert fits(schema, {})
    for other in ({"a": 1}, [], "", None, 5):
        assert not fits(schema, other)


LATITUDE = {
    "type": "object",
    "properties": {"at": {"type": "object", "properties": {"x": {}}}, "tags": {"type": "object"}},
}


def test_parameters_are_all_that_there_are() -> None:
    for schema in (arguments_schema(LATITUDE), arguments_schema(LATITUDE, is_strict=True)):
        assert fits(schema, {"at": {"x": 1}, "tags": {"a": 1}})
        assert not fits(schema, {"of": 1})
    assert fits(arguments_schema(LATITUDE), {"at": {"y": 1}})
    assert not fits(arguments_schema(LATITUDE, is_strict=True), {"at": {"y": 1}})


@pytest.mark.parametrize(
    ("parameters", "arguments"),
    [
        ({"type": "object", "additionalProperties": True}, {"a": 1}),
        ({"additionalProperties": {"type": "integer"}}, {"a": 1}),
        ({"type": "object", "patternProperties": {"^x": {}}}, {"x1": 1}),
        ({"type": "object", "required": ["a"]}, {"a": 1}),
        ({"type": "object", "minProperties": 1}, {"a": 1}),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"type": "object", "properties": {"a": {}}}}}, {"a": 1}),
        ({"anyOf": [{"required": ["a"]}, {"required": ["b"]}], "properties": {"a": {}}}, {"b": 1}),
        ({"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}, {"a": 1, "b": 1}),
        (
            {"properties": {"o": {"allOf": [{"properties": {"a": {}}}, {"properties": {"b": {}}}]}}},
            {"o": {"a": 1, "b": 1}},
        ),
        ({"const": {"a": 1}}, {"a": 1}),
    ],
)
@pytest.mark.parametrize("is_strict", [False, True])
def test_a_schema_that_says_more_of_its_properties_stays_as_open(
    parameters: Any, arguments: Any, is_strict: bool
) -> None:
    assert fits(parameters, arguments)
    assert fits(arguments_schema(parameters, is_strict), arguments)


@pytest.mark.parametrize(
    "parameters", [{"properties": 5}, {"required": 5}, {"required": [[]]}, {"properties": {"a": 5}}]
)
def test_a_malformed_schema_is_left_to_the_server(parameters: Any) -> None:
    assert arguments_schema(parameters, is_strict=True).items() >= parameters.items()


def test_names_and_data_of_a_strict_schema_are_no_words() -> None:
    schema = {"properties": {"properties": {"const": {"properties": {}}}, "allOf": {"type": "integer"}}}

    assert arguments_schema(schema, is_strict=True) == {"type": "object", **schema, "additionalProperties": False}
    assert strict_schema({"type": "object"}) == {"type": "object"}
