"""instructor, around OpenAI's package: a pydantic model comes back, in each mode that it has for such servers."""

from __future__ import annotations

from typing import Literal

import instructor
import openai
from openai_clients.front import KEY, QUESTION, Front, main
from pydantic import BaseModel, ConfigDict


class Weather(BaseModel):
    """The weather of a city."""

    model_config = ConfigDict(extra="forbid")

    city: Literal["Paris", "Oslo"]
    days: int


class Anything(BaseModel):
    """Any object."""


def tools(front: Front) -> None:
    _ask(front, instructor.Mode.TOOLS)


def tools_strict(front: Front) -> None:
    _ask(front, instructor.Mode.TOOLS_STRICT)


def json_mode(front: Front) -> None:
    """The prompt tells the schema, the server makes sure of an object only; a small model repeats itself in it."""
    answer = _client(front, instructor.Mode.JSON).chat.completions.create(
        model="base",
        messages=QUESTION,
        response_model=Anything,
        frequency_penalty=1.0,
        max_tokens=200,
        temperature=0,
        max_retries=1,
    )
    assert isinstance(answer, Anything)


def json_schema(front: Front) -> None:
    _ask(front, instructor.Mode.JSON_SCHEMA)


def partial_stream(front: Front) -> None:
    pieces = _client(front, instructor.Mode.TOOLS).chat.completions.create_partial(
        model="base", messages=QUESTION, response_model=Weather, max_tokens=60, temperature=0, max_retries=1
    )
    *_, last = pieces
    assert Weather.model_validate(last.model_dump())


def responses_tools(front: Front) -> None:
    client = _client(front, instructor.Mode.RESPONSES_TOOLS)
    answer = client.responses.create(
        model="base", input="Who are you?", response_model=Weather, max_output_tokens=60, temperature=0, max_retries=1
    )
    assert isinstance(answer, Weather)


def _client(front: Front, mode: instructor.Mode) -> instructor.Instructor:
    return instructor.from_openai(openai.OpenAI(base_url=front.url, api_key=KEY, max_retries=0), mode=mode)


def _ask(front: Front, mode: instructor.Mode) -> None:
    answer = _client(front, mode).chat.completions.create(
        model="base", messages=QUESTION, response_model=Weather, max_tokens=60, temperature=0, max_retries=1
    )
    assert isinstance(answer, Weather)


if __name__ == "__main__":
    main()
