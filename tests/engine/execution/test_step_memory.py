"""The trial of the largest steps, on a CPU, whose memory a test counts in its own way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest
import torch
from support.encoder_decoders import make_model

from checkpoints.tiny_llama import save_tiny_llama
from multilora_engine.batch.forward_batch import ForwardBatch, KVCache
from multilora_engine.config import EngineConfig
from multilora_engine.engine_info import SourceFacts
from multilora_engine.execution.step_memory import source_lens, step_lens, step_memory, trial_batch
from multilora_engine.lora.checkpoint_layout import checkpoint_layout
from multilora_engine.lora.device_tier import TableRows
from multilora_engine.models.decoder import Decoder
from multilora_engine.models.loader import load_model
from multilora_engine.models.weights import Placement

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("num_tokens", "num_seqs", "max_len", "lens"),
    [(8, 1, 100, [8]), (8, 3, 100, [1, 1, 6]), (8, 3, 4, [1, 3, 4]), (8, 8, 100, [1] * 8), (50, 3, 4, [4, 4, 4])],
)
def test_a_largest_step_has_all_tokens_and_sequences_that_a_step_may_have(
    num_tokens: int, num_seqs: int, max_len: int, lens: list[int]
) -> None:
    assert step_lens(num_tokens, num_seqs, max_len) == lens


@pytest.mark.parametrize("has_graphs", [False, True])
def test_the_model_computes_the_largest_step_and_with_graphs_the_largest_decode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_graphs: bool
) -> None:
    path = save_tiny_llama(tmp_path)
    config = EngineConfig(
        model_path=path, max_num_batched_tokens=70, max_num_seqs=5, block_size=16, enable_cuda_graphs=has_graphs
    )
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
    assert sizes == [mixed, mixed, *([[1] * 5, mixed] if has_graphs else [])]
    assert needed == 1070 + (1005 + 1070) * has_graphs


@pytest.mark.parametrize(
    ("max_tokens", "budget", "lens"), [(None, 50, [50]), (64, 50, [50]), (20, 50, [20, 20]), (20, 20, [20])]
)
def test_a_largest_step_encodes_as_many_of_the_longest_sources_as_it_may(
    max_tokens: int | None, budget: int, lens: list[int]
) -> None:
    assert source_lens(SourceFacts(max_tokens, 0, None, 0), budget) == lens
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
        enable_cuda_graphs=False,
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
