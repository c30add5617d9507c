"""Histories as other servers and SDKs write them: what is no word of the conversation changes no prompt."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessage, ParsedChatCompletionMessage
from openai.types.responses import Response

from multilora_client.openai.schemas.base import NOTES
from multilora_client.openai.schemas.chat import ChatRequest
from multilora_client.openai.schemas.responses import ResponsesRequest

CHAT_PATH, RESPONSES_PATH = "/v1/chat/completions", "/v1/responses"
CALL = {"id": "c1", "type": "function", "function": {"name": "sky", "arguments": '{"day": 1}'}}
TOOL = {"type": "function", "function": {"name": "sky", "parameters": {"type": "object", "properties": {}}}}

SERVERS: dict[str, dict[str, Any]] = {
    "OpenAI": ChatCompletionMessage(role="assistant", content="Dry.", refusal=None, annotations=[]).model_dump(),
    "OpenAI's parse": ParsedChatCompletionMessage[dict](
        role="assistant", content="Dry.", parsed={"rain": False}, tool_calls=None
    ).model_dump(),
    "vLLM": {
        "role": "assistant",
        "content": "Dry.",
        "refusal": None,
        "annotations": None,
        "audio": None,
        "function_call": None,
        "tool_calls": [],
        "reasoning": None,
        "reasoning_content": None,
        "token_ids": None,
    },
    "SGLang": {
        "role": "assistant",
        "content": "Dry.",
        "reasoning_content": None,
        "tool_calls": None,
        "matched_stop": 2,
    },
    "LiteLLM": {
        "role": "assistant",
        "content": "Dry.",
        "tool_calls": None,
        "function_call": None,
        "images": [],
        "thinking_blocks": [{"type": "thinking", "thinking": "Hm.", "signature": "x"}],
        "reasoning_items": [{"id": "rs_1"}],
        "provider_specific_fields": {"refusal": None, "citations": [[1]]},
        "annotations": [{"type": "url_citation"}],
    },
    "Ollama": {"role": "assistant", "content": "Dry.", "images": None},
    "OpenRouter": {"role": "assistant", "content": "Dry.", "refusal": None, "reasoning_details": [{"text": "Hm."}]},
    "Mistral": {"role": "assistant", "content": "Dry.", "tool_calls": None, "prefix": False},
    "parts": {
        "role": "assistant",
        "content": [{"type": "text", "text": "Dry.", "cache_control": {"type": "ephemeral"}, "annotations": []}],
    },
    "output parts": {"role": "assistant", "content": [{"type": "output_text", "text": "Dry.", "logprobs": []}]},
}
"""An answer of one text, as each server has it."""

CALLS: dict[str, dict[str, Any]] = {
    "OpenAI's stream": CALL | {"index": 0},
    "OpenAI's parse": CALL | {"function": CALL["function"] | {"parsed_arguments": {"day": 1}}},  # type: ignore[operator]
    "Gemini": CALL | {"extra_content": {"google": {"thought_signature": "x"}}},
    "LiteLLM": CALL | {"provider_specific_fields": {"thought_signature": "x"}, "caller": {"type": "direct"}},
    "Ollama": {"id": "c1", "function": {"index": 0, "name": "sky", "arguments": {"day": 1}}},
    "vLLM": CALL | {"metadata": None},
}
"""One call, as each server has it."""


def told(front: TestClient, server: Any, path: str, body: dict[str, Any]) -> Any:
    """The chat that the server got, with a text for each list of parts."""
    answer = front.post(path, json={"model": "base"} | body)
    assert answer.status_code == 200, answer.text
    return [message | {"content": text_of(message["content"])} for message in server.chat()]


def text_of(content: str | list[dict[str, str]]) -> str:
    return content if isinstance(content, str) else "".join(part["text"] for part in content)


def chat_of(*messages: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Rain?"}, *messages, {"role": "user", "content": "Sure?"}]}


@pytest.mark.parametrize("message", SERVERS.values(), ids=SERVERS)
def test_answers_of_every_server_are_history(front: TestClient, server: Any, message: dict[str, Any]) -> None:
    plain = told(front, server, CHAT_PATH, chat_of({"role": "assistant", "content": "Dry."}))
    assert told(front, server, CHAT_PATH, chat_of(message)) == plain


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_calls_of_every_server_are_history(front: TestClient, server: Any, call: dict[str, Any]) -> None:
    result = {"role": "tool", "tool_call_id": "c1", "content": "dry"}
    plain = told(front, server, CHAT_PATH, chat_of({"role": "assistant", "content": "", "tool_calls": [CALL]}, result))
    message = {"role": "assistant", "content": None, "tool_calls": [call], "reasoning": None}
    assert told(front, server, CHAT_PATH, chat_of(message, result | {"cache_control": {"type": "ephemeral"}})) == plain


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_one_name_for_templates(front: TestClient, server: Any, name: str) -> None:
    messages = told(front, server, CHAT_PATH, chat_of({"role": "assistant", "content": "Dry.", name: "Hm."}))
    assert messages[1] == {"role": "assistant", "content": "Dry.", "reasoning_content": "Hm."}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "Hm."},
        {
            "type": "thinking",
            "thinking": [{"type": "text", "text": "H"}, {"type": "text", "text": "m."}],
            "closed": None,
        },
        {"type": "thinking", "text": "Hm."},
        {"type": "reasoning", "text": "Hm.", "signature": "x"},
    ],
)
def test_reasoning_may_be_a_part(front: TestClient, server: Any, part: dict[str, Any]) -> None:
    text = {"type": "text", "text": "Dry."}
    messages = told(front, server, CHAT_PATH, chat_of({"role": "assistant", "content": [part, text]}))
    assert messages[1] == {"role": "assistant", "content": "Dry.", "reasoning_content": "Hm."}


def test_a_refusal_is_the_text_of_an_answer_without_another(front: TestClient, server: Any) -> None:
    messages = told(front, server, CHAT_PATH, chat_of({"role": "assistant", "content": None, "refusal": "No."}))
    assert messages[1] == {"role": "assistant", "content": "No."}
    part = {"type": "refusal", "refusal": "No."}
    assert told(front, server, CHAT_PATH, chat_of({"role": "assistant", "content": [part]})) == messages


@pytest.mark.parametrize(
    ("message", "message_of_error"),
    [
        ({"role": "assistant", "audio": {"id": "a"}}, "messages.1.audio: not supported: this server reads text"),
        (
            {"role": "assistant", "function_call": {"name": "f"}},
            "messages.1.function_call: not supported: write the call",
        ),
        ({"role": "user", "content": "a", "images": ["x"]}, "messages.1.images: "),
        ({"role": "assistant", "content": "a", "prefix": True}, "messages.1.prefix: true is not supported, only false"),
        (
            {"role": "user", "content": "a", "made_up": 1},
            "messages.1.made_up is not a parameter that this server knows",
        ),
        ({"role": "user", "content": [{"type": "text"}]}, "messages.1.content.0: a part of type text has text"),
        (
            {"role": "user", "content": [{"type": "refusal", "text": ""}]},
            "messages.1.content.0: a part of type refusal has",
        ),
        (
            {"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]},
            "messages.1.content.0.type: input_audio is not supported: this server reads text",
        ),
        (
            {"role": "user", "content": [{"type": "text", "text": "", "video": 1}]},
            "messages.1.content.0.video is not a",
        ),
    ],
)
def test_words_of_a_conversation_that_this_server_cannot_read_are_refused(
    front: TestClient, server: Any, message: Any, message_of_error: str
) -> None:
    answer = front.post(CHAT_PATH, json={"model": "base"} | chat_of(message))

    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages")
    assert error["message"].startswith(message_of_error)
    assert server.requests == []


OUTPUT = Response.model_validate(
    {
        "id": "resp_1",
        "created_at": 0,
        "model": "m",
        "object": "response",
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "output": [
            {"id": "rs_1", "type": "reasoning", "summary": [{"type": "summary_text", "text": "s"}], "status": None},
            {
                "id": "msg_1",
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "phase": "commentary",
                "content": [{"type": "output_text", "text": "I look.", "annotations": [], "logprobs": []}],
            },
            {
                "id": "fc_1",
                "type": "function_call",
                "call_id": "c1",
                "name": "sky",
                "arguments": '{"day": 1}',
                "status": "completed",
                "caller": {"type": "direct"},
            },
        ],
    }
).output


def test_output_of_responses_is_input_again(front: TestClient, server: Any) -> None:
    items = [item.model_dump() for item in OUTPUT]
    result = {"type": "function_call_output", "call_id": "c1", "output": "dry", "id": "fco_1", "status": "completed"}
    call = CALL | {"function": {"name": "sky", "arguments": {"day": 1}}}

    messages = told(front, server, RESPONSES_PATH, {"input": [{"role": "user", "content": "Rain?"}, *items, result]})

    assert messages == [
        {"role": "user", "content": "Rain?"},
        {"role": "assistant", "content": "I look.", "tool_calls": [call]},
        {"role": "tool", "content": "dry", "tool_call_id": "c1"},
    ]


def test_open_reasoning_belongs_to_the_answer_after_it(front: TestClient, server: Any) -> None:
    reasoning = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "Hm."}]}
    user = {"role": "user", "content": "Rain?"}
    messages = told(
        front, server, RESPONSES_PATH, {"input": [user, reasoning, {"role": "assistant", "content": "Dry."}, reasoning]}
    )
    assert messages == [user, {"role": "assistant", "content": "Dry.", "reasoning_content": "Hm."}]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_answers_of_openais_package_are_history(user: openai.OpenAI, server: Any, is_streamed: bool) -> None:
    """As programs write it: the message of an answer is appended as it is."""
    server.pieces = ['[{"name": "sky", "parameters": {"day": 1}}]']
    messages: list[Any] = [{"role": "user", "content": "Rain?"}]
    tool = TOOL | {"function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
    options: Any = {"model": "base", "tools": [tool], "tool_choice": "required"}
    if is_streamed:
        with user.chat.completions.stream(messages=messages, **options) as stream:
            message = stream.get_final_completion().choices[0].message
    else:
        message = user.chat.completions.parse(messages=messages, **options).choices[0].message
    calls = [
        CALL | {"id": call.id, "function": {"name": "sky", "arguments": {"day": 1}}}
        for call in message.tool_calls or []
    ]
    for form in (message, message.model_dump(), message.model_dump(exclude_unset=True)):
        user.chat.completions.create(model="base", messages=[*messages, form])  # type: ignore[list-item]
        assert server.chat() == [*messages, {"role": "assistant", "content": "", "tool_calls": calls}]


@pytest.mark.long(reason="litellm takes seconds to import")
@pytest.mark.parametrize("is_streamed", [False, True])
def test_answers_of_litellm_are_history(
    user: openai.OpenAI, server: Any, is_streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    import litellm

    server.pieces = ['[{"name": "sky", "parameters": {"day": 1}}]']
    messages: list[Any] = [{"role": "user", "content": "Rain?"}]
    asked: Any = {"model": "openai/base", "client": user, "api_key": "none"}
    answer = litellm.completion(messages=messages, tools=[TOOL], tool_choice="required", stream=is_streamed, **asked)
    if is_streamed:
        answer = litellm.stream_chunk_builder(list(answer), messages=messages)
    message = answer.choices[0].message
    assert message.tool_calls[0].function.name == "sky"
    for form in (message, message.model_dump()):
        litellm.completion(messages=[*messages, form], **asked)
        assert server.chat()[1]["tool_calls"][0]["function"] == {"name": "sky", "arguments": {"day": 1}}
        assert server.chat()[1].keys() == {"role", "content", "tool_calls"}


CHAT = {
    "model": "base",
    "tools": [TOOL],
    **chat_of(
        {"role": "assistant", "content": [{"type": "text", "text": "I look."}], "tool_calls": [CALL]},
        {"role": "tool", "tool_call_id": "c1", "content": "dry"},
    ),
}
RESPONSES = {
    "model": "base",
    "tools": [{"type": "function", "name": "sky", "parameters": {"type": "object", "properties": {}}}],
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
        {"type": "function_call", "call_id": "c1", "name": "sky", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "dry"},
    ],
}
JSON = st.sampled_from([None, True, 0, 1.5, "", "a", [], ["a"], [{}], {}, {"a": 1}, {"type": "text"}])


def objects(value: Any, is_schema: bool = False) -> Iterator[dict[str, Any]]:
    """The objects of a conversation and of its tools, without the schemas in them."""
    if isinstance(value, dict) and not is_schema:
        yield value
        for name, member in value.items():
            yield from objects(member, is_schema=name == "parameters")
    elif isinstance(value, list):
        for member in value:
            yield from objects(member)


@pytest.mark.parametrize(("request_type", "plain"), [(ChatRequest, CHAT), (ResponsesRequest, RESPONSES)])
@settings(max_examples=40, deadline=None)
@given(notes=st.lists(st.tuples(st.integers(0, 99), st.sampled_from(sorted(NOTES)), JSON), max_size=8))
def test_notes_anywhere_change_no_prompt(request_type: Any, plain: dict[str, Any], notes: Any) -> None:
    noted = copy.deepcopy(plain)
    parts = [*objects([noted.get("messages", noted.get("input")), noted["tools"]])]
    for place, name, value in notes:
        parts[place % len(parts)].setdefault(name, value)

    assert request_type.model_validate(noted).questions() == request_type.model_validate(plain).questions()


@pytest.mark.parametrize(("path", "plain"), [(CHAT_PATH, CHAT), (RESPONSES_PATH, RESPONSES)])
def test_what_is_no_note_is_refused_anywhere(front: TestClient, path: str, plain: dict[str, Any]) -> None:
    for number, part in enumerate(objects([plain.get("messages", plain.get("input")), plain["tools"]])):
        if "parameters" in part:
            continue  # a function, whose further members go to the template
        changed = json.loads(json.dumps(plain))
        [*objects([changed.get("messages", changed.get("input")), changed["tools"]])][number]["made_up"] = 1
        error = front.post(path, json=changed).json()["error"]
        assert (error["code"], "made_up is not a parameter" in error["message"]) == ("unknown_parameter", True)
