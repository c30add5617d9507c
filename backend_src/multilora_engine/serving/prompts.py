"""From what a client sends as a prompt to token ids: one text, or one chat as JSON."""

from __future__ import annotations

from typing import Any

import msgspec

from multilora_engine.engine_info import EngineInfo
from multilora_engine.errors import InvalidRequest
from multilora_engine.text import Tokenizer


def encode_text(text: str, tokenizer: Tokenizer, info: EngineInfo) -> list[int]:
    """Token ids of a text. Raises InvalidRequest when there are none, or the text is too long."""
    _check_length("text_input", text, info)
    token_ids = tokenizer.encode(text, info.add_special_tokens)
    if not token_ids:
        raise InvalidRequest("empty prompt: the text has no tokens")
    return token_ids


class _Chat(msgspec.Struct, forbid_unknown_fields=True):
    """A chat with the tools that the model may ask for, in whatever form its template expects them."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


def encode_messages(text: str, tokenizer: Tokenizer, info: EngineInfo) -> list[int]:
    """Token ids of a chat, ready for the answer.

    text: a JSON list of objects with `role` and `content`, or an object with such `messages` and with `tools`.
    Raises InvalidRequest for anything else, for what is too long, and for what the model's chat template refuses.
    """
    _check_length("messages", text, info)
    try:
        chat = msgspec.json.decode(text, type=list[dict[str, Any]] | _Chat)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(
            "messages must be a JSON list of objects with role and content, "
            f"or an object of such messages and tools: {error}"
        ) from None
    if isinstance(chat, _Chat):
        return tokenizer.apply_chat_template(chat.messages, chat.tools)
    return tokenizer.apply_chat_template(chat)


def _check_length(name: str, text: str, info: EngineInfo) -> None:
    """Tokenizing takes time and memory by the byte, and everybody else waits for it."""
    num_bytes = len(text.encode())
    if num_bytes > info.limits.max_prompt_bytes:
        raise InvalidRequest(f"{name} has {num_bytes} bytes and max_prompt_bytes is {info.limits.max_prompt_bytes}")
