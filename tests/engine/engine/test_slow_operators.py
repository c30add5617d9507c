"""An operator that fails the self-test stops the load, or, where that is allowed, plain PyTorch serves it, and is seen.

On CPU tensors that are served as a GPU's are, with plain functions in the place of kernels, of which some are broken.
"""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compressed_checkpoints import save_tiny_w4a16
from support.gpu_path import kernels_by_plain_torch
from support.interpreted_engine import answer, make_engine

from checkpoints.tiny_llama import save_tiny_llama
from multilora_engine.config import EngineConfig
from multilora_engine.engine import base_model
from multilora_engine.engine import engine as engine_module
from multilora_engine.engine.build import may_have_graphs
from multilora_engine.errors import ConfigError
from multilora_engine.execution import operator_check
from multilora_kernels import cuda
from multilora_kernels.self_test import OperatorFault, OperatorShapes
from multilora_kernels.slower_operators import SLOWER_OPERATORS

_EACH_WAY = ("lora_shrink", "lora_segments", "rotary_attention", "quantized_linear", "silu_mul")
"""An operator for each way in which a step calls some: by torch's dispatcher, directly, with weights or without."""

_IS_LONG = pytest.mark.long(reason="an engine starts and answers for each operator")


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
    monkeypatch.setattr(operator_check, "OperatorShapes", partial(OperatorShapes, contexts=(1, 17, 40)))


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory, default_model_dir: Path) -> tuple[Path, dict[str, list[int]]]:
    """A checkpoint, and the tokens of an engine on a CPU."""
    model = save_tiny_w4a16(tmp_path_factory.mktemp("model"))
    return model, answer(make_engine(model, default_model_dir, enable_async_scheduling=False))


@pytest.mark.parametrize("operator", ["lora_apply", "rotary_attention", "silu_mul", "quantized_linear"])
@pytest.mark.parametrize("raises", [False, True])
def test_the_load_stops_and_names_operator_shapes_error_and_the_parameter(
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
    assert fault.match("allow_slow_operators=true would have plain PyTorch serve that operator")


@pytest.mark.parametrize(
    "operator",
    [
        None,
        *_EACH_WAY,
        *(pytest.param(name, marks=_IS_LONG) for name in SLOWER_OPERATORS if name not in _EACH_WAY),
    ],
)
def test_plain_torch_serves_the_tokens_of_a_cpu_where_it_is_allowed(
    expected: tuple[Path, dict[str, list[int]]],
    default_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    operator: str | None,
) -> None:
    model, tokens = expected
    with kernels_by_plain_torch(monkeypatch), caplog.at_level(logging.WARNING):
        if operator is not None:
            _break(monkeypatch, operator)
        engine = make_engine(model, default_model_dir, allow_slow_operators=True, enable_async_scheduling=True)
        slow = engine.stats.slow_operators
        assert answer(engine) == tokens
    warnings = [record.getMessage() for record in caplog.records if "self-test" in record.getMessage()]
    if operator is None:
        assert (slow, warnings) == ([], [])
        return
    assert slow == [operator]
    (warning,) = warnings
    assert f"failed: {operator} of " in warning
    assert "the largest error is " in warning
    assert "plain PyTorch serves this operator" in warning
    assert f"CUDA graphs cannot hold {operator}" in caplog.text


def test_cuda_graphs_that_are_asked_for_stop_the_load_beside_a_slow_operator(
    tmp_path: Path, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = save_tiny_llama(tmp_path)
    # The CPU stands for a GPU here; by itself it has no graphs.
    for module in (base_model, engine_module):
        monkeypatch.setattr(module, "choose_device", lambda _config: torch.device("cpu"))
    with kernels_by_plain_torch(monkeypatch):
        make_engine(model, default_model_dir, allow_slow_operators=True, enable_cuda_graphs=True).close()
        _break(monkeypatch, "lora_expand")
        with pytest.raises(
            ConfigError, match=r"enable_cuda_graphs=true: .* lora_expand; write enable_cuda_graphs=auto"
        ):
            make_engine(model, default_model_dir, allow_slow_operators=True, enable_cuda_graphs=True)


@pytest.mark.parametrize(("slow", "has_graphs"), [([], True), (["silu_mul"], False)])
def test_no_steps_are_captured_beside_a_slow_operator(tmp_path: Path, slow: list[str], has_graphs: bool) -> None:
    config = EngineConfig(model_path=save_tiny_llama(tmp_path))
    assert config.enable_cuda_graphs == "auto"
    assert may_have_graphs(config, torch.device("cuda"), slow) is has_graphs


def test_operators_are_compared_before_any_memory_is_measured(
    tmp_path: Path, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step whose kernel fails would say no more than that."""
    monkeypatch.setattr(base_model, "plan_memory", _raise)
    with kernels_by_plain_torch(monkeypatch):
        monkeypatch.setattr(cuda, "add_rms_norm", _raise)
        with pytest.raises(OperatorFault, match="add_rms_norm of "):
            make_engine(save_tiny_llama(tmp_path), default_model_dir)
