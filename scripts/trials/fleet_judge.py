"""Judges the answers of a fleet whose adapters come, move and go while clients ask.

The adapters are those of telling_adapters.py: an answer says which adapter, in which version, gave it.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import Literal, Protocol
from urllib.error import HTTPError

from checkpoints.telling_adapters import BASE_ANSWER, NUM_PLACES, PROMPT_TOKENS, answer
from multilora_client import Client, MultiloraClientError
from multilora_engine.lora.names import task_id_of
from servers.dynamo_fleet import call

ABSENT = -1
"""Stands for a version of an adapter that is unloaded: requests for it are refused."""

STATED_CODES = ("NOT_FOUND", "UNAVAILABLE")

_BEGINNING_TOKENS = 64
_NUM_BEGINNINGS = 20
_TAIL_TOKENS = 8

Outcome = Literal["right", "earlier", "wrong", "base", "absent", "unavailable", "unstated"]
"""earlier: a version that was replaced while a worker was cut off. absent: NOT_FOUND of an adapter that is unloaded."""


@dataclass(frozen=True)
class Told:
    """worker: the fleet's number of the worker that answered, None where the door does not tell it."""

    tokens: list[int]
    worker: int | None = None
    cached_tokens: int = 0


class Refused(Exception):
    """A door answers with an error. The text is its code."""


class Door(Protocol):
    """A way to ask the fleet."""

    name: str

    def ask(self, number: int, prompt: list[int]) -> Told:
        """Raises Refused."""
        ...


class OpenAIDoor:
    """Dynamo's front. Each of its answers names the worker and the tokens of the prompt in the worker's cache."""

    name = "OpenAI"

    def __init__(self, url: str) -> None:
        self._url = url

    def ask(self, number: int, prompt: list[int]) -> Told:
        body = {
            "model": adapter_name(number),
            "prompt": prompt,
            "max_tokens": NUM_PLACES,
            "temperature": 0,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
            "nvext": {"extra_fields": ["worker_id"]},
        }
        try:
            told = call(f"{self._url}/v1/completions", body)
        except HTTPError as error:
            raise Refused(_code(error.code, error.read().decode(errors="replace"))) from None
        tokens = [int(token.removeprefix("token_id:")) for token in told["choices"][0]["logprobs"]["tokens"]]
        cached = told["usage"]["prompt_tokens_details"]["cached_tokens"] or 0
        return Told(tokens, told["nvext"]["worker_id"]["decode_worker_id"], cached)


class TritonDoor:
    """The Triton front of the fleet."""

    name = "Triton"

    def __init__(self, client: Client) -> None:
        self._client = client

    def ask(self, number: int, prompt: list[int]) -> Told:
        adapter = task_id_of(adapter_name(number))
        try:
            told = self._client.generate(input_ids=prompt, adapter=adapter, max_tokens=NUM_PLACES)
        except MultiloraClientError as error:
            raise Refused(error.code) from None
        return Told(told.token_ids[-NUM_PLACES:])


def adapter_name(number: int) -> str:
    return f"a{number:03}"


class Versions:
    """The versions of each adapter that may answer, now and in the past."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._history: defaultdict[int, list[tuple[float, frozenset[int]]]] = defaultdict(list)
        self._lagging: defaultdict[int, set[int]] = defaultdict(set)

    def may(self, number: int, *versions: int) -> None:
        """Allow these versions to answer from now on, beside the versions that may already."""
        self._change(number, self.now(number) | set(versions))

    def must(self, number: int, version: int, is_cut_off: bool = False) -> None:
        """Allow only this version from now on. is_cut_off: a cut-off worker need not know of it until `settle`."""
        with self._lock:
            if is_cut_off:
                self._lagging[number] |= self.now(number) - {version}
        self._change(number, {version})

    def settle(self) -> None:
        """Expect every worker to know the changes from now on."""
        with self._lock:
            self._lagging.clear()

    def now(self, number: int) -> frozenset[int]:
        return self._history[number][-1][1] if self._history[number] else frozenset()

    def since(self, number: int, second: float) -> frozenset[int]:
        """The versions that might answer at some time since `second`."""
        with self._lock:
            history = list(self._history[number])
        ended = [index for index, (begun, _) in enumerate(history) if begun <= second]
        first = ended[-1] if ended else 0
        return frozenset().union(*(versions for _, versions in history[first:]))

    def lagging(self, number: int) -> frozenset[int]:
        """The versions of a worker that was cut off."""
        with self._lock:
            return frozenset(self._lagging[number])

    def _change(self, number: int, versions: set[int] | frozenset[int]) -> None:
        with self._lock:
            self._history[number].append((time.monotonic(), frozenset(versions)))


@dataclass(frozen=True)
class Asked:
    """One request. second: the time of its answer. detail: of a wrong answer."""

    second: float
    number: int
    door: str
    worker: int | None
    outcome: Outcome
    seconds: float
    cached_tokens: int = 0
    prompt_tokens: int = 0
    detail: str = ""


@dataclass
class Tally:
    """The requests of a phase, in the order of their answers."""

    name: str
    asked: list[Asked] = field(default_factory=list)

    @property
    def outcomes(self) -> Counter[Outcome]:
        return Counter(one.outcome for one in self.asked)

    @property
    def hit_rate(self) -> float:
        """The share of prompt tokens that a prefix cache had, over the answers that tell it."""
        told = [one for one in self.asked if one.worker is not None]
        return sum(one.cached_tokens for one in told) / max(1, sum(one.prompt_tokens for one in told))


class Judge:
    """Clients that ask for adapters by Zipf's law, and judge the answers."""

    def __init__(self, doors: Sequence[Door], versions: Versions, num_adapters: int, seed: int) -> None:
        self._doors = doors
        self._versions = versions
        self._random = Random(seed)
        self._weights = [1 / (rank + 1) for rank in range(num_adapters)]
        self._beginnings = [self._tokens(_BEGINNING_TOKENS) for _ in range(_NUM_BEGINNINGS)]
        self._lock = threading.Lock()

    def run(self, tally: Tally, num_requests: int, num_clients: int) -> None:
        """Let `num_clients` clients ask `num_requests` times in all, through the doors in turn."""
        self._run(tally, [self._choose for _ in range(num_requests)], num_clients)

    def ask_each(self, tally: Tally, num_clients: int) -> None:
        """Ask for every adapter once through every door."""
        numbers = range(len(self._weights))
        self._run(tally, [partial(int, number) for number in numbers for _ in self._doors], num_clients)

    def _run(self, tally: Tally, choices: Sequence[Callable[[], int]], num_clients: int) -> None:
        with ThreadPoolExecutor(num_clients) as pool:
            doors = [self._doors[index % len(self._doors)] for index in range(len(choices))]
            for done in [pool.submit(self._ask, tally, *each) for each in zip(choices, doors, strict=True)]:
                done.result()

    def _choose(self) -> int:
        return self._random.choices(range(len(self._weights)), self._weights)[0]

    def _ask(self, tally: Tally, choose: Callable[[], int], door: Door) -> None:
        with self._lock:
            number = choose()
            prompt = self._random.choice(self._beginnings) + self._tokens(_TAIL_TOKENS)
        started, detail, told = time.monotonic(), "", None
        try:
            told = door.ask(number, prompt)
            outcome = self._judge(number, told.tokens, started)
            detail = "" if outcome == "right" else f"{adapter_name(number)}: {told.tokens}"
        except Refused as refused:
            detail = str(refused)
            outcome = self._judge_error(number, detail, started)
        ended = time.monotonic()
        worker, cached = (told.worker, told.cached_tokens) if told else (None, 0)
        asked = Asked(ended, number, door.name, worker, outcome, ended - started, cached, len(prompt), detail)
        with self._lock:
            tally.asked.append(asked)

    def _judge(self, number: int, tokens: list[int], started: float) -> Outcome:
        if tokens in [answer(number, version) for version in self._versions.since(number, started) - {ABSENT}]:
            return "right"
        if tokens in [answer(number, version) for version in self._versions.lagging(number) - {ABSENT}]:
            return "earlier"
        return "base" if tokens == BASE_ANSWER else "wrong"

    def _judge_error(self, number: int, code: str, started: float) -> Outcome:
        if code == "UNAVAILABLE":
            return "unavailable"
        may_be_absent = ABSENT in self._versions.since(number, started) | self._versions.lagging(number)
        return "absent" if code == "NOT_FOUND" and may_be_absent else "unstated"

    def _tokens(self, number: int) -> list[int]:
        return self._random.choices(PROMPT_TOKENS, k=number)


def _code(status: int, text: str) -> str:
    """The code of an error of Dynamo's front: the worker's code, if the front passes a worker's error on."""
    if status == 404 or "[NOT_FOUND]" in text:
        return "NOT_FOUND"
    # Dynamo's front says so with status 500 while it knows no worker.
    if status == 503 or "[UNAVAILABLE]" in text or (status == 500 and "Failed to generate completions" in text):
        return "UNAVAILABLE"
    try:
        said = json.loads(text)
    except ValueError:
        said = text
    return f"HTTP {status}: {said}"[:200]
