"""The JSON schema of an answer that has to be calls of functions, or may be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = Mapping[str, Any]

_ANY_OBJECT: Schema = {"type": "object"}
_ANSWER = "answer"

_DATA = frozenset({"const", "default", "enum", "examples"})
_SCHEMAS_BY_NAME = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})


def arguments_schema(parameters: Schema | None) -> Schema:
    """The schema of one function's arguments. parameters: those of its definition; without any it takes any object."""
    return parameters or _ANY_OBJECT


def calls_schema(functions: Mapping[str, Schema | None], max_calls: int | None) -> Schema:
    """The schema of a list of calls, each `{"name": ..., "parameters": {...}}`.

    functions: the parameters of each, by its name. max_calls: None for any number.
    """
    return {**_calls(functions, max_calls), "$defs": _definitions(functions)}


def calls_or_answer_schema(functions: Mapping[str, Schema | None], max_calls: int | None, answer: Schema) -> Schema:
    """The schema of such a list, or of an answer that follows a schema of its own."""
    definitions = {**_definitions(functions), _ANSWER: _moved(answer, _place(_ANSWER))}
    return {"anyOf": [{"$ref": _place(_ANSWER)}, _calls(functions, max_calls)], "$defs": definitions}


def _calls(functions: Mapping[str, Schema | None], max_calls: int | None) -> dict[str, Any]:
    calls = {"type": "array", "minItems": 1, "items": {"anyOf": [_call(name) for name in functions]}}
    return calls if max_calls is None else {**calls, "maxItems": max_calls}


def _call(name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": {"$ref": _place(_key(name))}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _definitions(functions: Mapping[str, Schema | None]) -> dict[str, Any]:
    return {
        _key(name): _moved(arguments_schema(parameters), _place(_key(name))) for name, parameters in functions.items()
    }


def _key(name: str) -> str:
    return f"function.{name}"


def _place(key: str) -> str:
    return f"#/$defs/{key}"


def _moved(schema: Any, place: str, has_names: bool = False) -> Any:
    """A schema whose references to itself hold where it is only a part of another one.

    has_names: its keys are names of the user's, not words of JSON Schema.
    """
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if has_names:
        return {name: _moved(value, place) for name, value in schema.items()}
    return {word: _moved_value(word, value, place) for word, value in schema.items()}


def _moved_value(word: str, value: Any, place: str) -> Any:
    if word in _DATA:
        return value
    if word == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
        return place + value.removeprefix("#")
    return _moved(value, place, has_names=word in _SCHEMAS_BY_NAME)
