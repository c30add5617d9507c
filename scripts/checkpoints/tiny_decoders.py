"""Tiny random decoders of every architecture that transformers has."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

_SHAPE: Mapping[str, Any] = {
    "vocab_size": 311,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "sliding_window": 24,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "is_decoder": True,
    "tie_word_embeddings": False,
}
"""No two sizes are equal. A field counts where an architecture has it, under its own name."""

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}

_HEADS_MAKE_THE_HIDDEN_SIZE = {"num_key_value_heads": 6, "head_dim": 8}
"""For the architectures that have no head_dim of their own, or one key of each head."""


_CHANGES: Mapping[str, Mapping[str, Any]] = {
    "bamba": {"mamba_n_heads": 4, "mamba_d_head": 24},
    "beam": {"mlp_layer_types": ["dense", "sparse", "sparse"]},
    "codegen": {"n_embd": 64, "n_head": 8},
    "cohere_compass_text": {"rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _ROPE)},
    "ctrl": {"dff": 88, "initializer_range": 0.1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1},
    "dots3_note_text": {"num_key_value_heads": 6},
    "gemma3_text": {"query_pre_attn_scalar": 10},
    "gpt_neo": {"attention_types": [[["global", "local", "global"], 1]]},
    "granitemoehybrid": {"mamba_n_heads": 4, "mamba_d_head": 24},
    "helium": {"head_dim": 8},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention", "conv"]},
    "mamba2": {"num_heads": 4, "head_dim": 24},
    "reformer": {"axial_pos_embds_dim": [16, 32], "axial_pos_shape": [16, 32]},
    "zamba2": {"layer_types": ["mamba", "hybrid", "mamba"]},
}
"""The sizes that go together in one architecture alone."""


def architectures() -> dict[str, str]:
    """The class of each `model_type` of transformers' list of decoders."""
    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """A config of an architecture with tiny sizes."""
    kind = CONFIG_MAPPING[model_type]
    own = {field.name for field in dataclasses.fields(kind)}
    names = {name: kind.attribute_map.get(name, name) for name in _SHAPE}
    fields = {names[name]: value for name, value in _SHAPE.items() if names[name] in own}
    if "head_dim" not in own:
        fields |= {name: value for name, value in _HEADS_MAKE_THE_HIDDEN_SIZE.items() if name in own}
    return kind(**{**fields, **_CHANGES.get(model_type, {}), **changes})


def tiny_decoder(model_type: str, **changes: Any) -> PreTrainedModel:
    """A model of random weights."""
    torch.manual_seed(7)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(tiny_config(model_type, **changes))
    model.float().eval()
    return model


def write_config(config: PreTrainedConfig, directory: Path) -> Path:
    """A checkpoint's config.json, without its weights."""
    directory.mkdir(parents=True, exist_ok=True)
    fields = config.to_dict() | {"architectures": [architectures()[config.model_type]]}
    (directory / "config.json").write_text(json.dumps(fields, default=str))
    return directory
