"""litellm: `openai/NAME` with `api_base`, as its documentation has it for servers like OpenAI's."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, Literal

import litellm
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

TOOLS: dict[str, Any] = {"tools": [WEATHER_TOOL], "parallel_tool_calls": False}


class Weather(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Oslo"]
    days: int


def _options(front: Front, model: str = "base", num_tokens: int = NUM_TOKENS) -> dict[str, Any]:
    server = {"model": f"openai/{model}", "api_base": front.url, "api_key": KEY, "num_retries": 0}
    return server | {"max_tokens": num_tokens, "temperature": 0}


def chat(front: Front) -> None:
    for model in ("base", ADAPTER):
        answer = litellm.completion(messages=QUESTION, **_options(front, model))
        same(answer.choices[0].message.content, front.chat(model))
        assert answer.usage.completion_tokens == NUM_TOKENS


def chat_async(front: Front) -> None:
    answer = asyncio.run(litellm.acompletion(messages=QUESTION, **_options(front)))
    same(answer.choices[0].message.content, front.chat())


def chat_stream(front: Front) -> None:
    pieces = list(
        litellm.completion(messages=QUESTION, stream=True, stream_options={"include_usage": True}, **_options(front))
    )
    answer = litellm.stream_chunk_builder(pieces, messages=QUESTION)
    same(answer.choices[0].message.content, front.chat())
    assert answer.usage.completion_tokens == NUM_TOKENS


def choices(front: Front) -> None:
    answer = litellm.completion(messages=QUESTION, n=2, **_options(front))
    same([choice.message.content for choice in answer.choices], [front.chat()] * 2)


def prompts(front: Front) -> None:
    answer = litellm.text_completion(prompt=PROMPTS, **_text(front))
    same([choice["text"] for choice in answer.choices], [front.continuation(prompt) for prompt in PROMPTS])


def _text(front: Front) -> dict[str, Any]:
    return _options(front) | {"model": "text-completion-openai/base"}


def batch(front: Front) -> None:
    answers = litellm.batch_completion(messages=[QUESTION, QUESTION], **_options(front))
    same([answer.choices[0].message.content for answer in answers], [front.chat()] * 2)


def json_schema(front: Front) -> None:
    answer = litellm.completion(messages=QUESTION, response_format=Weather, **_options(front, num_tokens=60))
    Weather.model_validate_json(answer.choices[0].message.content)


def tool_required(front: Front) -> None:
    _call_tool(front, "required")


def tool_named(front: Front) -> None:
    _call_tool(front, {"type": "function", "function": {"name": "weather"}})


def _call_tool(front: Front, choice: Any) -> None:
    options = _options(front, num_tokens=60)
    answer = litellm.completion(messages=QUESTION, tool_choice=choice, **TOOLS, **options)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    check_weather(call.function.arguments)


def tool_stream(front: Front) -> None:
    options = _options(front, num_tokens=60)
    pieces = litellm.completion(messages=QUESTION, tool_choice="required", stream=True, **TOOLS, **options)
    answer = litellm.stream_chunk_builder(list(pieces), messages=QUESTION)
    (call,) = answer.choices[0].message.tool_calls
    assert call.function.name == "weather"
    check_weather(call.function.arguments)


def responses(front: Front) -> None:
    """The package asks for no fewer tokens than OpenAI takes."""
    server = {"model": "openai/base", "api_base": front.url, "api_key": KEY}
    answer = litellm.responses(input="Who are you?", max_output_tokens=16, temperature=0, **server)
    same(answer.output[0].content[0].text, front.chat(num_tokens=16))


def embeddings(front: Front) -> None:
    """Embeddings are refused by a message that says so."""
    server = {"model": "openai/base", "api_base": front.url, "api_key": KEY, "num_retries": 0}
    ask = partial(litellm.embedding, input=["Who are you?"], **server)
    assert "embeddings" in message_of(openai.APIError, ask)
