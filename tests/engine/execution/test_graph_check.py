"""Graphs are on where they work, and nobody gets a token of one that does not. Without a GPU."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from support.engines import run_all
from support.gpu_path import copies_are_made, kernels_by_plain_torch, make_engine
from support.recorded_graph import Change, RecordedPieces, record
from support.tiny_mixture import save_tiny_mixture

from checkpoints.tiny_llama import VOCAB_SIZE, save_tiny_llama
from multilora_engine.batch.forward_batch import KVCache
from multilora_engine.config import EngineConfig
from multilora_engine.engine import build
from multilora_engine.engine.build import capture_graphs, capture_pieces
from multilora_engine.engine.engine import Engine
from multilora_engine.engine.memory import MemoryPlan
from multilora_engine.execution import piecewise_graphs
from multilora_engine.execution.cuda_graphs import Capture, DecodeGraphs
from multilora_engine.execution.graph_check import GraphCheck, GraphFault
from multilora_engine.execution.piecewise_graphs import CudaPieces, Pieces, PiecewiseGraphs, piece_sizes
from multilora_engine.models.model import only_group
from multilora_engine.request import GenerationRequest, SamplingParams
from multilora_engine.sampling.sampler import Best
from multilora_kernels import LoRATables, PagedSequences

MAX_NUM_SEQS, MAX_LEN = 5, 64


@pytest.mark.parametrize(
    ("save", "enable_async_scheduling"), [(save_tiny_llama, False), (save_tiny_llama, True), (save_tiny_mixture, True)]
)
def test_graphs_choose_the_tokens_of_steps_without(
    tmp_path: Path,
    default_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    save: Callable[..., Path],
    enable_async_scheduling: bool,
) -> None:
    copies_are_made(monkeypatch)
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


@pytest.mark.parametrize("is_second_first", [True, False])
def test_tokens_are_the_same_whether_updates_beside_the_products_are_early_or_late(
    tmp_path: Path, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch, is_second_first: bool
) -> None:
    kernels_by_plain_torch(monkeypatch)
    copies_are_made(monkeypatch)
    expected = _tokens(make_engine(tmp_path, default_model_dir, max_num_seqs=MAX_NUM_SEQS))
    engine = make_engine(tmp_path, default_model_dir, max_num_seqs=MAX_NUM_SEQS)
    engine._runner._graphs = _capture(engine, functools.partial(record, is_second_first=is_second_first))
    assert _tokens(engine) == expected


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
    waits: list[int] = []

    class Graph:
        def capture_begin(self, **_: Any) -> None: ...

        def capture_end(self) -> None:
            ends.append("end")
            if len(ends) > 1:
                raise RuntimeError("operation failed due to a previous error during capture")

        def replay(self) -> None: ...

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(len(ends)))
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    pieces = CudaPieces(None)
    with pieces.stream():
        pieces.begin()
        pieces.end()
    assert ends == ["end"]
    assert waits == [0, 1], "the next stream shares memory with what may still run"

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
    assert piece_sizes(700) == [64, 128, 192, 256, 320, 384, 448, 512, 640, 700]
    large = [640, 768, 896, 1024, 1280, 1536, 1792, 2048]
    assert piece_sizes(4096) == [64, 128, 192, 256, 320, 384, 448, 512, *large]


def test_captures_that_take_too_long_end_with_the_sizes_that_serve_any_step(
    tmp_path: Path, default_model_dir: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look at the clock takes a second, and there is one before each size but the first."""
    engine = make_engine(tmp_path, default_model_dir)
    seconds = iter(range(100))
    monkeypatch.setattr(piecewise_graphs, "time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    runner, tables = engine._runner, engine._loras.device.tables
    with caplog.at_level(logging.WARNING):
        pieces = PiecewiseGraphs(
            runner._model, runner._kv_cache, tables, [8, 16, 24, 32, 40], RecordedPieces(), limit_s=2
        )
    assert pieces.sizes == [8, 16, 40]
    assert "CUDA graphs of steps with prompts: 3 of 5 sizes, up to 40 tokens" in caplog.text


@pytest.mark.parametrize("capture", [lambda run: lambda: None, lambda run: run() or (lambda: None)])
def test_a_graph_that_gives_other_logits_is_not_used(
    tmp_path: Path, default_model_dir: Path, caplog: pytest.LogCaptureFixture, capture: Capture
) -> None:
    engine = make_engine(tmp_path, default_model_dir, max_num_seqs=MAX_NUM_SEQS)
    with caplog.at_level(logging.WARNING):
        assert _capture(engine, capture) is None
    assert (
        "launched kernel by kernel, which is slower: CUDA graphs failed: the CUDA graph of 1 sequences with adapters"
        in caplog.text
    )
    with pytest.raises(GraphFault):
        _capture(engine, capture, enable_cuda_graphs=True)
    assert engine.stats.num_cuda_graphs == 0


def _reads_old_ranks() -> Change:
    """The ranks of adapters as they were when the graph was first replayed: memory that nobody writes any more."""
    return functools.partial(_with_clone, "rank", {})


def _reads_old_places() -> Change:
    """The places of adapters' matrices, alike."""
    return functools.partial(_with_clone, "b_offset", {})


def _with_clone(field: str, clones: dict[int, torch.Tensor], value: Any) -> Any:
    if not isinstance(value, LoRATables):
        return value
    table = getattr(value, field)
    return value._replace(**{field: clones.setdefault(table.data_ptr(), torch.zeros_like(table))})


def _reads_first_block_only() -> Change:
    """All columns of a block table are the first one."""

    def change(value: Any) -> Any:
        if not isinstance(value, PagedSequences):
            return value
        return value._replace(block_tables=value.block_tables[:, :1].expand_as(value.block_tables).contiguous())

    return change


def _reads_one_split_only() -> Change:
    """Only the first sixteen keys are attended to, as if a later split had no program."""

    def change(value: Any) -> Any:
        return (
            value._replace(context_lens=value.context_lens.clamp(max=16))
            if isinstance(value, PagedSequences)
            else value
        )

    return change


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (_reads_old_ranks, "of 1 sequences with adapters"),
        (_reads_old_places, "of 1 sequences with adapters"),
        (_reads_first_block_only, "after 49 tokens in sequence 1 of 1"),
        (_reads_one_split_only, "after 49 tokens in sequence 1 of 1"),
    ],
)
def test_a_graph_with_one_wrong_pointer_table_or_split_is_found(
    tmp_path: Path,
    default_model_dir: Path,
    caplog: pytest.LogCaptureFixture,
    fault: Callable[[], Change],
    words: str,
) -> None:
    engine = make_engine(tmp_path, default_model_dir, max_num_seqs=MAX_NUM_SEQS)
    with caplog.at_level(logging.WARNING):
        assert _capture(engine, functools.partial(record, change=fault())) is None
    assert "decode steps are launched kernel by kernel, which is slower" in caplog.text
    assert words in caplog.text


def test_a_graph_that_chooses_other_tokens_than_the_likeliest_is_found(
    tmp_path: Path, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(tmp_path, default_model_dir, max_num_seqs=MAX_NUM_SEQS)
    monkeypatch.setattr(Best, "write", lambda best, logits: None)
    with pytest.raises(GraphFault, match="of 1 sequences chooses other tokens than the likeliest"):
        _capture(engine, record, enable_cuda_graphs=True)


def test_a_piece_with_one_wrong_pointer_is_found(tmp_path: Path, default_model_dir: Path) -> None:
    engine = make_engine(tmp_path, default_model_dir, max_num_seqs=MAX_NUM_SEQS)
    with pytest.raises(GraphFault, match="of 64 tokens with adapters"):
        _capture_pieces(engine, RecordedPieces(_reads_old_ranks()), max_num_batched_tokens=70, enable_cuda_graphs=True)


def test_the_adapters_of_the_check_are_gone_when_it_has_ended(tmp_path: Path, default_model_dir: Path) -> None:
    engine = make_engine(tmp_path, default_model_dir, max_num_seqs=MAX_NUM_SEQS)
    tier = engine._loras.device
    num_free = tier._pool.num_free
    assert _capture(engine, record) is not None
    assert tier._pool.num_free == num_free
    assert not tier.tables.rank.any()
    engine.check_integrity()
    tier.check_integrity()


def test_a_device_that_captures_nothing_serves_without_graphs_unless_they_are_asked_for(
    tmp_path: Path, default_model_dir: Path
) -> None:
    def capture(run: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("operation not permitted when stream is capturing")

    engine = make_engine(tmp_path, default_model_dir, max_num_seqs=MAX_NUM_SEQS)
    assert _capture(engine, capture) is None
    with pytest.raises(RuntimeError, match="not permitted"):
        _capture(engine, capture, enable_cuda_graphs=True)


def test_a_device_that_has_died_is_not_taken_for_graphs_that_fail(
    tmp_path: Path, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(run: Callable[[], None]) -> Callable[[], None]:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    engine = make_engine(tmp_path, default_model_dir, max_num_seqs=MAX_NUM_SEQS)
    monkeypatch.setattr(build, "is_device_dead", lambda device: True)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        _capture(engine, capture)


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
            GraphCheck(runner._model, runner._kv_cache, engine._loras.device, num_blocks, block_size, MAX_LEN),
            functools.partial(_captured, capture),
        )


def _capture_pieces(engine: Engine, pieces: Pieces, **options: Any) -> PiecewiseGraphs | None:
    """Over the engine's own cache, whose blocks they fill and free again."""
    runner, loras, block_size = engine._runner, engine._loras.device, engine._blocks.block_size
    values = {"model_path": engine.info.model_path, "block_size": block_size, **options}
    config = EngineConfig.model_validate({"max_num_seqs": MAX_NUM_SEQS} | values)
    check = GraphCheck(runner._model, runner._kv_cache, loras, engine.stats.num_blocks, block_size, MAX_LEN)
    plan = MemoryPlan(0, torch.bfloat16, num_host_pages=0, num_device_pages=0, max_model_len=MAX_LEN)
    return capture_pieces(runner._model, runner._kv_cache, config, plan, loras.tables, pieces, check)


def _counted(replays: list[int], run: Callable[[], None]) -> Callable[[], None]:
    """A recorded run, whose replays are noted."""
    replay = record(run)

    def counted() -> None:
        replays.append(1)
        replay()

    return counted


def _captured(capture: Capture, *args: Any) -> DecodeGraphs:
    return DecodeGraphs(*args, capture)
