"""POST /tokenize and /detokenize, as vLLM has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from multilora_client.openai.errors import invalid
from multilora_client.openai.schemas.base import ModelName, Strict, only
from multilora_client.openai.schemas.chat import MAX_MESSAGES, ChatMessage
from multilora_client.openai.schemas.tools import Tools
from multilora_client.openai.tools.prompt import tell_tools
from multilora_client.options import ChatOptions


class TokenizeRequest(Strict):
    """A prompt or messages to tokenize. model: None for the base model; all adapters share its tokenizer."""

    model: ModelName | None = None
    prompt: str | None = None
    messages: list[ChatMessage] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = None
    return_token_strs: Annotated[bool, only(False)] = False
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    tools: Tools = Field(default_factory=list)

    @model_validator(mode="after")
    def _check_prompt(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise invalid("exactly one of prompt and messages is required", "prompt")
        return self

    @property
    def special_tokens(self) -> bool | None:
        """As vLLM has it, a prompt gets them, and a chat, whose template writes its own, does not."""
        return True if self.add_special_tokens is None and self.messages is None else self.add_special_tokens

    def tools_told(self) -> list[Mapping[str, Any]] | None:
        """The messages in place of messages and tools, where the model's chat template has no place for tools."""
        return tell_tools([message.for_template() for message in self.messages or ()], self._tools)

    def chat(self) -> ChatOptions:
        if self.messages is None:
            return ChatOptions()
        return ChatOptions(
            messages=[message.for_template() for message in self.messages],
            tools=self._tools or None,
            chat_template_kwargs=self.chat_template_kwargs or None,
            add_generation_prompt=None if self.add_generation_prompt else False,
            continue_final_message=self.continue_final_message or None,
        )

    @property
    def _tools(self) -> list[dict[str, Any]]:
        return [tool.for_template() for tool in self.tools] if self.messages is not None else []


class DetokenizeRequest(Strict):
    model: ModelName | None = None
    tokens: list[int]
