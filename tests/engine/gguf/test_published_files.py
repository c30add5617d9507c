"""Published GGUF files against transformers over their dequantised weights."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from support.engines import run_all
from support.oracle import Oracle
from support.parity import assert_greedy, build_engine, requests_for
from transformers import AutoModelForCausalLM, AutoTokenizer

from checkpoints.prepare_gguf_models import MODELS, ensure_gguf_model
from multilora_engine.gguf.checkpoint import prepare_gguf
from multilora_engine.text.tokenizer import Tokenizer

TEXTS = [
    "The capital of France is",
    "def add(a, b):\n    return",
    "Once upon a time, in 2026,  there were",
    "  Wie geht es dir heute? Das Übel 漢字 😀",
    "import numpy as np\n\n\tx = np.zeros((10, 20))\n",
]


@pytest.mark.long(reason="downloads up to 500 MB, and loads models of up to 500 million parameters twice")
@pytest.mark.parametrize("name", MODELS)
def test_greedy_tokens_with_and_without_adapters_are_those_of_transformers_and_peft(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("multilora_engine.gguf.checkpoint._cache_directory", lambda: tmp_path / "cache")
    file = ensure_gguf_model(name)
    directory = prepare_gguf(file)
    tokenizer = Tokenizer(directory)
    theirs = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    for text in TEXTS:
        assert tokenizer.encode(text, True) == theirs.encode(text, add_special_tokens=True)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    oracle = Oracle(model, tmp_path)
    oracle.add_random(
        "rank 4", 4, ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"], seed=1
    )
    oracle.add_random("rank 16 k", 16, ["k_proj"], seed=2)
    engine = build_engine(directory, oracle, directory, kv_cache_bytes=256 << 20, max_model_len=512)
    prompts = [tokenizer.encode(text, True) for text in TEXTS]
    requests = requests_for(oracle, prompts * 2, max_tokens=12)
    answers = run_all(engine, requests)
    assert_greedy(oracle, requests, answers)
    del engine
    gc.collect()
