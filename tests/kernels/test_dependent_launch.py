"""Kernels that begin before the one before them has ended: the trial that decides on them, without a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.gpu_path import FakeDevice, make_device
from support.recorded_graph import record
from triton.runtime.jit import JITFunction

from multilora_kernels import add_rms_norm
from multilora_kernels.cuda import dependent_launch
from multilora_kernels.cuda.dependent_launch import LEAST_CAPABILITY, launches_dependently

CPU = torch.device("cpu")
Link = Callable[[torch.Tensor, torch.Tensor], None]


@pytest.fixture(autouse=True)
def undecided() -> Iterator[None]:
    launches_dependently.cache_clear()
    yield
    launches_dependently.cache_clear()


def _set_device(monkeypatch: pytest.MonkeyPatch, link: Link, capability: int = LEAST_CAPABILITY) -> list[bool]:
    """A device of this capability whose launches are `link`. Returns whether each launch was a dependent one."""
    are_dependent: list[bool] = []

    def launch(kernel: Any, source: torch.Tensor, target: torch.Tensor, *_: Any, **kwargs: Any) -> None:
        are_dependent.append(kwargs["launch_pdl"] and kwargs["IS_DEPENDENT"])
        link(source, target)

    monkeypatch.setattr(dependent_launch, "capability", lambda device: capability)
    monkeypatch.setattr(dependent_launch, "capture_graph", record)
    monkeypatch.setattr(JITFunction, "run", launch)
    return are_dependent


def _right(source: torch.Tensor, target: torch.Tensor) -> None:
    torch.add(source, 1, out=target)


def _early() -> Link:
    """What it reads has not been written since the last time."""
    seen: dict[int, torch.Tensor] = {}

    def link(source: torch.Tensor, target: torch.Tensor) -> None:
        before = seen.get(source.data_ptr(), source)
        seen[source.data_ptr()] = source.clone()
        torch.add(before, 1, out=target)

    return link


def _uncaptured(source: torch.Tensor, target: torch.Tensor) -> None:
    """No replay does it again."""
    target.numpy()[:] = source.numpy() + 1


def test_a_trial_that_is_right_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    are_dependent = _set_device(monkeypatch, _right)
    assert launches_dependently(CPU)
    assert len(are_dependent) > 0
    assert all(are_dependent)
    are_dependent.clear()
    assert launches_dependently(CPU)
    assert not are_dependent


def test_no_trial_is_made_of_what_a_chip_does_not_have(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    are_dependent = _set_device(monkeypatch, _right, capability=89)
    assert not launches_dependently(CPU)
    assert not are_dependent
    assert not caplog.records


def _refused(source: torch.Tensor, target: torch.Tensor) -> None:
    raise RuntimeError("CUDA error: invalid resource handle")


@pytest.mark.parametrize(
    ("link", "reason"),
    [
        (_refused, "RuntimeError: CUDA error: invalid resource handle"),
        (_early(), "kernels that were launched did not wait for one another"),
        (_uncaptured, "kernels that were captured did not wait for one another"),
    ],
)
def test_where_the_trial_fails_launches_are_plain_and_the_log_says_why(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, link: Link, reason: str
) -> None:
    _set_device(monkeypatch, link)
    with caplog.at_level(logging.WARNING):
        assert not launches_dependently(CPU)
    assert reason in caplog.text
    assert "no kernel begins before the one before it has ended" in caplog.text
    device = _served(monkeypatch)
    with device:
        add_rms_norm(*torch.zeros(2, 3, 16), torch.zeros(16), 1e-6)
    ((_, options),) = (launch for launch in device.order if launch[0] == "add_rms_norm_kernel")
    assert "launch_pdl" not in options
    assert not options["IS_DEPENDENT"]


def test_a_capture_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def capture(run: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    _set_device(monkeypatch, _right)
    monkeypatch.setattr(dependent_launch, "capture_graph", capture)
    assert not launches_dependently(CPU)
    assert "a trial failed: RuntimeError: operation not permitted when stream is capturing" in caplog.text


def _served(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    device = make_device(monkeypatch)
    device.serve(monkeypatch)
    return device
