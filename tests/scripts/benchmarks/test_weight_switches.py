"""The part of the engine's benchmark that compares codes alone with floats beside them."""

from __future__ import annotations

from pathlib import Path

import torch
from support.compressed_checkpoints import save_compressed
from transformers import AutoModelForCausalLM

from benchmarks.bench_engine import save_tiny_model
from benchmarks.engine_bench import Bench
from benchmarks.weight_switches import CHOICE, switch_rows
from checkpoints.telling_adapters import save_plain_tokenizer
from multilora_engine.models.weights import MEASURED_ROWS

INT8 = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}


def test_each_number_of_sequences_is_measured_in_floats_in_codes_and_with_both(tmp_path: Path) -> None:
    floats, coded = save_tiny_model(tmp_path / "floats"), tmp_path / "coded"
    model = AutoModelForCausalLM.from_pretrained(floats, dtype=torch.float32)
    save_compressed(model, coded, {"g": {"targets": ["Linear"], "weights": INT8}})
    save_plain_tokenizer(coded, model.config.vocab_size)
    options = {"num_threads": 1, "kv_cache_memory_bytes": 8 << 20}
    benches = {"float32": Bench(floats, **options), "w8a16": Bench(coded, **options)}

    rows = switch_rows(benches, ["w8a16"], (3, 1), rounds=1, context=4, num_steps=1, **options)

    values = {row.what: row.value for row in rows}
    for n in (1, 3):
        step, packed = values[f"decode {n}, w8a16, auto: a step"], values[f"decode {n}, w8a16: a step"]
        assert values[f"decode {n}, w8a16, auto against codes alone"] == packed / step > 0
        of_floats = values[f"decode {n}, float32: a step"]
        other = values[f"decode {n}, float32, another engine: a step"]
        assert values[f"decode {n}, w8a16, auto against float32"] == max(of_floats, other) / step
        assert values[f"decode {n}, float32, another engine against float32"] == of_floats / other
    told = [what for what in values if what.startswith(CHOICE)]
    hidden, vocabulary = model.config.hidden_size, model.config.vocab_size
    for shape in (f"{hidden} x {hidden}", f"{vocabulary} x {hidden}"):
        assert {f"{CHOICE}w8a16, {shape}: floats at {n} rows" for n in MEASURED_ROWS} <= {*told}
    assert all(values[what] > 0 for what in told)
    assert {row.is_met for row in rows if row.goal} <= {True, False}
    assert not any(bench.engine.has_work for bench in benches.values())
    for bench in benches.values():
        bench.close()
