"""Reading config.json: both generations of its spelling, and a refusal for everything the engine does not do."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from multilora_engine.errors import ConfigError
from multilora_engine.models.model_config import ModelConfig, Routing
from multilora_engine.models.registry import read_model_config

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}
QWEN2 = LLAMA | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
QWEN3 = LLAMA | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 16}
MISTRAL = LLAMA | {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 32}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
QWEN3_MOE = LLAMA | EXPERTS | {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe"}
QWEN2_MOE = (
    LLAMA
    | EXPERTS
    | {"shared_expert_intermediate_size": 36, "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe"}
)
OLMOE = LLAMA | EXPERTS | {"architectures": ["OlmoeForCausalLM"], "model_type": "olmoe"}
GPT_OSS = LLAMA | {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "num_local_experts": 6}
MIXTRAL = LLAMA | {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": 6}
LLAMA3_NUMBERS = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}


LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "original_max_position_embeddings": 64,
}


def read(path: Path, config: dict[str, Any], generation_config: dict[str, Any] | None = None) -> ModelConfig:
    (path / "config.json").write_text(json.dumps(config))
    if generation_config is not None:
        (path / "generation_config.json").write_text(json.dumps(generation_config))
    return read_model_config(path)


def test_a_llama_config_is_read_with_its_derived_head_size(tmp_path: Path) -> None:
    config = read(tmp_path, LLAMA | {"torch_dtype": "bfloat16", "rope_theta": 500000.0})
    assert (config.head_dim, config.q_size, config.kv_size) == (8, 48, 16)
    assert (config.ropes["all"].theta, config.ropes["all"].scaling) == (500000.0, None)
    assert config.layer_ropes == ("all",) * 4
    assert config.sliding_window == (None, None, None, None)
    assert config.dtype == "bfloat16"
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (False, False, False)


@pytest.mark.parametrize("type_key", ["type", "rope_type"])
def test_old_rope_scaling_reads_the_same_as_new_rope_parameters(tmp_path: Path, type_key: str) -> None:
    old = read(tmp_path, LLAMA | {"rope_theta": 9e4, "rope_scaling": {type_key: "llama3", **LLAMA3_NUMBERS}})
    new = read(tmp_path, LLAMA | {"rope_parameters": {"rope_type": "llama3", "rope_theta": 9e4, **LLAMA3_NUMBERS}})
    old_rope, new_rope = old.ropes["all"], new.ropes["all"]
    assert new_rope.scaling is not None
    assert old_rope.scaling is not None
    assert {**old_rope.scaling, "type": None} == {**new_rope.scaling, "type": None}
    assert old_rope.theta == new_rope.theta == 9e4


def test_biases_and_norms_are_those_of_the_architecture(tmp_path: Path) -> None:
    llama = read(tmp_path, LLAMA | {"attention_bias": True})
    qwen2 = read(tmp_path, QWEN2)
    qwen3 = read(tmp_path, QWEN3 | {"attention_bias": True})
    assert (llama.qkv_bias, llama.output_bias, llama.mlp_bias) == (True, True, False)
    assert (qwen2.qkv_bias, qwen2.output_bias, qwen2.mlp_bias) == (True, False, False)
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.mlp_bias) == (True, True, False)
    assert (qwen3.head_dim, qwen3.q_size) == (16, 96)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (MISTRAL, (32, 32, 32, 32)),
        (MISTRAL | {"sliding_window": None}, (None, None, None, None)),
        (MISTRAL | {"layer_types": ["full_attention", "sliding_attention"] * 2}, (None, 32, None, 32)),
        (QWEN2 | {"sliding_window": 8, "max_window_layers": 2}, (None, None, None, None)),
        (QWEN2 | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}, (None, None, None, 8)),
        (
            QWEN3
            | {
                "use_sliding_window": True,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
            },
            (8, None, 8, None),
        ),
    ],
)
def test_every_layer_has_its_own_window(
    tmp_path: Path, config: dict[str, Any], expected: tuple[int | None, ...]
) -> None:
    assert read(tmp_path, config).sliding_window == expected


def test_routing_and_biases_of_mixtures_are_those_of_the_architecture(tmp_path: Path) -> None:
    qwen3, qwen2, olmoe, mixtral = (read(tmp_path, config) for config in (QWEN3_MOE, QWEN2_MOE, OLMOE, MIXTRAL))
    assert (qwen3.routing, mixtral.routing) == (Routing(2, is_normalised=False), Routing(2, is_normalised=True))
    assert read(tmp_path, OLMOE | {"norm_topk_prob": True}).routing == Routing(2, is_normalised=True)
    assert [(c.qkv_bias, c.output_bias) for c in (qwen3, qwen2, olmoe, mixtral)] == [
        (False, False),
        (True, False),
        (False, False),
        (False, False),
    ]
    assert read(tmp_path, QWEN2_MOE | {"qkv_bias": False}).qkv_bias is False


def test_a_mixture_without_experts_is_dense(tmp_path: Path) -> None:
    config = read(tmp_path, QWEN3_MOE | {"num_experts": 0})
    assert {site.experts for site in config.sites.sites} == {1}


@pytest.mark.parametrize(
    ("in_config", "generation_config", "expected"),
    [
        (2, None, (2,)),
        (None, None, ()),
        ([5, 2], None, (5, 2)),
        (2, {"eos_token_id": [9, 2, 7]}, (9, 2, 7)),
        (2, {"eos_token_id": 0}, (0, 2)),
        (2, {}, (2,)),
    ],
)
def test_end_tokens_are_the_union_of_both_files(
    tmp_path: Path, in_config: Any, generation_config: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    assert read(tmp_path, LLAMA | {"eos_token_id": in_config}, generation_config).end_token_ids == expected


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["GemmaForCausalLM"]}, "supported are: LlamaForCausalLM, MistralForCausalLM"),
        ({"architectures": None}, "supported are: LlamaForCausalLM"),
        ({"model_type": "qwen2"}, "model_type 'qwen2' is not supported"),
        ({"architectures": ["PhimoeForCausalLM"], "model_type": "phimoe"}, "Qwen3ForCausalLM"),
        (QWEN3_MOE | {"num_experts_per_tok": 7}, "num_experts_per_tok 7 is more than the 6 experts"),
        (QWEN3_MOE | {"num_experts_per_tok": 0}, "num_experts_per_tok 0 must be positive"),
        (QWEN3_MOE | {"moe_intermediate_size": 0}, "moe_intermediate_size 0 must be positive"),
        (QWEN3_MOE | {"decoder_sparse_step": 0}, "decoder_sparse_step 0 must be positive"),
        (QWEN3_MOE | {"hidden_act": "gelu_pytorch_tanh"}, "is not supported for experts; supported is: silu"),
        (QWEN2_MOE | {"shared_expert_intermediate_size": 0}, "shared_expert_intermediate_size 0 must be positive"),
        (MIXTRAL | {"num_local_experts": 0}, "num_local_experts 0 must be positive"),
        (MIXTRAL | {"num_experts": "8"}, "num_local_experts '8' must be a whole number"),
        (MIXTRAL | {"num_experts": None}, "num_local_experts None must be a whole number"),
        (OLMOE | {"num_local_experts": [4]}, "num_experts [4] must be a whole number"),
        (QWEN3_MOE | {"num_local_experts": math.nan}, "nan must be a whole number"),
        (OLMOE | {"num_experts": 0}, "num_experts_per_tok 2 is more than the 0 experts"),
        (GPT_OSS | {"swiglu_alpha": 2.0}, "swiglu_alpha 2.0 is not supported; supported is: 1.702"),
        (GPT_OSS | {"swiglu_limit": 0.0}, "swiglu_limit 0.0 must be positive"),
        (GPT_OSS | {"num_experts_per_tok": 7}, "num_experts_per_tok 7 is more than the 6 experts"),
        (OLMOE | {"clip_qkv": 8.0}, "clip_qkv 8.0 is not supported"),
        ({"hidden_act": "gelu"}, "supported are: silu"),
        (
            {"rope_scaling": LONGROPE | {"short_factor": [1.0] * 3}},
            "needs a short_factor of 4 positive numbers, got [1.0, 1.0, 1.0]",
        ),
        ({"rope_scaling": LONGROPE | {"long_factor": [1.0, -1.0, 1.0, 1.0]}}, "needs a long_factor of 4 positive"),
        ({"rope_scaling": {"rope_type": "no-such-type", "factor": 2.0}}, "default, linear, dynamic, yarn, llama3"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": -1.0}}, "needs a positive factor, got -1.0"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5 is not supported"),
        ({"num_key_value_heads": 4}, "num_attention_heads 6 is not a multiple of num_key_value_heads 4"),
        ({"head_dim": 3}, "head_dim 3 must be even"),
        ({"dtype": "int8"}, "int8"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        (MISTRAL | {"layer_types": ["chunked_attention"] * 4}, "supported are: full_attention, sliding_attention"),
        ({"eos_token_id": "two"}, "two"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0 must be positive"),
        ({"num_hidden_layers": 2**70}, "num_hidden_layers 1180591620717411303424 must be at most 4096"),
        ({"num_hidden_layers": 4097}, "num_hidden_layers 4097 must be at most 4096"),
        ({"hidden_size": 2**31}, "hidden_size 2147483648 must be at most 2147483647"),
        ({"head_dim": 2**70}, "head_dim 1180591620717411303424 must be at most 2147483647"),
        ({"max_position_embeddings": 2**70}, "max_position_embeddings 1180591620717411303424 must be at most"),
        (MISTRAL | {"sliding_window": 2**70}, "sliding_window 1180591620717411303424 must be at most"),
        (MIXTRAL | {"num_local_experts": 2**70}, "num_local_experts 1180591620717411303424 must be at most 65536"),
        (QWEN3_MOE | {"num_experts": 2**70}, "num_experts 1180591620717411303424 must be at most 65536"),
        (OLMOE | {"num_local_experts": 2**70}, "num_local_experts 1180591620717411303424 must be at most 65536"),
        (QWEN3_MOE | {"moe_intermediate_size": 2**70}, "moe_intermediate_size 1180591620717411303424 must be at most"),
        ({"vocab_size": -1}, "vocab_size -1 must be positive"),
        ({"max_position_embeddings": 0}, "max_position_embeddings 0 must be positive"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "beta_fast": -1}}, "beta_fast must be a number from 0"),
        ({"rope_scaling": {"rope_type": ["linear"]}}, "rope_type must be a name"),
        ({"architectures": 5}, "architectures must be a list of names, got 5"),
        ({"architectures": [[]]}, "architectures must be a list of names"),
    ],
)
def test_what_the_engine_does_not_do_is_refused_with_what_it_does(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, LLAMA | change)
    assert message in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"{", b"[1, 2]", b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_no_json_object_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_model_config(tmp_path)


def test_a_missing_file_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_model_config(tmp_path)
