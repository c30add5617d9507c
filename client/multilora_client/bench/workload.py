"""The requests of a load, their targets and their times: pure functions of a seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

import numpy as np
import numpy.typing as npt

from multilora_client.adapter import Adapter

Popularity = Literal["uniform", "zipf", "turn"]

_WORDS = (
    "the of and to in is you that it he was for on are as with his they at be this have from or one had by but not "
    "what all were we when your can said there use an each which she do how their if will up other about out many then "
    "them these so some her would make like him into time has look two more write go see number no way could people my "
    "than first water been call who its now find long down day did get come made may part"
)
"""Words common enough to be a token each in most vocabularies."""


@dataclass(frozen=True)
class Target:
    """The adapter that a request asks, a task id for one that is there already, None for the base model.

    content: names the weights, which several task ids may share; "" is the base model.
    """

    adapter: Adapter | int | None = None
    content: str = ""

    @property
    def lora_task_id(self) -> int | None:
        """None for the base model."""
        return self.adapter.lora_task_id if isinstance(self.adapter, Adapter) else self.adapter


@dataclass(frozen=True)
class Job:
    """One request to be sent."""

    target: Target
    prompt: str


def clone_adapters(adapters: Sequence[tuple[str, Adapter]], num_adapters: int, first_task_id: int) -> list[Target]:
    """`num_adapters` task ids that share the weights of a few (name, adapter), in turn; the most popular one first."""
    targets = []
    for number in range(num_adapters):
        name, adapter = adapters[number % len(adapters)]
        targets.append(Target(Adapter(first_task_id + number, adapter.content), name))
    return targets


def uploaded_adapters(num_adapters: int, first_task_id: int) -> list[Target]:
    """`num_adapters` adapters that are there already, under these task ids."""
    return [Target(task_id, f"task {task_id}") for task_id in range(first_task_id, first_task_id + num_adapters)]


def make_jobs(
    targets: Sequence[Target], shares: npt.NDArray[np.float64] | None, prompts: Sequence[str], num_jobs: int, seed: int
) -> list[Job]:
    """Jobs with targets drawn by their shares, or for None in turn, and with the prompts in turn."""
    if shares is None:
        chosen = np.arange(num_jobs) % len(targets)
    else:
        chosen = np.random.default_rng(seed).choice(len(targets), num_jobs, p=shares)
    return [Job(targets[which], prompts[number % len(prompts)]) for number, which in enumerate(chosen)]


def popularity_shares(popularity: Popularity, num_adapters: int, zipf_s: float) -> npt.NDArray[np.float64] | None:
    """Each adapter's share of the requests, most popular first, adding up to 1: equal, or proportional to 1 / k**s.

    None for `turn`, by which no adapter is drawn.
    """
    if popularity == "turn":
        return None
    exponent = zipf_s if popularity == "zipf" else 0.0
    weights = np.arange(1, num_adapters + 1, dtype=np.float64) ** -exponent
    shares: npt.NDArray[np.float64] = weights / weights.sum()
    return shares


def poisson_arrivals(rate: float, num_requests: int, seed: int) -> list[float]:
    """The seconds at which independent requests arrive, `rate` a second on average."""
    gaps = np.random.default_rng(seed).exponential(1 / rate, num_requests)
    return [float(second) for second in np.cumsum(gaps)]


def make_prompts(num_prompts: int, num_words: int, seed: int) -> list[str]:
    """Random words, so that no two prompts share a long prefix."""
    random, words = Random(seed), _WORDS.split()
    return [" ".join(random.choices(words, k=num_words)) for _ in range(num_prompts)]
