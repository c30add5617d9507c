"""The trial of the largest steps, on a CPU, whose memory a test counts in its own way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from support.encoder_decoders import make_model
from support.recorded_graph import RecordedPieces, record

from checkpoints.tiny_llama import save_tiny_llama
from multilora_engine.batch.forward_batch import ForwardBatch, KVCache
from multilora_engine.config import EngineConfig
from multilora_engine.engine import base_model, build
from multilora_engine.engine.memory import kv_bytes_per_token
from multilora_engine.engine_info import SourceFacts
from multilora_engine.errors import ConfigError
from multilora_engine.execution.cuda_graphs import DecodeGraphs
from multilora_engine.execution.piecewise_graphs import PiecewiseGraphs
from multilora_engine.execution.step_memory import Kept, graph_memory, source_lens, step_lens, step_memory, trial_batch
from multilora_engine.lora.checkpoint_layout import checkpoint_layout
from multilora_engine.lora.device_tier import TableRows
from multilora_engine.models.decoder import Decoder
from multilora_engine.models.loader import load_model
from multilora_engine.models.model import Model
from multilora_engine.models.weights import Placement
from multilora_kernels import LoRATables

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "max_len", "lens"),
    [(8, 1, 100, [8]), (8, 3, 100, [1, 1, 6]), (8, 3, 4, [1, 3, 4]), (8, 8, 100, [1] * 8), (50, 3, 4, [4, 4, 4])],
)
def test_a_largest_step_has_all_tokens_and_sequences_that_a_step_may_have(
    num_tokens: int, num_seqs: int, max_len: int, lens: list[int]
) -> None:
    assert step_lens(num_tokens, num_seqs, max_len) == lens


def test_the_model_computes_the_largest_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save_tiny_llama(tmp_path)
    config = EngineConfig(model_path=path, max_num_batched_tokens=70, max_num_seqs=5, block_size=16)
    model = load_model(path, Placement(torch.float32, torch.float32, CPU))
    model.limit_length(64)
    layout = checkpoint_layout(path, 8, "float32")
    tables = TableRows(layout, torch.zeros(1, layout.page_bytes, dtype=torch.uint8), count=1).tables
    forward = Decoder.forward
    sizes: list[list[int]] = []

    def watched(
        self: Decoder, batch: ForwardBatch, kv_cache: KVCache, on_layer: Callable[[], None] = lambda: None
    ) -> torch.Tensor:
        sizes.append(batch.query_lens)
        assert batch.lora is not None
        logits = forward(self, batch, kv_cache, on_layer)
        assert logits.shape[0] == len(batch.query_lens)
        assert logits.isfinite().all()
        return logits

    def measure(run: Callable[[], object]) -> int:
        run()
        return 1000 + sum(sizes[-1])

    monkeypatch.setattr(Decoder, "forward", watched)
    needed = step_memory(model, config, torch.float32, tables, 64, measure)
    mixed = [1, 1, 1, 3, 64]
    assert sizes == [mixed, mixed]
    assert needed == 1070


@pytest.mark.parametrize(
    ("sizes", "in_driver", "expected"),
    [
        ([7], [31], 1007 + 31),
        # Each size but the largest keeps 3 bytes a token.
        ([1, 3, 5, 7], [31, 62], 1007 + 3 * (1 + 3 + 5) + 31 * 4),
        # The driver gave nothing back after the first capture.
        ([1, 3, 5, 7], [33, 31], 1007 + 3 * (1 + 3 + 5) + 31 * 4),
        # It took memory of its own with the first one.
        ([5, 7], [999, 60], 1007 + 3 * 5 + 60 * 2),
        ([3, 5, 7], [7, 13], 1007 + 3 * (3 + 5) + 21),
        # Other processes gave memory back meanwhile.
        ([5, 7], [0, 0], 1007 + 3 * 5),
    ],
)
def test_all_captured_sizes_take_what_two_of_them_tell(sizes: list[int], in_driver: list[int], expected: int) -> None:
    captured: list[list[int]] = []

    def measure(capture: Callable[[], object]) -> Kept:
        capture()
        return Kept(1007 + 3 * sum(captured[-1][:-1]), in_driver[len(captured) - 1])

    assert graph_memory(captured.append, sizes, measure) == expected
    assert captured == [sizes[-1:], sizes[-2:]][: len(sizes)]


def _make_trial(path: Path) -> tuple[Model, EngineConfig, LoRATables]:
    """What graphs are captured of for their memory."""
    save_tiny_llama(path)
    config = EngineConfig(model_path=path, max_num_batched_tokens=100, max_num_seqs=3, block_size=16)
    model = load_model(path, Placement(torch.float32, torch.float32, CPU))
    model.limit_length(64)
    layout = checkpoint_layout(path, 8, "float32")
    return model, config, TableRows(layout, torch.zeros(1, layout.page_bytes, dtype=torch.uint8), count=1).tables


def test_the_two_largest_sizes_are_captured_for_their_memory_over_one_block(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, config, tables = _make_trial(tmp_path)
    captured: list[list[int]] = []

    def measure(capture: Callable[[], object]) -> Kept:
        captured.append(cast(DecodeGraphs | PiecewiseGraphs, capture()).sizes)
        return Kept(1000, 20 * len(captured[-1]))

    def capture(*arguments: Any) -> DecodeGraphs:
        return DecodeGraphs(*arguments, record)

    monkeypatch.setattr(base_model, "kept_growth", lambda device: measure)
    monkeypatch.setattr(base_model, "capture_graphs", partial(base_model.capture_graphs, capture=capture))
    monkeypatch.setattr(base_model, "CudaPieces", lambda pool: RecordedPieces())
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    num_bytes = base_model._measure_graphs(model, config, tables, torch.float32, 64)
    assert captured == [[3], [2, 3], [100], [64, 100]]
    block = 16 * kv_bytes_per_token(model.config, torch.float32)
    assert num_bytes == block + (1000 + 3 * 20) + (1000 + 2 * 20)


@pytest.mark.parametrize("steps", ["decode steps", "steps with prompts"])
def test_a_trial_without_memory_tells_what_helps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, steps: str) -> None:
    model, config, tables = _make_trial(tmp_path)

    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def measure(capture: Callable[[], object]) -> Kept:
        capture()
        return Kept(0, 0)

    capture = fail if steps == "decode steps" else lambda *arguments: DecodeGraphs(*arguments, record)
    monkeypatch.setattr(base_model, "kept_growth", lambda device: measure)
    monkeypatch.setattr(base_model, "capture_graphs", partial(base_model.capture_graphs, capture=capture))
    monkeypatch.setattr(base_model, "CudaPieces", lambda pool: RecordedPieces())
    monkeypatch.setattr(build, "PiecewiseGraphs", fail)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1 << 28, 80 << 30))
    with pytest.raises(ConfigError) as caught:
        base_model._measure_graphs(model, config, tables, torch.float32, 64)
    assert str(caught.value) == (
        f"CUDA graphs of {steps} do not fit beside the model's weights: 0.25 of 80.00 GiB are free now, before the KV "
        "cache and the adapters have any; write a smaller max_num_seqs (it is 3) or "
        "max_num_batched_tokens (it is 100), or serve a smaller model"
    )


@pytest.mark.parametrize(
    ("max_tokens", "budget", "lens"), [(None, 50, [50]), (64, 50, [50]), (20, 50, [20, 20]), (20, 20, [20])]
)
def test_a_largest_step_encodes_as_many_of_the_longest_sources_as_it_may(
    max_tokens: int | None, budget: int, lens: list[int]
) -> None:
    assert source_lens(SourceFacts(max_tokens, 0, None, None, 0), budget) == lens
    assert source_lens(None, budget) == []


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_an_encoder_decoder_computes_the_largest_step_with_sources(tmp_path: Path, name: str) -> None:
    make_model(name).save_pretrained(tmp_path)
    config = EngineConfig(
        model_path=tmp_path,
        max_num_batched_tokens=70,
        max_num_seqs=5,
        max_num_encoder_tokens=90,
        block_size=16,
    )
    model = load_model(tmp_path, Placement(torch.float32, torch.float32, CPU))
    model.limit_length(64)
    layout = checkpoint_layout(tmp_path, 8, "float32")
    tables = TableRows(layout, torch.zeros(1, layout.page_bytes, dtype=torch.uint8), count=1).tables
    logits: list[torch.Tensor] = []

    def measure(run: Callable[[], object]) -> int:
        logits.append(cast(torch.Tensor, run()))
        return 1

    assert step_memory(model, config, torch.float32, tables, 64, measure) == 1
    assert logits[0].shape[0] == 5
    assert logits[0].isfinite().all()
    cross = trial_batch([1, 3], 16, tables, [20, 20]).cross
    assert cross is not None
    assert cross.new is not None
    assert (len(cross.num_keys), cross.new.lens, len(cross.new.slot_mapping)) == (4, [20, 20], 40)
