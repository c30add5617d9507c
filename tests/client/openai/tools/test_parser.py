"""Calls in the texts of models: each format, each way to cut it into pieces."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multilora_client.openai.tools.calls import CallDelta, Delta, join_calls, join_text
from multilora_client.openai.tools.formats import GUIDED_CALLS, TOOL_FORMATS, ToolFormat
from multilora_client.openai.tools.parser import ToolParser

NAMES = ("sky", "sea_level")
NESTED = '{"a": "}\\"{", "b": [{"c": "]"}]}'

ONE = [("sky", '{"a": 1}')]
TWO = [("sky", '{"a": 1}'), ("sea_level", "{}")]


def parse(
    tool_format: ToolFormat, pieces: list[str], max_calls: int | None = None
) -> tuple[str, list[tuple[str, str]], list[Delta]]:
    parser = ToolParser(tool_format, NAMES, max_calls)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + list(parser.finish())
    return join_text(deltas), [(call.name, call.arguments) for call in join_calls(deltas)], deltas


CASES = [
    # Hermes and Qwen.
    ("hermes", '<tool_call>\n{"name": "sky", "arguments": {"a": 1}}\n</tool_call>', "", ONE),
    ("hermes", f'<tool_call>{{"name": "sky", "arguments": {NESTED}}}</tool_call>', "", [("sky", NESTED)]),
    (
        "hermes",
        'Let me see.\n\n<tool_call>\n{"name": "sky", "arguments": {"a": 1}}\n</tool_call>\n'
        '<tool_call>\n{"name": "sea_level", "arguments": {}}\n</tool_call>\n',
        "Let me see.",
        TWO,
    ),
    ("hermes", '<tool_call>[{"name": "sky", "arguments": {"a": 1}}]</tool_call> Done.', "Done.", ONE),
    ("hermes", '{"name": "sky", "arguments": {"a": 1}}', '{"name": "sky", "arguments": {"a": 1}}', []),
    ("hermes", "<tool_call>soon</tool_call>", "<tool_call>soon</tool_call>", []),
    ("hermes", "a < b <tool", "a < b <tool", []),
    # Llama 3.
    ("llama3_json", '{"name": "sky", "parameters": {"a": 1}}', "", ONE),
    (
        "llama3_json",
        '<|python_tag|>{"name": "sky", "parameters": {"a": 1}}; {"name": "sea_level", "parameters": {}}',
        "",
        TWO,
    ),
    ("llama3_json", '{"type": "function", "name": "sky", "parameters": {"a": 1}}', "", ONE),
    # Mistral, with and without its mark, which is a special token.
    (
        "mistral",
        '[TOOL_CALLS] [{"name": "sky", "arguments": {"a": 1}}, {"name": "sea_level", "arguments": {}}]',
        "",
        TWO,
    ),
    ("mistral", ' [{"name": "sky", "arguments": {"a": 1}, "id": "123456789"}]', "", ONE),
    ("mistral", '[TOOL_CALLS]sky[ARGS]{"a": 1}[TOOL_CALLS]sea_level{}', "", TWO),
    ("mistral", 'sky{"a": 1}sea_level{}', "", TWO),
    # Any order of keys, and arguments that are JSON twice.
    ("auto", '{"arguments": {"a": 1}, "name": "sky"} And now?', "And now?", ONE),
    ("auto", '{"type": "function", "function": {"name": "sky", "arguments": "{\\"a\\": 1}"}}', "", ONE),
    ("auto", '{"name": "sky"}', "", [("sky", "{}")]),
    # Texts that are no calls.
    ("auto", "The sky is blue.", "The sky is blue.", []),
    ("auto", "sky", "sky", []),
    ("auto", "sky is", "sky is", []),
    ("auto", '{"temperature": 3}', '{"temperature": 3}', []),
    ("auto", '{"name": "Bob", "arguments": {}}', '{"name": "Bob", "arguments": {}}', []),
    ("auto", '{"name": ["sky"]', '{"name": ["sky"]', []),
    ("auto", "[1, 2, 3]", "[1, 2, 3]", []),
    ("auto", " \n two  words \n", " \n two  words \n", []),
    ("auto", '<tool_call>\n{"name": "sk', '<tool_call>\n{"name": "sk', []),
    ("auto", '<tool_call>{"name": "sea", "arguments": {}}', '<tool_call>{"name": "sea", "arguments": {}}', []),
    # An answer that max_tokens has cut off.
    ("auto", '<tool_call>{"name": "sky", "arguments": {"a": ', "", [("sky", '{"a": ')]),
]


@pytest.mark.parametrize(("name", "text", "said", "calls"), CASES)
def test_calls_are_taken_out_of_the_text(name: str, text: str, said: str, calls: list[tuple[str, str]]) -> None:
    assert parse(TOOL_FORMATS[name], [text])[:2] == (said, calls)


@pytest.mark.parametrize(
    ("text", "said", "calls"), [case[1:] for case in CASES if case[0] in ("llama3_json", "mistral")]
)
def test_auto_knows_what_others_know(text: str, said: str, calls: list[tuple[str, str]]) -> None:
    assert parse(TOOL_FORMATS["auto"], [text])[:2] == (said, calls)


@pytest.mark.parametrize(("name", "text", "said", "calls"), CASES)
@given(data=st.data())
def test_it_does_not_matter_how_the_text_is_cut(
    name: str, text: str, said: str, calls: list[tuple[str, str]], data: st.DataObject
) -> None:
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)))) | {0, len(text)})
    pieces = [text[start:end] for start, end in itertools.pairwise(cuts)]
    assert parse(TOOL_FORMATS[name], pieces)[:2] == (said, calls)


@given(st.text(alphabet='{}[]"\\:, \nskynamearguments<tool_call>/|;1', max_size=60))
def test_whatever_a_model_writes_is_text_or_calls(text: str) -> None:
    whole = parse(TOOL_FORMATS["auto"], [text])[:2]
    assert parse(TOOL_FORMATS["auto"], list(text))[:2] == whole
    if not whole[1]:
        assert whole[0] == text


def test_arguments_are_passed_on_as_they_come() -> None:
    parser = ToolParser(TOOL_FORMATS["hermes"], NAMES)

    def fed(text: str) -> list[Delta]:
        return list(parser.feed(text))

    assert join_text(fed('Aye.\n<tool_call>\n{"name": "sky", "argum')) == "Aye."
    assert fed('ents": ') == []
    begun, opening = fed('{"a"')
    assert isinstance(begun, CallDelta)
    assert (begun.index, begun.name, len(begun.call_id)) == (0, "sky", 9)
    assert opening == CallDelta(0, '{"a"')
    assert fed(": 1") == [CallDelta(0, ": 1")]
    assert fed("}}\n</tool") == [CallDelta(0, "}")]
    assert fed("_call>") == list(parser.finish()) == []


def test_calls_after_the_last_that_is_wanted_are_dropped() -> None:
    text = CASES[2][1]
    assert parse(TOOL_FORMATS["hermes"], [text], max_calls=1)[:2] == ("Let me see.", ONE)


def test_guided_calls_are_a_list() -> None:
    text = json.dumps([{"name": name, "parameters": json.loads(arguments)} for name, arguments in TWO])
    assert parse(GUIDED_CALLS, list(text))[:2] == ("", TWO)


def test_each_call_has_an_id_that_every_template_takes() -> None:
    ids = [call.call_id for call in join_calls(parse(TOOL_FORMATS["mistral"], [CASES[10][1]])[2])]
    assert len(set(ids)) == 2
    assert all(len(call_id) == 9 and call_id.isalnum() for call_id in ids)
