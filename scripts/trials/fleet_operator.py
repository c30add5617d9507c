"""An operator at work on the adapters of a fleet: loads, moves and unloads adapters in every possible way."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any
from urllib.error import URLError

import numpy as np
import torch

from checkpoints.telling_adapters import adapter_matrices
from multilora_client import Adapter, AdapterTensors, Client, MultiloraClientError
from multilora_engine.lora.names import task_id_of
from multilora_wire.converted_files import CONFIG_FILE, WEIGHTS_FILE
from multilora_wire.module_names import UPSTREAM_NAMES
from servers.dynamo_fleet import DynamoFleet, Worker, call
from trials.fleet_judge import ABSENT, Versions, adapter_name

_PAUSE_S = 0.25
_MODULE_IDS = {name: module_id for module_id, name in UPSTREAM_NAMES.items()}
_SHARE_OF_UNLOADS = 0.5
_ELSEWHERE = "moved/to/here"
"""Folders so deep below a source have no name: they are loaded by their paths alone."""


class FleetOperator:
    """done: the operations so far, by name; failed operations with their error.

    Every fifth adapter is known by its path alone: `load_first` loads these, and they are unloaded and loaded again.
    The other adapters are in the sources in version 0. A move sends new weights through Triton's door, or loads another
    path by a worker's `/v1/loras` or the operation `load`.
    """

    def __init__(
        self, fleet: DynamoFleet, client: Client, versions: Versions, adapters: Path, num_adapters: int, seed: int
    ) -> None:
        self._fleet = fleet
        self._client = client
        self._versions = versions
        self._adapters = adapters
        self._num_adapters = num_adapters
        self._random = Random(seed)
        self._next_version = dict.fromkeys(range(num_adapters), 1)
        self._lock = threading.Lock()
        self._not: Worker | None = None
        self._is_cut_off = False
        self._is_over = threading.Event()
        self.done: Counter[str] = Counter()

    def load_first(self) -> None:
        """Load the adapters that the sources do not have under their names."""
        for number in filter(is_loaded_by_hand, range(self._num_adapters)):
            self._carry_out("load at a worker", number, 0)
            self._versions.must(number, 0)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Operate, one operation after the other, until the context ends."""
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._is_over.set()
            thread.join()

    @contextmanager
    def without(self, worker: Worker, is_cut_off: bool = False) -> Iterator[None]:
        """Ask all workers but this one, from the end of the present operation on."""
        with self._lock:
            self._not, self._is_cut_off = worker, is_cut_off
        try:
            yield
        finally:
            with self._lock:
                self._not, self._is_cut_off = None, False

    def _run(self) -> None:
        while not self._is_over.wait(_PAUSE_S):
            with self._lock:
                self._operate()

    def _operate(self) -> None:
        number = self._random.randrange(self._num_adapters)
        if self._versions.now(number) == {ABSENT}:
            kind = "load"
        elif is_loaded_by_hand(number) and self._random.random() < _SHARE_OF_UNLOADS:
            kind = "unload"
        else:
            kind = "move"
        ways = (
            ["at a worker", "through Triton"] if kind != "move" else ["at a worker", "through Triton", "with weights"]
        )
        operation = f"{kind} {self._random.choice(ways)}"
        version = ABSENT if kind == "unload" else self._next_version[number]
        if version != ABSENT:
            self._next_version[number] += 1
        self._versions.may(number, version)
        try:
            self._carry_out(operation, number, version)
        except (URLError, TimeoutError, MultiloraClientError, RuntimeError) as error:
            # The operation may have succeeded or not: both versions may answer from now on.
            self.done[f"{operation} failed ({getattr(error, 'code', '') or error})"] += 1
        else:
            if kind == "load":
                # Dynamo's front refuses the name until its discovery has told it.
                self._fleet.wait_until(lambda: adapter_name(number) in self._fleet.models())
            self._versions.must(number, version, self._is_cut_off)
            self.done[operation] += 1

    def _carry_out(self, operation: str, number: int, version: int) -> None:
        name = adapter_name(number)
        path = self._adapters / _ELSEWHERE / f"{name}-{version}"
        if version != ABSENT and operation != "move with weights":
            save_adapter(path, number, version)
        match operation:
            case "move with weights":
                self._client.upload(_sent(number, version))
            case "move through Triton" | "load through Triton":
                self._client.load_adapter(name, path=str(path))
            case "unload through Triton":
                self._client.unload_adapter(name)
            case "unload at a worker":
                _check(call(f"{self._worker().system_url}/v1/loras/{name}", method="DELETE"))
            case _:
                body = {"lora_name": name, "source": {"uri": path.as_uri()}}
                _check(call(f"{self._worker().system_url}/v1/loras", body))

    def _worker(self) -> Worker:
        alive = [one for one in self._fleet.ready_workers() if one is not self._not]
        return self._random.choice(alive)


def is_loaded_by_hand(number: int) -> bool:
    """Whether the sources lack the adapter under its name."""
    return number % 5 == 4


def save_adapter(folder: Path, number: int, version: int) -> Path:
    """Write an adapter into a folder, as a converted one."""
    folder.mkdir(parents=True, exist_ok=True)
    weights, config = _tensors(number, version)
    np.save(folder / WEIGHTS_FILE, weights)
    np.save(folder / CONFIG_FILE, config)
    return folder


def _sent(number: int, version: int) -> Adapter:
    weights, config = _tensors(number, version)
    return Adapter(task_id_of(adapter_name(number)), AdapterTensors(weights, config, "FP32"))


def _tensors(number: int, version: int) -> tuple[Any, Any]:
    rows = adapter_matrices(number, version)
    weights = torch.stack([torch.cat([row.a.flatten(), row.b.flatten()]) for row in rows])
    config = np.array([[_MODULE_IDS[row.module], row.layer, len(row.a), 0] for row in rows], np.int32)
    return weights.numpy(), config


def _check(told: dict[str, str]) -> None:
    if told["status"] != "success":
        raise RuntimeError(told["message"])
