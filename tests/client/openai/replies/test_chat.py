"""Chats with tools and with several choices, asked with OpenAI's own package, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jsonschema
import openai
import pytest
from fastapi.testclient import TestClient
from openai.types.chat import ChatCompletion, ChatCompletionToolParam

from multilora_client.openai.catalogue import Catalogue
from multilora_client.openai.settings import FrontSettings

QUESTION: Any = [{"role": "user", "content": "Rain in Kiel?"}]
SKY: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "sky",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
SEA: ChatCompletionToolParam = {"type": "function", "function": {"name": "sea"}}
HERMES = ['I look. <tool_call>{"name"', ': "sky", "arguments": {"city"', ': "Kiel"}}', "</tool_call>"]


def ask(user: openai.OpenAI, **options: Any) -> ChatCompletion:
    return user.chat.completions.create(model="base", messages=QUESTION, **options)


def ask_streamed(user: openai.OpenAI, **options: Any) -> ChatCompletion:
    """The answer that OpenAI's package makes of the pieces."""
    with user.chat.completions.stream(model="base", messages=QUESTION, **options) as stream:
        stream.until_done()
        return stream.get_final_completion()


both = pytest.mark.parametrize("asked", [ask, ask_streamed])


def calls_of(answer: ChatCompletion, index: int = 0) -> list[tuple[str, Any]]:
    calls = answer.choices[index].message.tool_calls or []
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls if call.type == "function"]


@both
def test_calls_are_told_from_text(user: openai.OpenAI, server: Any, asked: Any) -> None:
    server.pieces = HERMES
    answer = asked(user, tools=[SKY, SEA])

    assert answer.choices[0].message.content == "I look."
    assert calls_of(answer) == [("sky", {"city": "Kiel"})]
    assert answer.choices[0].finish_reason == "tool_calls"


@both
def test_an_answer_without_calls_is_text_although_there_are_tools(user: openai.OpenAI, server: Any, asked: Any) -> None:
    answer = asked(user, tools=[SKY])

    assert answer.choices[0].message.content == "Ahoy, café"
    assert not answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "stop"


@both
def test_without_tools_calls_are_text(user: openai.OpenAI, server: Any, asked: Any) -> None:
    server.pieces = HERMES
    assert asked(user).choices[0].message.content == "".join(HERMES)
    assert asked(user, tools=[SKY], tool_choice="none").choices[0].message.content == "".join(HERMES)


def test_arguments_are_streamed_as_they_come(front: TestClient, server: Any) -> None:
    server.pieces = HERMES
    body = {"model": "base", "messages": QUESTION, "tools": [SKY], "stream": True}
    *events, _ = front.post("/v1/chat/completions", json=body).text.split("\n\n")[:-1]
    deltas = [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]
    calls = [call for delta in deltas for call in delta.get("tool_calls", [])]

    assert calls[0].pop("id")
    assert calls == [
        {"index": 0, "type": "function", "function": {"name": "sky", "arguments": ""}},
        {"index": 0, "function": {"arguments": '{"city"'}},
        {"index": 0, "function": {"arguments": ': "Kiel"}'}},
    ]


@both
def test_a_named_function_is_called_with_whatever_its_schema_allows(
    user: openai.OpenAI, server: Any, asked: Any
) -> None:
    server.pieces = ['{"city"', ': "Kiel"}']
    answer = asked(user, tools=[SKY, SEA], tool_choice={"type": "function", "function": {"name": "sky"}})

    assert json.loads(server.value("guided_decoding_guide")) == SKY["function"]["parameters"]
    assert calls_of(answer) == [("sky", {"city": "Kiel"})]
    assert answer.choices[0].message.content is None
    assert answer.choices[0].finish_reason == "tool_calls"


@both
@pytest.mark.parametrize("parser", ["auto", "none"])
def test_required_calls_are_guided_and_need_no_parser(
    open_front: Callable[..., TestClient], catalogue: Catalogue, server: Any, asked: Any, parser: Any
) -> None:
    front = open_front(catalogue, FrontSettings(tool_call_parser=parser))
    user = openai.OpenAI(base_url=f"{front.base_url}/v1", api_key="none", http_client=front, max_retries=0)
    server.pieces = ['[{"name": "sky", "parameters": {"city"', ': "Kiel"}}', ', {"name": "sea", "parameters": {}}]']
    answer = asked(user, tools=[SKY, SEA], tool_choice="required")

    schema = json.loads(server.value("guided_decoding_guide"))
    jsonschema.validate(json.loads("".join(server.pieces)), schema)
    assert calls_of(answer) == [("sky", {"city": "Kiel"}), ("sea", {})]
    assert answer.choices[0].finish_reason == "tool_calls"


def test_no_calls_are_parsed_where_the_operator_says_so(
    open_front: Callable[..., TestClient], catalogue: Catalogue, server: Any
) -> None:
    front = open_front(catalogue, FrontSettings(tool_call_parser="none"))
    server.pieces = HERMES
    body = {"model": "base", "messages": QUESTION, "tools": [SKY]}
    (choice,) = front.post("/v1/chat/completions", json=body).json()["choices"]

    assert choice["message"] == {"role": "assistant", "content": "".join(HERMES), "refusal": None}


@both
def test_one_call_at_a_time_where_only_one_is_wanted(user: openai.OpenAI, server: Any, asked: Any) -> None:
    server.pieces = HERMES * 2
    assert len(calls_of(asked(user, tools=[SKY]))) == 2
    assert calls_of(asked(user, tools=[SKY], parallel_tool_calls=False)) == [("sky", {"city": "Kiel"})]
    asked(user, tools=[SKY], tool_choice="required", parallel_tool_calls=False)
    assert json.loads(server.value("guided_decoding_guide"))["maxItems"] == 1


@both
def test_a_schema_for_the_answer_leaves_room_for_calls(user: openai.OpenAI, server: Any, asked: Any) -> None:
    answer_schema = {"type": "object", "properties": {"wet": {"type": "boolean"}}, "required": ["wet"]}
    options: Any = {
        "tools": [SKY],
        "response_format": {"type": "json_schema", "json_schema": {"name": "weather", "schema": answer_schema}},
    }
    for pieces, calls in ((['{"wet": ', "true}"], []), (['[{"name": "sky", "parameters": {}', "}]"], [("sky", {})])):
        server.pieces = pieces
        answer = asked(user, **options)
        assert calls_of(answer) == calls
        assert (answer.choices[0].message.content or "") == ("" if calls else "".join(pieces))
    schema = json.loads(server.value("guided_decoding_guide"))
    jsonschema.validate({"wet": True}, schema)
    jsonschema.validate([{"name": "sky", "parameters": {"city": "Kiel"}}], schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"dry": True}, schema)


@pytest.mark.parametrize("stream", [False, True])
def test_a_template_without_a_place_for_tools_gets_them_in_the_system_message(
    front: TestClient, server: Any, stream: bool
) -> None:
    server.refuses_tools = True
    body = {"model": "base", "messages": QUESTION, "tools": [SKY], "stream": stream}
    assert front.post("/v1/chat/completions", json=body).status_code == 200

    system, question = server.chat()
    assert system["role"] == "system"
    assert json.dumps(SKY) in system["content"]
    assert question == QUESTION[0]


CALLS = [
    *QUESTION,
    {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": {"name": "sky"}}]},
    {"role": "tool", "content": [{"type": "text", "text": "ra"}, {"type": "text", "text": "in"}], "tool_call_id": "1"},
]


@pytest.mark.parametrize("options", [{}, {"tools": [SKY], "tool_choice": "none"}, {"stream": True}])
def test_earlier_calls_are_told_to_a_template_without_a_place_for_them(
    front: TestClient, server: Any, options: dict[str, Any]
) -> None:
    """No tools are offered: the conversation alone has some."""
    server.refuses_tools = True
    body = {"model": "base", "messages": CALLS, **options}
    assert front.post("/v1/chat/completions", json=body).status_code == 200

    question, call, result = server.chat()
    assert question == QUESTION[0]
    assert call == {"role": "assistant", "content": '<tool_call>\n{"name": "sky", "arguments": {}}\n</tool_call>'}
    assert result == {"role": "user", "content": "<tool_response>\nrain\n</tool_response>"}


def test_a_template_with_a_place_for_calls_gets_them(front: TestClient, server: Any) -> None:
    assert front.post("/v1/chat/completions", json={"model": "base", "messages": CALLS}).status_code == 200

    assert server.chat()[1:] == [{**message, "content": message.get("content", "")} for message in SENT_CALLS]


SENT_CALLS = [
    {"role": "assistant", "tool_calls": [CALLS[1]["tool_calls"][0] | {"function": {"name": "sky", "arguments": {}}}]},  # type: ignore[index]
    CALLS[2],
]


def test_a_call_that_max_tokens_cuts_off_ends_by_length(user: openai.OpenAI, server: Any) -> None:
    server.pieces, server.finish_reason = HERMES[:2], "length"
    (choice,) = ask(user, tools=[SKY]).choices

    assert choice.finish_reason == "length"
    assert choice.message.tool_calls is not None
    assert choice.message.tool_calls[0].model_dump()["function"]["arguments"] == '{"city"'


def test_choices_are_streamed_side_by_side(user: openai.OpenAI, server: Any) -> None:
    server.pieces = HERMES
    answer = ask_streamed(user, tools=[SKY], n=3, stream_options={"include_usage": True})

    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert [calls_of(answer, index) for index in range(3)] == [[("sky", {"city": "Kiel"})]] * 3
    assert {choice.finish_reason for choice in answer.choices} == {"tool_calls"}
    assert len({choice.message.tool_calls[0].id for choice in answer.choices if choice.message.tool_calls}) == 3
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (7, 12)


def test_usage_is_in_every_event_when_it_is_wanted_all_along(user: openai.OpenAI, server: Any) -> None:
    server.outputs = {"num_cached_tokens": [3]}
    options: Any = {"include_usage": True, "continuous_usage_stats": True}
    events = list(ask(user, stream=True, stream_options=options))  # type: ignore[call-overload]

    assert [event.usage.completion_tokens for event in events] == [1, 1, 3, 4, 4, 4]
    assert {event.usage.prompt_tokens_details.cached_tokens for event in events} == {3}


def test_cached_tokens_are_told_where_the_server_tells_them(user: openai.OpenAI, server: Any) -> None:
    answer = ask(user)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is None
    server.outputs = {"num_cached_tokens": [5]}
    answer = ask(user)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 5


def test_prompt_logprobs_are_beside_the_choices(front: TestClient, server: Any) -> None:
    server.outputs = {
        "prompt_ids": [3, 4],
        "prompt_log_probs": [0.0, -0.5],
        "prompt_tokens": ["<s>", "hi"],
    }
    body = {"model": "base", "messages": QUESTION, "prompt_logprobs": 0}
    told = front.post("/v1/chat/completions", json=body).json()["prompt_logprobs"]

    assert told == [None, {"4": {"logprob": -0.5, "rank": None, "decoded_token": "hi"}}]


def test_a_service_tier_that_is_asked_for_is_told(front: TestClient) -> None:
    body = {"model": "base", "messages": QUESTION}
    assert "service_tier" not in front.post("/v1/chat/completions", json=body).json()
    assert front.post("/v1/chat/completions", json=body | {"service_tier": "auto"}).json()["service_tier"] == "default"


FORCED = '[\n{\n  "name": "sky",\n  "parameters": {"city": "Kiel"}\n}, {"name": "sea", "parameters": {}}]'
NAMED: Any = {"type": "function", "function": {"name": "sky"}}


def deltas_of(front: TestClient, **options: Any) -> list[dict[str, Any]]:
    body = {"model": "base", "messages": QUESTION, "tools": [SKY, SEA], "stream": True, **options}
    *events, _ = front.post("/v1/chat/completions", json=body).text.split("\n\n")[:-1]
    return [json.loads(event.removeprefix("data: "))["choices"][0]["delta"] for event in events]


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize("reason", ["length", "stop"])
def test_pieces_of_a_forced_call_are_never_text(front: TestClient, server: Any, choice: Any, reason: str) -> None:
    whole = FORCED if choice == "required" else '{"city": "Kiel"}'
    server.finish_reason = reason
    for length in range(len(whole) + 1):
        server.pieces = list(whole[:length]) or [""]
        body = {"model": "base", "messages": QUESTION, "tools": [SKY, SEA], "tool_choice": choice}
        (told,) = front.post("/v1/chat/completions", json=body).json()["choices"]
        first, *rest = deltas_of(front, tool_choice=choice)

        assert told["message"]["content"] is None
        assert (first, {key for delta in rest for key in delta} - {"tool_calls"}) == (
            {"role": "assistant", "content": None},
            set(),
        )
        if "tool_calls" not in told["message"]:
            assert told["finish_reason"] == reason


def test_text_that_may_be_a_call_is_text_where_none_is_forced(front: TestClient, server: Any) -> None:
    server.pieces = list('[{"name": "sk')
    first, *rest = deltas_of(front)

    assert first == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in rest) == '[{"name": "sk'


@pytest.mark.parametrize("choice", ["required", NAMED])
@pytest.mark.parametrize(
    "parameters", [{}, {"parameters": None}, {"parameters": {}}, {"parameters": {"type": "object"}}]
)
def test_a_forced_function_without_parameters_is_called_with_none(
    front: TestClient, server: Any, choice: Any, parameters: dict[str, Any]
) -> None:
    tools = [{"type": "function", "function": {"name": "sky", **parameters}}]
    body = {"model": "base", "messages": QUESTION, "tools": tools, "tool_choice": choice}
    assert front.post("/v1/chat/completions", json=body).status_code == 200

    schema = json.loads(server.value("guided_decoding_guide"))
    for arguments, fits in ({}, True), ({"a": 1}, False), ([], False):
        call = arguments if choice == NAMED else [{"name": "sky", "parameters": arguments}]
        assert jsonschema.Draft202012Validator(schema).is_valid(call) == fits


THOUGHT = ["<think>\nRain", " falls.", "\n</think>", "\n\nYes", "."]


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("parser", "pieces", "options", "reasoning", "content"),
    [
        ("auto", THOUGHT, {}, "Rain falls.", "Yes."),
        ("auto", ["Yes", "."], {}, None, "Yes."),
        ("auto", THOUGHT[:2], {}, "Rain falls.", None),
        ("none", THOUGHT, {}, None, "".join(THOUGHT)),
        ("auto", ['{"a": 1}'], {"response_format": {"type": "json_object"}}, None, '{"a": 1}'),
        ("auto", THOUGHT, {"include_reasoning": False}, None, "Yes."),
        ("auto", THOUGHT, {"separate_reasoning": False}, None, "".join(THOUGHT)),
        ("auto", THOUGHT, {"stream_reasoning": False}, "Rain falls.", "Yes."),
    ],
)
def test_thinking_is_told_apart_from_the_answer(
    catalogue: Catalogue,
    open_front: Callable[..., TestClient],
    server: Any,
    parser: Any,
    pieces: list[str],
    options: dict[str, Any],
    reasoning: str | None,
    content: str | None,
    is_streamed: bool,
) -> None:
    server.pieces = pieces
    front = open_front(catalogue, FrontSettings(reasoning_parser=parser))
    body = {"model": "base", "messages": QUESTION, "stream": is_streamed, **options}
    answer = front.post("/v1/chat/completions", json=body)
    if not is_streamed:
        message = answer.json()["choices"][0]["message"]
        assert (message.get("reasoning_content"), message["content"]) == (reasoning, content)
        return
    events = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n")[:-2]]
    deltas = [choice["delta"] for event in events for choice in event["choices"]]
    assert "".join(delta.get("reasoning_content", "") for delta in deltas) == (reasoning or "")
    assert "".join(delta.get("content") or "" for delta in deltas) == (content or "")


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize(
    ("pieces", "reasoning", "content"),
    [
        (["Rain", " falls.</think>Yes."], "Rain falls.", "Yes."),
        (["<thi", "nk>\nRain falls.</think>Yes."], "Rain falls.", "Yes."),
        (["Rain", " falls."], "Rain falls.", None),
    ],
)
def test_the_server_tells_whether_the_prompt_has_opened_the_thinking(
    catalogue: Catalogue,
    open_front: Callable[..., TestClient],
    server: Any,
    pieces: list[str],
    reasoning: str,
    content: str | None,
    is_streamed: bool,
) -> None:
    server.outputs = {"thinking_is_open": [True]}
    test_thinking_is_told_apart_from_the_answer(
        catalogue, open_front, server, "auto", pieces, {}, reasoning, content, is_streamed
    )


@pytest.mark.parametrize(
    ("parser", "options", "is_after_thinking"),
    [
        ("auto", {"response_format": {"type": "json_object"}}, True),
        ("auto", {"tools": [SKY], "tool_choice": "required"}, True),
        ("none", {"response_format": {"type": "json_object"}}, None),
        ("auto", {"response_format": {"type": "json_object"}, "separate_reasoning": False}, None),
        ("auto", {}, None),
    ],
)
def test_a_guide_holds_for_the_answer_after_the_thinking(
    catalogue: Catalogue,
    open_front: Callable[..., TestClient],
    server: Any,
    parser: Any,
    options: dict[str, Any],
    is_after_thinking: bool | None,
) -> None:
    front = open_front(catalogue, FrontSettings(reasoning_parser=parser))
    front.post("/v1/chat/completions", json={"model": "base", "messages": QUESTION, **options})
    assert server.value("guided_decoding_after_thinking") == is_after_thinking
