"""`AdapterUse`: what an adapter's folder says about its use: chat templates, end tokens, and defaults of its requests.

The folder's files travel as they are: the server alone has the base model, which it compares them with.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

import msgspec

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"
TOOL_TEMPLATE_FILE = f"{TEMPLATE_FOLDER}/tool_use.jinja"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"
TOKENIZER_FILE = "tokenizer.json"
ADDED_TOKENS_FILE = "added_tokens.json"
GENERATION_FILE = "generation_config.json"
OWN_FILE = "multilora.json"

USE_FILES = (
    TEMPLATE_FILE,
    TOOL_TEMPLATE_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    ADDED_TOKENS_FILE,
    GENERATION_FILE,
    OWN_FILE,
)
"""The files of an adapter's folder that say something about its use."""

MAX_FILE_BYTES = 1 << 20
MAX_TOKENIZER_CONFIG_BYTES = 4 << 20
"""Of `tokenizer_config.json`: Gemma 3's has 1.2 MB of added tokens."""

MAX_TOKENIZER_BYTES = 64 << 20
"""Of `tokenizer.json`, of which only the added tokens are read."""

MAX_SENT_BYTES = 8 << 20
"""Of the files as one JSON object. Of `tokenizer.json` it has the added tokens alone."""

MAX_TEXT_BYTES = 256 << 10
"""Of an `AdapterUse` as JSON: every tier keeps it in memory."""

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Tokens that `tokenizer_config.json` names, and that a template may write by these names.

A model may have others, such as `image_token`.
"""


class UseError(ValueError):
    """A file about an adapter's use cannot be read, or says what no server here does; the text names the file."""


class AdapterUse(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How an adapter is to be asked, where that differs from its base model. Every field may be empty.

    chat_templates: `default`, and `tool_use` for chats with tools, in Jinja. named_tokens: the tokens that a template
    writes by their names, empty for none. end_token_ids: they replace the base's end tokens. system_prompt: the first
    message of a chat that begins with no system message. The others are defaults of requests that do not set them;
    `top_k` 0 is no restriction.
    """

    chat_templates: dict[str, str] = {}
    named_tokens: dict[str, str] = {}
    end_token_ids: tuple[int, ...] = ()
    system_prompt: str = ""
    max_tokens: Annotated[int, msgspec.Meta(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, msgspec.Meta(ge=0, le=1e9)] | None = None
    top_k: Annotated[int, msgspec.Meta(ge=0, lt=2**31)] | None = None
    top_p: Annotated[float, msgspec.Meta(gt=0, le=1)] | None = None
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, msgspec.Meta(gt=0, le=1e9)] | None = None

    @property
    def text(self) -> str:
        """The same use always has the same text; "" for no use of its own."""
        return "" if self == NO_USE else msgspec.json.encode(self, order="deterministic").decode()

    @property
    def has_own_template(self) -> bool:
        """Whether the adapter's texts, which its tenant wrote, make the program that renders a chat."""
        return bool(self.chat_templates or self.named_tokens)

    def describe(self) -> tuple[str, ...]:
        """What it has, in a few words each."""
        templates = [f"{name} chat template" if name != "default" else "chat template" for name in self.chat_templates]
        values: dict[str, Any] = {name: getattr(self, name) for name in _TOLD}
        return (
            *sorted(templates),
            *(f"{name} {token}" if token else f"no {name}" for name, token in sorted(self.named_tokens.items())),
            *([f"end tokens {', '.join(map(str, self.end_token_ids))}"] if self.end_token_ids else []),
            *(["system prompt"] if self.system_prompt else []),
            *(f"{name} {value:g}" for name, value in values.items() if value is not None),
        )


_TOLD = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "repetition_penalty")

NO_USE = AdapterUse()
"""The use of an adapter that is asked as its base model is."""


@lru_cache(maxsize=256)
def parse_use(text: str) -> AdapterUse:
    """The use of a text that `AdapterUse.text` wrote. Raises UseError."""
    if not text:
        return NO_USE
    if (num_bytes := len(text.encode())) > MAX_TEXT_BYTES:
        raise UseError(f"an adapter's use has {num_bytes} bytes, at most {MAX_TEXT_BYTES} are kept")
    try:
        return msgspec.json.decode(text, type=AdapterUse)
    except msgspec.MsgspecError as error:
        raise UseError(f"an adapter's use cannot be read: {error}") from None


@lru_cache(maxsize=256)
def use_digest(text: str) -> str:
    """A short name of an `AdapterUse.text`: equal for the same text; "" for no use."""
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest() if text else ""


def read_use_files(directory: Path, check: Callable[[Path], None] = lambda path: None) -> dict[str, str]:
    """The texts of the files in `USE_FILES` that a folder has, by these names; of `tokenizer.json` the added tokens.

    check: raises for a path that may not be read, such as a link out of the source. Raises UseError or OSError.
    """
    texts = {}
    for name in USE_FILES:
        path = directory / name
        if not os.path.lexists(path):
            continue
        check(path)
        check_use_sizes({name: path.stat().st_size})
        content = path.read_bytes()
        if name == TOKENIZER_FILE:
            content = _added_tokens(content)
        texts[name] = _decoded(name, content)
    return texts


def check_use_sizes(sizes: Mapping[str, int]) -> None:
    """Raises UseError for a file that is larger than any of its name. sizes: in bytes, by name."""
    larger = {TOKENIZER_FILE: MAX_TOKENIZER_BYTES, TOKENIZER_CONFIG_FILE: MAX_TOKENIZER_CONFIG_BYTES}
    for name, num_bytes in sizes.items():
        most = larger.get(name, MAX_FILE_BYTES)
        if name in USE_FILES and num_bytes > most:
            raise UseError(f"{name} has {num_bytes} bytes, at most {most} are read")


def join_use_files(texts: Mapping[str, str]) -> bytes:
    """The files as one JSON object, for the wire."""
    return msgspec.json.encode(dict(texts), order="deterministic")


def split_use_files(content: bytes) -> dict[str, str]:
    """The texts that `join_use_files` joined. Raises UseError, also for a file that is not one of `USE_FILES`."""
    try:
        texts = msgspec.json.decode(content, type=dict[str, str])
    except msgspec.MsgspecError as error:
        raise UseError(f"it is no JSON object of files' texts by their names: {error}") from None
    if unknown := sorted(texts.keys() - set(USE_FILES)):
        raise UseError(f"it has {_shown(unknown)}; known are {', '.join(USE_FILES)}")
    check_use_sizes({name: len(text.encode()) for name, text in texts.items()})
    return texts


class _AddedTokens(msgspec.Struct):
    added_tokens: list[Any] = []


def _added_tokens(content: bytes) -> bytes:
    try:
        return msgspec.json.encode(msgspec.json.decode(content, type=_AddedTokens))
    except msgspec.MsgspecError as error:
        raise UseError(f"{TOKENIZER_FILE} cannot be read: {error}") from None


def _decoded(name: str, content: bytes) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UseError(f"{name} is not valid UTF-8: {error.reason} at byte {error.start}") from None


def _shown(names: Iterable[str]) -> str:
    return ", ".join(f"{name:.80}" for name in names)
