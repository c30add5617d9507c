"""Requests to a worker's engine, which may have another version of an adapter than the fleet knows."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from support.fronts import generation_request

from multilora_engine.dynamo.engine_calls import EngineCalls
from multilora_engine.dynamo.streams import OpenStreams
from multilora_engine.errors import AdapterNotFound, EngineUnavailable, RelayedError
from multilora_engine.process.messages import error_output
from multilora_engine.request import GenerationRequest, TokenOutput

NUMBER = 7


class Worker:
    """An engine that answers with the digest of what it has, and uploads that are brought to it. log: in order.

    in_engine: empty for nothing. known: of the upload, empty for none. given: what the engine was given last.
    """

    has_engine = True

    def __init__(self, in_engine: str, known: str, given: str = "") -> None:
        self.in_engine = in_engine
        self.known = known
        self.given = given
        self.log: list[str] = []
        self.learns = ""
        self.forgets = False

    def call_soon(self, task: Any) -> None:
        task()

    def generate(self, listener: Any, requests: list[GenerationRequest], *_: Any, **__: Any) -> None:
        (request,) = requests
        self.log.append(f"asked {self.in_engine}")
        if not self.in_engine:
            listener.on_output(error_output("r", AdapterNotFound(request.task_id)))
        else:
            if self.learns:
                self.known = self.in_engine = self.learns
            listener.on_output(TokenOutput("r", [1], "", lora_digest=self.in_engine))
            listener.on_output(TokenOutput("r", [2], "", finish_reason="length", lora_digest=self.in_engine))
        listener.flush()

    def digest(self, task_id: object) -> str:
        return self.known

    def is_behind(self, task_id: object) -> bool:
        return bool(self.known) and self.given != self.known

    async def bring(self, task_id: object, is_lost: bool = False) -> bool:
        if not self.known:
            return False
        self.log.append(f"brought {self.known}")
        self.in_engine = self.given = self.known
        if self.forgets:
            self.in_engine = "of the sources"
        return True


def answers(worker: Worker, task_id: int | None = NUMBER) -> Sequence[tuple[list[int], str]]:
    async def run() -> list[tuple[list[int], str]]:
        calls = EngineCalls(worker, asyncio.get_running_loop(), OpenStreams(), worker)  # type: ignore[arg-type]
        request = generation_request("r", [5], lora_task_id=task_id)
        outputs = [output async for output in calls.generate(request, "call", "", "")]
        return [(output.token_ids, output.lora_digest) for output in outputs if output is not None]

    return asyncio.run(asyncio.wait_for(run(), 30))


def test_a_later_upload_is_brought_before_the_request() -> None:
    worker = Worker(in_engine="old", known="new", given="old")
    assert answers(worker) == [([1, 2], "new")]
    assert worker.log == ["brought new", "asked new"]


def test_an_upload_that_the_engine_has_lost_is_brought_again() -> None:
    worker = Worker(in_engine="", known="new", given="new")
    assert answers(worker) == [([1, 2], "new")]
    assert worker.log == ["asked ", "brought new", "asked new"]


def test_what_the_sources_have_is_no_answer_where_an_upload_is_known() -> None:
    worker = Worker(in_engine="of the sources", known="new", given="new")
    assert answers(worker) == [([1, 2], "new")], "and nothing of the other one"
    assert worker.log == ["asked of the sources", "brought new", "asked new"]


def test_an_engine_that_loses_an_upload_twice_does_not_answer_with_another_version() -> None:
    worker = Worker(in_engine="of the sources", known="new", given="new")
    worker.forgets = True
    with pytest.raises(EngineUnavailable, match="try again"):
        answers(worker)
    assert worker.log == ["asked of the sources", "brought new", "asked of the sources"]


def test_an_upload_that_comes_meanwhile_may_answer() -> None:
    worker = Worker(in_engine="new", known="new", given="new")
    worker.learns = "later"
    assert answers(worker) == [([1, 2], "later")]
    assert worker.log == ["asked new"]


def test_what_nobody_has_sent_is_the_engine_s_business() -> None:
    assert answers(Worker(in_engine="of the sources", known="")) == [([1, 2], "of the sources")]
    assert answers(Worker(in_engine="x", known=""), task_id=None) == [([1, 2], "x")]
    with pytest.raises(RelayedError, match="LoRA task 7 not found in cache"):
        answers(Worker(in_engine="", known=""))
