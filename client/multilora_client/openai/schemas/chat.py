"""POST /v1/chat/completions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from multilora_client.generation import Answer
from multilora_client.openai.errors import invalid, quoted, unsupported
from multilora_client.openai.questions import Question
from multilora_client.openai.schemas.base import Strict, Told, only, refused
from multilora_client.openai.schemas.guides import single_guide
from multilora_client.openai.schemas.sampling import (
    MAX_TOP_LOGPROBS,
    UNLIMITED,
    Sampling,
    log_probs,
    prompt_log_probs,
    session_of,
)
from multilora_client.openai.schemas.tools import CallOfMessage, NamedChoice, ToolMode, Tools, tool_use
from multilora_client.openai.tools.calls import AnswerParser
from multilora_client.openai.tools.formats import ToolFormat
from multilora_client.openai.tools.prompt import tell_tools
from multilora_client.openai.tools.reasoning import ReasoningName, ReasoningParser
from multilora_client.openai.tools.use import ToolUse
from multilora_client.options import GenerateOptions

_TEXT_MEMBERS: Mapping[str, tuple[str, ...]] = {
    "text": ("text",),
    "input_text": ("text",),
    "output_text": ("text",),
    "refusal": ("refusal",),
    "thinking": ("thinking", "text"),
    "reasoning": ("text", "thinking"),
}
"""The types of parts, and the members that one of them may have its text in."""


def _check_type(kind: Any) -> Any:
    if isinstance(kind, str) and kind not in _TEXT_MEMBERS:
        name = quoted(kind).replace('"', "")
        raise unsupported(f"{name} is not supported: this server reads text")
    return kind


class TextPart(Told):
    """A text of a message. `refusal` is the text of an answer by which a model refused. `thinking`, or `reasoning`, is
    a model's earlier reasoning, as Mistral and SGLang have it.
    """

    type: Annotated[str, BeforeValidator(_check_type)]
    text: str = ""
    refusal: str = ""
    thinking: str | list[TextPart] = ""

    @model_validator(mode="after")
    def _check_text(self) -> Self:
        names, given = _TEXT_MEMBERS[self.type], self.model_fields_set - {"type"}
        if len(given) != 1 or not given <= {*names}:
            raise invalid(f"a part of type {self.type} has {names[0]}, and no other text")
        return self

    @property
    def is_reasoning(self) -> bool:
        return self.type in ("thinking", "reasoning")

    @property
    def content(self) -> str:
        thinking = self.thinking if isinstance(self.thinking, str) else "".join(part.content for part in self.thinking)
        return self.text or self.refusal or thinking

    def for_template(self) -> dict[str, str]:
        return {"type": "text", "text": self.content}


MAX_MESSAGES = 1 << 14
"""The most messages of a chat: all other callers wait while they are read, some 15 microseconds each."""


class ChatMessage(Told):
    """One turn. `developer` is the name of `system` with newer models of OpenAI.

    reasoning_content: for templates that show a model its earlier reasoning. vLLM's newer name for it is `reasoning`,
    Ollama's `thinking`. refusal: the text of an answer that has no other. tool_name: Ollama's `name` of a tool.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] = ""
    name: str | None = None
    tool_name: str | None = None
    tool_calls: list[CallOfMessage] = Field(default_factory=list)
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    thinking: str | None = None
    refusal: str | None = None
    prefix: Annotated[bool, only(False)] = False
    audio: Annotated[Any, refused("this server reads text")] = None
    images: Annotated[list[Any] | None, only([])] = None
    function_call: Annotated[Any, refused("write the call in tool_calls")] = None

    def for_template(self) -> dict[str, Any]:
        """The message as chat templates know it, and only the fields that were given. The server turns a text into a
        part, or parts into a text, where the model's template takes the other.
        """
        parts = [] if isinstance(self.content, str) else self.content
        texts = [part.for_template() for part in parts if not part.is_reasoning]
        content = self.content if isinstance(self.content, str) else texts
        role = "system" if self.role == "developer" else self.role
        calls = [call.for_template() for call in self.tool_calls]
        optional = {
            "name": self.name or self.tool_name,
            "tool_calls": calls or None,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content
            or self.reasoning
            or self.thinking
            or "".join(part.content for part in parts if part.is_reasoning)
            or None,
        }
        told = {"role": role, "content": content or self.refusal or ""}
        return told | {key: value for key, value in optional.items() if value is not None}


Effort = Annotated[str, Field(max_length=100)]
"""A word such as `low`."""


class ReasoningEffort(Strict):
    effort: Effort | None = None


class ChatRequest(Sampling):
    """`reasoning_effort`, which OpenRouter and SGLang call `reasoning.effort`, and `verbosity` go to the chat template,
    which gives them their meaning.
    """

    messages: list[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_tokens: int | None = Field(None, ge=1, le=UNLIMITED)
    max_completion_tokens: int | None = Field(None, ge=1, le=UNLIMITED)
    tools: Tools = Field(default_factory=list)
    tool_choice: ToolMode | NamedChoice | None = None
    parallel_tool_calls: bool = True
    logprobs: bool = False
    top_logprobs: int | None = Field(None, ge=0, le=MAX_TOP_LOGPROBS)
    modalities: Annotated[list[str] | None, only(["text"])] = None
    reasoning_effort: Effort | None = None
    reasoning: ReasoningEffort | None = None
    verbosity: Effort | None = None
    metadata: dict[str, Any] | None = None
    store: Annotated[bool, only(False)] = False
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prediction: dict[str, Any] | None = None  # makes OpenAI's answers faster, not different
    functions: Annotated[list[Any] | None, only([])] = None  # `tools`, before there were any
    function_call: Annotated[Any, only("none", "auto")] = None

    echo: Annotated[bool, only(False)] = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    documents: Annotated[list[Any] | None, only([])] = None  # chat_template_kwargs takes them, too

    @property
    def session(self) -> str | None:
        return self.lora_session or session_of(self.prompt_cache_key or self.user)

    @model_validator(mode="after")
    def _check_effort(self) -> Self:
        asked = {self.reasoning_effort, self.reasoning and self.reasoning.effort} - {None}
        if len(asked) > 1:
            raise invalid("reasoning_effort and reasoning contradict each other", "reasoning_effort")
        return self

    @model_validator(mode="after")
    def _check_max_tokens(self) -> Self:
        if self.max_tokens and self.max_completion_tokens and self.max_tokens != self.max_completion_tokens:
            raise invalid("max_tokens and max_completion_tokens contradict each other", "max_tokens")
        return self

    @model_validator(mode="after")
    def _check_truncation(self) -> Self:
        if self.truncate_prompt_tokens == -1 and not (self.max_tokens or self.max_completion_tokens):
            raise invalid(
                "truncate_prompt_tokens -1 leaves room for max_tokens, and needs it", "truncate_prompt_tokens"
            )
        return self

    @model_validator(mode="after")
    def _check_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise invalid("top_logprobs goes with logprobs only", "top_logprobs")
        return self

    @model_validator(mode="after")
    def _check_continuation(self) -> Self:
        opens_turn = self.add_generation_prompt and "add_generation_prompt" in self.model_fields_set
        if self.continue_final_message and opens_turn:
            raise invalid("continue_final_message contradicts add_generation_prompt", "continue_final_message")
        return self

    @model_validator(mode="after")
    def _check_guides(self) -> Self:
        guides = {name: guide for name, guide in self.guides().items() if name != "response_format"}
        if self.tool_use.is_forced and any(guides.values()):
            asked = next(name for name, guide in guides.items() if guide)
            raise invalid(f"{asked} and a tool_choice that forces a call contradict each other", asked)
        if self.tool_use.is_forced and self.stop:
            raise invalid("stop would cut the call that tool_choice forces; leave one of them out", "stop")
        self.guide()
        return self

    @property
    def includes_logprobs(self) -> bool:
        return self.logprobs

    @property
    def tool_use(self) -> ToolUse:
        return tool_use(self.tools, self.tool_choice, self.parallel_tool_calls)

    def parser(self, tool_format: ToolFormat | None, reasoning: ReasoningName, first: Answer) -> AnswerParser:
        """The parser of one answer. tool_format: the model's own form of calls; None to leave them in the text.

        first: the answer, or its first piece, which tells whether the prompt has opened the thinking.
        """
        parser = self.tool_use.parser(tool_format, self._answer_guide())
        if not self._parses(reasoning):
            return parser
        return ReasoningParser(parser, first.thinking_is_open, self.include_reasoning, self.stream_reasoning)

    def _parses(self, reasoning: ReasoningName) -> bool:
        """Whether thinking is told apart from the answer."""
        return reasoning != "none" and self.separate_reasoning

    def guide(self) -> GenerateOptions:
        """The guide of the text, be it calls or an answer."""
        return self.tool_use.guide(self._answer_guide())

    def _answer_guide(self) -> GenerateOptions:
        return single_guide(self.guides())

    def questions(self, reasoning: ReasoningName = "none") -> list[Question]:
        """The one question. Where thinking is told apart from the answer, a guide holds for the answer alone."""
        tools = [tool.for_template() for tool in self.tools] if self.tool_use.mode != "none" else []
        messages = [message.for_template() for message in self.messages]
        chat = GenerateOptions(
            messages=messages,
            tools=tools or None,
            chat_template_kwargs=self._template_values() or None,
            add_generation_prompt=None if self.add_generation_prompt else False,
            continue_final_message=self.continue_final_message or None,
            add_special_tokens=self.add_special_tokens,
            max_tokens=self.max_completion_tokens or self.max_tokens or UNLIMITED,
        )
        told = log_probs((self.top_logprobs or 0) if self.logprobs else None) | prompt_log_probs(self.prompt_logprobs)
        guide = self.guide()
        if guide and self._parses(reasoning):
            guide |= GenerateOptions(guide_after_thinking=True)
        options = chat | guide | self.sampling() | told
        if not (self.max_completion_tokens or self.max_tokens):
            options["default_options"] = [*(options["default_options"] or ()), "max_tokens"]
        return [Question(None, options, tell_tools(messages, tools))]

    def _template_values(self) -> dict[str, Any]:
        effort = self.reasoning_effort or (self.reasoning and self.reasoning.effort)
        named = {"reasoning_effort": effort, "verbosity": self.verbosity}
        return {key: value for key, value in named.items() if value is not None} | self.chat_template_kwargs
