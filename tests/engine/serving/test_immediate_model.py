"""The answers of a batch in which one request goes wrong."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray
from support.fake_triton import FakeRequest

from multilora_engine.errors import Unauthenticated
from multilora_engine.serving.engine_link import EngineLink
from multilora_engine.serving.immediate_model import ImmediateModel
from multilora_engine.serving.inputs import InputTensors


class EchoModel(ImmediateModel):
    """Answers with its input, or has a bug."""

    def answer(self, inputs: InputTensors, link: EngineLink) -> dict[str, NDArray[Any]]:
        text = inputs.text("IN", row=0)
        if text == "bug":
            raise RuntimeError("nobody thought of that")
        return {"OUT": np.array([[text]], object)}


class OpenLink:
    """Everybody may ask."""

    def rights(self, request: FakeRequest) -> None: ...


class ClosedLink:
    """Nobody may."""

    def rights(self, request: FakeRequest) -> None:
        raise Unauthenticated


def test_a_request_without_rights_is_not_looked_at() -> None:
    model = EchoModel()
    vars(model)["_link"] = ClosedLink()
    (refused,) = model.execute([FakeRequest({"IN": [["bug"]]}, id="ab12")])
    assert refused.error.code == "INVALID_ARG"
    assert refused.error.message.startswith("[UNAUTHENTICATED] no valid API key")


def test_a_bug_fails_its_own_request_with_a_code_and_the_others_are_answered() -> None:
    model = EchoModel()
    vars(model)["_link"] = OpenLink()
    requests = [FakeRequest({"IN": [[text]]}, id=text, output_names=("OUT",)) for text in ("first", "bug", "last")]
    first, failed, last = model.execute(requests)
    assert [response.arrays["OUT"].item() for response in (first, last)] == ["first", "last"]
    assert failed.error.code == "INTERNAL"
    assert failed.error.message == "[INTERNAL] RuntimeError: nobody thought of that (request bug)"
