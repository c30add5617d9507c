"""Functions that a model may call, as a chat request has them."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field

from multilora_client.openai.errors import invalid
from multilora_client.openai.schemas.base import Strict, Told
from multilora_client.openai.tools.guide import arguments_schema
from multilora_client.openai.tools.use import ToolUse

MAX_TOOLS = 128  # OpenAI's limit

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
ToolMode = Literal["none", "auto", "required"]


class Function(Told):
    """A function, whose other fields go to the chat template, too."""

    model_config = ConfigDict(extra="allow")

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Told):
    type: Literal["function"]
    function: Function

    def for_template(self) -> dict[str, Any]:
        """The tool as it was given."""
        return self.model_dump(exclude_unset=True)


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]


class FunctionChoice(Strict):
    name: FunctionName


class NamedChoice(Strict):
    type: Literal["function"]
    function: FunctionChoice


class FunctionCall(Told):
    """arguments: JSON, as a string; Ollama has the object itself."""

    name: str
    arguments: str | dict[str, Any] = ""


class CallOfMessage(Told):
    """A call in an assistant's message."""

    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall

    def for_template(self) -> dict[str, Any]:
        """Chat templates write the arguments as JSON themselves."""
        function = {"name": self.function.name, "arguments": _read_arguments(self.function.arguments)}
        return {**({"id": self.id} if self.id else {}), "type": self.type, "function": function}


def tool_use(tools: list[Tool], choice: ToolMode | NamedChoice | None, is_parallel: bool) -> ToolUse:
    """choice: None for `auto` where there are tools. Raises PydanticCustomError for a choice that is none of them."""
    functions = {
        tool.function.name: arguments_schema(tool.function.parameters, tool.function.strict or False) for tool in tools
    }
    if len(functions) < len(tools):
        raise invalid("two of the tools have the same name", "tools")
    max_calls = None if is_parallel else 1
    if isinstance(choice, NamedChoice):
        if choice.function.name not in functions:
            raise invalid(f"tool_choice names {choice.function.name!r}, which is none of the tools", "tool_choice")
        return ToolUse(functions, "named", choice.function.name, max_calls=1)
    if choice == "required" and not tools:
        raise invalid("tool_choice is required, and there are no tools", "tool_choice")
    return ToolUse(functions, (choice or "auto") if tools else "none", max_calls=max_calls)


def _read_arguments(arguments: str | dict[str, Any]) -> Any:
    """The arguments as JSON values; the model's own text where it is no JSON."""
    try:
        return json.loads(arguments or "{}") if isinstance(arguments, str) else arguments
    except ValueError:
        return arguments
