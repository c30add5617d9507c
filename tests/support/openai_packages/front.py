"""The front without any package: JSON over HTTP. The values that packages return are compared with these answers."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

QUESTION: list[dict[str, Any]] = [{"role": "user", "content": "Who are you?"}]
PROMPTS = ["The sea is", "Bees make", "The capital of France is"]
ADAPTER = "pirate"
KEY = "none"
"""An API key, on which packages insist and which a front without keys does not read."""
NUM_TOKENS = 8

WEATHER_PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris", "Oslo"]}, "days": {"type": "integer"}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells the weather.", "parameters": WEATHER_PARAMETERS},
}


@dataclass(frozen=True)
class Front:
    """url: as clients are given it, with /v1."""

    url: str

    def post(self, path: str, **body: Any) -> Any:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(f"{self.url}/{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=60) as response:
            return json.load(response)

    def chat(self, model: str = "base", num_tokens: int = NUM_TOKENS) -> str:
        """The greedy answer to `QUESTION`."""
        answer = self.post("chat/completions", model=model, messages=QUESTION, max_tokens=num_tokens, temperature=0)
        return answer["choices"][0]["message"]["content"]

    def continuation(self, prompt: str, model: str = "base") -> str:
        """The greedy continuation of `prompt`."""
        answer = self.post("completions", model=model, prompt=prompt, max_tokens=NUM_TOKENS, temperature=0)
        return answer["choices"][0]["text"]


def same(told: object, expected: object) -> None:
    assert told == expected, f"{told!r} is not {expected!r}"


def check_weather(arguments: str | dict[str, Any]) -> None:
    """Check that a call of `WEATHER_TOOL` names a city and a number of days, of the model's choice."""
    values = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert set(values) == {"city", "days"}, values
    assert values["city"] in ("Paris", "Oslo"), values
    assert isinstance(values["days"], int), values


def message_of(error: type[Exception], ask: Callable[[], object]) -> str:
    """The message of the error that `ask` must raise."""
    try:
        answer = ask()
    except error as raised:
        return str(raised)
    raise AssertionError(f"no {error.__name__}, but {answer}")
