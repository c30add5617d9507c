"""Checks every answer of many clients to far more adapters than fit: none is of the wrong adapter.

The adapters are those of telling_adapters.py: an answer says which adapter, in which version, gave it. Clients ask,
upload, replace, cancel and stop at random, against a real engine process. Right is an answer of the adapter that was
asked for, in the version that was current when the request was accepted. An error is right if the situation explains
it: not cached, no room, cancelled by the client itself. With a disk tier nothing that was uploaded may get lost, not
even in a restart: each popularity has an engine process of its own, over the same files.
"""

from __future__ import annotations

import itertools
import os
import queue
import statistics
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Literal

import msgspec

from checkpoints.telling_adapters import (
    BASE_ANSWER,
    EXPERT_INTERMEDIATE_SIZE,
    HIDDEN_SIZE,
    MAX_RANK,
    NUM_LAYERS,
    PROMPT_TOKENS,
    SPANNING_INTERMEDIATE_SIZE,
    answer,
    packed_adapter,
    save_checkpoint,
)
from multilora_engine.lora.checkpoint_layout import checkpoint_layout
from multilora_engine.lora.layout import PackedAdapter
from multilora_engine.process.client import EngineClient
from multilora_engine.process.paths import owned_socket_path
from multilora_engine.process.supervisor import EngineProcess
from multilora_engine.request import GenerationRequest, SamplingParams, TokenOutput
from multilora_wire.layout import AdapterLayout
from support.checked_engine import Counts

Popularity = Literal["zipf", "uniform"]

EXPECTED_ERRORS = frozenset({"NOT_FOUND", "UNAVAILABLE", "CANCELLED"})
"""The codes for an adapter that is not cached, no room, and a request that its client has cancelled."""

ANSWER_TIMEOUT_S = 120.0
_START_TIMEOUT_S = 300.0
"""An engine on a GPU compiles its kernels first."""

_MAX_PROMPT_TOKENS = 48
_BLOCK_SIZES = {"cpu": 16, "cuda": 64}
_BLOCKS_PER_CLIENT = 2
"""Half of the blocks of the longest requests, so that some are preempted and compute their prompts twice."""


@dataclass
class Tally:
    """The counts of outcomes, by name; `wrong` describes each wrong answer."""

    counts: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, name: str) -> None:
        with self._lock:
            self.counts[name] += 1

    def add(self, verdict: str | None, output: TokenOutput) -> None:
        """One request ended with `output`; `verdict` tells the fault, None if there is none."""
        with self._lock:
            self.counts["requests"] += 1
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


@dataclass(frozen=True)
class Options:
    """One run. device_adapters, host_adapters: the number that fits each tier. has_disk: whether the others are on
    disk. is_spanning: whether the model's MLP is so wide that pieces of its adapters span pages. num_experts: in place
    of the MLP; 0 for none. device: of the engine, "cpu" or "cuda".
    """

    num_turns: int
    num_adapters: int
    num_clients: int
    device_adapters: int
    host_adapters: int
    has_disk: bool
    seed: int = 0
    is_spanning: bool = False
    num_experts: int = 0
    device: str = "cpu"

    @property
    def intermediate_size(self) -> int:
        """Width of the model's MLP, or of an expert."""
        if self.num_experts:
            return EXPERT_INTERMEDIATE_SIZE
        return SPANNING_INTERMEDIATE_SIZE if self.is_spanning else HIDDEN_SIZE


@dataclass(frozen=True)
class Habits:
    """Shares of a client's actions; the rest are plain requests."""

    replace: float = 0.02
    replace_and_ask: float = 0.02
    touch: float = 0.01
    cancel: float = 0.03
    stop: float = 0.02
    base: float = 0.03

    def draw(self, random: Random) -> str:
        """The name of a field, or `ask`."""
        shares = dict(vars(self))
        return random.choices([*shares, "ask"], [*shares.values(), 1 - sum(shares.values())])[0]


class Soak:
    """Clients of one engine process."""

    def __init__(
        self,
        client: EngineClient,
        layout: AdapterLayout,
        options: Options,
        adapters: Sequence[Versions],
        tally: Tally,
    ) -> None:
        """adapters, tally: the clients' knowledge and the outcomes so far; written."""
        self._client = client
        self._layout = layout
        self._options = options
        self._adapters = adapters
        self._tally = tally
        self._request_ids = itertools.count()

    def run(self, popularity: Popularity, num_turns: int) -> None:
        """Let all clients together take `num_turns` turns at the same time. Raises a client's exception."""
        weights = [1 / (number + 1) if popularity == "zipf" else 1 for number in range(len(self._adapters))]
        cumulative = list(itertools.accumulate(weights))
        turns = queue.SimpleQueue[int]()
        for turn in range(num_turns):
            turns.put(turn)

        def act(client_number: int) -> None:
            random = Random(f"{self._options.seed} {popularity} {client_number}")
            with suppress(queue.Empty):
                while True:
                    turns.get_nowait()
                    self._turn(random, random.choices(self._adapters, cum_weights=cumulative)[0])

        with ThreadPoolExecutor(self._options.num_clients) as pool:
            list(pool.map(act, range(self._options.num_clients)))

    def _turn(self, random: Random, versions: Versions) -> None:
        match habit := Habits().draw(random):
            case "replace" | "touch":
                self._upload(versions, is_new=habit == "replace")
            case "base":
                self._ask_base(random)
            case _:
                self._ask(random, versions, habit)

    def _upload(self, versions: Versions, is_new: bool) -> None:
        call = Call()
        with versions.lock:
            version, packed = versions.pack(is_new, self._layout)
            self._client.put_adapter(call, self._next_id(), versions.task_id, packed)
        output = call.wait()
        self._tally.count("replacements" if is_new else "touches")
        self._judge(versions, range(version, version + 1), call, output, num_expected=0)

    def _ask(self, random: Random, versions: Versions, habit: str) -> None:
        """Ask by task id, or with the weights of a new version; and with the weights when they are not cached."""
        prompt = _prompt(random)
        is_known = versions.confirmed >= 0
        is_new = habit == "replace_and_ask"
        output = self._ask_once(prompt, versions, habit, with_weights=is_new, is_new=is_new)
        if output.error_code == "NOT_FOUND":
            self._tally.count("evicted, sent again" if is_known else "sent for the first time")
            self._ask_once(prompt, versions, habit, with_weights=True, is_new=False)

    def _ask_once(
        self, prompt: list[int], versions: Versions, habit: str, with_weights: bool, is_new: bool
    ) -> TokenOutput:
        request, call = self._request(prompt, versions.task_id), Call()
        must_be_found = self._options.has_disk and versions.confirmed >= 0
        if habit == "cancel":
            call.on_first_tokens = call.give_up
        if habit == "stop":
            call.on_first_tokens = lambda: self._client.stop(Call(), self._next_id(), request.request_id)
        with versions.lock:
            possible, adapter = versions.possible, None
            if with_weights:
                version, packed = versions.pack(is_new, self._layout)
                possible, adapter = range(version, version + 1), (versions.task_id, packed)
            self._client.generate(call, [request], request.request_id, adapter)
        output = call.wait()
        self._judge(versions, possible, call, output, must_be_found=must_be_found)
        return output

    def _ask_base(self, random: Random) -> None:
        call = Call()
        self._client.generate(call, [self._request(_prompt(random), None)])
        output = call.wait()
        is_right = output.error_code is None and call.token_ids == BASE_ANSWER and output.lora_digest == ""
        verdict = None if is_right else f"the base model answered {call.token_ids}, {output}"
        self._tally.add(verdict, output)

    def _judge(
        self,
        versions: Versions,
        possible: range,
        call: Call,
        output: TokenOutput,
        num_expected: int = len(BASE_ANSWER),
        must_be_found: bool = False,
    ) -> None:
        """Check that an answer is whole, unless there is a reason, and that its tokens are of a possible version."""
        matching = versions.matching(possible, call.token_ids, output.lora_digest)
        is_lost = must_be_found and output.error_code == "NOT_FOUND"
        is_cut = not is_lost and (output.error_code in EXPECTED_ERRORS or output.finish_reason == "cancelled")
        is_whole = output.error_code is None and len(call.token_ids) == num_expected
        is_right = (is_cut and not call.token_ids) or ((is_cut or is_whole) and bool(matching))
        if is_right and output.error_code is None:
            versions.confirm(matching)
        verdict = f"adapter {versions.number} in {possible} answered {call.token_ids}, {output}"
        self._tally.add(None if is_right else verdict, output)

    def _request(self, prompt: list[int], task_id: int | None) -> GenerationRequest:
        return GenerationRequest(self._next_id(), prompt, SamplingParams(max_tokens=len(BASE_ANSWER)), task_id)

    def _next_id(self) -> str:
        return f"soak-{next(self._request_ids)}"


def _prompt(random: Random) -> list[int]:
    """Runs of one token, so that many prompts start alike."""
    token, length = random.choice(PROMPT_TOKENS), random.randint(2, _MAX_PROMPT_TOKENS)
    return [*[PROMPT_TOKENS[0]] * (length - 1), token]


@contextmanager
def engine(parameters: Mapping[str, str], counts_file: Path) -> Iterator[EngineClient]:
    """Starts an engine process, and ends it; it leaves `Counts` in `counts_file`. Yields a client of it."""
    command = (sys.executable, str(Path(__file__).with_name("checked_engine.py")), str(counts_file))
    with owned_socket_path(os.getpid()) as socket_path:
        process = EngineProcess(parameters, socket_path, command=command)
        process.start()
        client = EngineClient(socket_path)
        try:
            client.wait_until_ready(_START_TIMEOUT_S)
            yield client
            assert process.generation == 1, f"the engine died {process.generation - 1} times"
        finally:
            client.close()
            process.close()


def engine_parameters(directory: Path, layout: AdapterLayout, options: Options) -> dict[str, str]:
    """Tiers that hold as many adapters as `options` says, and a KV cache that is a little too small."""
    samples = [packed_adapter(number, 0, layout).pages.nbytes for number in range(64)]
    kv_block_bytes = _BLOCK_SIZES[options.device] * 2 * NUM_LAYERS * HIDDEN_SIZE * 4
    disk = {"lora_cache_dir": str(directory / "cache")} if options.has_disk else {}
    return {
        "model_path": str(directory / "model"),
        "device": options.device,
        "dtype": "float32",
        "num_threads": "1",
        "max_num_seqs": str(options.num_clients),
        "kv_cache_memory_bytes": str(options.num_clients * _BLOCKS_PER_CLIENT * kv_block_bytes),
        "max_lora_rank": str(MAX_RANK),
        "max_loras": str(options.device_adapters),
        "lora_cache_host_memory_bytes": str(int(statistics.mean(samples) * options.host_adapters)),
        "lora_on_conflict": "replace",
        **disk,
    }


def soak(options: Options, popularities: Sequence[Popularity]) -> tuple[Tally, list[Counts]]:
    """An engine for each popularity, one after the other; the requests are divided between them."""
    tally, counts = Tally(), []
    adapters = [Versions(number) for number in range(options.num_adapters)]
    with tempfile.TemporaryDirectory(prefix="multilora-soak-") as name:
        directory = Path(name)
        checkpoint = save_checkpoint(directory / "model", options.intermediate_size, options.num_experts)
        layout = checkpoint_layout(checkpoint, MAX_RANK, "float32")
        parameters, counts_file = engine_parameters(directory, layout, options), directory / "counts.json"
        for popularity in popularities:
            with engine(parameters, counts_file) as client:
                num_turns = options.num_turns // len(popularities)
                Soak(client, layout, options, adapters, tally).run(popularity, num_turns)
            counts.append(msgspec.json.decode(counts_file.read_bytes(), type=Counts))
    return tally, counts
