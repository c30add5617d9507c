"""Quantised checkpoints against transformers + PEFT over the same weights as floats: the same greedy tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.compressed_checkpoints import save_compressed
from support.engines import run_all
from support.oracle import Oracle
from support.parity import (
    add_random_adapters,
    assert_adapters_matter,
    assert_greedy,
    build_engine,
    requests_for,
    tiny_prompts,
)
from transformers import LlamaConfig, LlamaForCausalLM

from multilora_engine.request import GenerationRequest

TINY = {
    "vocab_size": 311,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}


def integers(num_bits: int, symmetric: bool, group_size: int = 0, **more: Any) -> dict[str, Any]:
    """`weights` of a scheme; without a group size a scale an output."""
    grouped = {"strategy": "group", "group_size": group_size} if group_size else {"strategy": "channel"}
    return {"num_bits": num_bits, "type": "int", "symmetric": symmetric, **grouped, **more}


def scheme(weights: dict[str, Any], *targets: str, **more: Any) -> dict[str, Any]:
    return {"targets": targets or ["Linear"], "weights": weights, **more}


CASES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "w4a16 in groups": ({"g": scheme(integers(4, True, 8))}, ["lm_head"]),
    "w3a16 with zero points": ({"g": scheme(integers(3, False))}, ["lm_head"]),
    "head and embeddings too": ({"g": scheme(integers(8, False, 4), "Linear", "Embedding")}, []),
    "q, k, v in different ways": (
        {
            "a": scheme(integers(4, True, 8), "re:.*q_proj", "re:.*mlp.*"),
            "b": scheme(integers(6, False, 12), "model.layers.1.self_attn.v_proj", "re:.*o_proj$"),
        },
        ["re:.*layers.2.*up_proj"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_those_of_peft_over_the_dequantised_weights(
    name: str, tmp_path: Path, default_model_dir: Path
) -> None:
    groups, ignore = CASES[name]
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    save_compressed(model, tmp_path / "checkpoint", groups, ignore=ignore)
    assert_served_as_peft_does(model, tmp_path, default_model_dir)


def assert_served_as_peft_does(model: LlamaForCausalLM, directory: Path, tokenizer_path: Path) -> None:
    """Of the checkpoint in `directory`, whose weights `model` has as floats."""
    oracle = Oracle(model, directory)
    add_random_adapters(oracle)
    engine = build_engine(
        directory / "checkpoint", oracle, tokenizer_path, max_num_batched_tokens=40, max_num_seqs=14, num_threads=1
    )
    requests = requests_for(oracle, tiny_prompts(14), max_tokens=16)
    answers = run_all(engine, requests)
    assert_greedy(oracle, requests, answers)
    base = [GenerationRequest(r.request_id, r.prompt_token_ids, r.sampling) for r in requests]
    assert_adapters_matter(requests, answers, run_all(engine, base))
