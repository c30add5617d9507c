"""Graphs of decode steps are on where they work, and nobody gets a token of one that does not. Without a GPU."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import run_all
from support.gpu_path import make_engine
from support.recorded_graph import RecordedPieces, record
from support.tiny_mixture import save_tiny_mixture
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    PreTrainedModel,
)

from checkpoints.tiny_llama import VOCAB_SIZE, save_tiny_llama
from multilora_engine.batch.forward_batch import KVCache
from multilora_engine.config import EngineConfig
from multilora_engine.engine.build import capture_graphs, capture_pieces
from multilora_engine.engine.engine import Engine
from multilora_engine.engine.memory import MemoryPlan
from multilora_engine.execution.cuda_graphs import Capture, DecodeGraphs
from multilora_engine.execution.piecewise_graphs import CudaPieces, Pieces, PiecewiseGraphs, piece_sizes
from multilora_engine.execution.self_test import GraphFault, StartProgress, faults_named, operator_shapes
from multilora_engine.lora.device_tier import TableRows
from multilora_engine.models.loader import load_model
from multilora_engine.models.model import only_group
from multilora_engine.models.weights import Placement
from multilora_engine.request import GenerationRequest, SamplingParams
from multilora_kernels.cuda import block_sizes
from multilora_kernels.self_test import OperatorFault
from multilora_wire.layout import adapter_layout

MAX_NUM_SEQS, MAX_LEN = 5, 64


@pytest.mark.parametrize(
    ("save", "enable_async_scheduling"), [(save_tiny_llama, False), (save_tiny_llama, True), (save_tiny_mixture, True)]
)
def test_graphs_choose_the_tokens_of_steps_without(
    tmp_path: Path, default_model_dir: Path, save: Callable[..., Path], enable_async_scheduling: bool
) -> None:
    options = {"enable_async_scheduling": enable_async_scheduling, "max_num_seqs": MAX_NUM_SEQS}
    expected = _tokens(make_engine(tmp_path, default_model_dir, save, **options))
    engine = make_engine(tmp_path, default_model_dir, save, **options)
    replays: list[int] = []
    graphs = _capture(engine, functools.partial(_counted, replays))
    assert graphs is not None
    engine._runner._graphs = graphs
    assert engine.stats.num_cuda_graphs == len(graphs.sizes)
    replays.clear()
    assert _tokens(engine) == expected
    assert len(replays) >= 10


@pytest.mark.parametrize(
    ("save", "max_num_batched_tokens"),
    [*((save_tiny_llama, size) for size in (5, 70, 200)), (save_tiny_mixture, 70)],
)
def test_steps_with_prompts_choose_the_same_tokens_in_pieces(
    tmp_path: Path, default_model_dir: Path, save: Callable[..., Path], max_num_batched_tokens: int
) -> None:
    options = {"max_num_seqs": MAX_NUM_SEQS, "max_num_batched_tokens": max_num_batched_tokens}
    expected = _tokens(make_engine(tmp_path, default_model_dir, save, **options))
    engine = make_engine(tmp_path, default_model_dir, save, **options)
    pieces = _capture_pieces(engine, RecordedPieces(), **options)
    assert pieces is not None
    assert pieces.sizes == piece_sizes(max_num_batched_tokens)
    engine._runner._pieces = pieces
    assert _tokens(engine) == expected


class _IdlePieces(RecordedPieces):
    """Whose replays compute nothing."""

    def end(self) -> Callable[[], None]:
        super().end()
        return lambda: None


def test_pieces_that_give_other_logits_are_not_used(
    tmp_path: Path, default_model_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(tmp_path, default_model_dir, max_num_seqs=MAX_NUM_SEQS)
    with caplog.at_level(logging.WARNING):
        assert _capture_pieces(engine, _IdlePieces(), max_num_batched_tokens=70) is None
    assert "steps with prompts are launched kernel by kernel" in caplog.text
    with pytest.raises(GraphFault, match="of 64 tokens with adapters"):
        _capture_pieces(engine, _IdlePieces(), max_num_batched_tokens=70, enable_cuda_graphs=True)


def test_a_capture_that_fails_halfway_is_ended_and_one_that_has_ended_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ends: list[str] = []

    class Graph:
        def capture_begin(self, **_: Any) -> None: ...

        def capture_end(self) -> None:
            ends.append("end")
            if len(ends) > 1:
                raise RuntimeError("operation failed due to a previous error during capture")

        def replay(self) -> None: ...

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    pieces = CudaPieces(None)
    with pieces.stream():
        pieces.begin()
        pieces.end()
    assert ends == ["end"]

    def fail() -> None:
        with pieces.stream():
            pieces.begin()
            raise ValueError("halfway")

    with pytest.raises(ValueError, match="halfway"):
        fail()
    assert ends == ["end", "end"]


def test_sizes_of_pieces_are_few_and_end_with_the_largest_step_that_pays() -> None:
    assert piece_sizes(200) == [64, 128, 192, 200]
    assert piece_sizes(3) == [3]
    assert piece_sizes(4096) == [64, 128, 192, 256, 320, 384, 448, 512]


@pytest.mark.parametrize("capture", [lambda run: lambda: None, lambda run: run() or (lambda: None)])
def test_a_graph_that_gives_other_logits_is_not_used(
    tmp_path: Path, default_model_dir: Path, caplog: pytest.LogCaptureFixture, capture: Capture
) -> None:
    engine = make_engine(tmp_path, default_model_dir, max_num_seqs=MAX_NUM_SEQS)
    with caplog.at_level(logging.WARNING):
        assert _capture(engine, capture) is None
    assert (
        "launched kernel by kernel, which is slower: CUDA graphs failed: the CUDA graph of 1 sequences" in caplog.text
    )
    with pytest.raises(GraphFault):
        _capture(engine, capture, enable_cuda_graphs=True)
    assert engine.stats.num_cuda_graphs == 0


def test_a_device_that_captures_nothing_serves_without_graphs_unless_they_are_asked_for(
    tmp_path: Path, default_model_dir: Path
) -> None:
    def capture(run: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    engine = make_engine(tmp_path, default_model_dir, max_num_seqs=MAX_NUM_SEQS)
    assert _capture(engine, capture) is None
    with pytest.raises(RuntimeError, match="not permitted"):
        _capture(engine, capture, enable_cuda_graphs=True)


def _tokens(engine: Engine) -> dict[str, list[int]]:
    """Of more requests than run at once, of different lengths, with adapters and without."""
    requests = [
        GenerationRequest(
            f"r{n}",
            [(7 * n + i) % VOCAB_SIZE for i in range(3 * n + 1)],
            SamplingParams(max_tokens=4 + n, end_id=-1, temperature=0.8 * (n % 2), seed=n),
            lora_task_id=(None, 0, 1)[n % 3],
        )
        for n in range(7)
    ]
    return {name: answer.token_ids for name, answer in run_all(engine, requests).items()}


def _capture(engine: Engine, capture: Capture, **options: Any) -> DecodeGraphs | None:
    """Over a cache of their own."""
    runner, num_blocks, block_size = engine._runner, engine.stats.num_blocks, engine._blocks.block_size
    shape = only_group(runner._model.kv_groups).cache_shape((num_blocks + 1) * block_size, torch.bfloat16)
    runner._kv_cache = KVCache(*(torch.zeros(shape, dtype=torch.bfloat16) for _ in range(2)))
    runner._kv_memory = None
    plan = MemoryPlan(num_blocks, torch.bfloat16, num_host_pages=0, num_device_pages=0, max_model_len=MAX_LEN)
    config = EngineConfig.model_validate(
        {"model_path": engine.info.model_path, "max_num_seqs": MAX_NUM_SEQS, "block_size": block_size, **options}
    )
    with torch.inference_mode():
        return capture_graphs(
            runner._model,
            runner._kv_cache,
            config,
            plan,
            engine._loras.device.tables,
            functools.partial(_captured, capture),
        )


def _capture_pieces(engine: Engine, pieces: Pieces, **options: Any) -> PiecewiseGraphs | None:
    """Over the engine's own cache, whose first block they fill and free again."""
    runner = engine._runner
    values = {"model_path": engine.info.model_path, "block_size": engine._blocks.block_size, **options}
    config = EngineConfig.model_validate({"max_num_seqs": MAX_NUM_SEQS} | values)
    return capture_pieces(runner._model, runner._kv_cache, config, engine._loras.device.tables, pieces)


def _counted(replays: list[int], run: Callable[[], None]) -> Callable[[], None]:
    """A recorded run, whose replays are noted."""
    replay = record(run)

    def counted() -> None:
        replays.append(1)
        replay()

    return counted


def _captured(capture: Capture, *args: Any) -> DecodeGraphs:
    return DecodeGraphs(*args, capture)


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
    expected = torch.OutOfMemoryError if kind is torch.OutOfMemoryError else OperatorFault
    with pytest.raises(expected), faults_named("a step", torch.device("cpu")):
        raise kind("out of memory")
