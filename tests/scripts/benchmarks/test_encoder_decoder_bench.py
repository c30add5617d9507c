"""The benchmark of encoder-decoder models asks PEFT for what it names, and its limit can be recomputed."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from benchmarks import encoder_decoder_bench
from benchmarks.encoder_decoder_bench import (
    PeftAnswers,
    answer_all,
    encoder_decoder_rows,
    save_random_model,
    step_limit,
)
from benchmarks.engine_bench import Bench
from benchmarks.machine_limits import Limits

T5 = T5Config.from_dict(
    {"d_model": 64, "d_kv": 16, "num_heads": 6, "d_ff": 96, "num_layers": 2, "vocab_size": 300}
    | {"initializer_factor": 3.0, "decoder_start_token_id": 0}
)
BART = BartConfig(
    vocab_size=300,
    d_model=64,
    encoder_layers=2,
    decoder_layers=3,
    encoder_attention_heads=4,
    decoder_attention_heads=4,
    encoder_ffn_dim=96,
    decoder_ffn_dim=80,
    max_position_embeddings=64,
    init_std=0.3,
    forced_eos_token_id=None,
)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((T5ForConditionalGeneration, T5), id="t5"),
        pytest.param((BartForConditionalGeneration, BART), id="bart"),
    ],
)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    model_class: type[PreTrainedModel]
    config: PreTrainedConfig
    model_class, config = request.param
    return save_random_model(tmp_path_factory.mktemp("model"), model_class, config)


def test_peft_answers_alike_one_after_another_and_in_one_batch(checkpoint: Path) -> None:
    peft = PeftAnswers(checkpoint, num_adapters=3, rank=4)
    sources = [[5, 6, 7, 8, 9], [11, 12, 13], [40, 41, 42, 43]]
    in_turn = peft.in_turn(sources, 8)
    assert in_turn == peft.mixed(sources, 8)
    assert in_turn != peft.base(sources, 8)
    assert [len(answer) for answer in in_turn] == [8] * 3


def test_the_limit_is_that_of_what_a_step_reads_or_of_its_flops(checkpoint: Path) -> None:
    model = PeftAnswers(checkpoint, num_adapters=1, rank=1).model
    decoder = {name: p.numel() for name, p in model.get_decoder().named_parameters() if p.dim() == 2}
    read = [
        numel
        for name, numel in decoder.items()
        if "embed" not in name
        and "relative" not in name
        and not ("EncDec" in name and (".k." in name or ".v." in name))
        and not ("encoder_attn" in name and ("k_proj" in name or "v_proj" in name))
    ]
    weights, (layers, width) = sum(read) + 300 * 64, (2, 96) if model.config.model_type == "t5" else (3, 64)
    num_keys = 3 + 5 + 2 * 4
    reads = step_limit(model, [3, 5], 4, Limits(bandwidth=1, peak=math.inf))
    assert reads == torch.float32.itemsize * (weights + 2 * layers * width * num_keys)
    multiplies = step_limit(model, [3, 5], 4, Limits(bandwidth=math.inf, peak=1))
    assert multiplies == 2 * 2 * weights + 4 * layers * width * num_keys


def test_the_engine_gives_the_answers_of_transformers(checkpoint: Path) -> None:
    bench = Bench(checkpoint, num_threads=1, kv_cache_memory_bytes=8 << 20)
    sources = [bench.prompt(length) for length in (20, 3, 20)]
    answers = answer_all(bench, [None] * 3, sources, num_tokens=8)
    bench.close()
    assert answers == PeftAnswers(checkpoint, num_adapters=1, rank=1).base(sources, 8)


def test_every_figure_of_a_model_is_positive_and_ratios_are_those_of_the_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoder_decoder_bench, "SHAPES", {"tiny": (T5ForConditionalGeneration, T5)})
    results = encoder_decoder_rows(1, num_steps=1, answer_tokens=2, num_threads=1, kv_cache_memory_bytes=8 << 20)
    rows = {row.what.removeprefix("tiny: "): row for row in results}
    assert all(row.value > 0 for row in rows.values())
    assert [row.goal for row in rows.values() if row.goal] == [">= 4", ">= 1.5", "<= 1.6"]
    own = rows["16 different adapters"].value
    for way in ("one after another", "in one batch"):
        times = own / rows[f"the same by PEFT, {way}"].value
        assert rows[f"adapters, times PEFT {way}"].value == pytest.approx(times)
