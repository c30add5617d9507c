"""OpenAI's own package."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Literal

import openai
from pydantic import BaseModel, ConfigDict

from support.openai_packages.front import (
    ADAPTER,
    KEY,
    NUM_TOKENS,
    PROMPTS,
    QUESTION,
    WEATHER_TOOL,
    Front,
    check_weather,
    message_of,
    same,
)

OPTIONS: dict[str, Any] = {"max_tokens": NUM_TOKENS, "temperature": 0}
TOOLS: dict[str, Any] = {"tools": [WEATHER_TOOL], "parallel_tool_calls": False, "max_tokens": 60, "temperature": 0}


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Oslo"]
    days: int


def _client(front: Front) -> openai.OpenAI:
    return openai.OpenAI(base_url=front.url, api_key=KEY, max_retries=0)


def chat(front: Front) -> None:
    for model in ("base", ADAPTER):
        answer = _client(front).chat.completions.create(model=model, messages=QUESTION, **OPTIONS)
        same(answer.choices[0].message.content, front.chat(model))
    assert front.chat("base") != front.chat(ADAPTER)


def chat_stream(front: Front) -> None:
    pieces = _client(front).chat.completions.create(
        model="base", messages=QUESTION, stream=True, stream_options={"include_usage": True}, **OPTIONS
    )
    *texts, last = pieces
    same("".join(piece.choices[0].delta.content or "" for piece in texts), front.chat())
    assert last.usage is not None
    assert last.usage.completion_tokens == NUM_TOKENS


def chat_async(front: Front) -> None:
    async def ask() -> str | None:
        async with openai.AsyncOpenAI(base_url=front.url, api_key=KEY, max_retries=0) as client:
            answer = await client.chat.completions.create(model="base", messages=QUESTION, **OPTIONS)
            return answer.choices[0].message.content

    same(asyncio.run(ask()), front.chat())


def choices(front: Front) -> None:
    answer = _client(front).chat.completions.create(model="base", messages=QUESTION, n=3, **OPTIONS)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {front.chat()}


def choices_stream(front: Front) -> None:
    texts = ["", "", ""]
    for piece in _client(front).chat.completions.create(model="base", messages=QUESTION, n=3, stream=True, **OPTIONS):
        for choice in piece.choices:
            texts[choice.index] += choice.delta.content or ""
    same(texts, [front.chat()] * 3)


def prompts(front: Front) -> None:
    answer = _client(front).completions.create(model="base", prompt=PROMPTS, **OPTIONS)
    same([choice.text for choice in answer.choices], [front.continuation(prompt) for prompt in PROMPTS])


def echo(front: Front) -> None:
    answer = _client(front).completions.create(
        model="base", prompt=PROMPTS[0], echo=True, logprobs=2, max_tokens=0, temperature=0
    )
    (choice,) = answer.choices
    assert choice.text == PROMPTS[0]
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or []) == PROMPTS[0]
    first, *rest = choice.logprobs.token_logprobs or []
    assert first is None
    assert all(value < 0 for value in rest)


def log_probs(front: Front) -> None:
    answer = _client(front).chat.completions.create(
        model="base", messages=QUESTION, logprobs=True, top_logprobs=2, **OPTIONS
    )
    content = answer.choices[0].logprobs.content
    same(b"".join(bytes(token.bytes) for token in content).decode(), front.chat())
    assert all(token.top_logprobs[0].logprob == token.logprob for token in content)


def json_schema(front: Front) -> None:
    answer = _client(front).chat.completions.parse(
        model="base", messages=QUESTION, response_format=Weather, max_tokens=60, temperature=0
    )
    assert isinstance(answer.choices[0].message.parsed, Weather)


def tool_required(front: Front) -> None:
    _call_tool(front, "required")


def tool_named(front: Front) -> None:
    _call_tool(front, {"type": "function", "function": {"name": "weather"}})


def tool_auto(front: Front) -> None:
    answer = _client(front).chat.completions.create(model="base", messages=QUESTION, tools=[WEATHER_TOOL], **OPTIONS)
    assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")


def _call_tool(front: Front, choice: Any) -> None:
    answer = _client(front).chat.completions.create(model="base", messages=QUESTION, tool_choice=choice, **TOOLS)
    (call,) = answer.choices[0].message.tool_calls
    assert answer.choices[0].finish_reason == "tool_calls"
    assert call.function.name == "weather"
    check_weather(call.function.arguments)


def tool_stream(front: Front) -> None:
    """The SDK puts the pieces of the arguments together."""
    with _client(front).chat.completions.stream(
        model="base", messages=QUESTION, tool_choice="required", **TOOLS
    ) as stream:
        (call,) = stream.get_final_completion().choices[0].message.tool_calls
    assert call.function.name == "weather"
    check_weather(call.function.arguments)


def tool_result(front: Front) -> None:
    """The second turn of an agent: the tool's answer goes back to the model."""
    call = {
        "id": "call_1",
        "type": "function",
        "function": {"name": "weather", "arguments": '{"city": "Oslo", "days": 1}'},
    }
    turns = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "snow"},
    ]
    answer = _client(front).chat.completions.create(model="base", messages=turns, **OPTIONS)
    assert answer.choices[0].message.content


def responses(front: Front) -> None:
    answer = _client(front).responses.create(
        model="base", input=QUESTION, max_output_tokens=NUM_TOKENS, temperature=0, store=False
    )
    same(answer.output_text, front.chat())


def responses_stream(front: Front) -> None:
    events = list(
        _client(front).responses.create(
            model="base", input="Who are you?", max_output_tokens=NUM_TOKENS, temperature=0, store=False, stream=True
        )
    )
    assert [event.sequence_number for event in events] == list(range(len(events)))
    same("".join(event.delta for event in events if event.type == "response.output_text.delta"), front.chat())
    assert events[-1].type == "response.incomplete"
    same(events[-1].response.output_text, front.chat())


def responses_schema(front: Front) -> None:
    answer = _client(front).responses.parse(
        model="base", input="Who are you?", text_format=Weather, max_output_tokens=60, temperature=0, store=False
    )
    assert isinstance(answer.output_parsed, Weather)


def responses_tool(front: Front) -> None:
    answer = _client(front).responses.create(
        model="base",
        input="Who are you?",
        tools=[{"type": "function", "strict": True, **WEATHER_TOOL["function"]}],
        tool_choice="required",
        parallel_tool_calls=False,
        max_output_tokens=60,
        temperature=0,
    )
    (call,) = answer.output
    assert call.type == "function_call"
    assert call.name == "weather"
    check_weather(call.arguments)


def models(front: Front) -> None:
    names = [model.id for model in _client(front).models.list()]
    assert {"base", ADAPTER} <= set(names)
    assert _client(front).models.retrieve(ADAPTER).id == ADAPTER


def embeddings(front: Front) -> None:
    """Embeddings are refused by a message that says so."""
    ask = partial(_client(front).embeddings.create, model="base", input="Who are you?")
    assert "embeddings" in message_of(openai.APIStatusError, ask)
