"""Sites by the fields of config.json, against the modules that transformers makes of the same fields."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    GptOssConfig,
    LlamaConfig,
    MBartConfig,
    MixtralConfig,
    MT5Config,
    OlmoeConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    Starcoder2Config,
    T5Config,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING,
)

from multilora_wire.config_sites import config_sites

SHAPE: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 24,
    "intermediate_size": 52,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
MIXTURE = SHAPE | {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 28}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**SHAPE, head_dim=10),
    "starcoder2": Starcoder2Config(**SHAPE),
    "qwen3 moe": Qwen3MoeConfig(**MIXTURE, head_dim=10, mlp_only_layers=[1, 2]),
    "qwen3 moe, every second layer": Qwen3MoeConfig(**MIXTURE, head_dim=10, decoder_sparse_step=2),
    "qwen3 moe, no experts": Qwen3MoeConfig(**MIXTURE | {"num_experts": 0}, head_dim=10),
    "qwen2 moe": Qwen2MoeConfig(**MIXTURE, shared_expert_intermediate_size=36, mlp_only_layers=[0]),
    "qwen2 moe, one expert": Qwen2MoeConfig(
        **MIXTURE | {"num_experts": 1, "num_experts_per_tok": 1}, shared_expert_intermediate_size=36
    ),
    "olmoe": OlmoeConfig(**SHAPE, num_experts=5, num_experts_per_tok=2, pad_token_id=0),
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=5, num_experts_per_tok=2),
}


def shapes_by_transformers(config: PreTrainedConfig) -> dict[str, tuple[int, int, int]]:
    """Inputs, outputs and experts of each linear in the layers, by its name."""
    with torch.device("meta"):
        model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config)
    shapes: dict[str, tuple[int, int, int]] = {}
    for name, parameter in model.model.named_parameters():
        path = name.removesuffix(".weight")
        if parameter.dim() == 2 and path.startswith("layers."):
            shapes[path] = (parameter.shape[1], parameter.shape[0], 1)
        elif path.endswith(".experts.gate_up_proj"):
            num_experts, outputs, inputs = parameter.shape
            for linear in ("gate_proj", "up_proj"):
                shapes[path.replace("gate_up_proj", linear)] = (inputs, outputs // 2, num_experts)
        elif path.endswith(".experts.down_proj"):
            num_experts, outputs, inputs = parameter.shape
            shapes[path] = (inputs, outputs, num_experts)
    return shapes


@pytest.mark.parametrize("name", CONFIGS)
def test_sites_are_the_linears_of_transformers(name: str) -> None:
    config = CONFIGS[name]
    sites = config_sites(config.to_dict())
    assert {s.name: (s.in_size, s.out_size, s.experts) for s in sites.sites} == shapes_by_transformers(config)
    assert sites.outer is not None
    assert (sites.outer.vocab_size, sites.outer.is_tied) == (31, config.tie_word_embeddings)


T5 = {"vocab_size": 31, "d_model": 24, "d_kv": 10, "num_heads": 3, "d_ff": 52, "num_layers": 2}
BART: dict[str, Any] = {
    "vocab_size": 31,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 52,
    "decoder_ffn_dim": 44,
    "max_position_embeddings": 16,
}
ENCODER_DECODERS: dict[str, PreTrainedConfig] = {
    "t5": T5Config(**T5),
    "t5 v1.1": T5Config(**T5, num_decoder_layers=3, feed_forward_proj="gated-gelu"),
    "mt5": MT5Config(**T5, num_decoder_layers=1),
    "bart": BartConfig(**BART),
    "mbart": MBartConfig(**BART),
}


@pytest.mark.parametrize("name", ENCODER_DECODERS)
def test_sites_of_encoder_decoders_are_the_linears_of_transformers(name: str) -> None:
    """By their names in the whole model; layers of the encoder come after the decoder's."""
    config = ENCODER_DECODERS[name]
    with torch.device("meta"):
        model = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING[type(config)](config)
    linears = {
        path: (module.in_features, module.out_features)
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and path != "lm_head"
    }
    sites = config_sites(config.to_dict())
    assert {sites.full_name(s.name): (s.in_size, s.out_size) for s in sites.sites} == linears
    assert sites.outer is None

    num_decoder_layers = getattr(config, "num_decoder_layers", None) or config.decoder_layers
    encoder = {s.layer for s in sites.sites if "encoder." in sites.full_name(s.name)}
    assert encoder == set(range(num_decoder_layers, num_decoder_layers + 2))
    assert sites.num_layers == num_decoder_layers + 2
    self_attention, cross_attention = [0, 1, 2, 3, 4], [8, 9, 10, 11, 12]
    mlp = [5, 6, 7, 18] if name in ("t5 v1.1", "mt5") else [5, 6]
    for layer in range(sites.num_layers):
        expected = {*self_attention, *mlp, *([] if layer in encoder else cross_attention)}
        assert {module_id for number, module_id in sites.module_at if number == layer} == expected


def test_the_first_configurations_of_t5_have_fewer_fields() -> None:
    fields = {**T5, "model_type": "t5"}
    assert config_sites(fields) == config_sites(ENCODER_DECODERS["t5"].to_dict())
    assert config_sites({**fields, "model_type": "mt5"}).module_names[18] == "mlp_gate_up"


@pytest.mark.parametrize("fields", [{"d_kv": None}, {"num_layers": 0}, {"feed_forward_proj": 3}])
def test_fields_that_describe_no_encoder_decoder_are_an_error(fields: dict[str, Any]) -> None:
    with pytest.raises((TypeError, ValueError, AttributeError)):
        config_sites({**T5, "model_type": "t5", **fields})


@pytest.mark.parametrize("name", ["qwen3 moe", "qwen2 moe", "olmoe", "mixtral", "gpt-oss"])
def test_the_form_of_experts_is_that_of_transformers(name: str) -> None:
    gpt_oss = GptOssConfig(**SHAPE, head_dim=10, num_local_experts=5)
    config = gpt_oss if name == "gpt-oss" else CONFIGS[name]
    with torch.device("meta"):
        experts = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).model.layers[-1].mlp.experts

    form = config_sites(config.to_dict()).experts_form

    assert (form.is_transposed, form.is_interleaved) == (experts.is_transposed, not experts.is_concatenated)


@pytest.mark.parametrize("field", ["num_local_experts", "n_routed_experts"])
def test_experts_of_an_unknown_model_type_are_not_taken_for_one_mlp(field: str) -> None:
    fields = SHAPE | {"model_type": "phimoe"}
    assert {site.experts for site in config_sites(fields | {field: 0}).sites} == {1}
    with pytest.raises(ValueError, match="experts of model type 'phimoe' are not known"):
        config_sites(fields | {field: 16})


@pytest.mark.parametrize(
    "changes", [{"hidden_size": None}, {"num_attention_heads": 0, "head_dim": None}, {"decoder_sparse_step": 0}]
)
def test_fields_that_describe_no_decoder_are_an_error(changes: dict[str, Any]) -> None:
    with pytest.raises((KeyError, TypeError, ArithmeticError)):
        config_sites(CONFIGS["qwen3 moe"].to_dict() | changes)
