"""`render_chat`: fills in a chat template. The text goes to the tokenizer in pieces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from multilora_engine.errors import InvalidRequest
from multilora_engine.text.chat_contents import fit_contents
from multilora_engine.text.plain_specials import PlainSpecials

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class Chat(msgspec.Struct, frozen=True):
    """A chat to be rendered.

    options: `add_generation_prompt`, `continue_final_message` and other variables of the template. plain_specials: the
    special tokens that stay text where messages, tools and options spell them. max_bytes: of the rendered chat.
    """

    messages: Sequence[Mapping[str, Any]]
    tools: Sequence[Mapping[str, Any]] | None
    options: Mapping[str, Any]
    plain_specials: tuple[str, ...]
    max_bytes: int | None


def render_chat(chats: PreTrainedTokenizerFast, chat: Chat) -> list[str]:
    """The pieces of the rendered chat, each to be tokenized by itself.

    chats: has the template. Raises InvalidRequest if the template refuses the chat, if the rendered chat is too long,
    or if the template would silently leave out a content, tool calls or the tools.
    """
    whole = {**chat.options, "add_generation_prompt": False, "continue_final_message": False}
    messages = fit_contents(chat.messages, lambda contents: _render(chats, contents, chat.tools, whole))
    plain = PlainSpecials(chat.plain_specials)
    messages, tools, options = (plain.mark(each) for each in (messages, chat.tools, chat.options))
    options = {"add_generation_prompt": True, **options}
    text = _render(chats, messages, tools, options)
    if tools and text == _render(chats, messages, None, options):
        raise InvalidRequest("the chat template has no place for tools")
    pieces = plain.pieces(text)
    if chat.max_bytes is not None and (num_bytes := sum(len(piece.encode()) for piece in pieces)) > chat.max_bytes:
        raise InvalidRequest(
            f"the chat template makes {num_bytes} bytes of the messages; a prompt may have {chat.max_bytes}"
        )
    return pieces


def _render(
    chats: PreTrainedTokenizerFast,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    options: Mapping[str, Any],
) -> str:
    try:
        text = chats.apply_chat_template(
            [dict(message) for message in messages],
            tools=[dict(tool) for tool in tools] if tools else None,
            tokenize=False,
            **options,
        )
    except MemoryError:
        raise
    except Exception as error:  # templates are programs, which may raise any error
        raise InvalidRequest(f"the chat template refused the messages: {error}") from error
    return str(text)
