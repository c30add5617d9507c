"""The knowledge that the clients of soak_adapters have of adapters, their calls, and how answers are judged."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from checkpoints.telling_adapters import (
    answer,
    packed_adapter,
)
from multilora_engine.lora.layout import PackedAdapter
from multilora_engine.request import TokenOutput
from multilora_wire.layout import AdapterLayout

ANSWER_TIMEOUT_S = 120.0


@dataclass
class Tally:
    """The counts of outcomes, by name; `wrong` describes each wrong answer."""

    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1

    def add(self, verdict: str | None, output: TokenOutput, seconds: float) -> None:
        """One request ended with `output`; `verdict` tells the fault, None if there is none."""
        with self._lock:
            self.counts["requests"] += 1
            self.seconds.append(seconds)
            if verdict is not None:
                self.wrong.append(verdict)
            elif output.error_code is None:
                self.counts["right"] += 1
            if output.error_code is not None:
                self.errors[output.error_code] += 1


class Call:
    """A listener that keeps the answer to one request."""

    unsent_bytes = 0

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.is_given_up = False
        self.on_first_tokens: Callable[[], None] | None = None
        self._final: queue.SimpleQueue[TokenOutput] = queue.SimpleQueue()

    def on_output(self, output: TokenOutput) -> None:
        self.token_ids += output.token_ids
        if output.is_final:
            self._final.put(output)
        elif self.on_first_tokens is not None:
            on_first_tokens, self.on_first_tokens = self.on_first_tokens, None
            on_first_tokens()

    def flush(self) -> None:
        """Nothing is held back."""

    def is_cancelled(self) -> bool:
        return self.is_given_up

    def give_up(self) -> None:
        """Stop waiting for the answer; the engine client learns it when it asks."""
        self.is_given_up = True

    def wait(self) -> TokenOutput:
        return self._final.get(timeout=ANSWER_TIMEOUT_S)


class Versions:
    """The clients' knowledge of one adapter.

    The lock is held while a version is chosen and submitted, and one engine client submits in order: the engine sees
    versions in rising order, and a request sees at least `confirmed` and at most `submitted` as they were then.
    """

    def __init__(self, number: int) -> None:
        self.lock = threading.Lock()
        self.number = number
        self.submitted = -1
        self.confirmed = -1
        self._digests: dict[int, str] = {}

    @property
    def task_id(self) -> int:
        """An id far from the others, and beyond 32 bits."""
        return (self.number + 1) * 1_000_000_007

    @property
    def possible(self) -> range:
        """The versions a request that is submitted now may be answered by."""
        return range(max(0, self.confirmed), self.submitted + 1)

    def pack(self, is_new: bool, layout: AdapterLayout) -> tuple[int, PackedAdapter]:
        """The newest version, or the next one, about to be submitted."""
        self.submitted = max(0, self.submitted + is_new)
        packed = packed_adapter(self.number, self.submitted, layout)
        self._digests[self.submitted] = packed.digest
        return self.submitted, packed

    def confirm(self, versions: Iterable[int]) -> None:
        """Note that one of `versions` gave an answer, to a request or an upload."""
        with self.lock:
            self.confirmed = max(self.confirmed, min(versions))

    def matching(self, versions: Iterable[int], token_ids: list[int], digest: str) -> list[int]:
        """The versions whose answer starts with `token_ids` and whose digest it is; a cut answer may have none."""
        return [
            version
            for version in versions
            if answer(self.number, version)[: len(token_ids)] == token_ids and digest in ("", self._digests[version])
        ]
