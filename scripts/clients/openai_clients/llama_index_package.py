"""llama-index: `OpenAILike`, its class for servers like OpenAI's."""

import asyncio
from typing import Any, Literal

from llama_index.core.llms import ChatMessage
from llama_index.core.prompts import PromptTemplate
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from openai_clients.front import ADAPTER, KEY, NUM_TOKENS, PROMPTS, Front, check_weather, main, same
from pydantic import BaseModel, ConfigDict

QUESTION = [ChatMessage(role="user", content="Who are you?")]


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Oslo"]
    days: int


def _weather(city: Literal["Paris", "Oslo"], days: int) -> str:
    """Tells the weather."""
    return f"snow in {city}, {days} days"


def _model(front: Front, model: str = "base", num_tokens: int = NUM_TOKENS, **options: Any) -> OpenAILike:
    server = {"model": model, "api_base": front.url, "api_key": KEY, "max_retries": 0}
    return OpenAILike(**server, is_chat_model=True, max_tokens=num_tokens, temperature=0, **options)


def chat(front: Front) -> None:
    for model in ("base", ADAPTER):
        same(_model(front, model).chat(QUESTION).message.content, front.chat(model))


def chat_async(front: Front) -> None:
    same(asyncio.run(_model(front).achat(QUESTION)).message.content, front.chat())


def chat_stream(front: Front) -> None:
    same("".join(piece.delta or "" for piece in _model(front).stream_chat(QUESTION)), front.chat())


def complete(front: Front) -> None:
    model = OpenAILike(
        model="base", api_base=front.url, api_key=KEY, is_chat_model=False, max_tokens=NUM_TOKENS, temperature=0
    )
    same(model.complete(PROMPTS[0]).text, front.continuation(PROMPTS[0]))


def tool_required(front: Front) -> None:
    tool = FunctionTool.from_defaults(_weather, name="weather")
    model = _model(front, num_tokens=60, is_function_calling_model=True)
    answer = model.chat_with_tools([tool], user_msg="Who are you?", tool_required=True)
    (call,) = model.get_tool_calls_from_response(answer)
    assert call.tool_name == "weather"
    check_weather(call.tool_kwargs)


def structured_by_schema(front: Front) -> None:
    _structure(_model(front, num_tokens=60, should_use_structured_outputs=True))


def structured_by_function(front: Front) -> None:
    _structure(_model(front, num_tokens=60, is_function_calling_model=True))


def _structure(model: OpenAILike) -> None:
    assert isinstance(model.structured_predict(Weather, PromptTemplate("Who are you?")), Weather)


if __name__ == "__main__":
    main()
