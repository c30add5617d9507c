"""How models write calls of functions, by the chat templates that they were trained with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

ParserName = Literal["auto", "hermes", "llama3_json", "mistral", "none"]


@dataclass(frozen=True)
class ToolFormat:
    """A call is a JSON object with `name`, and with `arguments` or `parameters`; several may follow each other.

    marks: texts that announce calls, wherever they are. end_marks: texts that end them.
    is_bare: whether an answer may begin with calls right away. Tokens like `[TOOL_CALLS]` are special ones in most
        vocabularies, which stand for no text, so that a call loses its mark on the way.
    has_leading_names: whether a call may also be a name followed by the arguments' object, as in Mistral since v11.
    """

    marks: tuple[str, ...] = ()
    end_marks: tuple[str, ...] = ()
    is_bare: bool = False
    has_leading_names: bool = False


_HERMES, _HERMES_END = "<tool_call>", "</tool_call>"
_LLAMA, _MISTRAL = "<|python_tag|>", "[TOOL_CALLS]"

TOOL_FORMATS: Mapping[str, ToolFormat] = {
    "auto": ToolFormat((_HERMES, _LLAMA, _MISTRAL), (_HERMES_END,), is_bare=True, has_leading_names=True),
    "hermes": ToolFormat((_HERMES,), (_HERMES_END,)),
    "llama3_json": ToolFormat((_LLAMA,), is_bare=True),
    "mistral": ToolFormat((_MISTRAL,), is_bare=True, has_leading_names=True),
}
"""The formats of `--tool-call-parser`, except `none`. `auto` knows all of them."""

GUIDED_CALLS = ToolFormat(is_bare=True)
"""The format of an answer that has to be calls: see `tools.guide`."""
