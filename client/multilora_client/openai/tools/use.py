"""`ToolUse`: the functions that an answer may call, or has to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from multilora_client.openai.tools.calls import AnswerParser, CallsOnly, NamedCall, PlainText
from multilora_client.openai.tools.formats import GUIDED_CALLS, ToolFormat
from multilora_client.openai.tools.guide import Schema, calls_or_answer_schema, calls_schema
from multilora_client.openai.tools.parser import ToolParser
from multilora_client.options import GenerateOptions


@dataclass(frozen=True)
class ToolUse:
    """functions: the schema of each one's arguments, by its name. mode: `named` has to call `name`, `required` any.

    max_calls: None for no limit.
    """

    functions: Mapping[str, Schema] = field(default_factory=dict)
    mode: Literal["none", "auto", "required", "named"] = "none"
    name: str = ""
    max_calls: int | None = None

    @property
    def is_forced(self) -> bool:
        """Whether the answer is calls, and no text."""
        return self.mode in ("required", "named")

    def guide(self, answer: GenerateOptions) -> GenerateOptions:
        """The guide of the text, where an answer without calls follows a guide, or none, of its own."""
        match self.mode:
            case "named":
                return _schema_guide(self.functions[self.name])
            case "required":
                return _schema_guide(calls_schema(self.functions, self.max_calls))
            case "auto" if (schema := _schema_of(answer)) is not None:
                return _schema_guide(calls_or_answer_schema(self.functions, self.max_calls, schema))
            case _:
                return answer

    def parser(self, tool_format: ToolFormat | None, answer: GenerateOptions) -> AnswerParser:
        """The parser of one answer. tool_format: the format of calls without a guide, None to leave them in the text.

        answer: the guide of an answer without calls.
        """
        if self.mode == "named":
            return NamedCall(self.name)
        if self.mode == "required":
            return CallsOnly(ToolParser(GUIDED_CALLS, self.functions, self.max_calls))
        if self.mode == "auto" and _schema_of(answer) is not None:
            return ToolParser(GUIDED_CALLS, self.functions, self.max_calls)
        if self.mode == "none" or tool_format is None:
            return PlainText()
        return ToolParser(tool_format, self.functions, self.max_calls)


def _schema_of(answer: GenerateOptions) -> Schema | None:
    """The JSON schema of a guide, None for no guide and for one of another kind."""
    if answer.get("guide_type") != "json_schema":
        return None
    schema: Schema = json.loads(answer.get("guide") or "")
    return schema


def _schema_guide(schema: Schema) -> GenerateOptions:
    return GenerateOptions(guide_type="json_schema", guide=json.dumps(schema))
