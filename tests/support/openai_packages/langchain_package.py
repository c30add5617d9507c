"""langchain-openai: `ChatOpenAI` and `OpenAI` with `base_url`."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel, ConfigDict

from support.openai_packages.front import ADAPTER, KEY, NUM_TOKENS, PROMPTS, Front, check_weather, same

QUESTION = "Who are you?"
ONE_CALL = {"strict": True, "parallel_tool_calls": False}
"""The arguments of the tool, strictly: a small model would invent others."""


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Oslo"]
    days: int


@tool
def _weather(city: Literal["Paris", "Oslo"], days: int) -> str:
    """Tells the weather."""
    return f"snow in {city}, {days} days"


_weather.name = "weather"


def _chat_model(front: Front, model: str = "base", num_tokens: int = NUM_TOKENS, **options: Any) -> ChatOpenAI:
    server = {"model": model, "base_url": front.url, "api_key": KEY, "max_retries": 0}
    return ChatOpenAI(**server, max_tokens=num_tokens, temperature=0, **options)


def invoke(front: Front) -> None:
    for model in ("base", ADAPTER):
        answer = _chat_model(front, model).invoke(QUESTION)
        same(answer.content, front.chat(model))
        assert answer.usage_metadata["output_tokens"] == NUM_TOKENS


def ainvoke(front: Front) -> None:
    same(asyncio.run(_chat_model(front).ainvoke(QUESTION)).content, front.chat())


def stream(front: Front) -> None:
    answer = None
    for piece in _chat_model(front, stream_usage=True).stream(QUESTION):
        answer = piece if answer is None else answer + piece
    same(answer.content, front.chat())
    assert answer.usage_metadata["output_tokens"] == NUM_TOKENS


def batch(front: Front) -> None:
    answers = _chat_model(front).batch([QUESTION, QUESTION])
    same([answer.content for answer in answers], [front.chat()] * 2)


def generate_prompts(front: Front) -> None:
    """The older class sends all prompts in one request."""
    text_model = OpenAI(
        model="base", base_url=front.url, api_key=KEY, max_retries=0, max_tokens=NUM_TOKENS, temperature=0
    )
    answers = text_model.generate(PROMPTS)
    same([answer[0].text for answer in answers.generations], [front.continuation(prompt) for prompt in PROMPTS])


def log_probs(front: Front) -> None:
    answer = _chat_model(front, logprobs=True, top_logprobs=2).invoke(QUESTION)
    tokens = answer.response_metadata["logprobs"]["content"]
    same(b"".join(bytes(token["bytes"]) for token in tokens).decode(), front.chat())


def tool_any(front: Front) -> None:
    _call_tool(front, "any")


def tool_named(front: Front) -> None:
    _call_tool(front, "weather")


def _call_tool(front: Front, choice: str) -> None:
    answer = _chat_model(front, num_tokens=60).bind_tools([_weather], tool_choice=choice, **ONE_CALL).invoke(QUESTION)
    (call,) = answer.tool_calls
    assert call["name"] == "weather"
    check_weather(call["args"])


def tool_stream(front: Front) -> None:
    model = _chat_model(front, num_tokens=60).bind_tools([_weather], tool_choice="any", **ONE_CALL)
    answer = None
    for piece in model.stream(QUESTION):
        answer = piece if answer is None else answer + piece
    (call,) = answer.tool_calls
    check_weather(call["args"])


def tool_result(front: Front) -> None:
    call = {"name": "weather", "args": {"city": "Oslo", "days": 1}, "id": "call_1"}
    turns = [HumanMessage(QUESTION), AIMessage("", tool_calls=[call]), ToolMessage("snow", tool_call_id="call_1")]
    assert _chat_model(front).invoke(turns).content


def structured_by_schema(front: Front) -> None:
    _structure(front, "json_schema")


def structured_by_function(front: Front) -> None:
    _structure(front, "function_calling")


def _structure(front: Front, method: str) -> None:
    model = _chat_model(front, num_tokens=60).with_structured_output(Weather, method=method, strict=True)
    assert isinstance(model.invoke(QUESTION), Weather)


def responses(front: Front) -> None:
    answer = _chat_model(front, num_tokens=NUM_TOKENS, use_responses_api=True).invoke(QUESTION)
    same(answer.text, front.chat())


def responses_stream(front: Front) -> None:
    model = _chat_model(front, use_responses_api=True)
    same("".join(piece.text for piece in model.stream(QUESTION)), front.chat())
