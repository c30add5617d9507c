"""The parts of an answer: reasoning, text and calls of functions. They come in pieces, which add up to the whole."""

from __future__ import annotations

import secrets
import string
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol

_ID_ALPHABET = string.ascii_letters + string.digits
_ID_LENGTH = 9
"""The length of an id that Mistral's chat templates demand; to others it is all the same."""


@dataclass(frozen=True)
class TextDelta:
    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """A piece of what the model thought before its answer."""

    text: str


@dataclass(frozen=True)
class CallDelta:
    """A piece of the call with this index. The first one has the `name` and the `call_id`, every one `arguments`.

    arguments: JSON as the model wrote it.
    """

    index: int
    arguments: str = ""
    name: str = ""
    call_id: str = ""


Delta = TextDelta | ReasoningDelta | CallDelta


class AnswerParser(Protocol):
    """Reads the text of one answer. num_calls: how many calls have begun."""

    @property
    def num_calls(self) -> int: ...

    def feed(self, text: str) -> Iterator[Delta]:
        """The parts that the next piece of text decides."""

    def finish(self) -> Iterator[Delta]:
        """The parts that are left when no text follows."""


class PlainText:
    """An AnswerParser without tools: everything is text."""

    num_calls = 0

    def feed(self, text: str) -> Iterator[Delta]:
        if text:
            yield TextDelta(text)

    def finish(self) -> Iterator[Delta]:
        yield from ()


class NamedCall:
    """An AnswerParser for a function that is known beforehand: everything is its arguments."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.num_calls = 0

    def feed(self, text: str) -> Iterator[Delta]:
        if text and not self.num_calls:
            self.num_calls = 1
            yield CallDelta(0, name=self._name, call_id=new_call_id())
        if text:
            yield CallDelta(0, text)

    def finish(self) -> Iterator[Delta]:
        yield from ()


class CallsOnly:
    """An AnswerParser for an answer that must be calls. Anything else is a call that was cut off, not text."""

    def __init__(self, parser: AnswerParser) -> None:
        self._parser = parser

    @property
    def num_calls(self) -> int:
        return self._parser.num_calls

    def feed(self, text: str) -> Iterator[Delta]:
        return _calls_of(self._parser.feed(text))

    def finish(self) -> Iterator[Delta]:
        return _calls_of(self._parser.finish())


@dataclass(frozen=True)
class ToolCall:
    """A call as a whole."""

    call_id: str
    name: str
    arguments: str


def join_text(deltas: Iterable[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, TextDelta))


def join_reasoning(deltas: Iterable[Delta]) -> str:
    return "".join(delta.text for delta in deltas if isinstance(delta, ReasoningDelta))


def join_calls(deltas: Iterable[Delta]) -> list[ToolCall]:
    """The calls that the pieces add up to, in their order."""
    calls: list[ToolCall] = []
    for delta in deltas:
        match delta:
            case CallDelta(_, arguments, name, call_id) if call_id:
                calls.append(ToolCall(call_id, name, arguments))
            case CallDelta(index, arguments):
                calls[index] = ToolCall(calls[index].call_id, calls[index].name, calls[index].arguments + arguments)
    return calls


def _calls_of(deltas: Iterable[Delta]) -> Iterator[Delta]:
    return (delta for delta in deltas if isinstance(delta, CallDelta))


def new_call_id() -> str:
    return "".join(secrets.choice(_ID_ALPHABET) for _ in range(_ID_LENGTH))
