"""The form of an answer, in each way that clients ask for it."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import llguidance
import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st

from multilora_client.openai.schemas.chat import ChatRequest

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
        ({"response_format": {"type": "json_object"}}, "json_schema", '{"type": "object"}'),
        ({"regex": "a+"}, "regex", "a+"),
        ({"ebnf": 'root ::= "a"'}, "ebnf_grammar", 'root ::= "a"'),
        ({"json_schema": '{"type": "null"}'}, "json_schema", '{"type": "null"}'),
        ({"regex": "a+", "guided_regex": "a+", "structured_outputs": {"regex": "a+"}}, "regex", "a+"),
        ({"ebnf": "start: /a/", "guided_grammar": "start: /a/"}, "ebnf_grammar", "start: /a/"),
        ({"guided_choice": ["a"], "structured_outputs": {"choice": ["a"]}}, "ebnf_grammar", 'start: "a"'),
        (
            {
                "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}},
                "guided_json": json.dumps(SCHEMA, indent=1),
                "json_schema": json.dumps(SCHEMA),
            },
            "json_schema",
            json.dumps(SCHEMA),
        ),
        ({"response_format": {"type": "text"}, "regex": "a+"}, "regex", "a+"),
        (
            {"structured_outputs": {"json": {"type": "object"}, "json_object": True}},
            "json_schema",
            '{"type": "object"}',
        ),
        ({"structured_outputs": {"regex": "a+", "json_object": False, "disable_fallback": True}}, "regex", "a+"),
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
        ({"structured_outputs": {"regex": "a", "disable_additional_properties": True}}, "structured_outputs"),
        ({"regex": "a", "guided_regex": "b"}, "guided_regex"),
        ({"regex": "a", "ebnf": "a"}, "regex"),
        ({"guided_json": {"a": {}, "b": {}}, "json_schema": '{"b": {}, "a": {}}'}, "guided_json"),
        ({"guided_choice": []}, "guided_choice"),
    ],
)
def test_guides_that_contradict_each_other_are_refused(front: TestClient, given: dict[str, Any], param: str) -> None:
    answer = front.post("/v1/chat/completions", json=CHAT | given)

    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    "choices",
    [
        ["yes", "no"],
        ['say "no"', "back\\slash", "new\nline", "café 🐝", "a/b|c"],
        ["".join(map(chr, range(128))), "\x7f", "\x80\x9f\xa0\xad", "\u2028\u2029\ufeff\uffff\U0010ffff"],
    ],
)
def test_a_choice_is_a_grammar_of_exactly_these_texts(front: TestClient, server: Any, choices: list[str]) -> None:
    front.post("/v1/chat/completions", json=CHAT | {"guided_choice": choices})
    grammar = llguidance.grammar_from("ebnf", server.value("guided_decoding_guide"))

    for text in choices:
        assert follows(grammar, text)
    assert not follows(grammar, choices[0] + "!")
    assert not follows(grammar, choices[0][:-1])


@settings(max_examples=60, deadline=None)
@given(choice=st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=8))
def test_any_text_may_be_a_choice(choice: str) -> None:
    guide = ChatRequest.model_validate(CHAT | {"guided_choice": [choice]}).guide()["guide"]
    grammar = llguidance.grammar_from("ebnf", guide)

    assert follows(grammar, choice)
    assert not follows(grammar, choice + "x")


POINTS = {"type": "object", "properties": {"at": {"type": "object", "properties": {"x": {"type": "integer"}}}}}


@pytest.mark.parametrize("is_strict", [False, True, None])
def test_a_strict_schema_names_all_properties(front: TestClient, server: Any, is_strict: bool | None) -> None:
    told = {"name": "s", "schema": POINTS, "strict": is_strict}
    for path, body in (
        ("/v1/chat/completions", CHAT | {"response_format": {"type": "json_schema", "json_schema": told}}),
        ("/v1/responses", {"model": "base", "input": "hi", "text": {"format": {"type": "json_schema", **told}}}),
    ):
        front.post(path, json=body)
        schema = jsonschema.Draft202012Validator(json.loads(server.value("guided_decoding_guide")))
        assert schema.is_valid({"at": {"x": 1}})
        assert schema.is_valid({"at": {"x": 1, "y": 1}}) == schema.is_valid({"z": 1}) == (not is_strict)


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
