"""The second stream of captured steps: a replay gives the same whenever that stream's work runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from support.gpu_path import kernels_by_plain_torch
from support.lora_cases import FUSED, Case, make_case
from support.recorded_graph import record

from benchmarks.lora_workloads import LinearShape
from multilora_kernels import PackedWeight, activated, lora_linear, packed_linear, streams
from multilora_kernels.segments import rows_of

CPU = torch.device("cpu")
SQUARE = LinearShape(in_features=40, slice_sizes=(40, 40))


def _linears(case: Case, weights: list[PackedWeight], x: torch.Tensor, out: torch.Tensor) -> None:
    """Two linears, the second of the first's result."""
    for weight in weights:
        y = lora_linear(x, weight, case.tables, 0, FUSED.slice_sizes, case.segments)
        x = y[:, : FUSED.in_features].tanh()
    out.copy_(y)


def _activations(case: Case, weights: list[PackedWeight], x: torch.Tensor, out: torch.Tensor) -> None:
    """Two linears of gate and up, the second of the activations of the first."""
    for weight in weights:
        product = partial(packed_linear, x, weight)
        y = activated(product, x, case.tables, 0, SQUARE.slice_sizes[0], rows_of(case.mapping), "silu")
        x = y.tanh()
    out.copy_(y)


def _replayed(
    monkeypatch: pytest.MonkeyPatch,
    is_second_first: bool,
    layers: Callable[..., None] = _linears,
    shape: LinearShape = FUSED,
    num_outputs: int = FUSED.out_features,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The result of new inputs by a replay, and by the operators one after the other."""
    kernels_by_plain_torch(monkeypatch)
    case = make_case("distinct", 6, shape)
    rows = torch.randn(2, shape.out_features, shape.in_features)
    weights = [PackedWeight(weight, shape.out_features) for weight in rows]
    x, out, expected = torch.randn(6, shape.in_features), *torch.empty(2, 6, num_outputs)
    replay = record(lambda: layers(case, weights, x, out), is_second_first=is_second_first)
    x.copy_(torch.randn(6, shape.in_features))
    replay()
    layers(case, weights, x, expected)
    return out, expected


@pytest.mark.parametrize("is_second_first", [True, False])
def test_a_replay_gives_the_same_whether_the_second_stream_is_early_or_late(
    monkeypatch: pytest.MonkeyPatch, is_second_first: bool
) -> None:
    assert torch.equal(*_replayed(monkeypatch, is_second_first))
    assert torch.equal(*_replayed(monkeypatch, is_second_first, _activations, SQUARE, SQUARE.in_features))


@pytest.mark.parametrize(("waits_kept", "is_second_first"), [(0, True), (1, False)])
def test_without_either_wait_a_replay_gives_something_else(
    monkeypatch: pytest.MonkeyPatch, waits_kept: int, is_second_first: bool
) -> None:
    # Of each linear the second stream waits first, and then the first waits for the second.
    num_waits = 0

    def lost(event: object) -> None:
        nonlocal num_waits
        num_waits += 1
        if num_waits % 2 == waits_kept:
            wait(event)

    beside = streams.beside

    def beside_without(*arguments: object) -> object:
        nonlocal wait
        wait = streams._wait
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(streams, "_wait", lost)
            return beside(*arguments)  # type: ignore[arg-type]

    wait = streams._wait
    monkeypatch.setattr("multilora_kernels.apply.beside", beside_without)
    actual, expected = _replayed(monkeypatch, is_second_first)
    assert not torch.equal(actual, expected)


def test_launches_of_two_streams_share_no_counter(monkeypatch: pytest.MonkeyPatch) -> None:
    of_stream = []
    for is_second in (False, True):
        monkeypatch.setattr(streams, "_is_second", lambda device, is_second=is_second: is_second)
        of_stream.append(streams.counters(CPU))
        assert streams.counters(CPU).data_ptr() == of_stream[-1].data_ptr()
    first, second = of_stream
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert abs(second.data_ptr() - first.data_ptr()) >= first.nbytes == 4 * streams.MAX_COUNTERS
    assert not torch.cat(of_stream).any()
