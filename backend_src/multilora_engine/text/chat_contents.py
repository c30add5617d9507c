"""`fit_contents`: puts the contents of a chat into the form that its template takes: a text, or a list of parts.

Some templates write `message.content` as it is. Others loop over its parts. One template may do both, for different
roles. A template that gets the wrong form drops the content silently, writes it as Python or JSON would, or refuses it.
A template is a program, so only its output shows what it does. So `fit_contents` first renders the chat with a number
in place of each text. The numbers in the output show which texts reach the prompt. The cost does not depend on the
length of the texts.
"""

from __future__ import annotations

import itertools
import re
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from multilora_engine.errors import InvalidRequest

Message = Mapping[str, Any]
Forms = tuple[int, ...]
"""The index of the chosen form, for each message."""

_MAX_CHANGES = 2
"""How often the form of one message is changed."""

_QUOTING = re.compile(r"""(?:\[|text\\*['"]\s*:)\s*\\*['"]$""")
_QUOTING_ANY_MEMBER = re.compile(r"""(?:\[|['"]\s*:)\s*\\*['"]$""")
_MAX_QUOTING = 40
"""The characters before a mark that show how the mark is quoted."""

_NUM_DIGITS = 8
"""A mark's number has one digit more: enough for more texts than a request has bytes."""


@dataclass
class _Unit:
    """A piece of a message. At least one of its marks has to reach the prompt.

    name: how errors call the piece.
    is_optional: whether a template may leave the piece out.
    of_tools: whether only a template for tools has a place for the piece.
    """

    name: str
    is_optional: bool
    of_tools: bool
    marks: list[str] = field(default_factory=list)


@dataclass
class _Lacks:
    """What a prompt lacks.

    needed: the messages that must reach the prompt and do not, each with the error for the client.
    wanted: the messages with a missing text that a template may leave out.
    """

    needed: dict[int, str] = field(default_factory=dict)
    wanted: set[int] = field(default_factory=set)

    @property
    def messages(self) -> set[int]:
        return {*self.needed, *self.wanted}


def fit_contents(messages: Sequence[Message], render: Callable[[Sequence[Message]], str]) -> list[Message]:
    """The messages, each with its content in a form that the template takes.

    A text beside tool calls may be missing from the prompt if the template drops it in every form. If the template
    refuses all forms of the chat, the messages are returned in the form for which the template says why, or as they
    came.

    render: fills in the template. It raises InvalidRequest if the template refuses the chat.

    Raises InvalidRequest if a message, or a tool call, reaches the prompt in no form.
    """
    forms = [_forms_of(message) for message in messages]
    fewest: dict[int, str] = {}
    refused: list[Message] = []
    tried: set[Forms] = set()
    for chosen in _candidates(messages, forms):
        fitted: list[Message] | None = None
        for _ in range(1 + _MAX_CHANGES):
            if chosen in tried:
                break
            tried.add(chosen)
            formed = [_formed(*each) for each in zip(messages, forms, chosen, strict=True)]
            try:
                lacks = _lacks(formed, render)
            except InvalidRequest as error:
                if _is_of_template(error):
                    refused = refused or formed
                break
            if not lacks.needed:
                fitted = fitted or formed
                if not lacks.wanted:
                    return formed
            else:
                fewest = min(fewest or lacks.needed, lacks.needed, key=len)
            chosen = tuple((form + (i in lacks.messages)) % len(forms[i]) for i, form in enumerate(chosen))
        if fitted is not None:
            return fitted
    if fewest:
        raise InvalidRequest(next(iter(fewest.values())))
    return refused or list(messages)


def _is_of_template(refusal: InvalidRequest) -> bool:
    """Whether the error is the template's own explanation of why it refuses a chat."""
    from jinja2.exceptions import TemplateError  # imported here because only refused chats need it

    return type(refusal.__cause__) is TemplateError


def _forms_of(message: Message) -> list[Any]:
    """The content as it came, then the other forms of the same text."""
    content = message.get("content")
    if isinstance(content, str):
        return [content, [_text_part(content)]]
    if isinstance(content, list) and content and all(_is_text_part(part) for part in content):
        text = "".join(part["text"] for part in content)
        return [content, text, *([[_text_part(text)]] if len(content) > 1 else [])]
    return [content]


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _is_text_part(part: Any) -> bool:
    return isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type", "text") == "text"


def _candidates(messages: Sequence[Message], forms: Sequence[Sequence[Any]]) -> Iterator[Forms]:
    """The forms to try first, the likeliest first. A template that refuses a chat does not say for which message."""
    texts = tuple(_text(each) for each in forms)
    parts = tuple(_single_part(each) for each in forms)
    yield (0,) * len(messages)
    yield texts
    yield parts
    yield tuple(
        text if message["role"] in ("system", "developer") else part
        for message, text, part in zip(messages, texts, parts, strict=True)
    )


def _text(forms: Sequence[Any]) -> int:
    return next((i for i, content in enumerate(forms) if isinstance(content, str)), 0)


def _single_part(forms: Sequence[Any]) -> int:
    return next((i for i, content in enumerate(forms) if isinstance(content, list) and len(content) == 1), 0)


def _formed(message: Message, forms: Sequence[Any], form: int) -> Message:
    return {**message, "content": forms[form]} if form else message


def _lacks(messages: Sequence[Message], render: Callable[[Sequence[Message]], str]) -> _Lacks:
    """What the prompt of these messages lacks. Raises InvalidRequest if `render` does."""
    marking = _Marking()
    text = render([marking.message(i, message) for i, message in enumerate(messages)])
    found, quoted = marking.read(text)
    lacks = _Lacks()
    for i, unit in marking.units:
        if not quoted.isdisjoint(unit.marks) or (found.isdisjoint(unit.marks) and not unit.is_optional):
            place = " has no place for tools: it" if unit.of_tools else ""
            lacks.needed.setdefault(i, f"the chat template{place} leaves out {unit.name}")
        elif found.isdisjoint(unit.marks):
            lacks.wanted.add(i)
    return lacks


class _Marking:
    """Replaces texts by marks: numbers that nobody can guess.

    units: each with the index of its message.
    """

    def __init__(self) -> None:
        self.units: list[tuple[int, _Unit]] = []
        self._secret = str(uuid.uuid4().int)
        self._numbers = itertools.count(10**_NUM_DIGITS)
        self._in_lists: dict[str, re.Pattern[str]] = {}

    def message(self, i: int, message: Message) -> Message:
        name = f"message {i} (role {_short(message['role'])})"
        marked = {**message}
        calls = message.get("tool_calls")
        if "content" in message:
            is_optional = bool(calls) and message["role"] == "assistant"
            marked["content"] = self._content(i, name, message["content"], is_optional, message["role"] == "tool")
        if isinstance(calls, list):
            marked["tool_calls"] = [self._call(i, f"call {j} of {name}", call) for j, call in enumerate(calls)]
        if isinstance(call := message.get("function_call"), dict):
            marked["function_call"] = self._call(i, f"the call of {name}", call)
        return marked

    def read(self, text: str) -> tuple[set[str], set[str]]:
        """The marks in the prompt, and the marks of parts that the template wrote as Python or JSON writes a list."""
        found: set[str] = set()
        quoted: set[str] = set()
        for before, after in itertools.pairwise(text.split(self._secret)):
            found.add(mark := self._secret + after[: _NUM_DIGITS + 1])
            if (quoting := self._in_lists.get(mark)) and quoting.search(before[-_MAX_QUOTING:]):
                quoted.add(mark)
        return found, quoted

    def _content(self, i: int, name: str, content: Any, is_optional: bool, of_tools: bool) -> Any:
        if isinstance(content, list):
            units = [
                _Unit(f"part {j}{_type_of(part)} of {name}", is_optional, of_tools) for j, part in enumerate(content)
            ]
            self.units += [(i, unit) for unit in units]
            marked = [self._part(unit, part) for unit, part in zip(units, content, strict=True)]
            for unit, part in zip(units, content, strict=True):
                quoting = _QUOTING if _is_text_part(part) else _QUOTING_ANY_MEMBER
                self._in_lists |= dict.fromkeys(unit.marks, quoting)
            return marked
        if not isinstance(content, (str, dict)) or (is_optional and not content):
            return content
        unit = _Unit(name, is_optional, of_tools)
        marked = self._texts(unit, content)
        if unit.marks:
            self.units.append((i, unit))
        return marked

    def _part(self, unit: _Unit, part: Any) -> Any:
        return {**part, "text": self._mark(unit)} if _is_text_part(part) else self._texts(unit, part)

    def _call(self, i: int, name: str, call: Any) -> Any:
        """The call with a mark as the function's name. Arguments get no mark: templates read them in many ways."""
        if not isinstance(call, dict):
            return call
        if isinstance(function := call.get("function"), dict):
            return {**call, "function": self._call(i, name, function)}
        self.units.append((i, unit := _Unit(name, is_optional=False, of_tools=True)))
        return {**call, "name": self._mark(unit)}

    def _texts(self, unit: _Unit, value: Any) -> Any:
        """The value with each text in it replaced by a mark, except the types of parts."""
        if isinstance(value, str):
            return self._mark(unit)
        if isinstance(value, list):
            return [self._texts(unit, item) for item in value]
        if isinstance(value, dict):
            return {key: item if key == "type" else self._texts(unit, item) for key, item in value.items()}
        return value

    def _mark(self, unit: _Unit) -> str:
        mark = f"{self._secret}{next(self._numbers)}"
        unit.marks.append(mark)
        return mark


def _type_of(part: Any) -> str:
    return f" (type {_short(part['type'])})" if isinstance(part, dict) and part.get("type", "text") != "text" else ""


def _short(value: Any) -> str:
    return str(value)[:40]
