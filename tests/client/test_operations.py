"""The operator's calls, blocking and asyncio, from their arguments to the JSON and back."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import msgspec
import pytest

from multilora_client import (
    AdapterEvent,
    AdapterEvents,
    AdapterInfo,
    AdapterLayout,
    AsyncClient,
    AsyncMockTransport,
    Client,
    InferRequest,
    MockTransport,
    ModelInfo,
    Response,
    ServerFault,
)
from multilora_client.tensors import flat_values
from multilora_wire.sites import decoder_sites

PIRATE = {
    "lora_task_id": 2**64 - 1,
    "name": "pirate",
    "digest": "ab" * 32,
    "status": "READY_FOR_USE",
    "location": "DEVICE",
    "bytes": 2_500_000,
    "ranks": [4, 8],
    "num_pins": 1,
    "is_pinned": True,
    "last_used_s": 12.5,
    "num_hits": 3,
}
INFO = AdapterInfo(**{**PIRATE, "ranks": (4, 8)})  # type: ignore[arg-type]
LAYOUT = AdapterLayout(decoder_sites(2, 64, 64, 32, 128), 64, "float32", 262144)
MODEL = ModelInfo("SmolLM2-135M-Instruct", 8192, 49152, "1.2.3")
EVENT = {"kind": "evicted", "lora_task_id": 7, "digest": "cd", "time_ns": 10**18, "instance": "h:1"}
Answer = dict[str, Any] | list[Any] | str


def call(answer: Answer, operate: Callable[[Any], Any], *, is_async: bool) -> tuple[dict[str, Any], Any]:
    """(the operation that the server got, what the client made of its answer)."""
    received: list[InferRequest] = []

    def handler(request: InferRequest) -> list[Response]:
        received.append(request)
        return [Response({"response": [answer if isinstance(answer, str) else json.dumps(answer)]})]

    result = operate(
        AsyncClient(transport=AsyncMockTransport(handler)) if is_async else Client(transport=MockTransport(handler))
    )
    if inspect.isawaitable(result):
        result = asyncio.run(_wait(result))
    (request,) = received
    assert request.model == "adapters"
    (text,) = flat_values("BYTES", request.inputs["request"].data)
    return json.loads(text), result


async def _wait(result: Any) -> Any:
    return await result


both = pytest.mark.parametrize("is_async", [False, True], ids=["blocking", "asyncio"])


@both
@pytest.mark.parametrize(
    ("operate", "operation", "answer", "expected"),
    [
        (lambda client: client.list_adapters(), {"operation": "list"}, {"adapters": [PIRATE]}, [INFO]),
        (lambda c: c.pin_adapter(7), {"operation": "pin", "lora_task_id": 7}, {"adapter": PIRATE}, INFO),
        (lambda c: c.unpin_adapter("pirate"), {"operation": "unpin", "name": "pirate"}, {"adapter": PIRATE}, INFO),
        (
            lambda c: c.load_adapter("pirate", "hub"),
            {"operation": "load", "name": "pirate", "source": "hub"},
            {"adapter": PIRATE},
            INFO,
        ),
        (
            lambda c: c.load_adapter("pirate", path="team/pirate"),
            {"operation": "load", "name": "pirate", "source": "", "path": "team/pirate"},
            {"adapter": PIRATE},
            INFO,
        ),
        *(
            (
                lambda c, name=name: getattr(c, f"{name}_adapter")(7, expected_digest="ab"),
                {"operation": name, "lora_task_id": 7, "expected_digest": "ab"} | more,
                {"adapter": PIRATE},
                INFO,
            )
            for name, more in (("load", {"source": ""}), ("unload", {}), ("pin", {}), ("unpin", {}))
        ),
        (
            lambda c: c.combine_adapters("both", {7: 1.0}, ""),
            {
                "operation": "combine",
                "name": "both",
                "members": [{"lora_task_id": 7, "weight": 1.0}],
                "expected_digest": "",
            },
            {"adapter": PIRATE},
            INFO,
        ),
        (lambda c: c.describe_model(), {"operation": "describe"}, msgspec.to_builtins(MODEL), MODEL),
        (lambda c: c.unload_adapter(0), {"operation": "unload", "lora_task_id": 0}, {"adapter": PIRATE}, INFO),
        (
            lambda client: client.adapter_events(3),
            {"operation": "events", "since": 3},
            {"events": [EVENT], "last": 4, "num_missed": 0},
            AdapterEvents([AdapterEvent("evicted", 7, "cd", 10**18, "h:1")], 4, 0),
        ),
        (lambda client: client.adapter_stats(), {"operation": "stats"}, {"tiers": {}}, {"tiers": {}}),
        (lambda c: c.adapter_layout(), {"operation": "layout"}, {"layout": asdict(LAYOUT)}, LAYOUT),
    ],
)
def test_an_operation_reaches_the_server_and_its_answer_comes_back(
    operate: Callable[[Any], Any], operation: dict[str, Any], answer: Answer, expected: Any, is_async: bool
) -> None:
    assert call(answer, operate, is_async=is_async) == (operation, expected)


def test_a_newer_server_may_say_more(fake_triton: Any) -> None:
    fake_triton.report = {"adapters": [{**PIRATE, "colour": "black"}]}
    with Client(fake_triton.url) as client:
        assert client.list_adapters() == [INFO]


def test_a_layout_of_another_version_is_not_misread() -> None:
    answer = {"layout": asdict(LAYOUT) | {"version": LAYOUT.version + 1}}
    with pytest.raises(
        ServerFault, match=f"layout has version {LAYOUT.version + 1}, this client knows {LAYOUT.version}"
    ):
        call(answer, lambda client: client.adapter_layout(), is_async=False)


@pytest.mark.parametrize("answer", ["", "oops", [1]])
def test_an_answer_that_is_no_json_object_is_the_servers_fault(answer: Answer) -> None:
    with pytest.raises(ServerFault, match="the model adapters answered with"):
        call(answer, lambda client: client.adapter_stats(), is_async=False)
