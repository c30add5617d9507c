"""POST /v1/responses. The front keeps nothing: every request brings its whole conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from multilora_client.openai.errors import invalid, reason_of
from multilora_client.openai.questions import Question
from multilora_client.openai.schemas.base import ModelName, Strict, only, refused
from multilora_client.openai.schemas.chat import MAX_MESSAGES, ChatMessage, ChatRequest, Effort
from multilora_client.openai.schemas.guides import JsonSchema, ResponseFormat
from multilora_client.openai.schemas.response_items import InputItem, messages_of
from multilora_client.openai.schemas.sampling import MAX_TOP_LOGPROBS, UNLIMITED, TokenChoice
from multilora_client.openai.schemas.tools import (
    MAX_TOOLS,
    Function,
    FunctionChoice,
    FunctionName,
    NamedChoice,
    Tool,
    ToolMode,
)
from multilora_client.openai.tools.reasoning import ReasoningName

_NO_STORE = "this server keeps no responses; send the whole conversation as input"


class FunctionTool(Function):
    """A function, flat."""

    type: Literal["function"]

    def for_chat(self) -> Tool:
        return Tool(type="function", function=Function(**self.model_dump(exclude_unset=True, exclude={"type"})))


class FunctionToolChoice(Strict):
    type: Literal["function"]
    name: FunctionName


class TextFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    name: str = "schema"
    description: str | None = None
    schema_: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool = False

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.type == "json_schema") != (self.schema_ is not None):
            raise invalid("schema goes with the type json_schema, and that type needs it")
        return self

    def for_chat(self) -> ResponseFormat:
        schema = None if self.schema_ is None else JsonSchema(schema=self.schema_, strict=self.strict)
        return ResponseFormat(type=self.type, json_schema=schema)


class TextOptions(Strict):
    format: TextFormat = TextFormat(type="text")
    verbosity: Effort | None = None


class Reasoning(Strict):
    """effort: goes to the chat template. summary, generate_summary: there are none."""

    effort: Effort | None = None
    summary: str | None = None
    generate_summary: str | None = None
    context: Annotated[str | None, only("auto")] = None
    mode: Annotated[str | None, only("standard")] = None


class ResponsesStreamOptions(Strict):
    include_obfuscation: bool = False  # concerns OpenAI's network packets; the answer is the same


Included = Literal[
    "message.output_text.logprobs",
    "reasoning.encrypted_content",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
]
"""But for the first, they belong to parts that no answer of this server has."""


class ResponsesRequest(TokenChoice):
    model: ModelName
    input: str | Annotated[list[InputItem], Field(min_length=1, max_length=MAX_MESSAGES)]
    instructions: str | None = None
    stream: bool = False
    stream_options: ResponsesStreamOptions | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=UNLIMITED)
    text: TextOptions = TextOptions()
    tools: list[FunctionTool] = Field(default_factory=list, max_length=MAX_TOOLS)
    tool_choice: ToolMode | FunctionToolChoice = "auto"
    parallel_tool_calls: bool = True
    top_logprobs: int = Field(0, ge=0, le=MAX_TOP_LOGPROBS)
    include: list[Included] = Field(default_factory=list)
    reasoning: Reasoning = Reasoning()
    truncation: Annotated[str, only("disabled")] = "disabled"
    store: Annotated[bool, only(False)] = False
    background: Annotated[bool, only(False)] = False
    previous_response_id: Annotated[Any, refused(_NO_STORE)] = None
    conversation: Annotated[Any, refused(_NO_STORE)] = None
    prompt: Annotated[Any, refused("this server keeps no prompts; send the text as input")] = None
    metadata: dict[str, Any] = Field(default_factory=dict)
    user: str | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    context_management: Annotated[list[Any] | None, only([])] = None
    max_tool_calls: int | None = Field(None, ge=1)  # limits tools that a server calls; here the client calls them

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        try:
            self.chat()
        except ValidationError as error:
            raise invalid(*reason_of(error.errors(), None)) from None
        return self

    @property
    def includes_logprobs(self) -> bool:
        return "message.output_text.logprobs" in self.include

    def questions(self, reasoning: ReasoningName = "none") -> list[Question]:
        """The one question, see `ChatRequest.questions`."""
        return self.chat().questions(reasoning)

    def chat(self) -> ChatRequest:
        """The request as a chat."""
        return ChatRequest.model_validate(
            self.token_choice()
            | {
                "model": self.model,
                "messages": self._messages(),
                "max_completion_tokens": self.max_output_tokens,
                "response_format": self.text.format.for_chat(),
                "tools": [tool.for_chat() for tool in self.tools],
                "tool_choice": self._tool_choice(),
                "parallel_tool_calls": self.parallel_tool_calls,
                "logprobs": self.includes_logprobs,
                "top_logprobs": self.top_logprobs if self.includes_logprobs else None,
                "reasoning_effort": self.reasoning.effort,
                "verbosity": self.text.verbosity,
                "prompt_cache_key": self.prompt_cache_key,
                "user": self.user,
            }
        )

    def _messages(self) -> list[ChatMessage]:
        told = [] if self.instructions is None else [ChatMessage(role="system", content=self.instructions)]
        if isinstance(self.input, str):
            return [*told, ChatMessage(role="user", content=self.input)]
        told += messages_of(self.input)
        if not told:
            raise invalid("input: has no message", "input")
        return told

    def _tool_choice(self) -> ToolMode | NamedChoice:
        if isinstance(self.tool_choice, FunctionToolChoice):
            return NamedChoice(type="function", function=FunctionChoice(name=self.tool_choice.name))
        return self.tool_choice
