"""The items of a conversation as /v1/responses has them: messages, calls of functions, and their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Discriminator, Field, Tag

from multilora_client.openai.errors import invalid, quoted, unsupported
from multilora_client.openai.schemas.base import Told
from multilora_client.openai.schemas.chat import ChatMessage, TextPart
from multilora_client.openai.schemas.tools import CallOfMessage, FunctionCall

_TYPES = ("message", "function_call", "function_call_output", "reasoning")


class MessageItem(Told):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]


class CallItem(Told):
    """arguments: JSON, as a string."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    def for_chat(self) -> CallOfMessage:
        return CallOfMessage(id=self.call_id, function=FunctionCall(name=self.name, arguments=self.arguments))


class CallOutputItem(Told):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[TextPart]
    name: str | None = None


class ReasoningText(Told):
    type: Literal["reasoning_text", "text"]
    text: str


class ReasoningItem(Told):
    """Reasoning ahead of an answer. Its summary is for people; what is encrypted, other servers read."""

    type: Literal["reasoning"]
    content: list[ReasoningText] = Field(default_factory=list)
    summary: list[Any] = Field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.content)


def _type_of(item: Any) -> Any:
    """A message may leave its type out."""
    return item.get("type") or "message" if isinstance(item, dict) else getattr(item, "type", None)


def _check_type(item: Any) -> Any:
    kind = _type_of(item)
    if kind is None:
        raise invalid("must be an object")
    if kind not in _TYPES:
        raise unsupported(f"type {quoted(kind)} is not supported, only {', '.join(_TYPES)}")
    return item


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(_type_of),
    BeforeValidator(_check_type),
]


def messages_of(items: Sequence[MessageItem | CallItem | CallOutputItem | ReasoningItem]) -> list[ChatMessage]:
    """The conversation as a chat, where reasoning and calls are parts of the assistant's turn."""
    messages: list[ChatMessage] = []
    reasoning = ""
    for item in items:
        match item:
            case MessageItem():
                messages.append(ChatMessage(role=item.role, content=item.content))
            case CallOutputItem():
                told = ChatMessage(role="tool", content=item.output, tool_call_id=item.call_id, name=item.name)
                messages.append(told)
            case CallItem():
                if not messages or messages[-1].role != "assistant":
                    messages.append(ChatMessage(role="assistant"))
                messages[-1].tool_calls.append(item.for_chat())
            case ReasoningItem():
                reasoning += item.text
                continue
        if reasoning and messages[-1].role == "assistant":
            messages[-1].reasoning_content = reasoning
        reasoning = ""
    return messages
