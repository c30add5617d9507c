"""`StructuredOutputs`: a guide as vLLM writes it in its sampling parameters, which Dynamo's front passes on, too."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from multilora_engine.errors import InvalidRequest, Unsupported
from multilora_engine.request import Guide

_REGEX_SPECIAL = re.compile(r"([\\.+*?()|\[\]{}^$#&~-])")
"""The characters that Rust's `regex::escape` escapes."""


class StructuredOutputs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """json: a schema, as an object or as its text. choice: the answer is one of these. json_object: any JSON. backend,
    disable_fallback: choose another engine's library, where ours has but one. The other fields are refused if they ask
    for something."""

    json: Any = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    backend: str | None = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    structural_tag: Any = None


def read_guide(options: StructuredOutputs, name: str) -> Guide | None:
    """The guide that the options ask for. name: of the options, in errors.

    Raises InvalidRequest for several guides, Unsupported for the options of another engine.
    """
    if options.structural_tag is not None:
        raise Unsupported("structural_tag; this engine guides by json, regex, choice and grammar")
    if options.whitespace_pattern is not None or options.disable_any_whitespace:
        option = "disable_any_whitespace" if options.whitespace_pattern is None else "whitespace_pattern"
        raise Unsupported(f"{option}; put the white space into a regex or a grammar")
    if options.disable_additional_properties:
        raise Unsupported("disable_additional_properties; write additionalProperties into the schema")
    guides = [
        *([] if options.json is None else [_json_guide(options.json)]),
        *([] if options.regex is None else [Guide("regex", options.regex)]),
        *([] if options.choice is None else [_choice_guide(options.choice, name)]),
        *([] if options.grammar is None else [Guide("ebnf_grammar", options.grammar)]),
        *([Guide("json")] if options.json_object else []),
    ]
    if len(guides) > 1:
        raise InvalidRequest(f"{name} has several of json, regex, choice, grammar and json_object; give one of them")
    return guides[0] if guides else None


def _json_guide(schema: Any) -> Guide:
    return Guide("json_schema", schema if isinstance(schema, str) else json.dumps(schema))


def _choice_guide(choices: list[str], name: str) -> Guide:
    if not choices:
        raise InvalidRequest(f"{name}.choice is an empty list; give at least one text")
    return Guide("regex", "|".join(_REGEX_SPECIAL.sub(r"\\\1", choice) for choice in choices))
