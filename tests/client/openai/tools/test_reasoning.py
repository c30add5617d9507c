"""A model's thinking and its answer, told apart in any pieces."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multilora_client.openai.tools.calls import (
    Delta,
    PlainText,
    ReasoningDelta,
    TextDelta,
    join_calls,
    join_reasoning,
    join_text,
)
from multilora_client.openai.tools.formats import TOOL_FORMATS
from multilora_client.openai.tools.parser import ToolParser
from multilora_client.openai.tools.reasoning import ReasoningParser

CALL = '<tool_call>{"name": "sky", "arguments": {}}</tool_call>'
PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<thi", "nk>", "</", "think>", "a", " ", "\n", "<", "b c"]))


def read(pieces: Sequence[str], **options: bool) -> list[Delta]:
    parser = ReasoningParser(PlainText(), **{"is_open": False, **options})
    return [*(delta for piece in pieces for delta in parser.feed(piece)), *parser.finish()]


def expected(text: str, is_open: bool) -> tuple[str, str]:
    """The thinking and the answer of a whole text."""
    body = text.lstrip().removeprefix("<think>")
    if not is_open and body == text.lstrip():
        return "", text
    thought, mark, answer = body.partition("</think>")
    return thought.strip(), answer.lstrip() if mark else ""


@given(pieces=PIECES, is_open=st.booleans(), is_streamed=st.booleans())
def test_pieces_add_up_to_the_parts_of_the_whole(pieces: list[str], is_open: bool, is_streamed: bool) -> None:
    deltas = read(pieces, is_open=is_open, is_streamed=is_streamed)
    assert (join_reasoning(deltas), join_text(deltas)) == expected("".join(pieces), is_open)
    if not is_streamed:
        assert sum(isinstance(delta, ReasoningDelta) for delta in deltas) <= 1
    assert join_text(read(pieces, is_open=is_open, is_told=False)) == join_text(deltas)
    assert not join_reasoning(read(pieces, is_open=is_open, is_told=False))


def test_thinking_comes_as_soon_as_it_is_decided() -> None:
    parser = ReasoningParser(PlainText(), is_open=False)
    steps = [list(parser.feed(piece)) for piece in ("<thi", "nk>\n", "a", " b", "</", "think>", "\n\n", "c", " d")]
    thought = [ReasoningDelta("a"), ReasoningDelta(" b")]
    assert steps == [[], [], thought[:1], thought[1:], [], [], [], [TextDelta("c")], [TextDelta(" d")]]


@pytest.mark.parametrize("text", ["Hello <think>no</think>", "<thin air>", "<", " \n"])
def test_an_answer_that_does_not_begin_with_the_mark_is_text(text: str) -> None:
    assert join_text(read([*text])) == text
    assert not join_reasoning(read([*text]))


def test_calls_are_found_after_the_thinking_and_not_in_it() -> None:
    parser = ReasoningParser(ToolParser(TOOL_FORMATS["auto"], ["sky"]), is_open=False)
    text = f"<think>I could call {CALL}</think>{CALL}"
    deltas = [*(delta for char in text for delta in parser.feed(char)), *parser.finish()]
    assert join_reasoning(deltas) == f"I could call {CALL}"
    assert [call.name for call in join_calls(deltas)] == ["sky"]
    assert parser.num_calls == 1
