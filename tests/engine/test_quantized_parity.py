"""Quantised checkpoints against transformers + PEFT over the same weights as floats: the same greedy tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.compressed_checkpoints import save_compressed
from support.engines import run_all
from support.gptq_awq import awq_tensors, gptq_config, gptq_tensors, in_layers, quantized, save_linears
from support.oracle import Oracle
from support.parity import (
    TINY,
    add_random_adapters,
    assert_adapters_matter,
    assert_greedy,
    build_engine,
    requests_for,
    tiny_prompts,
)
from transformers import LlamaConfig, LlamaForCausalLM

from multilora_engine.request import GenerationRequest


def integers(num_bits: int, symmetric: bool, group_size: int = 0, **more: Any) -> dict[str, Any]:
    """`weights` of a scheme; without a group size a scale an output."""
    grouped = {"strategy": "group", "group_size": group_size} if group_size else {"strategy": "channel"}
    return {"num_bits": num_bits, "type": "int", "symmetric": symmetric, **grouped, **more}


def scheme(weights: dict[str, Any], *targets: str, **more: Any) -> dict[str, Any]:
    return {"targets": targets or ["Linear"], "weights": weights, **more}


FP8_BLOCKS = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "block", "block_structure": [16, 8]}
FP8_PER_TOKEN = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "token", "dynamic": True}
COMPRESSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "w4a16 in groups": ({"g": scheme(integers(4, True, 8))}, ["lm_head"]),
    "w3a16 with zero points": ({"g": scheme(integers(3, False))}, ["lm_head"]),
    "head and embeddings too": ({"g": scheme(integers(8, False, 4), "Linear", "Embedding")}, []),
    "blocks of FP8": ({"g": scheme(FP8_BLOCKS, input_activations=FP8_PER_TOKEN)}, ["lm_head"]),
    "q, k, v in different ways": (
        {
            "a": scheme(integers(4, True, 8), "re:.*q_proj", "re:.*mlp.*"),
            "b": scheme(integers(6, False, 12), "model.layers.1.self_attn.v_proj", "re:.*o_proj$"),
        },
        ["re:.*layers.2.*up_proj"],
    ),
}


def default_and_long(cases: Iterable[str], default: Collection[str]) -> list[Any]:
    long = pytest.mark.long(reason="seconds a checkpoint; loading is tested for each format")
    return [pytest.param(name, marks=[] if name in default else long) for name in cases]


@pytest.mark.parametrize("name", default_and_long(COMPRESSED, ["q, k, v in different ways"]))
def test_compressed_tensors(name: str, tmp_path: Path, default_model_dir: Path) -> None:
    groups, ignore = COMPRESSED[name]
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    save_compressed(model, tmp_path / "checkpoint", groups, ignore=ignore)
    assert_served_as_peft_does(model, tmp_path, default_model_dir)


GPTQ = gptq_config(4, 8, desc_act=True)
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"}
PACKED = {
    "GPTQ with inputs grouped by activations, the same groups for q, k and v": (
        GPTQ,
        lambda name, w: quantized(w, 4, 8, act_order=True, seed=w.shape[1]),
        gptq_tensors,
    ),
    "GPTQ with inputs grouped by activations, other groups for each linear": (
        GPTQ,
        lambda name, w: quantized(w, 4, 8, act_order=True, seed=len(name)),
        gptq_tensors,
    ),
    "AWQ": (AWQ, lambda name, w: quantized(w, 4, 8), awq_tensors),
}


@pytest.mark.parametrize("name", default_and_long(PACKED, ["AWQ", next(iter(PACKED))]))
def test_checkpoints_of_gptq_and_awq(name: str, tmp_path: Path, default_model_dir: Path) -> None:
    config, codes, pack = PACKED[name]
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**TINY | {"head_dim": 8}))
    (tmp_path / "checkpoint").mkdir()
    save_linears(tmp_path / "checkpoint", model, config, in_layers(codes, pack))
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
