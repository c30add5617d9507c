"""Clients that keep asking a real server through all its faults, and judge every answer.

The adapters are those of telling_adapters.py. Every client asks the base model and the adapters
whose upload was acknowledged, streaming or whole, over gRPC or HTTP, and uploads new adapters. A request with an error
is counted by the error's code and sent again; an answer of the wrong adapter is wrong, and an acknowledged adapter that
is not found is lost.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from random import Random

import numpy as np
import torch

from checkpoints.telling_adapters import BASE_TOKEN, PROMPT_TOKENS, adapter_matrices, answer
from multilora_client import Adapter, AdapterNotFound, AdapterTensors, Client, MultiloraClientError
from multilora_client.options import GenerateOptions
from multilora_wire.layout import AdapterLayout

ANSWER_TIMEOUT_S = 60.0
"""A request that has neither an answer nor an error by then is stuck."""

_LONG_ANSWER = 150
_PAUSE_AFTER_ERROR_S = 0.05
_SHARE_OF_UPLOADS = 0.1
_SHARE_OF_CANCELS = 0.05
_SHARE_OF_BASE = 0.1


def telling_adapter(number: int, layout: AdapterLayout, version: int = 0) -> Adapter:
    """The adapter `number` as clients send it; its task id is far beyond 32 bits."""
    ids = layout.sites.module_ids
    rows = adapter_matrices(number, version)
    weights = torch.stack([torch.cat([row.a.flatten(), row.b.flatten()]) for row in rows]).numpy()
    config = np.array([[ids[row.module], row.layer, len(row.a), 0] for row in rows], np.int32)
    return Adapter(task_id(number), AdapterTensors(weights, config, "FP32"))


def task_id(number: int) -> int:
    return (number + 1) * 1_000_000_007


def text_of(tokens: list[int]) -> str:
    """The text of tokens, as the plain tokenizer of the telling model writes them."""
    return "".join(f"<{token}>" for token in tokens)


@dataclass
class Tally:
    """The outcomes that clients saw since it was made, by name: `right`, error codes, `uploads`; and the faults.

    messages: the first of each code.
    """

    seen: Counter[str] = field(default_factory=Counter)
    messages: dict[str, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    lost: set[int] = field(default_factory=set)
    stuck: int = 0


class JudgingClients:
    """Clients of one server. Its addresses stay the same when it is restarted."""

    def __init__(
        self,
        http_url: str,
        grpc_url: str,
        layout: AdapterLayout,
        num_clients: int,
        num_adapters: int,
        seed: int = 0,
    ) -> None:
        """num_adapters: once so many adapters are acknowledged, clients upload these again."""
        self._urls = [f"http://{http_url}", f"grpc://{grpc_url}"]
        self._layout = layout
        self._num_clients = num_clients
        self._num_adapters = num_adapters
        self._seed = seed
        self._lock = threading.Lock()
        self._acknowledged: list[int] = []
        self._next_number = 0
        self._damaged: dict[int, float | None] = {}
        """The time at which each adapter whose files were damaged was acknowledged again; None: not yet."""
        self._is_over = threading.Event()
        self._right_since: dict[int, float] = {}
        self.tally = Tally()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Ask until the context ends. Raises a client's exception unless the server caused it."""
        self._is_over.clear()
        with ThreadPoolExecutor(self._num_clients) as pool:
            clients = [pool.submit(self._run, number) for number in range(self._num_clients)]
            try:
                yield
            finally:
                self._is_over.set()
        for client in clients:
            client.result()

    @property
    def num_acknowledged(self) -> int:
        return len(self._acknowledged)

    def new_tally(self) -> Tally:
        """Count from zero, and return the tally so far."""
        with self._lock:
            before, self.tally = self.tally, Tally()
        return before

    def num_errors(self) -> Counter[str]:
        """The errors that clients saw since the tally was made, by code."""
        with self._lock:
            return Counter({name: count for name, count in self.tally.seen.items() if name.isupper()})

    def wait_until_all_are_right(self, timeout_s: float) -> float:
        """Seconds until every client had a right answer to a request that it made from now on; raises TimeoutError."""
        started = time.monotonic()
        while time.monotonic() - started < timeout_s:
            if all(self._right_since.get(number, 0.0) > started for number in range(self._num_clients)):
                return max(self._right_since.values()) - started
            time.sleep(0.02)
        raise TimeoutError(f"not every client had a right answer within {timeout_s:g} s; they saw {self.tally}")

    def expect_damage(self, task_ids: Collection[int]) -> None:
        """Expect the server to report that these adapters' files are damaged; clients then send them again."""
        with self._lock:
            self._damaged |= {number: None for number in self._acknowledged if task_id(number) in task_ids}

    def ask_all(self) -> set[int]:
        """Ask every acknowledged adapter once, and return the numbers of the adapters that did not answer rightly."""
        silent = set(self._acknowledged)
        with Client(self._urls[0]) as client:
            for number in list(self._acknowledged):
                with suppress(MultiloraClientError), self._counting():
                    if self._ask(client, Random(number), number):
                        silent.discard(number)
        return silent

    def upload(self, client: Client, number: int) -> None:
        """Upload an adapter. Raises MultiloraClientError; otherwise the adapter is acknowledged."""
        with self._counting():
            client.upload(telling_adapter(number, self._layout), timeout_s=ANSWER_TIMEOUT_S)
        with self._lock:
            self.tally.seen["uploads"] += 1
            if number not in self._acknowledged:
                self._acknowledged.append(number)

    def _run(self, client_number: int) -> None:
        random = Random(f"{self._seed} {client_number}")
        while not self._is_over.is_set():
            # A new client after every error: gRPC waits longer and longer before it tries a server again.
            with Client(self._urls[client_number % len(self._urls)]) as client, suppress(MultiloraClientError):
                while not self._is_over.is_set():
                    self._turn(client, random, client_number)
            self._is_over.wait(_PAUSE_AFTER_ERROR_S)

    def _turn(self, client: Client, random: Random, client_number: int) -> None:
        """Take one turn. Raises MultiloraClientError after any error, once it is counted."""
        started, draw = time.monotonic(), random.random()
        if draw < _SHARE_OF_UPLOADS or not self._acknowledged:
            self.upload(client, self._number_to_upload(random))
        elif draw < _SHARE_OF_UPLOADS + _SHARE_OF_CANCELS:
            self._cancel(client)
        else:
            is_base = draw < _SHARE_OF_UPLOADS + _SHARE_OF_CANCELS + _SHARE_OF_BASE
            with self._counting():
                is_right = self._ask(client, random, None if is_base else random.choice(self._acknowledged))
            if is_right:
                self._right_since[client_number] = started

    def _number_to_upload(self, random: Random) -> int:
        with self._lock:
            if self._next_number >= self._num_adapters and self._acknowledged:
                return random.choice(self._acknowledged)
            self._next_number += 1
            return self._next_number - 1

    def _cancel(self, client: Client) -> None:
        prompt = [PROMPT_TOKENS[0]]
        with self._counting():
            chunks = client.stream(input_ids=prompt, max_tokens=_LONG_ANSWER, timeout_s=ANSWER_TIMEOUT_S)
            next(chunks)
            chunks.close()
        with self._lock:
            self.tally.seen["cancelled by the client"] += 1

    def _ask(self, client: Client, random: Random, number: int | None) -> bool:
        """Whether the answer was right. Raises MultiloraClientError."""
        prompt = [random.choice(PROMPT_TOKENS) for _ in range(random.randint(1, 300))]
        expected = [BASE_TOKEN] * _LONG_ANSWER if number is None else answer(number, 0)
        adapter = None if number is None else task_id(number)
        options: GenerateOptions = {"input_ids": prompt, "max_tokens": len(expected)}
        options["timeout_s"] = ANSWER_TIMEOUT_S
        text, asked_at = "", time.monotonic()
        try:
            if random.random() < 0.5:
                text = client.generate(adapter=adapter, **options).text
            else:
                for chunk in client.stream(adapter=adapter, **options):
                    text += chunk.text
        except MultiloraClientError as error:
            self._judge(number, text, text_of(expected)[: len(text)])
            if isinstance(error, AdapterNotFound) and number is not None:
                self._note_missing(client, number, asked_at)
            raise
        return self._judge(number, text, text_of(expected))

    def _note_missing(self, client: Client, number: int, asked_at: float) -> None:
        """The adapter is lost, unless damaged: then a client that asked before its new acknowledgement may miss it."""
        with self._lock:
            mended_at = self._damaged.get(number, 0.0)
            if mended_at is not None and asked_at > mended_at:
                self.tally.lost.add(number)
        if mended_at is None:
            self.upload(client, number)
            with self._lock:
                self._damaged[number] = time.monotonic()

    def _judge(self, number: int | None, text: str, expected: str) -> bool:
        with self._lock:
            if text != expected:
                self.tally.wrong.append(f"adapter {number} answered {text!r}, expected {expected!r}")
            elif text:
                self.tally.seen["right"] += 1
        return text == expected

    @contextmanager
    def _counting(self) -> Iterator[None]:
        try:
            yield
        except MultiloraClientError as error:
            with self._lock:
                self.tally.seen[error.code] += 1
                self.tally.messages.setdefault(error.code, str(error))
                self.tally.stuck += error.code == "DEADLINE"
            raise
