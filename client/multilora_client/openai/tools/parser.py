"""`ToolParser`: takes the calls of functions out of a model's text, while the model writes them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator

from multilora_client.openai.tools.calls import CallDelta, Delta, TextDelta, new_call_id
from multilora_client.openai.tools.formats import ToolFormat
from multilora_client.openai.tools.json_span import JsonSpan

_ARGUMENTS_MARK = "[ARGS]"
_ARGUMENTS = ("arguments", "parameters")
_KEYS = ("name", "type", "id", "function", *_ARGUMENTS)
_HEADER = re.compile(
    r'\{\s*(?:"(?:type|id)"\s*:\s*"[^"\\]*"\s*,\s*)*"name"\s*:\s*"(?P<name>[^"\\]*)"\s*,\s*'
    rf'"(?:{"|".join(_ARGUMENTS)})"\s*:\s*(?=\{{)'
)


class ToolParser:
    """An AnswerParser for one way to write calls. Only functions that were offered are called; all else is text.

    The arguments of a call are passed on as they come, once the text is certain to be a call: in the usual order of its
    object after its name, else at its end.
    """

    def __init__(self, tool_format: ToolFormat, names: Collection[str], max_calls: int | None = None) -> None:
        """names: the functions' names. max_calls: all text after this many calls is dropped; None for no limit."""
        self.num_calls = 0
        self._names = frozenset(names)
        self._max_calls = max_calls
        self._is_bare = tool_format.is_bare
        self._marks = tool_format.marks
        self._all_marks = (*tool_format.marks, *tool_format.end_marks)
        self._leading_names = self._names if tool_format.has_leading_names else frozenset[str]()
        self._mark = _any_of(self._marks)
        self._prefix = re.compile(rf"(?:{self._mark.pattern})?[\s,;\[]*")
        self._separators = re.compile(rf"(?:[\s,;\]]|{_any_of(tool_format.end_marks).pattern})*")
        self._named = re.compile(
            rf"(?P<name>{_any_of(self._leading_names).pattern})(?:{re.escape(_ARGUMENTS_MARK)})?(?=\{{)"
        )
        self._held = ""
        self._span = JsonSpan()
        self._num_scanned = 0
        self._is_in_object = False
        self._step: Callable[[], list[Delta] | None] = self._begin

    def feed(self, text: str) -> Iterator[Delta]:
        """The parts that the next piece of text decides."""
        self._held += text
        while self._held and (deltas := self._step()) is not None:
            yield from deltas

    def finish(self) -> Iterator[Delta]:
        """The parts that are left when no text follows: a call that ends before its arguments is text, too."""
        if self._step == self._between:
            self._held = self._held[_end_of(self._separators, self._held) :]
        if self._step not in (self._arguments, self._closing):
            yield from _said(self._held.rstrip() if self.num_calls else self._held)
        self._held = ""

    # Each step reads from the held text, and decides which step is next. None: it needs more text.

    def _begin(self) -> list[Delta] | None:
        body = self._held.lstrip()
        if not body:
            return None
        self._step = self._call if self._begins_bare(body) else self._text
        return []

    def _text(self) -> list[Delta] | None:
        if mark := self._mark.search(self._held):
            text, self._held = self._held[: mark.start()].rstrip(), self._held[mark.start() :]
            self._expect_call()
            return _said(text)
        # White space in front of a call is no text of its own.
        text = self._held[: len(self._held) - _overlap(self._held, self._marks)].rstrip()
        self._held = self._held[len(text) :]
        return _said(text) or None

    def _call(self) -> list[Delta] | None:
        start = _end_of(self._prefix, self._held)
        if start == len(self._held):
            return None
        header = _HEADER.match(self._held, start) or self._named.match(self._held, start)
        if header and header["name"] in self._names:
            return self._open(header)
        if not self._may_be_call(self._held[start:]):
            return self._no_call()
        end = self._object_end(start) if self._held[start] == "{" else None
        return None if end is None else self._whole_call(start, end)

    def _arguments(self) -> list[Delta]:
        piece = self._take_span(self._closing if self._is_in_object else self._between)
        return [CallDelta(self.num_calls - 1, piece)]

    def _closing(self) -> list[Delta]:
        self._take_span(self._between)
        return []

    def _between(self) -> list[Delta] | None:
        rest = self._held[_end_of(self._separators, self._held) :]
        is_call = rest.startswith((*self._marks, "{")) or self._begins_with_name(rest)
        if not is_call and (not rest or any(mark.startswith(rest) for mark in self._all_marks)):
            return None
        self._held = rest
        if is_call:
            self._expect_call()
        else:
            self._step = self._text
        return []

    def _drop(self) -> list[Delta]:
        self._held = ""
        return []

    def _expect_call(self) -> None:
        self._span, self._num_scanned = JsonSpan(), 0
        self._step = self._call

    def _open(self, header: re.Match[str]) -> list[Delta]:
        """Begin a call. Its arguments come next, and then the end of the object, if the call is in one."""
        self._held = self._held[header.end() :]
        self._span = JsonSpan()
        self._is_in_object = header.re is _HEADER
        self._step = self._arguments
        return self._said_call(header["name"])

    def _object_end(self, start: int) -> int | None:
        """The end, in the held text, of the object that begins at `start`. No character is looked at twice."""
        scanned = max(self._num_scanned, start)
        end = self._span.end(self._held[scanned:])
        self._num_scanned = len(self._held)
        return None if end is None else scanned + end

    def _whole_call(self, start: int, end: int) -> list[Delta]:
        name, arguments = _read_call(self._held[start:end])
        if name not in self._names:
            return self._no_call()
        self._held = self._held[end:]
        self._step = self._between
        return self._said_call(name, arguments)

    def _no_call(self) -> list[Delta]:
        """A seeming call is text; a mark at its beginning is not to be found again."""
        mark = self._mark.match(self._held)
        text = mark.group() if mark else ""
        self._held = self._held[len(text) :]
        self._step = self._text
        return _said(text)

    def _take_span(self, following: Callable[[], list[Delta] | None]) -> str:
        """The held part of a JSON value. Where the value ends, `following` is the next step."""
        end = self._span.end(self._held)
        length = len(self._held) if end is None else end
        taken, self._held = self._held[:length], self._held[length:]
        if end is not None:
            self._span = JsonSpan(depth=1)
            self._step = following
        return taken

    def _said_call(self, name: str, arguments: str = "") -> list[Delta]:
        if self.num_calls == self._max_calls:
            self._step = self._drop
            return []
        self.num_calls += 1
        return [CallDelta(self.num_calls - 1, arguments, name, new_call_id())]

    def _begins_bare(self, body: str) -> bool:
        return self._is_bare and (body[0] in "{[" or self._begins_with_name(body))

    def _begins_with_name(self, body: str) -> bool:
        """Whether the text may be a function's name followed by arguments, or the beginning of that."""
        return bool(body) and any(
            f"{name}{opening}".startswith(body) or body.startswith(f"{name}{opening}")
            for name in self._leading_names
            for opening in ("{", f"{_ARGUMENTS_MARK}{{")
        )

    def _may_be_call(self, body: str) -> bool:
        return _first_key_fits(body) if body[0] == "{" else self._begins_with_name(body)


def _said(text: str) -> list[Delta]:
    return [TextDelta(text)] if text else []


def _any_of(texts: Iterable[str]) -> re.Pattern[str]:
    """A pattern for the longest text that fits; it matches nothing where there are no texts."""
    return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)) or "(?!)")


def _end_of(pattern: re.Pattern[str], text: str) -> int:
    """The end of a pattern that every text begins with."""
    match = pattern.match(text)
    assert match is not None, f"{pattern.pattern} matches the empty text, too"
    return match.end()


def _overlap(text: str, marks: Iterable[str]) -> int:
    """How much of the end of a text may be the beginning of a mark."""
    return max((n for mark in marks for n in range(1, len(mark)) if text.endswith(mark[:n])), default=0)


def _first_key_fits(body: str) -> bool:
    """Whether the object may be a call by the first of its keys, as far as it is there."""
    inside = body[1:].lstrip()
    if not inside:
        return True
    key, quote, _ = inside[1:].partition('"')
    return inside[0] == '"' and (key in _KEYS if quote else any(known.startswith(key) for known in _KEYS))


def _read_call(text: str) -> tuple[str, str]:
    """The name and the arguments of a call whose keys are in any order, ("", "") for anything else."""
    try:
        fields = json.loads(text)
    except ValueError:
        return "", ""
    fields = fields["function"] if isinstance(fields.get("function"), dict) else fields
    arguments: object = next((fields[key] for key in _ARGUMENTS if key in fields), {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return str(fields.get("name", "")), text
