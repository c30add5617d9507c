"""The self-test of a start: what is compared, what is told, and what is no fault."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest
import torch
from support.tiny_mixture import save_tiny_mixture
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    PreTrainedModel,
)

from checkpoints.tiny_llama import save_tiny_llama
from multilora_engine.execution.self_test import StartProgress, faults_named, operator_shapes
from multilora_engine.lora.device_tier import TableRows
from multilora_engine.models.loader import load_model
from multilora_engine.models.weights import Placement
from multilora_kernels.cuda import block_sizes
from multilora_wire.layout import adapter_layout


class _Heard(logging.Handler):
    """Sets an event for each of the first lines."""

    def __init__(self, *events: threading.Event) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        for event in self._events[: len(self.lines)]:
            event.set()


def test_an_item_that_takes_long_is_told_again_and_again_and_the_end_ends_it() -> None:
    first, second = threading.Event(), threading.Event()
    heard = _Heard(first, second)
    logger = logging.getLogger("multilora_engine.execution.self_test")
    before = logger.level
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    try:
        with StartProgress("self-test", interval_s=0.01) as progress:
            progress.note(3, 40, "lora_apply")
            assert first.wait(60)
            assert second.wait(60)
        num_lines = len(heard.lines)
        assert all(line.startswith("self-test: 3 of 40 are done; now lora_apply, for 0 s") for line in heard.lines)
        assert "start-progress" not in {thread.name for thread in threading.enumerate()}
        assert len(heard.lines) == num_lines
    finally:
        logger.removeHandler(heard)
        logger.setLevel(before)


def test_a_failure_passes_and_nothing_is_told_before_the_first_item(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), pytest.raises(RuntimeError, match="out"), StartProgress("kernels", 0.001):
        raise RuntimeError("out")
    assert caplog.messages == []


_SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "pad_token_id": 0,
}


def _save(path: Path, model: PreTrainedModel) -> Path:
    model.save_pretrained(path)
    return path


def _save_glm(path: Path) -> Path:
    """Half of a head of 16 turns, in pairs."""
    return _save(path, Glm4ForCausalLM(Glm4Config(**_SIZES, head_dim=16)))


def _save_cohere(path: Path) -> Path:
    """Every fourth layer attends to all keys, and turns none."""
    return _save(path, Cohere2ForCausalLM(Cohere2Config(**_SIZES, sliding_window=8)))


@pytest.mark.parametrize(
    ("save", "rotations"),
    [
        (save_tiny_llama, {(8, False)}),
        (_save_glm, {(8, True)}),
        (_save_cohere, {(8, True), (0, False)}),
    ],
)
def test_cache_and_rotations_of_a_model_are_compared(
    tmp_path: Path, save: object, rotations: set[tuple[int, bool]]
) -> None:
    assert callable(save)
    device = torch.device("cpu")
    model = load_model(save(tmp_path / "model"), Placement(torch.bfloat16, torch.bfloat16, device))
    layout = adapter_layout(model.adapter_sites, 8, "int8")
    page = torch.zeros(1, layout.page_bytes, dtype=torch.uint8)
    shapes = operator_shapes(model, TableRows(layout, page, count=1).tables, 16, torch.int8)
    assert (shapes.kv_dtype, shapes.lora_dtype, shapes.max_rank) == (torch.int8, torch.int8, 8)
    assert set(shapes.rotations) == rotations
    assert len(shapes.rotations) == len(rotations)
    assert shapes.head_dim == model.config.head_dim
    assert shapes.more_rows == ()


def test_the_experts_of_a_mixture_are_compared(tmp_path: Path) -> None:
    path = save_tiny_mixture(tmp_path / "model")
    model = load_model(path, Placement(torch.bfloat16, torch.bfloat16, torch.device("cpu")))
    layout = adapter_layout(model.adapter_sites, 8, "bfloat16")
    tables = TableRows(layout, torch.zeros(1, layout.page_bytes, dtype=torch.uint8), count=1).tables
    assert operator_shapes(model, tables, 16, torch.bfloat16).experts == (5, 2, 24, 0, False)


def test_kernels_that_a_plan_has_for_some_numbers_of_rows_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = torch.device("cpu")
    model = load_model(save_tiny_llama(tmp_path), Placement(torch.bfloat16, torch.bfloat16, device))
    layout = adapter_layout(model.adapter_sites, 8, "bfloat16")
    tables = TableRows(layout, torch.zeros(1, layout.page_bytes, dtype=torch.uint8), count=1).tables
    monkeypatch.setattr(block_sizes, "row_bounds", lambda _capability: [16, 64])
    assert operator_shapes(model, tables, 16, torch.bfloat16).more_rows == (16, 64, 65)


@pytest.mark.parametrize("kind", [MemoryError, torch.OutOfMemoryError])
def test_too_little_memory_is_no_fault_of_an_operator(kind: type[Exception]) -> None:
    with pytest.raises(kind), faults_named("a step", torch.device("cpu")):
        raise kind("out of memory")
