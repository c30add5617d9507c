"""The JSON schema of an answer that has to be calls of functions, or may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Schema = Mapping[str, Any]

_ANSWER = "answer"

_OPEN = frozenset({"additionalProperties", "patternProperties", "unevaluatedProperties"})
"""Words by which a schema says itself whether an object has properties beside `properties`."""

_NEVER_STRICT = frozenset({"$dynamicRef", "allOf", "dependentSchemas", "else", "if", "not", "then"})
"""Words that OpenAI refuses in strict schemas: their parts may be about the same object, and each about other
properties."""

_OTHER_WAYS = _NEVER_STRICT | {"$ref", "anyOf", "const", "enum", "minProperties", "oneOf", "propertyNames"}
"""Words that describe an object in other ways than by its `properties`."""

_DATA = frozenset({"const", "default", "enum", "examples"})
_SCHEMAS_BY_NAME = frozenset({"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"})


def arguments_schema(parameters: Schema | None, is_strict: bool = False) -> Schema:
    """The schema of one function's arguments, by OpenAI's defaults, which are not JSON Schema's.

    parameters: those of the function's definition: an object, which has no others unless they say otherwise; without
    any the function takes none. is_strict: the same is true of all objects in them.
    """
    schema = strict_schema(parameters or {}) if is_strict else parameters or {}
    if not _OTHER_WAYS.isdisjoint(schema):
        return schema
    return _closed({"type": "object", "properties": {}, **schema})


def strict_schema(schema: Schema) -> Schema:
    """The schema as OpenAI reads it under `strict`: an object has no properties that it does not name."""
    return schema if _combines(schema) else _each_closed(schema)


def _closed(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema of an object without further properties, unless it says otherwise, needs some, or is malformed."""
    properties, required = schema["properties"], schema.get("required", [])
    is_complete = (
        isinstance(properties, dict) and isinstance(required, list) and all(n in [*properties] for n in required)
    )
    return {**schema, "additionalProperties": False} if is_complete and _OPEN.isdisjoint(schema) else schema


def _each_closed(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_each_closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {word: _map_schemas(word, value, _each_closed) for word, value in schema.items()}
    return _closed(parts) if "properties" in parts and _OTHER_WAYS.isdisjoint(parts) else parts


def _combines(schema: Any) -> bool:
    """Whether several parts of a schema may be about the same object."""
    if isinstance(schema, list):
        return any(map(_combines, schema))
    if not isinstance(schema, dict):
        return False
    if not _NEVER_STRICT.isdisjoint(schema) or {"$ref", "properties"} <= schema.keys():
        return True
    found: list[bool] = []
    for word, value in schema.items():
        _map_schemas(word, value, lambda part: found.append(_combines(part)))
    return any(found)


def _map_schemas(word: str, value: Any, change: Callable[[Any], Any]) -> Any:
    """The value of a word of a schema, with `change` done to the schemas in it."""
    if word in _DATA:
        return value
    if word in _SCHEMAS_BY_NAME and isinstance(value, dict):
        return {name: change(part) for name, part in value.items()}
    return change(value)


def calls_schema(functions: Mapping[str, Schema], max_calls: int | None) -> Schema:
    """The schema of a list of calls, each `{"name": ..., "parameters": {...}}`.

    functions: the schema of each one's arguments, by its name. max_calls: None for any number.
    """
    return {**_calls(functions, max_calls), "$defs": _definitions(functions)}


def calls_or_answer_schema(functions: Mapping[str, Schema], max_calls: int | None, answer: Schema) -> Schema:
    """The schema of such a list, or of an answer that follows a schema of its own."""
    definitions = {**_definitions(functions), _ANSWER: _moved(answer, _place(_ANSWER))}
    return {"anyOf": [{"$ref": _place(_ANSWER)}, _calls(functions, max_calls)], "$defs": definitions}


def _calls(functions: Mapping[str, Schema], max_calls: int | None) -> dict[str, Any]:
    calls = {"type": "array", "minItems": 1, "items": {"anyOf": [_call(name) for name in functions]}}
    return calls if max_calls is None else {**calls, "maxItems": max_calls}


def _call(name: str) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": name}, "parameters": {"$ref": _place(_key(name))}},
        "required": ["name", "parameters"],
        "additionalProperties": False,
    }


def _definitions(functions: Mapping[str, Schema]) -> dict[str, Any]:
    return {_key(name): _moved(schema, _place(_key(name))) for name, schema in functions.items()}


def _key(name: str) -> str:
    return f"function.{name}"


def _place(key: str) -> str:
    return f"#/$defs/{key}"


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to itself hold where it is only a part of another one."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {word: _moved_value(word, value, place) for word, value in schema.items()}


def _moved_value(word: str, value: Any, place: str) -> Any:
    if word == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
        return place + value.removeprefix("#")
    return _map_schemas(word, value, lambda part: _moved(part, place))
