"""Logits against transformers, in float32, for sequences that are prefilled in chunks and decoded in mixed batches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    DynamicCache,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from multilora_engine.models.layers import SparseMLP
from multilora_engine.models.loader import load_model
from multilora_engine.models.weights import Placement
from multilora_kernels import cpu

SHAPE = {
    "vocab_size": 103,
    "hidden_size": 40,
    "intermediate_size": 52,
    "num_hidden_layers": 3,
    "num_attention_heads": 5,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "initializer_range": 0.4,
}
GROUPED = SHAPE | {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 5000.0,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}
NO_TOKENS = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
"""The defaults of some families are beyond this small vocabulary."""
GEMMA = {
    "query_pre_attn_scalar": 7,
    "sliding_window": 8,
    "final_logit_softcapping": 20.0,
}
GLM = GROUPED | NO_TOKENS | {"head_dim": 12, "attention_bias": True, "partial_rotary_factor": 0.5}
EXPERTS = {"num_experts": 7, "num_experts_per_tok": 3, "moe_intermediate_size": 28}

CHECKPOINTS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE)),
    "llama tied": (LlamaForCausalLM, LlamaConfig(**GROUPED, tie_word_embeddings=True)),
    "llama biases": (LlamaForCausalLM, LlamaConfig(**GROUPED, attention_bias=True, mlp_bias=True)),
    "llama rope llama3": (LlamaForCausalLM, LlamaConfig(**GROUPED, rope_parameters=LLAMA3)),
    "llama rope linear": (
        LlamaForCausalLM,
        LlamaConfig(**SHAPE, rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 700.0}),
    ),
    "llama rope yarn": (LlamaForCausalLM, LlamaConfig(**SHAPE, rope_parameters=YARN)),
    "llama rope yarn mscale": (
        LlamaForCausalLM,
        LlamaConfig(
            **GROUPED,
            rope_parameters=YARN
            | {"mscale": 0.7, "mscale_all_dim": 1.3, "beta_fast": 16, "beta_slow": 2, "truncate": False},
        ),
    ),
    "llama rope dynamic": (
        LlamaForCausalLM,
        LlamaConfig(
            **SHAPE | {"max_position_embeddings": 16},
            rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
        ),
    ),
    "mistral": (MistralForCausalLM, MistralConfig(**GROUPED, sliding_window=None)),
    "mistral sliding window": (MistralForCausalLM, MistralConfig(**GROUPED, sliding_window=7)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SHAPE | {"tie_word_embeddings": True})),
    "qwen2 sliding window": (
        Qwen2ForCausalLM,
        Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=5, max_window_layers=1),
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**GROUPED)),
    "qwen3 biases and windows": (
        Qwen3ForCausalLM,
        Qwen3Config(
            **GROUPED,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=6,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(**GROUPED, **GEMMA, attn_logit_softcapping=5.0)),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **GROUPED,
            **GEMMA,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 20000.0},
            },
        ),
    ),
    "phi3": (Phi3ForCausalLM, Phi3Config(**GROUPED, **NO_TOKENS, sliding_window=9)),
    "phi3 rope longrope in part": (
        Phi3ForCausalLM,
        Phi3Config(
            **GROUPED | {"hidden_size": 60, "max_position_embeddings": 64, "original_max_position_embeddings": 64},
            **NO_TOKENS,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.6,
                "short_factor": [1.0, 1.3, 2.5],
                "long_factor": [1.0, 3.0, 9.0],
                "original_max_position_embeddings": 64,
            },
        ),
    ),
    "granite": (
        GraniteForCausalLM,
        GraniteConfig(
            **GROUPED,
            embedding_multiplier=3.0,
            attention_multiplier=0.2,
            residual_multiplier=0.6,
            logits_scaling=1.7,
        ),
    ),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config(**GROUPED)),
    "glm": (GlmForCausalLM, GlmConfig(**GLM)),
    "glm4": (Glm4ForCausalLM, Glm4Config(**GLM)),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config(**GROUPED, **NO_TOKENS, no_rope_layers=[1, 0, 1])),
    "cohere2": (
        Cohere2ForCausalLM,
        Cohere2Config(
            **GROUPED | {"hidden_size": 60},
            sliding_window=8,
            logit_scale=0.4,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "starcoder2": (Starcoder2ForCausalLM, Starcoder2Config(**GROUPED, **NO_TOKENS, sliding_window=None)),
    "qwen3 moe": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(**GROUPED, **EXPERTS, norm_topk_prob=True, mlp_only_layers=[1]),
    ),
    "qwen3 moe biases and windows": (
        Qwen3MoeForCausalLM,
        Qwen3MoeConfig(
            **GROUPED,
            **EXPERTS,
            decoder_sparse_step=2,
            attention_bias=True,
            use_sliding_window=True,
            sliding_window=6,
        ),
    ),
    "qwen2 moe": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig(**SHAPE, **EXPERTS, shared_expert_intermediate_size=36, mlp_only_layers=[0]),
    ),
    "qwen2 moe windows": (
        Qwen2MoeForCausalLM,
        Qwen2MoeConfig(
            **SHAPE,
            **EXPERTS,
            shared_expert_intermediate_size=36,
            norm_topk_prob=True,
            qkv_bias=False,
            use_sliding_window=True,
            sliding_window=5,
            max_window_layers=2,
        ),
    ),
    "olmoe": (
        OlmoeForCausalLM,
        OlmoeConfig(**SHAPE, **NO_TOKENS, num_experts=6, num_experts_per_tok=2),
    ),
    "gpt-oss": (
        GptOssForCausalLM,
        GptOssConfig(
            **GROUPED,
            num_local_experts=5,
            num_experts_per_tok=2,
            sliding_window=6,
            swiglu_limit=1.5,
            rope_parameters=YARN | {"truncate": False, "beta_fast": 32.0, "beta_slow": 1.0},
        ),
    ),
    "gpt-oss, other layers and no biases of attention": (
        GptOssForCausalLM,
        GptOssConfig(
            **GROUPED,
            num_local_experts=7,
            num_experts_per_tok=3,
            sliding_window=9,
            attention_bias=False,
            layer_types=["full_attention", "full_attention", "sliding_attention"],
        ),
    ),
    "mixtral": (MixtralForCausalLM, MixtralConfig(**GROUPED, num_local_experts=5, sliding_window=7)),
    "mixtral, one expert a token": (
        MixtralForCausalLM,
        MixtralConfig(**GROUPED, num_local_experts=5, num_experts_per_tok=1),
    ),
}

BFLOAT16_SHARE = 0.8
"""Of the square of transformers' error: 0.2 to 0.4 here, and 0.4 to 0.7 where linears round their activations."""
ATOL = 3e-4
"""Of logits up to 11. Random weights this large make attention so sharp that either side, in float32, is up to 8e-5
away from float64, in whatever direction its processor's products happen to round."""

CHUNKS = [[7, 9, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], [21, 1, 1], [2, 2, 2, 2, 2, 2, 2, 2]]
"""Tokens per step of four sequences; the first step has all of them, later ones those that have tokens left."""


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_logits_match_transformers_for_chunked_prefill_and_decode_in_one_batch(
    name: str, tmp_path: Path, paged_runner: Callable[..., Any], paged_sequence: Callable[..., Any]
) -> None:
    reference = make_checkpoint(name, tmp_path)
    runner = paged_runner(load_model(tmp_path, placement(torch.float32)))
    sequences = [paged_sequence(random_tokens(sum(chunks), seed)) for seed, chunks in enumerate(CHUNKS)]
    logits: list[list[torch.Tensor]] = [[] for _ in sequences]
    for step in range(max(map(len, CHUNKS))):
        work = [(i, chunks[step]) for i, chunks in enumerate(CHUNKS) if step < len(chunks)]
        for (i, _), rows in zip(work, runner.step([(sequences[i], n) for i, n in work]), strict=True):
            logits[i].append(rows)
    for sequence, chunks, rows in zip(sequences, CHUNKS, logits, strict=True):
        expected = reference_logits(reference, sequence.token_ids, chunks)
        torch.testing.assert_close(torch.cat(rows), expected, atol=ATOL, rtol=1e-4)


@pytest.mark.parametrize(
    "name", ["llama", "qwen3 biases and windows", "gemma2", "glm4", "cohere2", "qwen2 moe", "gpt-oss"]
)
def test_plain_pytorch_computes_where_no_operator_is_compiled(
    name: str,
    tmp_path: Path,
    paged_runner: Callable[..., Any],
    paged_sequence: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "_library", functools.cache(lambda: None))
    test_logits_match_transformers_for_chunked_prefill_and_decode_in_one_batch(
        name, tmp_path, paged_runner, paged_sequence
    )


@pytest.mark.parametrize("name", ["qwen2 moe", "mixtral"])
def test_experts_that_are_stored_as_one_tensor_load_the_same(name: str, tmp_path: Path) -> None:
    """transformers 5 keeps them so in memory, and on request on disk."""
    model = make_checkpoint(name, tmp_path / "each")
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)
    each, stacked = (load_model(tmp_path / path, placement(torch.float32)) for path in ("each", "stacked"))
    places = stacked.checkpoint_tensors()
    names = [name for name in places if ".experts." in name]
    assert names
    assert all(name.endswith(("gate_up_proj", "down_proj")) for name in names)
    for one, other in zip(each.layers, stacked.layers, strict=True):
        if isinstance(one.mlp, SparseMLP):
            for weight, same in ((one.mlp._gate_up, other.mlp._gate_up), (one.mlp._down, other.mlp._down)):
                assert weight.weight.weight.data.equal(same.weight.weight.data)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama rope yarn", "qwen3 biases and windows"])
def test_half_precision_is_as_near_to_float32_as_transformers_is(
    name: str,
    dtype: torch.dtype,
    tmp_path: Path,
    paged_runner: Callable[..., Any],
    paged_sequence: Callable[..., Any],
) -> None:
    reference, chunks = make_checkpoint(name, tmp_path), [9, 6, 1, 1, 1]
    # One sequence's error is mostly chance (by a factor of ten either way), the mean of eight is not.
    prompts = [random_tokens(sum(chunks), seed) for seed in range(8)]
    sequences = [paged_sequence(prompt) for prompt in prompts]
    runner = paged_runner(load_model(tmp_path, placement(dtype)))
    steps = [torch.stack(runner.step([(sequence, n) for sequence in sequences])) for n in chunks]
    exact = torch.stack([reference_logits(reference, prompt, chunks) for prompt in prompts])
    reference.to(dtype)
    half = torch.stack([reference_logits(reference, prompt, chunks) for prompt in prompts])
    assert steps[0].dtype == torch.float32
    assert (torch.cat(steps, dim=1) - exact).square().mean() < 2 * (half.float() - exact).square().mean()


@pytest.mark.parametrize("name", ["llama rope yarn", "cohere2", "qwen2 moe", "olmoe"])
def test_bfloat16_on_a_cpu_is_nearer_to_float64_of_the_rounded_model_than_transformers_is(
    name: str, tmp_path: Path, paged_runner: Callable[..., Any], paged_sequence: Callable[..., Any]
) -> None:
    chunks = [9, 6, 1, 1, 1]
    reference = make_checkpoint(name, tmp_path).to(torch.bfloat16)
    prompts = [random_tokens(sum(chunks), seed) for seed in range(8)]
    sequences = [paged_sequence(prompt) for prompt in prompts]
    runner = paged_runner(load_model(tmp_path, placement(torch.bfloat16)))
    steps = [torch.stack(runner.step([(sequence, n) for sequence in sequences])) for n in chunks]
    ours = torch.cat(steps, dim=1).double()
    theirs = torch.stack([reference_logits(reference, prompt, chunks) for prompt in prompts]).double()
    exact = torch.stack([reference_logits(reference.double(), prompt, chunks) for prompt in prompts])
    our_errors, their_errors = ((found - exact).square() for found in (ours, theirs))
    if hasattr(reference.config, "num_experts"):
        # Whichever side chooses another expert for a token, by chance, has nearly all of the error there.
        assert our_errors.median() < BFLOAT16_SHARE * their_errors.median()
    else:
        assert our_errors.mean() < BFLOAT16_SHARE * their_errors.mean()


def placement(dtype: torch.dtype) -> Placement:
    return Placement(dtype, dtype, torch.device("cpu"))


def make_checkpoint(name: str, path: Path) -> PreTrainedModel:
    """Random weights, biases and norms included, saved in shards."""
    architecture, config = CHECKPOINTS[name]
    torch.manual_seed(0)
    model = architecture(config).eval()
    model.set_experts_implementation("eager")  # The default cannot do these odd sizes in 16 bits.
    with torch.no_grad():
        for of, parameter in model.named_parameters():
            if parameter.dim() == 1 or of.endswith("_bias"):
                parameter.normal_(1.0, 0.3)
    model.save_pretrained(path, max_shard_size="20kB")
    return model


def random_tokens(n: int, seed: int) -> list[int]:
    return torch.randint(0, SHAPE["vocab_size"], (n,), generator=torch.Generator().manual_seed(seed)).tolist()


@torch.inference_mode()
def reference_logits(model: PreTrainedModel, token_ids: list[int], chunks: list[int]) -> torch.Tensor:
    """[num_tokens, vocab] of one sequence alone, fed in the same chunks (which matters to dynamic rope scaling)."""
    cache = DynamicCache(config=model.config)
    parts = torch.tensor(token_ids).split(chunks)
    return torch.cat([model(part[None], past_key_values=cache, use_cache=True).logits[0] for part in parts])
