"""The form of an answer, in each way that clients ask for it."""

from __future__ import annotations

import json
from typing import Any

import llguidance
import pytest
from fastapi.testclient import TestClient

CHAT = {"model": "base", "messages": [{"role": "user", "content": "hi"}]}
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("given", "guide_type", "guide"),
    [
        ({"guided_json": SCHEMA}, "json_schema", json.dumps(SCHEMA)),
        ({"guided_json": '{"type": "null"}'}, "json_schema", '{"type": "null"}'),
        ({"guided_regex": "a+"}, "regex", "a+"),
        ({"guided_choice": ["yes", "no"]}, "ebnf_grammar", 'start: "yes" | "no"'),
        ({"guided_grammar": 'start: "a"', "guided_decoding_backend": "outlines"}, "ebnf_grammar", 'start: "a"'),
        ({"structured_outputs": {"json": SCHEMA}}, "json_schema", json.dumps(SCHEMA)),
        ({"structured_outputs": {"json_object": True}}, "json_schema", '{"type": "object"}'),
        ({"structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"structured_outputs": {"choice": ["yes"]}}, "ebnf_grammar", 'start: "yes"'),
        ({"structured_outputs": {"grammar": "start: /a/"}}, "ebnf_grammar", "start: /a/"),
    ],
)
@pytest.mark.parametrize("prompt", [{"messages": CHAT["messages"]}, {"prompt": "hi"}])
def test_a_guide_reaches_the_server(
    front: TestClient, server: Any, prompt: dict[str, Any], given: dict[str, Any], guide_type: str, guide: str | None
) -> None:
    path = "/v1/chat/completions" if "messages" in prompt else "/v1/completions"
    answer = front.post(path, json={"model": "base"} | prompt | given)

    assert answer.status_code == 200, answer.text
    assert server.value("guided_decoding_guide_type") == guide_type
    assert server.value("guided_decoding_guide") == guide


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"guided_json": SCHEMA, "guided_regex": "a"}, "guided_json"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"guided_choice": []}, "guided_choice"),
    ],
)
def test_guides_that_contradict_each_other_are_refused(front: TestClient, given: dict[str, Any], param: str) -> None:
    answer = front.post("/v1/chat/completions", json=CHAT | given)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("choices", [["yes", "no"], ['say "no"', "back\\slash", "new\nline", "café 🐝", "a/b|c"]])
def test_a_choice_is_a_grammar_of_exactly_these_texts(front: TestClient, server: Any, choices: list[str]) -> None:
    front.post("/v1/chat/completions", json=CHAT | {"guided_choice": choices})
    grammar = llguidance.grammar_from("ebnf", server.value("guided_decoding_guide"))

    for text in choices:
        assert follows(grammar, text)
    assert not follows(grammar, choices[0] + "!")
    assert not follows(grammar, choices[0][:-1])


def follows(grammar: str, text: str) -> bool:
    """Whether llguidance takes the text as a whole, byte by byte."""
    tokens = [bytes([byte]) for byte in range(256)] + [b"<end>"]
    table = llguidance.TokenizerWrapper(ByteTokenizer(tokens))
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer(table), grammar)
    assert not matcher.is_error(), matcher.get_error()
    return all(matcher.try_consume_tokens([byte]) for byte in text.encode()) and matcher.is_accepting()


class ByteTokenizer:
    """A token for every byte, and one for the end."""

    eos_token_id = 256
    bos_token_id = None
    special_token_ids = (256,)

    def __init__(self, tokens: list[bytes]) -> None:
        self.tokens = tokens

    def __call__(self, text: str) -> list[int]:
        return list(text.encode())
