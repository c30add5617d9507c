"""Turns a client's prompt into token ids: one text, or one chat as JSON."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import msgspec

from multilora_engine.engine_info import EngineInfo
from multilora_engine.errors import InvalidRequest
from multilora_engine.text.tokenizer import Tokenizer
from multilora_engine.text.tokenizer_files import fast_tokenizer_class


def encode_text(text: str, tokenizer: Tokenizer, info: EngineInfo, add_special_tokens: bool) -> list[int]:
    """Token ids of a text. Raises InvalidRequest when there are none, or the text is too long."""
    check_prompt_bytes("text_input", len(text.encode()), info)
    token_ids = tokenizer.encode(text, add_special_tokens)
    if not token_ids:
        raise InvalidRequest("empty prompt: the text has no tokens")
    return token_ids


class _Chat(msgspec.Struct, forbid_unknown_fields=True):
    """A chat with the tools that the model may ask for, in the form that its template expects.

    chat_template_kwargs: other variables of the template. add_generation_prompt: whether it opens the assistant's
    turn. continue_final_message: whether the last message is left open instead, for the answer to go on with it.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] = {}
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False


def encode_messages(text: str, tokenizer: Tokenizer, info: EngineInfo, add_special_tokens: bool = False) -> list[int]:
    """Token ids of a chat, ready for the answer.

    text: a JSON list of objects with `role` and `content`, or an object with such `messages` and with any of `tools`,
        `chat_template_kwargs`, `add_generation_prompt` and `continue_final_message`.
    add_special_tokens: whether the tokenizer adds its own to those that the template writes.
    Raises InvalidRequest for anything else, for texts that are too long, and for chats that the template refuses.
    """
    check_prompt_bytes("messages", len(text.encode()), info)
    try:
        chat = msgspec.json.decode(text, type=list[dict[str, Any]] | _Chat)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(
            "messages must be a JSON list of objects with role and content, "
            f"or an object of such messages, tools and how the template is filled in: {error}"
        ) from None
    except RecursionError:
        raise InvalidRequest("messages are JSON that is nested too deep") from None
    if not isinstance(chat, _Chat):
        chat = _Chat(chat)
    options, keeps_special = _template_options(chat), info.special_tokens_in_messages
    most = info.limits.max_prompt_bytes
    try:
        return tokenizer.apply_chat_template(
            chat.messages, chat.tools, options, keeps_special, most, add_special_tokens
        )
    except RecursionError:
        raise InvalidRequest("messages are nested too deep for the model's chat template") from None


def _template_options(chat: _Chat) -> dict[str, Any]:
    if reserved := sorted(chat.chat_template_kwargs.keys() & _reserved()):
        raise InvalidRequest(f"chat_template_kwargs may not set {', '.join(reserved)}")
    if chat.add_generation_prompt and chat.continue_final_message:
        raise InvalidRequest("add_generation_prompt and continue_final_message are true: the answer cannot begin twice")
    opens_turn = not chat.continue_final_message if chat.add_generation_prompt is None else chat.add_generation_prompt
    return chat.chat_template_kwargs | {
        "add_generation_prompt": opens_turn,
        "continue_final_message": chat.continue_final_message,
    }


@functools.cache
def _reserved() -> frozenset[str]:
    """Arguments of the tokenizer's own, the template itself among them; `documents` it only hands on."""
    return frozenset(inspect.signature(fast_tokenizer_class().apply_chat_template).parameters) - {"documents"}


def check_prompt_bytes(name: str, num_bytes: int, info: EngineInfo) -> None:
    """Raises InvalidRequest for a prompt of so many bytes: reading it takes time and memory by the byte."""
    if num_bytes > info.limits.max_prompt_bytes:
        raise InvalidRequest(f"{name} has {num_bytes} bytes; a prompt may have {info.limits.max_prompt_bytes}")
