"""`ReasoningParser`: tells what a model thinks before its answer from the answer, while the model writes both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Literal

from multilora_client.openai.tools.calls import AnswerParser, Delta, ReasoningDelta

ReasoningName = Literal["auto", "none"]
"""`auto`: a model thinks where it writes `<think>` first, or where the chat's template has written it already, as
DeepSeek-R1's does; `none`: thinking stays in the text."""

_BEGIN, _END = "<think>", "</think>"
"""The marks of Qwen 3, SmolLM3, GLM and DeepSeek-R1."""


class ReasoningParser:
    """An AnswerParser for a model that may think first. Another parser reads the answer.

    White space at the ends of the thinking, and before the answer, belongs to neither.
    """

    def __init__(self, parser: AnswerParser, is_open: bool, is_told: bool = True, is_streamed: bool = True) -> None:
        """is_open: the text begins inside the thinking, though the model may repeat the mark.

        is_told: whether the thinking is passed on. is_streamed: whether while it comes, and not at its end.
        """
        self._parser = parser
        self._is_told = is_told
        self._is_streamed = is_streamed
        self._is_open = is_open
        self._held = ""
        self._num_thought = 0
        self._step: Callable[[], Iterator[Delta]] = self._begin

    @property
    def num_calls(self) -> int:
        return self._parser.num_calls

    def feed(self, text: str) -> Iterator[Delta]:
        """The parts that the next piece of text decides."""
        self._held += text
        yield from self._step()

    def finish(self) -> Iterator[Delta]:
        """The parts that are left when no text follows."""
        if self._step == self._think or (self._step == self._begin and self._is_open):
            yield from self._thought(self._held.strip())
        elif self._step == self._begin:
            yield from self._parser.feed(self._held)
        yield from self._parser.finish()

    # Each step reads from the held text, and decides which step is next.

    def _begin(self) -> Iterator[Delta]:
        body = self._held.lstrip()
        if body.startswith(_BEGIN):
            self._held, self._step = body.removeprefix(_BEGIN), self._think
            yield from self._think()
        elif not _BEGIN.startswith(body):
            self._step = self._think if self._is_open else self._answer
            yield from self._step()

    def _think(self) -> Iterator[Delta]:
        if not self._num_thought:
            self._held = self._held.lstrip()
        thought, mark, rest = self._held.partition(_END)
        if mark:
            self._held, self._step = rest, self._open_answer
            yield from self._thought(thought.rstrip())
            yield from self._open_answer()
        elif self._is_streamed:
            # The end of the text may be the beginning of the mark, and white space the end of the thinking.
            thought = thought[: len(thought) - _overlap(thought)].rstrip()
            self._held = self._held[len(thought) :]
            yield from self._thought(thought)

    def _open_answer(self) -> Iterator[Delta]:
        self._held = self._held.lstrip()
        if self._held:
            self._step = self._answer
            yield from self._answer()

    def _answer(self) -> Iterator[Delta]:
        text, self._held = self._held, ""
        yield from self._parser.feed(text)

    def _thought(self, text: str) -> Iterator[Delta]:
        self._num_thought += len(text)
        if text and self._is_told:
            yield ReasoningDelta(text)


def _overlap(text: str) -> int:
    """How much of the end of a text may be the beginning of the mark at the end."""
    return max((n for n in range(1, len(_END)) if text.endswith(_END[:n])), default=0)
