"""Kernels that begin before the one before them has ended: the trial that decides on them, without a GPU."""

from __future__ import annotations

import ast
import importlib
import logging
import pkgutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from support.gpu_path import FakeDevice, make_device
from support.recorded_graph import record
from triton.runtime.jit import JITFunction

from gpu.model_parts import launched_plainly
from multilora_kernels import add_rms_norm, cuda
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


def _kernels() -> dict[str, JITFunction[Any]]:
    """All of this package."""
    modules = [
        importlib.import_module(f"{cuda.__name__}.{found.name}") for found in pkgutil.iter_modules(cuda.__path__)
    ]
    values = [(name, value) for module in modules for name, value in vars(module).items()]
    return {name: value for name, value in values if isinstance(value, JITFunction)}


def test_whatever_kernel_depends_on_the_one_before_waits_in_its_first_statement() -> None:
    first_statements = {
        "IS_DEPENDENT": "if IS_DEPENDENT:\n    gdc_wait()",
        "LAUNCHES_DEPENDENTS": "if LAUNCHES_DEPENDENTS:\n    gdc_launch_dependents()",
    }
    names: dict[str, set[str]] = {constant: set() for constant in first_statements}
    for name, kernel in _kernels().items():
        (function,) = ast.parse(kernel.src).body
        _docstring, *body = function.body  # type: ignore[attr-defined]
        own = [statement for constant, statement in first_statements.items() if constant in kernel.arg_names]
        assert [ast.unparse(statement) for statement in body[: len(own)]] == own, name
        for constant in first_statements.keys() & set(kernel.arg_names):
            names[constant].add(name)
    assert names["IS_DEPENDENT"] >= {"decode_kernel", "add_rms_norm_kernel", "add_layer_norm_kernel"}
    assert names["LAUNCHES_DEPENDENTS"] >= {"expand_rows_kernel", "multiply_codes_kernel"}


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
    assert not _depends(_served(monkeypatch), _norm)


def test_a_step_is_measured_beside_the_same_one_launched_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    _set_device(monkeypatch, _right)
    assert launches_dependently(CPU)
    device = _served(monkeypatch)
    assert _depends(device, _norm)
    assert not _depends(device, launched_plainly(_norm))
    assert _depends(device, _norm)


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


def _norm() -> None:
    add_rms_norm(*torch.zeros(2, 3, 16), torch.zeros(16), 1e-6)


def _depends(device: FakeDevice, step: Callable[[], None]) -> bool:
    """Whether the only kernel of a step is launched as a dependent."""
    device.order.clear()
    with device:
        step()
    ((_, options),) = (launch for launch in device.order if launch[0] == "add_rms_norm_kernel")
    assert options.get("launch_pdl", False) == options["IS_DEPENDENT"]
    return bool(options["IS_DEPENDENT"])
