"""The items of a conversation as /v1/responses has them: messages, calls of functions, and their outputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from multilora_client.openai.schemas.base import Strict
from multilora_client.openai.schemas.chat import ChatMessage
from multilora_client.openai.schemas.tools import CallOfMessage, FunctionCall


class InputText(Strict):
    """The text of a user, or of an answer that is sent back; its other fields say nothing to a model."""

    type: Literal["input_text", "output_text", "text"]
    text: str
    annotations: list[Any] = Field(default_factory=list)
    logprobs: list[Any] = Field(default_factory=list)


class MessageItem(Strict):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[InputText]
    id: str | None = None
    status: str | None = None
    phase: str | None = None

    @property
    def text(self) -> str:
        return _text_of(self.content)


class CallItem(Strict):
    """arguments: JSON, as a string."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str
    id: str | None = None
    status: str | None = None

    def for_chat(self) -> CallOfMessage:
        return CallOfMessage(id=self.call_id, function=FunctionCall(name=self.name, arguments=self.arguments))


class CallOutputItem(Strict):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]
    id: str | None = None
    status: str | None = None


def _type_of(item: Any) -> Any:
    """A message may leave its type out."""
    return item.get("type", "message") if isinstance(item, dict) else getattr(item, "type", None)


InputItem = Annotated[
    Annotated[MessageItem, Tag("message")]
    | Annotated[CallItem, Tag("function_call")]
    | Annotated[CallOutputItem, Tag("function_call_output")],
    Discriminator(_type_of),
]


def messages_of(items: Sequence[MessageItem | CallItem | CallOutputItem]) -> list[ChatMessage]:
    """The conversation as a chat, where calls are part of the assistant's turn."""
    messages: list[ChatMessage] = []
    for item in items:
        match item:
            case MessageItem():
                messages.append(ChatMessage(role=item.role, content=item.text))
            case CallOutputItem():
                messages.append(ChatMessage(role="tool", content=_text_of(item.output), tool_call_id=item.call_id))
            case CallItem():
                if not messages or messages[-1].role != "assistant":
                    messages.append(ChatMessage(role="assistant"))
                messages[-1].tool_calls.append(item.for_chat())
    return messages


def _text_of(content: str | list[InputText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
