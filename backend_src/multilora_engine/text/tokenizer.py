"""Tokens to text and back. The text of a token sequence is decided here, and nowhere else.

The text of tokens is their bytes (`Tokenizer.token_bytes`), joined and decoded as UTF-8. Every invalid piece becomes
U+FFFD. So the text does not depend on how a stream was cut. For byte-level tokenizers this is transformers' text.
Sentencepiece tokenizers differ in one way: transformers drops the first space of each text that it decodes. We keep the
space of a continuation, which starts with a space whenever the model meant one, and drop that of a text of its own: of
the decoder of a model with an encoder.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from tokenizers import Encoding

from multilora_engine.errors import InvalidRequest
from multilora_engine.text.chat_rendering import Chat, render_chat
from multilora_engine.text.template_sandbox import TemplateSandbox
from multilora_engine.text.token_table import special_ids, start_of_text, token_table
from multilora_engine.text.tokenizer_files import read_tokenizer
from multilora_wire.adapter_use import NO_USE, AdapterUse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


class TemplateRefusal(InvalidRequest):
    """The template of a chat makes no prompt of it; the template of an adapter might."""


class Tokenizer:
    """The tokenizer of a checkpoint directory: text and chats to token ids, token ids to bytes and text.

    Raises ConfigError at construction when there is no fast tokenizer, or one whose decoder is neither byte-level nor
    sentencepiece style (`▁` for a space, optionally `<0xNN>` for a byte).
    """

    def __init__(self, path: Path) -> None:
        self._files = read_tokenizer(path)
        self._backend = self._files.backend
        # A checkpoint may store that prompts are cut or filled up; transformers undoes it in its own calls only.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._bytes = token_table(self._backend)
        self._start_of_text = start_of_text(self._backend)
        self.special_ids = frozenset(special_ids(self._backend))
        self._sandbox = TemplateSandbox()

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id; a model's own vocabulary may be padded beyond it."""
        return len(self._bytes)

    @property
    def eos_id(self) -> int | None:
        return self._files.eos_id

    @property
    def pad_id(self) -> int | None:
        return self._files.pad_id

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of a prompt. add_special_tokens: whether the tokenizer adds its special tokens, such as BOS."""
        try:
            return self._files.encode(text, add_special_tokens)
        except (TypeError, UnicodeError) as error:
            raise InvalidRequest(f"the prompt is not valid Unicode text: {error}") from error

    def encode_words(self, words: list[str]) -> list[list[int]]:
        """Token ids of each word, without special tokens. This takes a quarter of the time of one `encode` a word."""
        encodings = self._backend.encode_batch_fast(words, add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: Mapping[str, Any] = MappingProxyType({}),
        keeps_special_tokens: bool = True,
        max_bytes: int | None = None,
        add_special_tokens: bool = False,
        use: AdapterUse = NO_USE,
    ) -> list[int]:
        """Token ids of a chat, ready for the assistant's answer.

        A content may be a text or a list of parts; it is converted to the form that the template takes.

        options: `add_generation_prompt`, `continue_final_message` and other variables of the template.
        keeps_special_tokens: whether text in messages, tools and options that spells a special token becomes one.
        max_bytes: the size limit of the rendered chat.
        add_special_tokens: whether the tokenizer adds its special tokens, such as BOS, as to a prompt.
        use: of the adapter that answers, whose templates, named tokens and system prompt come before the base's.
            Such templates and tokens are rendered in a process with limits.

        Raises TemplateRefusal if there is no template, if the template refuses the chat, if the rendered chat is too
        long, or if the template would silently leave out a content, tool calls or the tools. InvalidRequest for
        messages that are none.
        """
        _check_messages(messages)
        if not (use.chat_templates or self._files.templates):
            raise TemplateRefusal("this model has no chat template; send text_input instead of messages")
        try:
            return self._apply_chat_template(
                messages, tools, options, keeps_special_tokens, max_bytes, add_special_tokens, use
            )
        except TemplateRefusal:
            raise
        except InvalidRequest as error:
            raise TemplateRefusal(str(error)) from error.__cause__

    def _apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None,
        options: Mapping[str, Any],
        keeps_special_tokens: bool,
        max_bytes: int | None,
        add_special_tokens: bool,
        use: AdapterUse,
    ) -> list[int]:
        if use.system_prompt and messages[0]["role"] not in ("system", "developer"):
            messages = [{"role": "system", "content": use.system_prompt}, *messages]
        specials = () if keeps_special_tokens else tuple(map(self.token_name, self.special_ids))
        chat = Chat(messages, tools, dict(options), specials, max_bytes)
        if use.has_own_template:
            templates, named = use.chat_templates or self._files.templates, {**self.named_tokens, **use.named_tokens}
            pieces = self._sandbox.render(templates, {name: token for name, token in named.items() if token}, chat)
        else:
            pieces = render_chat(self._chats, chat)
        if add_special_tokens:
            bare = Encoding.merge([self._backend.encode(piece, add_special_tokens=False) for piece in pieces], False)
            return list(self._backend.post_process(bare, None, True).ids)
        return [token_id for piece in pieces for token_id in self.encode(piece, add_special_tokens=False)]

    @cached_property
    def _chats(self) -> PreTrainedTokenizerFast:
        return self._files.load_chats()

    @property
    def templates(self) -> Mapping[str, str]:
        """The base model's chat templates, by their names."""
        return self._files.templates

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """The tokens that the base model's templates may write by names, such as `bos_token`."""
        return self._files.named_tokens

    def token_id(self, token: str) -> int | None:
        """The id of a token by its spelling; None if there is none."""
        return self._backend.token_to_id(token)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes a token stands for, often only part of a character. Special and unknown ids have none."""
        return self._bytes[token_id] if 0 <= token_id < len(self._bytes) else b""

    def first_bytes(self, token_id: int) -> bytes:
        """`token_bytes` of the first token of a text that continues no other: without the space before each text."""
        return self._start_of_text(self.token_bytes(token_id))

    def spell(self, token_id: int) -> bytes:
        """The bytes of an ordinary token, or the name of a special token."""
        return self.token_name(token_id).encode() if token_id in self.special_ids else self.token_bytes(token_id)

    def token_name(self, token_id: int) -> str:
        """How the vocabulary spells a token."""
        return str(self._backend.id_to_token(token_id))

    def decode(self, token_ids: Iterable[int], is_start: bool = False) -> str:
        """The text of tokens: their bytes joined, invalid UTF-8 replaced by U+FFFD.

        is_start: whether the text continues no other.
        """
        texts = [data for data in map(self.token_bytes, token_ids) if data]
        if is_start:
            texts[:1] = map(self._start_of_text, texts[:1])
        return b"".join(texts).decode("utf-8", "replace")


def _check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if not messages:
        raise InvalidRequest("messages is an empty list; send at least one message")
    for i, message in enumerate(messages):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise InvalidRequest(f'message {i} must look like {{"role": "user", "content": "..."}}, got {message!r}')
