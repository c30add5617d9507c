"""Logits of GGUF files against transformers over the dequantised weights: every family, every type of tensor."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Type
from support.gguf_files import write_model
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from multilora_engine.errors import ConfigError
from multilora_engine.gguf.checkpoint import prepare_gguf
from multilora_engine.models.loader import load_model, stored_dtype
from multilora_engine.models.weights import Placement

SHAPE: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
WIDE_HEADS = SHAPE | {"num_attention_heads": 4, "head_dim": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 5000.0,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0 + i / 8 for i in range(8)],
    "long_factor": [1.0 + i for i in range(8)],
    "original_max_position_embeddings": 64,
}
GEMMA = WIDE_HEADS | {"query_pre_attn_scalar": 128, "sliding_window": 8}
MODELS: dict[str, tuple[type[PreTrainedModel], Any]] = {
    "llama": (LlamaForCausalLM, LlamaConfig(**SHAPE)),
    "llama tied, biases, llama3": (
        LlamaForCausalLM,
        LlamaConfig(**SHAPE, tie_word_embeddings=True, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3),
    ),
    "llama linear": (
        LlamaForCausalLM,
        LlamaConfig(**SHAPE, rope_parameters={"rope_type": "linear", "factor": 3.0, "rope_theta": 700.0}),
    ),
    "mistral": (MistralForCausalLM, MistralConfig(**WIDE_HEADS, sliding_window=None)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "qwen2 yarn": (
        Qwen2ForCausalLM,
        Qwen2Config(
            **SHAPE,
            rope_parameters={
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 64,
                "rope_theta": 10000.0,
            },
        ),
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**WIDE_HEADS)),
    "granite": (
        GraniteForCausalLM,
        GraniteConfig(
            **SHAPE,
            embedding_multiplier=3.0,
            attention_multiplier=0.2,
            residual_multiplier=0.6,
            logits_scaling=1.7,
        ),
    ),
    "smollm3": (SmolLM3ForCausalLM, SmolLM3Config(**SHAPE | {"num_hidden_layers": 4})),
    "gemma2": (Gemma2ForCausalLM, Gemma2Config(**GEMMA, attn_logit_softcapping=5.0, final_logit_softcapping=20.0)),
    "gemma3": (
        Gemma3ForCausalLM,
        Gemma3TextConfig(
            **GEMMA | {"num_hidden_layers": 7},
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
                "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 20000.0},
            },
        ),
    ),
    "phi3": (Phi3ForCausalLM, Phi3Config(**SHAPE, sliding_window=9)),
    "phi3 longrope": (
        Phi3ForCausalLM,
        Phi3Config(**SHAPE, original_max_position_embeddings=64, rope_parameters=LONGROPE),
    ),
    "olmo2": (Olmo2ForCausalLM, Olmo2Config(**SHAPE)),
    "glm4": (Glm4ForCausalLM, Glm4Config(**WIDE_HEADS, attention_bias=True, partial_rotary_factor=0.5)),
    "cohere2": (
        Cohere2ForCausalLM,
        Cohere2Config(**SHAPE | {"num_hidden_layers": 4}, sliding_window=8, logit_scale=0.4),
    ),
    "starcoder2": (Starcoder2ForCausalLM, Starcoder2Config(**SHAPE, sliding_window=None)),
}


def mixed(name: str) -> Type:
    """As llama.cpp's Q4_K_M mixes types: tensors that need more bits have more."""
    return Type.Q6_K if any(part in name for part in ("v_proj", "down", "embed", "lm_head", "c_proj")) else Type.Q4_K


KINDS: dict[str, Callable[[str], Type]] = {
    **{kind.name: lambda _, kind=kind: kind for kind in (Type.F32, Type.F16, Type.BF16, Type.Q8_0)},  # type: ignore[misc]
    **{kind.name: lambda _, kind=kind: kind for kind in (Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1)},  # type: ignore[misc]
    **{kind.name: lambda _, kind=kind: kind for kind in (Type.Q4_K, Type.Q5_K, Type.Q6_K)},  # type: ignore[misc]
    "Q4_K and Q6_K": mixed,
    "Q5_0 and F16": lambda name: Type.F16 if "k_proj" in name or "embed" in name else Type.Q5_0,
}
PROMPTS = [21, 9, 14]
STEPS = 5


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multilora_engine.gguf.checkpoint._cache_directory", lambda: tmp_path / "cache")


def make(name: str, kind: str, path: Path, **options: Any) -> PreTrainedModel:
    """Random weights, biases and norms included, as the file has them."""
    architecture, config = MODELS[name]
    torch.manual_seed(0)
    model = architecture(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.normal_(1.0, 0.3)
    write_model(path, model, KINDS[kind], **options)
    return model


def placement() -> Placement:
    return Placement(torch.float32, torch.float32, torch.device("cpu"))


@torch.inference_mode()
def check_logits(
    model: PreTrainedModel, directory: Path, paged_runner: Callable[..., Any], paged_sequence: Callable[..., Any]
) -> None:
    """Prompts in chunks, then single tokens: the same logits, and so the same greedy tokens."""
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, 300, (length + STEPS,), generator=generator).tolist() for length in PROMPTS]
    runner = paged_runner(load_model(directory, placement()))
    sequences = [paged_sequence(prompt) for prompt in prompts]
    logits = [runner.step([(sequence, length) for sequence, length in zip(sequences, PROMPTS, strict=True)])]
    logits += [runner.step([(sequence, 1) for sequence in sequences]) for _ in range(STEPS)]
    for prompt, rows in zip(prompts, zip(*logits, strict=True), strict=True):
        ours, theirs = torch.cat(rows), model(torch.tensor(prompt)[None]).logits[0]
        torch.testing.assert_close(ours, theirs, atol=1e-4 * float(theirs.abs().max()), rtol=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_logits_of_every_family_match_transformers(
    name: str, tmp_path: Path, paged_runner: Callable[..., Any], paged_sequence: Callable[..., Any]
) -> None:
    model = make(name, "Q4_K and Q6_K", tmp_path / "tiny.gguf")
    check_logits(model, prepare_gguf(tmp_path / "tiny.gguf"), paged_runner, paged_sequence)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_every_type_match_transformers(
    kind: str, tmp_path: Path, paged_runner: Callable[..., Any], paged_sequence: Callable[..., Any]
) -> None:
    model = make("llama", kind, tmp_path / "tiny.gguf")
    check_logits(model, prepare_gguf(tmp_path / "tiny.gguf"), paged_runner, paged_sequence)


def test_a_file_in_pieces_is_one_model(
    tmp_path: Path, paged_runner: Callable[..., Any], paged_sequence: Callable[..., Any]
) -> None:
    model = make("llama", "Q8_0", tmp_path / "tiny.gguf", split=7)
    pieces = sorted(tmp_path.glob("tiny-*.gguf"))
    assert len(pieces) == 3
    directory = prepare_gguf(pieces[1])
    assert directory.name == "tiny"
    check_logits(model, directory, paged_runner, paged_sequence)
    pieces[2].unlink()
    with pytest.raises(ConfigError, match=r"tiny-00003-of-00003\.gguf is missing"):
        prepare_gguf(pieces[0])


def test_the_log_tells_what_is_codes_and_what_is_floats(tmp_path: Path) -> None:
    make("llama", "Q4_K and Q6_K", tmp_path / "tiny.gguf")
    model = load_model(prepare_gguf(tmp_path / "tiny.gguf"), placement())
    assert set(model.weight_bytes) == {
        "int4 in groups of 32, with minimums",
        "int8 in groups of 16, with minimums",
        "int8 in groups of 16",
    }


def test_floats_are_stored_as_the_file_has_them(tmp_path: Path) -> None:
    make("llama", "BF16", tmp_path / "tiny.gguf")
    assert stored_dtype(prepare_gguf(tmp_path / "tiny.gguf")) == torch.bfloat16


def test_a_weight_with_minimums_is_floats_where_no_operator_takes_them(
    tmp_path: Path,
    paged_runner: Callable[..., Any],
    paged_sequence: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = make("llama", "Q4_K and Q6_K", tmp_path / "tiny.gguf")
    directory = prepare_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setattr("multilora_engine.models.quantization.format.has_gpu_operators", lambda _: True)
    assert set(load_model(directory, placement()).weight_bytes) == {"float32", "int8 in groups of 16"}
    check_logits(model, directory, paged_runner, paged_sequence)
