"""The form that an answer must have, in each way that clients of OpenAI, vLLM and SGLang ask for it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from multilora_client.openai.errors import invalid
from multilora_client.openai.schemas.base import Strict, only
from multilora_client.openai.tools.guide import strict_schema
from multilora_client.options import GenerateOptions

Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1000)]


def _check_json(text: str) -> str:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise invalid(f"is not JSON: {error}") from None
    if not isinstance(schema, dict | bool):
        raise invalid("must be a JSON schema, which is an object")
    return text


JsonGuide = dict[str, Any] | Annotated[str, AfterValidator(_check_json)]


class JsonSchema(Strict):
    """strict: as in OpenAI's API, objects have only the properties that the schema names."""

    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool = False

    def guide(self) -> GenerateOptions:
        return json_schema_guide(strict_schema(self.schema_) if self.strict else self.schema_)


class ResponseFormat(Strict):
    """OpenAI's form of a chat's answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise invalid("json_schema goes with the type json_schema, and that type needs it")
        return self

    def guide(self) -> GenerateOptions:
        if self.json_schema is not None:
            return self.json_schema.guide()
        return json_object_guide() if self.type == "json_object" else GenerateOptions()


class StructuredOutputs(Strict):
    """vLLM's forms of an answer, one of them at a time."""

    json_: JsonGuide | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_fallback: bool = False  # from one library to another: there is one
    disable_any_whitespace: Annotated[bool, only(False)] = False
    disable_additional_properties: Annotated[bool, only(False)] = False

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        self.guide()
        return self

    def guide(self) -> GenerateOptions:
        return single_guide(
            {
                "json": guide_of(self.json_, None, None, None),
                "regex": guide_of(None, self.regex, None, None),
                "choice": guide_of(None, None, self.choice, None),
                "grammar": guide_of(None, None, None, self.grammar),
                "json_object": json_object_guide() if self.json_object else GenerateOptions(),
            }
        )


def guide_of(
    json_guide: JsonGuide | None, regex: str | None, choice: list[str] | None, grammar: str | None
) -> GenerateOptions:
    """The guide of the one form that is given."""
    if json_guide is not None:
        return json_schema_guide(json_guide)
    if regex is not None:
        return GenerateOptions(guide_type="regex", guide=regex)
    if choice is not None:
        return GenerateOptions(guide_type="ebnf_grammar", guide=f"start: {' | '.join(map(_quoted, choice))}")
    return GenerateOptions() if grammar is None else GenerateOptions(guide_type="ebnf_grammar", guide=grammar)


def json_schema_guide(schema: Mapping[str, Any] | str) -> GenerateOptions:
    """schema: an object, or its JSON."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return GenerateOptions(guide_type="json_schema", guide=text)


def json_object_guide() -> GenerateOptions:
    """OpenAI promises an object, where the server's own guide `json` takes any value."""
    return json_schema_guide({"type": "object"})


def single_guide(guides: dict[str, GenerateOptions]) -> GenerateOptions:
    """The one guide that a request's fields ask for. Raises PydanticCustomError when they ask for different ones."""
    asked = {name: guide for name, guide in guides.items() if guide}
    if len({(guide.get("guide_type"), _plain(guide)) for guide in asked.values()}) > 1:
        raise invalid(f"{' and '.join(asked)} contradict each other; give one of them", next(iter(asked)))
    return next(iter(asked.values()), GenerateOptions())


def _plain(guide: GenerateOptions) -> str:
    """The text of a guide, in which schemas differ by no more than their values and the order of their members."""
    text = guide.get("guide") or ""
    return json.dumps(json.loads(text)) if guide.get("guide_type") == "json_schema" else text


def _quoted(text: str) -> str:
    """A string of a Lark grammar, whose escapes are JSON's. Its lexer takes no control character as it stands."""
    return json.dumps(text)
