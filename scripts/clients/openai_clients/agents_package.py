"""openai-agents: an agent whose tool must be called before it answers, over either of OpenAI's interfaces."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import openai
from agents import (
    Agent,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    RunResult,
    function_tool,
    set_tracing_disabled,
)
from openai_clients.front import KEY, Front, main

set_tracing_disabled(True)


def _agent(model: Model, calls: list[tuple[str, int]]) -> Agent[Any]:
    @function_tool
    def weather(city: Literal["Paris", "Oslo"], days: int) -> str:
        """Tells the weather."""
        calls.append((city, days))
        return "snow"

    settings = ModelSettings(tool_choice="required", parallel_tool_calls=False, temperature=0, max_tokens=400)
    return Agent("forecaster", instructions="Be brief.", model=model, tools=[weather], model_settings=settings)


def _client(front: Front) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=front.url, api_key=KEY, max_retries=0)


def _check(result: Any, calls: list[tuple[str, int]]) -> None:
    """Check that the tool was called, that its result went back, and that the model answered."""
    assert len(calls) == 1
    assert result.final_output
    assert len(result.raw_responses) == 2


def chat_completions(front: Front) -> None:
    calls: list[tuple[str, int]] = []
    _check(_run(OpenAIChatCompletionsModel("base", _client(front)), calls), calls)


def chat_completions_stream(front: Front) -> None:
    calls: list[tuple[str, int]] = []
    _check(_run_streamed(OpenAIChatCompletionsModel("base", _client(front)), calls), calls)


def responses(front: Front) -> None:
    calls: list[tuple[str, int]] = []
    _check(_run(OpenAIResponsesModel("base", _client(front)), calls), calls)


def responses_stream(front: Front) -> None:
    calls: list[tuple[str, int]] = []
    _check(_run_streamed(OpenAIResponsesModel("base", _client(front)), calls), calls)


def _run(model: Model, calls: list[tuple[str, int]]) -> RunResult:
    return asyncio.run(Runner.run(_agent(model, calls), "Will it snow?"))


def _run_streamed(model: Model, calls: list[tuple[str, int]]) -> Any:
    async def ask() -> Any:
        result = Runner.run_streamed(_agent(model, calls), "Will it snow?")
        async for _ in result.stream_events():
            pass
        return result

    return asyncio.run(ask())


if __name__ == "__main__":
    main()
