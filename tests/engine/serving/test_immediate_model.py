"""The answers of a batch in which one request goes wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from support.fake_triton import FakeRequest
from support.fronts import TIMEOUT_S

from multilora_engine.errors import Unauthenticated
from multilora_engine.request import Sender
from multilora_engine.serving.front import EngineLink
from multilora_engine.serving.immediate_model import ImmediateModel
from multilora_engine.serving.inputs import InputTensors
from multilora_engine.serving.ordered_jobs import LONG_REQUEST_BYTES, OrderedJobs
from multilora_engine.serving.senders import Rights


class EchoModel(ImmediateModel):
    """Answers with its input, or has a bug."""

    def answer(self, inputs: InputTensors, link: EngineLink) -> dict[str, NDArray[Any]]:
        text = inputs.text("IN", row=0)
        if text == "bug":
            raise RuntimeError("nobody thought of that")
        return {"OUT": np.array([[text]], object)}


class Client:
    """Its tasks run at once."""

    def call_soon(self, task: Callable[[], None]) -> None:
        task()


@dataclass
class OpenLink:
    """Everybody may ask."""

    client: Client = field(default_factory=Client)

    def rights(self, request: FakeRequest) -> Rights:
        return Rights(Sender(), min_priority=0)


class ClosedLink(OpenLink):
    """Nobody may."""

    def rights(self, request: FakeRequest) -> Rights:
        raise Unauthenticated


@pytest.fixture
def started() -> Iterator[Callable[[ImmediateModel, OpenLink], ImmediateModel]]:
    """Gives a model its link, and ends the threads of it."""
    with ExitStack() as stack:

        def start(model: ImmediateModel, link: OpenLink) -> ImmediateModel:
            vars(model).update(_link=link, _jobs=OrderedJobs(1, "test"))
            stack.callback(vars(model)["_jobs"].close)
            return model

        yield start


def asked(model: ImmediateModel, **more: Any) -> FakeRequest:
    request = FakeRequest(output_names=("OUT",), **more)
    model.execute([request])
    return request


def test_a_request_without_rights_is_not_looked_at(started: Any) -> None:
    model = started(EchoModel(), ClosedLink())
    (refused,) = asked(model, tensors={"IN": [["bug"]]}, id="ab12").sender.wait()
    assert refused.error is not None
    assert refused.error.code == "INVALID_ARG"
    assert refused.error.message.startswith("[UNAUTHENTICATED] no valid API key")


def test_a_bug_fails_its_own_request_with_a_code_and_the_others_are_answered(started: Any) -> None:
    model = started(EchoModel(), OpenLink())
    requests = [FakeRequest({"IN": [[text]]}, id=text, output_names=("OUT",)) for text in ("first", "bug", "last")]
    model.execute(requests)
    (first,), (failed,), (last,) = (request.sender.wait() for request in requests)
    assert [response.arrays["OUT"].item() for response in (first, last)] == ["first", "last"]
    assert failed.error is not None
    assert failed.error.code == "INTERNAL"
    assert failed.error.message == "[INTERNAL] RuntimeError: nobody thought of that (request bug)"


def test_a_short_request_is_answered_while_a_long_one_is_read(started: Any) -> None:
    may_end = threading.Event()

    class SlowModel(EchoModel):
        def answer(self, inputs: InputTensors, link: EngineLink) -> dict[str, NDArray[Any]]:
            if inputs.num_bytes > LONG_REQUEST_BYTES:
                assert may_end.wait(TIMEOUT_S)
            return super().answer(inputs, link)

    model = started(SlowModel(), OpenLink())
    long = asked(model, tensors={"IN": [["x" * (LONG_REQUEST_BYTES + 1)]]})
    (short,) = asked(model, tensors={"IN": [["hi"]]}).sender.wait()
    assert (short.arrays["OUT"].item(), long.sender.responses) == ("hi", [])
    may_end.set()
    (answered,) = long.sender.wait()
    assert len(answered.arrays["OUT"].item()) == LONG_REQUEST_BYTES + 1
