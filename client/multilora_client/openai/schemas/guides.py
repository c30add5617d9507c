"""The form that an answer must have, in the four ways that clients ask for it."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from multilora_client.openai.errors import invalid
from multilora_client.openai.schemas.base import Strict
from multilora_client.options import GenerateOptions

Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=1000)]
JsonGuide = dict[str, Any] | str


class JsonSchema(Strict):
    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool = True


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
            return json_schema_guide(self.json_schema.schema_)
        return json_object_guide() if self.type == "json_object" else GenerateOptions()


class StructuredOutputs(Strict):
    """vLLM's forms of an answer, one of them at a time."""

    json_: JsonGuide | None = Field(None, alias="json")
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None

    @model_validator(mode="after")
    def _check_one(self) -> Self:
        if len(self.model_fields_set) > 1:
            raise invalid(f"{' and '.join(sorted(self.model_fields_set))} contradict each other; give one of them")
        return self

    def guide(self) -> GenerateOptions:
        if self.json_object:
            return json_object_guide()
        return guide_of(self.json_, self.regex, self.choice, self.grammar)


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


def json_schema_guide(schema: JsonGuide) -> GenerateOptions:
    """schema: an object, or its JSON."""
    text = schema if isinstance(schema, str) else json.dumps(schema)
    return GenerateOptions(guide_type="json_schema", guide=text)


def json_object_guide() -> GenerateOptions:
    """OpenAI promises an object, where the server's own guide `json` takes any value."""
    return json_schema_guide({"type": "object"})


def single_guide(guides: dict[str, GenerateOptions]) -> GenerateOptions:
    """The one guide that a request's fields ask for. Raises PydanticCustomError when there are several."""
    asked = {name: guide for name, guide in guides.items() if guide}
    if len(asked) > 1:
        raise invalid(f"{' and '.join(asked)} contradict each other; give one of them", next(iter(asked)))
    return next(iter(asked.values()), GenerateOptions())


def _quoted(text: str) -> str:
    """A string of a Lark grammar, whose escapes are JSON's."""
    return json.dumps(text, ensure_ascii=False)
