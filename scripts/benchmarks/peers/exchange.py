"""How benchmarks ask a program: a line of JSON for the job, then one for each case, and as many lines back.

Standard library only: each program runs in the environment of its engine.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO


@dataclass(frozen=True)
class Job:
    """The set-up of one contestant.

    model: directory of a Hugging Face checkpoint, or a GGUF file. adapters: directories of PEFT adapters, all of
    `rank`; empty for an engine that serves none. dtype: of its arithmetic, float32 or bfloat16. options: further ones
    of an engine. scratch: a directory for what this run leaves. converted: one for files made of this model, kept for
    later runs. gguf: files of the model for llama.cpp, by dtype; the file DIRECTORY.gguf belongs to each adapter then.
    """

    model: str
    adapters: list[str]
    rank: int
    dtype: str
    num_threads: int
    max_num_seqs: int
    max_model_len: int
    scratch: str
    converted: str
    options: dict[str, str] = field(default_factory=dict)
    gguf: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Case:
    """Prompts that come at once, each answered greedily with exactly `num_tokens` tokens.

    adapters: for each prompt the place of its adapter in `Job.adapters`, None for the base model.
    """

    name: str
    prompts: list[list[int]]
    adapters: list[int | None]
    num_tokens: int


@dataclass(frozen=True)
class Answer:
    """tokens: of each prompt's answer. times: seconds from the beginning of the case until each token was there."""

    tokens: list[list[int]]
    times: list[list[float]]


class Recorder:
    """Collects the tokens of one case as they come."""

    def __init__(self, num_prompts: int) -> None:
        self._started = time.perf_counter()
        self._tokens: list[list[int]] = [[] for _ in range(num_prompts)]
        self._times: list[list[float]] = [[] for _ in range(num_prompts)]

    def add(self, prompt: int, tokens: list[int]) -> None:
        """New tokens of one prompt's answer."""
        now = time.perf_counter() - self._started
        self._tokens[prompt] += tokens
        self._times[prompt] += [now] * len(tokens)

    def answer(self) -> Answer:
        """All tokens of the case."""
        return Answer(self._tokens, self._times)


def serve(start: Callable[[Job], Callable[[Case], Answer]]) -> None:
    """Read a job, then cases, until the input ends. `start` loads the engine, and gives what answers a case."""
    output = _own_output()
    answer = start(Job(**json.loads(sys.stdin.readline())))
    _send(output, {"is_ready": True})
    for line in sys.stdin:
        _send(output, asdict(answer(Case(**json.loads(line)))))


def made(path: Path, make: Callable[[Path], None]) -> Path:
    """`path`, a file or a folder, written by `make` where it is not there. Nobody ever finds a part of it."""
    if not path.exists():
        unfinished = path.with_name(f"unfinished-{path.name}")
        if unfinished.is_dir():
            shutil.rmtree(unfinished)
        path.parent.mkdir(parents=True, exist_ok=True)
        make(unfinished)
        unfinished.rename(path)
    return path


def _own_output() -> TextIO:
    """Standard output for the answers alone: engines print to it, too, and get standard error."""
    output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return output


def _send(output: TextIO, message: dict[str, Any]) -> None:
    output.write(json.dumps(message) + "\n")
    output.flush()
