"""Decoders of transformers' modules in the whole engine, against transformers + PEFT: the same greedy tokens."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from support.engines import run_all
from support.mixture_oracle import EXPERT_IDS, MixtureOracle, make_engine
from support.oracle import ATTENTION, Oracle
from support.parity import (
    answer_as_peft_does_in_little_memory,
    assert_adapters_matter,
    assert_greedy,
    build_small_engine,
    requests_for,
    tiny_prompts,
)
from transformers.pytorch_utils import Conv1D

from checkpoints.tiny_decoders import tiny_decoder
from multilora_engine.models.general.tree import is_experts
from multilora_engine.models.registry import read_model_config
from multilora_engine.request import GenerationRequest
from multilora_wire.module_names import MOE_4H_TO_H

SHORT = ("gpt2", "gpt_neox", "phi", "stablelm", "opt", "gemma")
"""Transposed and fused linears, learned positions, biases, parallel layers, partly turned heads, scaled embeddings."""


LONG = (
    *("apertus", "arcee", "bert", "bert-generation", "biogpt", "bitnet", "cohere", "cohere_compass_text"),
    *("ctrl", "cwm", "electra", "ernie", "ernie4_5", "exaone4", "gpt_bigcode", "granite_swa"),
    *("helium", "hunyuan_v1_dense", "hyperclovax", "jais2", "ministral", "ministral3", "modernbert-decoder"),
    *("nanochat", "nemotron", "olmo", "olmo3", "persimmon", "roc_bert", "seed_oss", "vaultgemma"),
    *("afmoe", "cohere2_moe", "dots1", "ernie4_5_moe", "exaone_moe", "flex_olmo", "flint", "glm4_moe", "granitemoe"),
    *("granitemoe_swa", "granitemoeshared", "hy_v3", "hunyuan_v1_moe", "kolibri1", "laguna", "mellum", "minimax_m2"),
    *("phimoe", "solar_open"),
    *("llama", "qwen2", "gemma3_text", "phi3", "qwen3_moe", "mixtral"),
)
"""All others without layers of the engine's own, and some with them."""

MIXTURES = ("dots1", "flex_olmo", "glm4_moe", "minimax_m2", "qwen3_moe", "solar_open")


@pytest.mark.parametrize(
    "model_type", [*SHORT, *(pytest.param(name, marks=pytest.mark.long(reason="2 s each")) for name in LONG)]
)
def test_decoders_of_transformers_answer_as_peft_does_through_chunks_preemption_and_reused_prefixes(
    model_type: str, tmp_path: Path, default_model_dir: Path
) -> None:
    oracle, path = save_with_adapters(model_type, tmp_path)
    small = build_small_engine(
        oracle, path, default_model_dir, enable_async_scheduling=True, model_implementation="transformers"
    )
    assert small.info.model_implementation == "transformers"
    requests, answers = answer_as_peft_does_in_little_memory(oracle, small)
    base = [GenerationRequest(r.request_id, r.prompt_token_ids, r.sampling) for r in requests]
    assert_adapters_matter(requests, answers, run_all(small, base))


@pytest.mark.parametrize(
    "model_type", ["ernie4_5_moe", *(pytest.param(n, marks=pytest.mark.long(reason="2 s each")) for n in MIXTURES)]
)
def test_adapters_on_experts_answer_as_merged_weights_do(
    model_type: str, tmp_path: Path, default_model_dir: Path
) -> None:
    model, path = tiny_decoder(model_type), tmp_path / "checkpoint"
    model.save_pretrained(path)
    oracle = MixtureOracle(model, tmp_path, read_model_config(path, "transformers").sites)
    oracle.add_random("attention", 8, ATTENTION, seed=1)
    oracle.add_rows("experts", 4, EXPERT_IDS, seed=5)
    oracle.add_rows("two experts", 7, EXPERT_IDS, seed=6, experts=[0, 3])
    oracle.add_rows("down alone", 2, [MOE_4H_TO_H], seed=7)
    options = {"model_implementation": "transformers", "max_num_batched_tokens": 24, "max_num_seqs": 24}
    engine = make_engine(oracle, path, default_model_dir, **options)
    requests = requests_for(oracle, tiny_prompts(15), max_tokens=24)
    answers = run_all(engine, requests)
    assert_greedy(oracle, requests, answers)
    base = run_all(engine, [GenerationRequest(r.request_id, r.prompt_token_ids, r.sampling) for r in requests])
    changed = {r.lora_task_id for r in requests if answers[r.request_id].token_ids != base[r.request_id].token_ids}
    assert changed == set(range(len(oracle.adapters)))


def save_with_adapters(model_type: str, directory: Path) -> tuple[Oracle, Path]:
    """A model with random weights and adapters on its linears, and its checkpoint."""
    model = tiny_decoder(model_type)
    model.save_pretrained(directory / "checkpoint")
    linears = linears_of_layers(model)
    oracle = Oracle(model, directory)
    oracle.add_random("rank 1 all", 1, linears, seed=1)
    oracle.add_random("rank 7 some", 7, linears[::2], seed=2)
    oracle.add_random("rank 16 rsLoRA", 16, linears[1:], seed=3, use_rslora=True)
    oracle.add_random(
        "rank 64 and others", 64, linears, seed=4, rank_pattern={linears[-1]: 3}, alpha_pattern={linears[0]: 9}
    )
    return oracle, directory / "checkpoint"


def linears_of_layers(model: torch.nn.Module) -> list[str]:
    """The names of all linears in layers, without the layer, in order. Of a mixture those of attention alone: PEFT
    takes the usual names in MLPs for those of experts.
    """
    names = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear | Conv1D)]
    if any(map(is_experts, model.modules())):
        names = [name for name in names if "attn" in name and "gate" not in name]
    return list(dict.fromkeys(place[1] for name in names if (place := re.search(r"\.\d+\.(.+)", name))))
