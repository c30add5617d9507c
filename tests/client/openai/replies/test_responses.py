"""/v1/responses, judged by OpenAI's own package: its types of events and bodies, and what it makes of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from fastapi.testclient import TestClient
from openai.types.responses import FunctionToolParam, Response, ResponseStreamEvent
from pydantic import TypeAdapter

from multilora_client import Unavailable

PATH = "/v1/responses"
SKY: FunctionToolParam = {
    "type": "function",
    "name": "sky",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    "strict": True,
}
EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
HERMES = ["I look.", ' <tool_call>{"name": "sky", "arguments": {"city"', ': "Kiel"}}</tool_call>']
LOGPROBS: dict[str, Any] = {
    "sequence_length": [1],
    "output_ids": [5],
    "cum_log_probs": np.array([-0.5], np.float32),
    "output_log_probs": np.array([-0.5], np.float32),
    "top_log_prob_ids": [5],
    "top_log_probs": np.array([-0.5], np.float32),
    "output_tokens": ["a", "a"],
}


def streamed(front: TestClient, **options: Any) -> list[dict[str, Any]]:
    """The events, each of the type that OpenAI's package gives it."""
    answer = front.post(PATH, json={"model": "base", "input": "Rain?", "stream": True, **options})
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = list(read_events(answer.text))
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def read_events(text: str) -> Iterator[dict[str, Any]]:
    for lines in text.removesuffix("\n\n").split("\n\n"):
        name, data = lines.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENTS.validate_python(event)
        yield event


def types(events: list[dict[str, Any]]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def test_a_text_is_one_message(user: openai.OpenAI, server: Any) -> None:
    server.outputs = {"num_cached_tokens": [3]}
    answer = user.responses.create(model="pirate", input="Who are you?", instructions="Be brief.", store=False)

    Response.model_validate(answer.to_dict())
    assert answer.output_text == "Ahoy, café"
    assert (answer.status, answer.model, answer.instructions) == ("completed", "pirate", "Be brief.")
    assert answer.usage is not None
    assert (answer.usage.input_tokens, answer.usage.output_tokens, answer.usage.total_tokens) == (7, 1, 8)
    assert answer.usage.input_tokens_details.cached_tokens == 3
    assert server.value("lora_task_id") == 7
    assert server.chat() == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Who are you?"},
    ]


def test_a_streamed_text_comes_in_openais_order(front: TestClient) -> None:
    events = streamed(front)

    assert types(events) == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        "output_text.delta",
        "output_text.delta",
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert [event["delta"] for event in events[4:7]] == ["Ahoy", ", ", "café"]
    assert events[2]["item"]["status"] == "in_progress"
    assert events[2]["item"]["content"] == []
    assert events[3]["part"]["text"] == ""
    assert events[-1]["response"]["output"] == [events[9]["item"]]
    assert events[-1]["response"]["usage"]["output_tokens"] == 4


@pytest.mark.parametrize("pieces", [["Ahoy"], HERMES, [""], HERMES[1:] * 2])
def test_a_stream_adds_up_to_the_whole_answer(front: TestClient, server: Any, pieces: list[str]) -> None:
    def comparable(body: dict[str, Any]) -> Any:
        """Without values that are drawn for each answer, and the tokens, in which the pieces of this server differ."""
        body["output"] = [
            {name: value for name, value in item.items() if name not in ("id", "call_id")} for item in body["output"]
        ]
        return {name: value for name, value in body.items() if name not in ("id", "created_at", "usage")}

    server.pieces = pieces
    whole = front.post(PATH, json={"model": "base", "input": "Rain?", "tools": [SKY]}).json()
    Response.model_validate(whole)
    assert comparable(streamed(front, tools=[SKY])[-1]["response"]) == comparable(whole)


def test_a_call_is_an_item_of_its_own(user: openai.OpenAI, front: TestClient, server: Any) -> None:
    server.pieces = HERMES
    events = streamed(front, tools=[SKY])

    assert types(events)[4:] == [
        "output_text.delta",
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
        "completed",
    ]
    message, call = user.responses.create(model="base", input="Rain?", tools=[SKY]).output
    assert (message.type, call.type) == ("message", "function_call")
    assert call.type == "function_call"
    assert (call.name, call.arguments, call.status) == ("sky", '{"city": "Kiel"}', "completed")


def test_a_conversation_goes_on_with_what_came_of_a_call(user: openai.OpenAI, server: Any) -> None:
    server.pieces = HERMES
    question: Any = {"role": "user", "content": [{"type": "input_text", "text": "Rain?"}]}
    first = user.responses.create(model="base", input=[question], tools=[SKY])
    call = first.output[1]
    assert call.type == "function_call"

    server.pieces = ["It is dry."]
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "dry"}
    answers: list[Any] = [item.model_dump(exclude_none=True) for item in first.output]
    second = user.responses.create(model="base", input=[question, *answers, result], tools=[SKY])

    assert second.output_text == "It is dry."
    function = {"name": "sky", "arguments": {"city": "Kiel"}}
    assert server.chat()["messages"] == [
        {"role": "user", "content": [{"type": "text", "text": "Rain?"}]},
        {
            "role": "assistant",
            "content": [{"type": "text", "text": "I look."}],
            "tool_calls": [{"id": call.call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "content": "dry", "tool_call_id": call.call_id},
    ]


def test_tools_reach_the_template_as_those_of_chats_do(user: openai.OpenAI, server: Any) -> None:
    user.responses.create(model="base", input="Rain?", tools=[SKY])
    function = {name: value for name, value in SKY.items() if name != "type"}
    assert server.chat()["tools"] == [{"type": "function", "function": function}]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "sky"}])
def test_a_call_can_be_forced(user: openai.OpenAI, server: Any, choice: Any) -> None:
    server.pieces = ['[{"name": "sky", "parameters": {}}]' if choice == "required" else "{}"]
    (call,) = user.responses.create(model="base", input="Rain?", tools=[SKY], tool_choice=choice).output

    assert server.value("guided_decoding_guide_type") == "json_schema"
    assert call.type == "function_call"
    assert (call.name, call.arguments) == ("sky", "{}")


def test_an_answer_follows_a_schema(user: openai.OpenAI, server: Any) -> None:
    schema = {"type": "object", "properties": {"wet": {"type": "boolean"}}}
    user.responses.create(
        model="base", input="Rain?", text={"format": {"type": "json_schema", "name": "weather", "schema": schema}}
    )
    assert json.loads(server.value("guided_decoding_guide")) == schema
    user.responses.create(model="base", input="Rain?", text={"format": {"type": "json_object"}})
    assert json.loads(server.value("guided_decoding_guide")) == {"type": "object"}


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"temperature": 0.5}, "temperature", 0.5),
        ({"top_p": 0}, "temperature", 0.0),
        ({"seed": 5}, "seed", 5),
        ({"stop": ["END"]}, "stop_words", "END"),
        ({"logit_bias": {"5": -100}}, "embedding_bias_ids", 5),
        ({"top_k": 7}, "runtime_top_k", 7),
        ({"ignore_eos": True}, "end_id", -1),
    ],
)
def test_its_tokens_are_chosen_as_those_of_chats(
    front: TestClient, server: Any, given: dict[str, Any], name: str, value: object
) -> None:
    answer = front.post(PATH, json={"model": "base", "input": "hi"} | given)
    assert answer.status_code == 200, answer.text
    assert server.value(name) == value


def test_an_answer_without_room_is_incomplete(front: TestClient, server: Any) -> None:
    server.finish_reason = "length"
    *_, done, last = streamed(front, max_output_tokens=4)

    assert server.value("max_tokens") == 4
    assert (last["type"], last["response"]["status"]) == ("response.incomplete", "incomplete")
    assert last["response"]["incomplete_details"] == {"reason": "max_output_tokens"}
    assert done["item"]["status"] == "incomplete"


def test_log_probs_are_told_where_they_are_included(front: TestClient, server: Any) -> None:
    server.pieces, server.outputs = ["a"], LOGPROBS
    entry = {"token": "a", "logprob": -0.5, "bytes": [97]}
    options = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    events = streamed(front, **options)

    told = [entry | {"top_logprobs": [entry]}]
    assert [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"] == [told]
    assert events[-1]["response"]["output"][0]["content"][0]["logprobs"] == told


@pytest.mark.parametrize("error", [Unavailable("the engine died"), None])
def test_an_error_in_the_midst_is_the_last_event(front: TestClient, server: Any, error: Exception | None) -> None:
    server.error, server.error_at = error, 2
    server.finish_reason = "stop" if error else "cancelled"
    *_, text, last = streamed(front)

    assert text["type"] != "response.completed"
    assert (last["type"], last["response"]["status"]) == ("response.failed", "failed")
    assert last["response"]["error"]["code"] == "server_error"


def test_an_error_before_the_first_piece_has_its_own_status(front: TestClient, server: Any) -> None:
    server.error = Unavailable("full")
    assert front.post(PATH, json={"model": "base", "input": "hi", "stream": True}).status_code == 503


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "unsupported_value"),
        ({"conversation": "conv_1"}, "conversation", "unsupported_value"),
        ({"prompt": {"id": "pmpt_1"}}, "prompt", "unsupported_value"),
        ({"store": True}, "store", "unsupported_value"),
        ({"background": True}, "background", "unsupported_value"),
        ({"truncation": "auto"}, "truncation", "unsupported_value"),
        ({"include": ["made_up.results"]}, "include", "invalid_value"),
        ({"tools": [{"type": "web_search"}]}, "tools", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"input": []}, "input", "invalid_value"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input", "unsupported_value"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "unsupported_value"),
        ({"text": {"format": {"type": "json_schema", "name": "s"}}}, "text", "invalid_value"),
        ({"made_up": 1}, "made_up", "unknown_parameter"),
    ],
)
def test_what_it_cannot_do_is_refused_by_name(
    front: TestClient, server: Any, given: dict[str, Any], param: str, code: str
) -> None:
    answer = front.post(PATH, json={"model": "base", "input": "hi"} | given)

    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, param, code)
    assert server.requests == []


@pytest.mark.parametrize(
    "given",
    [
        {"store": False, "background": False, "truncation": "disabled", "service_tier": "auto", "user": "u"},
        {"reasoning": {"effort": "low", "summary": "auto"}, "text": {"verbosity": "low"}, "metadata": {"a": "b"}},
        {
            "include": ["reasoning.encrypted_content"],
            "max_tool_calls": 2,
            "stream_options": {"include_obfuscation": True},
        },
    ],
)
def test_what_changes_no_answer_is_taken(front: TestClient, given: dict[str, Any]) -> None:
    assert front.post(PATH, json={"model": "base", "input": "hi"} | given).status_code == 200


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "sky"}])
def test_pieces_of_a_forced_call_are_never_text(front: TestClient, server: Any, choice: Any) -> None:
    whole = '[{"name": "sky", "parameters": {"city": "Kiel"}}, {' if choice == "required" else '{"city": "Kiel"'
    server.finish_reason = "length"
    for length in range(len(whole) + 1):
        server.pieces = list(whole[:length]) or [""]
        options = {"tools": [SKY], "tool_choice": choice}
        body = front.post(PATH, json={"model": "base", "input": "Rain?", **options}).json()
        events = streamed(front, **options)

        assert (body["status"], {item["type"] for item in body["output"]} - {"function_call"}) == ("incomplete", set())
        assert not any("output_text" in event["type"] or "content_part" in event["type"] for event in events)
        assert len(events[-1]["response"]["output"]) == len(body["output"])


def test_neutral_members_change_nothing(front: TestClient, server: Any) -> None:
    front.post(PATH, json={"model": "base", "input": "hi"})
    plain = server.requests[-1].inputs
    given = {
        "include": ["file_search_call.results", "web_search_call.action.sources", "reasoning.encrypted_content"],
        "prompt_cache_options": {"ttl": "30m"},
        "context_management": [],
        "reasoning": {"context": "auto", "mode": "standard", "generate_summary": "auto"},
        "moderation": None,
        "max_tool_calls": 3,
    }
    assert front.post(PATH, json={"model": "base", "input": "hi"} | given).status_code == 200
    assert {name: tensor.data for name, tensor in server.requests[-1].inputs.items()} == {
        name: tensor.data for name, tensor in plain.items()
    }


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input": [{"type": "item_reference", "id": "m"}]}, 'input.0: type "item_reference" is not supported, only '),
        ({"input": ["hi"]}, "input.0: must be an object"),
        ({"input": [{"type": "reasoning", "summary": []}]}, "input: has no message"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image"}]}]},
            "input.0.content.0.type: input_image is not supported: this server reads text",
        ),
        ({"tools": [SKY, SKY]}, "two of the tools have the same name"),
        ({"context_management": [{"type": "compaction"}]}, "context_management: "),
        ({"reasoning": {"mode": "pro"}}, 'reasoning.mode: "pro" is not supported, only "standard"'),
    ],
)
def test_refusals_are_in_the_words_of_the_protocol(front: TestClient, given: dict[str, Any], message: str) -> None:
    error = front.post(PATH, json={"model": "base", "input": "hi"} | given).json()["error"]

    assert error["message"].startswith(message), error["message"]
    assert error["param"] == next(iter(given))


def test_thinking_that_the_prompt_has_opened_is_an_item_too(user: openai.OpenAI, server: Any) -> None:
    server.pieces, server.outputs = ["Rain falls.</think>", "Yes."], {"thinking_is_open": [True]}
    answer = user.responses.create(model="base", input="Rain?", store=False)
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output_text == "Yes."


def test_thinking_is_an_item_before_the_answer(front: TestClient, user: openai.OpenAI, server: Any) -> None:
    server.pieces = ["<think>\nRain", " falls.</think>", "\n\nYes."]
    answer = user.responses.create(model="base", input="Rain?", store=False)
    Response.model_validate(answer.to_dict())
    thought, message = answer.output
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert [part.text for part in thought.content] == ["Rain falls."]
    assert (message.type, answer.output_text) == ("message", "Yes.")
    events = streamed(front)
    assert types(events)[2:9] == [
        "output_item.added",
        "content_part.added",
        "reasoning_text.delta",
        "reasoning_text.delta",
        "reasoning_text.done",
        "content_part.done",
        "output_item.done",
    ]
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["reasoning", "message"]
    history = [*({**item, "status": None} for item in answer.to_dict()["output"]), {"role": "user", "content": "Why?"}]
    front.post(PATH, json={"model": "base", "input": history})
    told = server.chat()[0]
    assert (told["role"], told["reasoning_content"]) == ("assistant", "Rain falls.")
