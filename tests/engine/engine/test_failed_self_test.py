"""An operator that fails the self-test stops the load, which names it.

On CPU tensors that are served as a GPU's are, with plain functions in the place of kernels, of which some are broken.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.compressed_checkpoints import save_tiny_w4a16
from support.gpu_path import kernels_by_plain_torch
from support.interpreted_engine import make_engine

from checkpoints.tiny_llama import save_tiny_llama
from multilora_engine.engine import base_model
from multilora_engine.execution import self_test
from multilora_kernels import cuda
from multilora_kernels.self_test import OperatorFault, OperatorShapes


def _raise(*_: Any, **__: Any) -> None:
    raise RuntimeError("PassManager::run failed")


def _break(monkeypatch: pytest.MonkeyPatch, operator: str) -> None:
    """Its results are of the right shapes, and wrong by 1."""
    right = getattr(cuda, operator)

    def wrong(*arguments: Any, **out: Any) -> Any:
        results = right(*arguments, **out)
        if results is None:  # It changes its second argument, or the first one.
            changed = arguments[1] if operator in ("lora_apply", "lora_expand") else arguments[0]
            changed = changed.input_ids if operator == "fill_step_inputs" else changed
            changed += 1
            return None
        return (results[0] + 1, *results[1:]) if isinstance(results, tuple) else results + 1

    monkeypatch.setattr(cuda, operator, wrong)


@pytest.fixture(autouse=True)
def short_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference of attention takes a second for a context of thousands."""
    monkeypatch.setattr(self_test, "OperatorShapes", partial(OperatorShapes, contexts=(1, 17, 40)))


@pytest.mark.parametrize("operator", ["lora_apply", "rotary_attention", "silu_mul", "quantized_linear"])
@pytest.mark.parametrize("raises", [False, True])
def test_the_load_stops_and_names_operator_shapes_and_error(
    tmp_path: Path, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch, operator: str, raises: bool
) -> None:
    model = save_tiny_w4a16(tmp_path)
    with kernels_by_plain_torch(monkeypatch):
        if raises:
            monkeypatch.setattr(cuda, operator, _raise)
        else:
            _break(monkeypatch, operator)
        with pytest.raises(OperatorFault) as fault:
            make_engine(model, default_model_dir)
    error = "RuntimeError: PassManager::run failed" if raises else "the largest error is .* times"
    assert fault.match(rf"the self-test on cpu failed: {operator} of .*float32.*: {error}")


def test_operators_are_compared_before_any_memory_is_measured(
    tmp_path: Path, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step whose kernel fails would say no more than that."""
    monkeypatch.setattr(base_model, "plan_memory", _raise)
    with kernels_by_plain_torch(monkeypatch):
        monkeypatch.setattr(cuda, "add_rms_norm", _raise)
        with pytest.raises(OperatorFault, match="add_rms_norm of "):
            make_engine(save_tiny_llama(tmp_path), default_model_dir)
