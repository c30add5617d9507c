"""Many clients of the real engine process, and far more adapters than fit: no answer is of the wrong adapter."""

from __future__ import annotations

import pytest
import torch
from support.adapter_soak import Call, Options, Soak, Tally, Versions, soak

from checkpoints.telling_adapters import MAX_RANK, answer, save_checkpoint
from multilora_engine.lora.checkpoint_layout import checkpoint_layout
from multilora_engine.request import TokenOutput
from multilora_wire.layout import AdapterLayout

_ALL = pytest.mark.long(reason="each case starts two engines; the others have every part of this one")


@pytest.mark.parametrize(
    ("has_disk", "is_spanning"),
    [
        pytest.param(False, False, id="sent again"),
        pytest.param(True, True, id="from disk, spanning pages"),
        pytest.param(True, False, id="from disk", marks=_ALL),
        pytest.param(False, True, id="sent again, spanning pages", marks=_ALL),
    ],
)
def test_every_answer_is_of_the_right_adapter_and_version(has_disk: bool, is_spanning: bool) -> None:
    options = Options(400, 60, 16, device_adapters=4, host_adapters=20, has_disk=has_disk, is_spanning=is_spanning)
    tally, counts = soak(options, ["zipf", "uniform"])
    assert tally.wrong == []
    assert tally.counts["right"] > 320
    assert set(tally.errors) <= {"NOT_FOUND", "CANCELLED"}
    assert (tally.counts["evicted, sent again"] == 0) is has_disk
    assert sum(c.loras.host.evictions for c in counts) > 50
    assert (sum(c.loras.disk.hits for c in counts) > 50) is has_disk
    assert sum(c.loras.waits for c in counts) > 50
    assert sum(c.loras.replacements for c in counts) > 0
    for c in counts:
        assert 0 < c.loras.device.bytes_used <= c.loras.host.bytes_used
        assert c.loras.host.bytes_used > 0.5 * c.loras.host.bytes_total
        assert (c.loras.disk.bytes_used > 0) is has_disk


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
@pytest.mark.parametrize("has_disk", [False, True])
def test_every_answer_of_a_gpu_is_of_the_right_adapter_and_version(has_disk: bool) -> None:
    options = Options(4000, 200, 64, device_adapters=16, host_adapters=60, has_disk=has_disk, device="cuda")
    tally, counts = soak(options, ["zipf", "uniform"])
    assert tally.wrong == []
    assert tally.counts["right"] > 3200
    assert set(tally.errors) <= {"NOT_FOUND", "CANCELLED"}
    assert sum(c.loras.waits for c in counts) > 50
    assert sum(c.loras.replacements for c in counts) > 0


@pytest.mark.parametrize("num_adapters", [40, pytest.param(200, marks=_ALL)])
def test_adapters_over_all_experts_answer_through_their_own_experts_alone(num_adapters: int) -> None:
    options = Options(2 * num_adapters, num_adapters, 6, 4, host_adapters=10, has_disk=True, num_experts=6)
    tally, counts = soak(options, ["uniform"])
    assert tally.wrong == []
    assert tally.counts["right"] > 1.2 * num_adapters
    assert set(tally.errors) <= {"NOT_FOUND", "CANCELLED"}
    assert sum(c.loras.host.evictions for c in counts) > num_adapters / 2


@pytest.fixture(scope="module")
def layout(tmp_path_factory: pytest.TempPathFactory) -> AdapterLayout:
    return checkpoint_layout(save_checkpoint(tmp_path_factory.mktemp("telling")), MAX_RANK, "float32")


class _ScriptedClient:
    """Answers every request at once with the next of `outputs`."""

    def __init__(self, outputs: list[TokenOutput]) -> None:
        self._outputs = iter(outputs)

    def generate(self, listener: Call, *_: object) -> None:
        listener.on_output(next(self._outputs))


def output(token_ids: list[int], finish_reason: str | None = "length", **fields: str) -> TokenOutput:
    return TokenOutput("r", token_ids, "", finish_reason, **fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "is_wrong"),
    [
        (output(answer(5, 2)), False),
        (output(answer(5, 1)), False),
        (output(answer(5, 0)), True),
        (output(answer(5, 3)), True),
        (output(answer(6, 2)), True),
        (output(answer(5, 2)[:4]), True),
        (output(answer(5, 2)[:4], "cancelled"), False),
        (output(answer(6, 2)[:4], "cancelled"), True),
        (output(answer(5, 2), lora_digest="of another"), True),
        (output([], None, error_code="UNAVAILABLE"), False),
        (output([], None, error_code="INTERNAL"), True),
        (output([], None, error_code="NOT_FOUND"), True),
    ],
)
def test_a_wrong_answer_is_seen(layout: AdapterLayout, given: TokenOutput, is_wrong: bool) -> None:
    """Adapter 5 has been in version 1 for certain, and version 2 has been submitted. Nothing may get lost."""
    options, tally = Options(1, 1, 1, 1, 1, has_disk=True), Tally()
    versions = Versions(5)
    versions.pack(True, layout)
    versions.pack(True, layout)
    versions.confirm([1])
    versions.pack(True, layout)
    soak = Soak(_ScriptedClient([given]), layout, options, [versions], tally)  # type: ignore[arg-type]
    soak._ask_once([100], versions, "ask", with_weights=False, is_new=False)
    assert bool(tally.wrong) is is_wrong
