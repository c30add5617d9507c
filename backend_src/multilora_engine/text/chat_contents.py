"""`fit_contents`: the contents of a chat in the form that its template takes, a text or a list of parts.

Some templates write `message.content` as it is, others walk over its parts, and a template may do the one for system
messages and the other for the rest. What it does not take it leaves out without a word, writes as Python or JSON would,
or refuses. A template is a program: only its output tells. So the chat is rendered with a number in the place of each
text first, which shows what reaches the prompt, at a price that does not depend on how long the texts are.
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
"""Of each message, which of its forms."""

_MAX_CHANGES = 2
"""Of the form of one message."""

_QUOTING = re.compile(r"""(?:\[|text\\*['"]\s*:)\s*\\*['"]$""")
_QUOTING_ANY_MEMBER = re.compile(r"""(?:\[|['"]\s*:)\s*\\*['"]$""")
_MAX_QUOTING = 40
"""Characters before a mark that tell how it is quoted."""

_NUM_DIGITS = 8
"""Marks have one more, which numbers more texts than a request has bytes."""


@dataclass
class _Unit:
    """A piece of a message that has to reach the prompt by one of its marks.

    name: for errors. is_optional: whether a template may leave it out. of_tools: whether only a template for tools has
    a place for it.
    """

    name: str
    is_optional: bool
    of_tools: bool
    marks: list[str] = field(default_factory=list)


@dataclass
class _Lacks:
    """What a prompt lacks. needed: why a request cannot go on without it, by the message. wanted: messages with a text
    that a template may leave out.
    """

    needed: dict[int, str] = field(default_factory=dict)
    wanted: set[int] = field(default_factory=set)

    @property
    def messages(self) -> set[int]:
        return {*self.needed, *self.wanted}


def fit_contents(messages: Sequence[Message], render: Callable[[Sequence[Message]], str]) -> list[Message]:
    """The messages, with each content that the template does not take as it is in another form.

    render: fills the template in; raises InvalidRequest where it refuses. Raises InvalidRequest for a message that
    reaches the prompt in no form, and for calls of tools that do not. A text beside calls may be left out, where the
    template leaves it out in every form. Messages that are refused in every form are given as they are, or so that the
    template says why.
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
    """Whether the template says by itself why it refuses a chat."""
    from jinja2.exceptions import TemplateError  # only here, since it is not needed where no chat is refused

    return type(refusal.__cause__) is TemplateError


def _forms_of(message: Message) -> list[Any]:
    """A content as it is, and the other forms of the same text."""
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
    """What to begin with, the likeliest first. Where a template refuses a form, it does not tell for which message."""
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
    """Raises InvalidRequest as `render`."""
    marking = _Marking()
    text = render([marking.message(i, message) for i, message in enumerate(messages)])
    found, quoted = marking.read(text)
    lacks = _Lacks()
    for i, unit in marking.units:
        if not quoted.isdisjoint(unit.marks) or (found.isdisjoint(unit.marks) and not unit.is_optional):
            place = " has no place for tools: it" if unit.of_tools else ""
            lacks.needed.setdefault(i, f"the model's chat template{place} leaves out {unit.name}")
        elif found.isdisjoint(unit.marks):
            lacks.wanted.add(i)
    return lacks


class _Marking:
    """Puts marks, numbers that nobody can guess, in the place of texts. units: with the number of the message."""

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
        """The marks that a prompt has, and those of parts that are written with their list, as Python or JSON does."""
        found: set[str] = set()
        quoted: set[str] = set()
        for before, behind in itertools.pairwise(text.split(self._secret)):
            found.add(mark := self._secret + behind[: _NUM_DIGITS + 1])
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
        """With a mark for the function's name: templates read the arguments in many ways."""
        if not isinstance(call, dict):
            return call
        if isinstance(function := call.get("function"), dict):
            return {**call, "function": self._call(i, name, function)}
        self.units.append((i, unit := _Unit(name, is_optional=False, of_tools=True)))
        return {**call, "name": self._mark(unit)}

    def _texts(self, unit: _Unit, value: Any) -> Any:
        """A value with a mark for each text in it but for the types of parts."""
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
