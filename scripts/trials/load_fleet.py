"""Loads a fleet of Dynamo with adapters by Zipf, kills workers, cuts one off, moves an adapter, and says what clients
were told.

The adapters are those of telling_adapters.py: an answer says which adapter, in which version, gave it.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median, quantiles
from tempfile import TemporaryDirectory
from typing import Annotated
from urllib.error import HTTPError

import numpy as np
import torch
import typer
from rich.console import Console
from rich.table import Table

from checkpoints.telling_adapters import (
    BASE_ANSWER,
    MAX_RANK,
    NUM_PLACES,
    PROMPT_TOKENS,
    adapter_matrices,
    answer,
    save_checkpoint,
)
from multilora_wire.converted_files import CONFIG_FILE, WEIGHTS_FILE
from multilora_wire.module_names import UPSTREAM_NAMES
from servers.dynamo_fleet import DynamoFleet, call
from servers.machines import Machines, can_make_machines
from servers.started_server import sigterm_as_ctrl_c

_BASE = "telling"
_NUM_BEGINNINGS = 20
_BEGINNING_TOKENS = 64
_TAIL_TOKENS = 8
_PARTITION_S = 10
_MODULE_IDS = {name: module_id for module_id, name in UPSTREAM_NAMES.items()}
_PARAMETERS = {
    "kv_cache_memory_bytes": "16MiB",
    "lora_cache_host_memory_bytes": "16MiB",
    "max_num_seqs": "16",
    "num_threads": "1",
    "max_lora_rank": str(MAX_RANK),
}


@dataclass
class Tally:
    """The answers to the clients of a phase. seconds: of each answer. cached, prompt: tokens."""

    name: str
    num_right: int = 0
    num_wrong: int = 0
    num_from_base: int = 0
    errors: Counter[int] = field(default_factory=Counter)
    seconds: list[float] = field(default_factory=list)
    cached: int = 0
    prompt: int = 0


class Load:
    """Clients that ask until they are told to stop. versions: for each adapter, the versions that may answer now."""

    def __init__(self, fleet: DynamoFleet, num_adapters: int, seed: int) -> None:
        self._fleet = fleet
        self._random = Random(seed)
        self._weights = [1 / (rank + 1) for rank in range(num_adapters)]
        self.versions = [{0} for _ in range(num_adapters)]
        self._beginnings = [self._tokens(_BEGINNING_TOKENS) for _ in range(_NUM_BEGINNINGS)]
        self._lock = threading.Lock()

    def run(self, tally: Tally, num_requests: int, num_clients: int) -> None:
        """Have `num_clients` clients ask `num_requests` times in all."""
        with ThreadPoolExecutor(num_clients) as pool:
            for done in [pool.submit(self._ask, tally) for _ in range(num_requests)]:
                done.result()

    def _ask(self, tally: Tally) -> None:
        with self._lock:
            (number,) = self._random.choices(range(len(self._weights)), self._weights)
            prompt = self._random.choice(self._beginnings) + self._tokens(_TAIL_TOKENS)
            expected = [answer(number, version) for version in self.versions[number]]
        body = {
            "model": adapter_name(number),
            "prompt": prompt,
            "max_tokens": NUM_PLACES,
            "temperature": 0,
            "logprobs": 1,
            "return_tokens_as_token_ids": True,
        }
        started = time.perf_counter()
        try:
            told = call(f"{self._fleet.url}/v1/completions", body)
        except HTTPError as error:
            with self._lock:
                tally.errors[error.code] += 1
            return
        seconds = time.perf_counter() - started
        tokens = [int(token.removeprefix("token_id:")) for token in told["choices"][0]["logprobs"]["tokens"]]
        with self._lock:
            # An adapter that has moved meanwhile may answer either way.
            expected += [answer(number, version) for version in self.versions[number]]
            tally.num_right += tokens in expected
            tally.num_wrong += tokens not in expected
            tally.num_from_base += tokens == BASE_ANSWER
            tally.seconds.append(seconds)
            tally.prompt += told["usage"]["prompt_tokens"]
            tally.cached += told["usage"]["prompt_tokens_details"]["cached_tokens"] or 0

    def _tokens(self, number: int) -> list[int]:
        return self._random.choices(PROMPT_TOKENS, k=number)


def main(
    num_workers: Annotated[int, typer.Option(min=3, help="Workers beside the front.")] = 3,
    num_adapters: Annotated[int, typer.Option(min=2, help="Adapters; the n-th is asked for 1/n as often.")] = 100,
    num_requests: Annotated[int, typer.Option(min=1, help="Of each phase.")] = 500,
    num_clients: Annotated[int, typer.Option(min=1, help="That ask at the same time.")] = 8,
    namespaces: Annotated[bool, typer.Option(help="Give each worker a network namespace, and cut one off.")] = True,
    router_mode: Annotated[str, typer.Option(help="Of Dynamo's front: kv, round-robin or random.")] = "kv",
    seed: Annotated[int, typer.Option(help="Of what is asked.")] = 1,
) -> None:
    """Start a fleet, load it, move an adapter, kill two workers, cut one off; exit status 1 after a wrong answer."""
    console = Console()
    if namespaces and not can_make_machines():
        console.print("This user may not make network namespaces: run as root, or with --no-namespaces.")
        raise typer.Exit(2)
    with TemporaryDirectory() as directory, ExitStack() as resources:
        model, adapters = save_checkpoint(Path(directory) / "model"), Path(directory) / "adapters"
        # Dynamo's front takes no model without a template for chats and an end token, whether they are used or not.
        (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": PROMPT_TOKENS[-1]}))
        for number in range(num_adapters):
            save_adapter(adapters / adapter_name(number), number, version=0)
        options = ("--router-mode", router_mode, "--migration-limit", "3")
        resources.enter_context(sigterm_as_ctrl_c())
        machines = resources.enter_context(Machines(num_workers)) if namespaces else None
        with DynamoFleet(model, _BASE, options, machines=machines) as fleet:
            tallies = list(phases(fleet, adapters, num_workers, num_adapters, num_requests, num_clients, seed))
    console.print(table_of(tallies))
    if any(tally.num_wrong for tally in tallies):
        raise typer.Exit(1)


def phases(
    fleet: DynamoFleet,
    adapters: Path,
    num_workers: int,
    num_adapters: int,
    num_requests: int,
    num_clients: int,
    seed: int,
) -> Iterator[Tally]:
    """Hurt the fleet between and during phases of load; the tally of each phase's clients."""
    parameters = {**_PARAMETERS, "lora_sources": json.dumps([{"source": "directory", "root": str(adapters)}])}
    names = {adapter_name(number) for number in range(num_adapters)}
    for _ in range(num_workers):
        fleet.start_worker(parameters)
    fleet.wait_ready(num_workers)
    fleet.wait_until(lambda: names <= set(fleet.models()))
    load = Load(fleet, num_adapters, seed)

    def move() -> None:
        load.versions[0].add(1)
        save_adapter(adapters / adapter_name(0), 0, version=1)
        body = {"lora_name": adapter_name(0), "source": {"uri": (adapters / adapter_name(0)).as_uri()}}
        for worker in fleet.workers:
            call(f"{worker.system_url}/v1/loras", body)
        load.versions[0].discard(0)

    def replace() -> None:
        fleet.start_worker(parameters)
        fleet.wait_ready(1)

    def cut_off() -> None:
        machine = fleet.workers[2].machine
        assert machine is not None
        machine.cut()
        time.sleep(_PARTITION_S)
        machine.join()

    steps: Mapping[str, Callable[[], None]] = {
        "all workers": lambda: None,
        "the most asked adapter moves to other weights": move,
        "kill -9 of a worker": fleet.workers[0].kill,
        "another worker comes": replace,
        "kill -9 of a second worker": fleet.workers[1].kill,
        "a third one comes": replace,
        f"a worker is cut off for {_PARTITION_S} s": cut_off,
        "after that": lambda: None,
    }
    for name, hurt in steps.items():
        if hurt is cut_off and fleet.workers[2].machine is None:
            continue
        tally = Tally(name)
        with ThreadPoolExecutor(1) as pool:
            running = pool.submit(load.run, tally, num_requests, num_clients)
            hurt()
            running.result()
        yield tally


def adapter_name(number: int) -> str:
    return f"a{number:03}"


def save_adapter(folder: Path, number: int, version: int) -> None:
    """Write an adapter as a converted one, in the place of another version of it."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = adapter_matrices(number, version)
    weights = torch.stack([torch.cat([row.a.flatten(), row.b.flatten()]) for row in rows])
    config = [[_MODULE_IDS[row.module], row.layer, len(row.a), 0] for row in rows]
    np.save(folder / WEIGHTS_FILE, weights.numpy())
    np.save(folder / CONFIG_FILE, np.array(config, np.int32))


def table_of(tallies: list[Tally]) -> Table:
    table = Table("phase", "right", "wrong", "from the base", "errors", "p50 ms", "p95 ms", "prefix hits", box=None)
    for tally in tallies:
        milliseconds = [seconds * 1e3 for seconds in tally.seconds]
        table.add_row(
            tally.name,
            str(tally.num_right),
            str(tally.num_wrong),
            str(tally.num_from_base),
            ", ".join(f"{number} x {code}" for code, number in sorted(tally.errors.items())) or "0",
            f"{median(milliseconds):.0f}",
            f"{quantiles(milliseconds, n=20)[-1]:.0f}",
            f"{tally.cached / max(1, tally.prompt):.0%}",
        )
    return table
