"""Serving from a GPU, in a dry run on a CPU; and the clients that count wrong answers."""

from __future__ import annotations

import asyncio
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from checkpoints.telling_adapters import BASE_TOKEN, answer
from gpu import serve, serve_steps, telling_load
from gpu.telling_load import STREAMED, UNLOADS, UPLOADS, WHOLE
from multilora_client.errors import MultiloraClientError
from repository import REPOSITORY
from trials.judging_clients import Tally, text_of


def rows_of(output, step: str) -> dict[str, dict[str, object]]:
    return {row["what"]: row for row in map(json.loads, (output / f"{step}.jsonl").read_text().splitlines())}


def run(output, *options: str) -> dict[str, str]:
    """How each step ends."""
    command = [str(REPOSITORY / "scripts" / "gpu_serve"), "--dry-run", "--output", str(output), *options]
    subprocess.run(command, env=os.environ | {"PYTHON": sys.executable}, stdout=subprocess.DEVNULL)
    return {part["name"]: part["end"] for part in json.loads((output / "gpu_serve.json").read_text())["parts"]}


OWN_STEPS = ("packages", "prepare", "answers", "speed")


def check_rows(output, by: str) -> None:
    assert "torch" not in rows_of(output, "packages")["missing"]["note"]
    answers = rows_of(output, "answers")
    assert answers["ready"]["note"] == f"by {by}"
    assert answers["checked answers"]["value"] >= 60
    assert answers["wrong answers"]["value"] == 0
    assert not [name for name in answers if name.startswith("errors")]
    assert all(answers[name]["value"] > 0 for name in (STREAMED, WHOLE, UPLOADS))
    speed = rows_of(output, "speed")
    assert {f"2 at once, {mix}: through the server" for mix in ("all different", "no adapter", "one adapter")} <= set(
        speed
    )
    assert speed["2 at once, all different, engine in this process"]["value"] > 0


def test_every_step_runs_without_tritonserver(tmp_path):
    ends = run(tmp_path, "--no-tritonserver", "--steps", *OWN_STEPS)
    assert ends == dict.fromkeys(OWN_STEPS, "done"), (tmp_path / "gpu_serve.md").read_text()
    check_rows(tmp_path, "the engine's own process")


@pytest.mark.long(reason="a server starts three times, and the interpreter runs the kernels of a step")
def test_every_step_runs_with_tritonserver(tmp_path):
    ends = run(tmp_path)
    assert ends == dict.fromkeys(serve.STEPS, "done"), (tmp_path / "gpu_serve.md").read_text()
    assert rows_of(tmp_path, "kernels_of_a_step")
    check_rows(tmp_path, "tritonserver")
    assert "UNAVAILABLE" in rows_of(tmp_path, "recovery")["right again after an error that sticks"]["note"]


def test_a_step_that_cannot_run_stops_no_other(tmp_path, monkeypatch):
    monkeypatch.setitem(serve.STEPS, "packages", 0.01)
    monkeypatch.setitem(serve.STEPS, "prepare", 0.02)
    results = serve.serve(tmp_path, tmp_path / "work", None, False, ["packages", "prepare"])
    assert [result.end for result in results.values()] == ["stopped after 0 s"] * 2
    assert "## packages: stopped" in (tmp_path / "gpu_serve.md").read_text()


class Telling:
    """A client of a server that answers as it should, but for one adapter."""

    def __init__(self, is_right: bool) -> None:
        self._is_right = is_right
        self._versions: dict[int, int] = {}

    async def ask(
        self, prompt: Sequence[int], max_tokens: int, number: int | None, streams: bool
    ) -> AsyncGenerator[str, None]:
        await asyncio.sleep(0)
        if number is not None and number not in self._versions:
            raise MultiloraClientError("not found", code="NOT_FOUND")
        version = self._versions.get(number, 0) if self._is_right else 0
        tokens = [BASE_TOKEN] * max_tokens if number is None else answer(number, version)
        for piece in [[token] for token in tokens] if streams else [tokens]:
            yield text_of(piece)

    async def upload(self, number: int, version: int) -> None:
        self._versions[number] = version

    async def unload(self, number: int) -> None:
        del self._versions[number]


@pytest.mark.parametrize("is_right", [True, False])
def test_an_answer_of_an_earlier_version_is_wrong(is_right):
    tally = Tally()
    asyncio.run(telling_load._Owner(Telling(is_right), 7, tally).run(goal=400, end=float("inf")))
    assert tally.seen[STREAMED] + tally.seen[WHOLE] == 400
    assert tally.seen[UNLOADS] > 2
    assert bool(tally.wrong) != is_right
    assert not [code for code in tally.seen if code.isupper()]


class Breaking(Telling):
    """It answers again, after so many errors, if ever, by an engine of the same number or of another one.

    next_pid: None for an engine that hangs.
    """

    socket, grpc_url, token = Path("/"), "", ""

    def __init__(self, num_errors: float, next_pid: int | None) -> None:
        super().__init__(is_right=True)
        self._errors_left, self._next_pid = num_errors, next_pid
        self.engine_pid: int | None = 7

    def kill(self, pid: int, number: signal.Signals) -> None:
        assert (pid, number, self._versions) == (7, signal.SIGUSR1, {5: 0})
        self.engine_pid = None

    async def ask(self, *asked: Any, **options: Any) -> AsyncGenerator[str, None]:
        if self.engine_pid is None and self._errors_left:
            self._errors_left -= 1
            raise MultiloraClientError("the engine is starting", code="UNAVAILABLE")
        self.engine_pid = self.engine_pid or self._next_pid
        if self.engine_pid is None:
            await asyncio.Event().wait()
        async for piece in super().ask(*asked, **options):
            yield piece


@pytest.mark.parametrize(
    ("num_errors", "next_pid", "end"),
    [
        (3, 8, "until then 3 UNAVAILABLE"),
        (math.inf, 8, "until then [0-9]+ UNAVAILABLE"),
        (1, 7, "until then 1 UNAVAILABLE"),
        (1, None, "until then 1 UNAVAILABLE, 1 no answer"),
    ],
)
def test_recovery_ends_with_the_answer_of_another_engine_or_with_its_time(monkeypatch, num_errors, next_pid, end):
    served = Breaking(num_errors, next_pid)

    @asynccontextmanager
    async def client_of(*_: object) -> AsyncIterator[Breaking]:
        yield served

    monkeypatch.setattr(serve_steps, "client_of", client_of)
    monkeypatch.setattr(serve_steps.os, "kill", served.kill)
    monkeypatch.setattr(serve_steps, "_ASK_INTERVAL_S", 0.001)
    is_right = (num_errors, next_pid) == (3, 8)
    deadline = math.inf if is_right else time.monotonic() + 0.1
    recovery = serve_steps._break_engine(served, None, 5, deadline)
    if is_right:
        (row,) = asyncio.run(recovery)
        assert row.note == end
    else:
        with pytest.raises(AssertionError, match=end):
            asyncio.run(recovery)
