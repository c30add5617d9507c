"""Fields of config.json as the engine completes them, against transformers' own config of the same file."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig

from multilora_engine.errors import ConfigError
from multilora_engine.models.model_config import ModelConfig, check_shape, decoder_config
from multilora_engine.models.registry import FAMILIES, read_model_config

SMALL: dict[str, Any] = {
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
MIXED = ["full_attention", "sliding_attention"] * 2
YARN = {"rope_type": "yarn", "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
OLD_LONGROPE = {"type": "su", **LONGROPE}
ROPE_NAMES = ("rope_scaling", "rope_parameters")
BY_TYPE = {"full_attention": {"rope_theta": 9e4}, "sliding_attention": {"rope_type": "linear", "factor": 2.0}}

CHANGES: list[dict[str, Any]] = [
    *({name: value} for name in ("num_key_value_heads", "head_dim") for value in (None, 1, 3, 6, 8)),
    *({name: value} for name in ("sliding_window", "vocab_size") for value in (None, 0, 32, "32", True, 2.5)),
    *({"layer_types": value} for value in (None, MIXED, MIXED[1:], ["attention"] * 4, ["mamba"] * 4, "full", [1] * 4)),
    *({name: value} for name in ("hidden_size", "num_attention_heads") for value in (None, 0, 7, "48", [48])),
    *({name: True} for name in ("attention_bias", "mlp_bias", "tie_word_embeddings", "use_sliding_window", "use_bias")),
    *({name: "yes"} for name in ("tie_word_embeddings", "rms_norm_eps", "rope_theta", "partial_rotary_factor")),
    *({name: 0.25} for name in ("rms_norm_eps", "layer_norm_eps", "norm_epsilon", "logit_scale", "logits_scaling")),
    *({name: 2.5} for name in ("embedding_multiplier", "attention_multiplier", "residual_multiplier")),
    *({name: value} for name in ("hidden_act", "hidden_activation") for value in ("silu", "gelu_pytorch_tanh", "relu")),
    *({name: None} for name in ("hidden_act", "hidden_activation", "rms_norm_eps", "layer_norm_eps", "norm_epsilon")),
    *({name: value} for name in ("rope_theta", "rope_local_base_freq") for value in (None, 5e5, 500000, -1.0)),
    *({"partial_rotary_factor": value} for value in (None, 0.5, 0.25, 1.0, 2.0)),
    *({name: value} for name in ROPE_NAMES for value in (None, {}, "linear", [1], 3)),
    *(
        {name: value, **more}
        for name in ROPE_NAMES
        for value in (
            {"type": "linear", "factor": 2.0},
            {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 7e4},
            {"rope_type": "linear"},
            {"rope_type": "linear", "factor": "2"},
            {"rope_type": "no-such-type"},
            {"rope_type": "default", "partial_rotary_factor": 0.5},
            {"rope_type": "default", "partial_rotary_factor": "half"},
            YARN,
            YARN | {"original_max_position_embeddings": 64},
            LLAMA3,
            LLAMA3 | {"original_max_position_embeddings": "128"},
            {"rope_type": "llama3", "factor": 8.0},
            {"rope_type": "longrope", **LONGROPE},
            OLD_LONGROPE,
            {"type": "su", **LONGROPE, "original_max_position_embeddings": 64},
            {"rope_type": "longrope", "short_factor": [1.0]},
            BY_TYPE,
            {"full_attention": {"rope_theta": 9e4}},
            {"full_attention": {"rope_theta": 9e4}, "sliding_attention": None},
            {"full_attention": 1, "sliding_attention": 2},
        )
        for more in ({}, {"rope_theta": 3e4}, {"layer_types": MIXED}, {"partial_rotary_factor": 0.5})
    ),
    {"original_max_position_embeddings": 128, "rope_scaling": {"rope_type": "longrope", **LONGROPE}},
    {"original_max_position_embeddings": "128"},
    {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3},
    {"use_sliding_window": True, "sliding_window": 8, "no_rope_layers": [1, 0, 1, 0]},
    {"use_sliding_window": True, "sliding_window": None},
    *({"no_rope_layers": value} for value in (None, [1, 0, 1, 0], [0, 0], "1010", ["a"] * 4)),
    *({"no_rope_layer_interval": value} for value in (0, 1, 2, "2")),
    *({"sliding_window_pattern": value} for value in (0, 1, 2, "2")),
    *({name: value} for name in ("final_logit_softcapping", "attn_logit_softcapping") for value in (None, 12.5, "30")),
    *({"query_pre_attn_scalar": value} for value in (None, 144, "144")),
    *({"use_bidirectional_attention": value} for value in (None, False, True)),
]

STRICTER: list[dict[str, Any]] = [
    {"num_attention_heads": 0},
    {"vocab_size": 0},
    {"sliding_window": True},
    {"sliding_window": 2.5},
    *({name: "yes"} for name in ("rms_norm_eps", "rope_theta", "partial_rotary_factor")),
]
"""What the engine refuses and transformers takes for fields that a family does not have, but the engine would read."""

LENIENT: dict[str, list[dict[str, Any]]] = {
    "MistralForCausalLM": [{name: {"rope_type": "longrope", **LONGROPE}, "layer_types": MIXED} for name in ROPE_NAMES],
    "Phi3ForCausalLM": [change for change in CHANGES for name in ROPE_NAMES if change.get(name) == OLD_LONGROPE],
}
"""What the engine reads and transformers refuses: Mistral with windows in some layers, of another class to it; and the
first Phi-3 of long contexts, whose original length stands beside the rotary embeddings."""


def by_transformers(path: Path, raw: dict[str, Any]) -> ModelConfig:
    """What the engine makes of the fields that transformers has.

    Which of them a family's layers read is shown in test_foreign_fields.py.
    """
    name = raw["architectures"][0]
    family = FAMILIES[name]
    auto = AutoConfig.from_pretrained(path, local_files_only=True)
    if "original_max_position_embeddings" in raw or family.model_type == "phi3":
        auto.standardize_rope_params()  # as its layers do once more
    names = set(family.fields.__struct_fields__) - set(family.fields.unread)
    fields: Any = SimpleNamespace(
        **dict.fromkeys(family.fields.unread),
        **{field: getattr(auto, field, None) for field in names},
        norm_eps_field=family.fields.norm_eps_field,
        activation_field=family.fields.activation_field,
    )
    config = family.read(fields, decoder_config(path, raw, fields, name))
    check_shape(config)
    is_partial = any(rope.rotary_dim != config.head_dim for rope in config.ropes.values())
    if is_partial and not family.may_turn_in_part:
        raise ConfigError("partial")
    return config


def outcomes(path: Path, raw: dict[str, Any]) -> tuple[ModelConfig | None, ModelConfig | None]:
    """By the engine and by transformers; None for a refusal."""
    (path / "config.json").write_text(json.dumps(raw))
    try:
        ours = read_model_config(path)
    except ConfigError:
        ours = None
    try:
        return ours, by_transformers(path, raw)
    except Exception:  # its refusals have many types
        return ours, None


def head(name: str) -> dict[str, Any]:
    return {"architectures": [name], "model_type": FAMILIES[name].model_type}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_field_that_is_left_out_has_the_default_of_transformers(tmp_path: Path, name: str) -> None:
    ours, theirs = outcomes(tmp_path, head(name))
    assert ours is not None
    assert ours == theirs


def differing(path: Path, name: str, changes: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    found = []
    for change in changes:
        ours, theirs = outcomes(path, head(name) | SMALL | change)
        is_known = (change in STRICTER and ours is None) or change in LENIENT.get(name, ())
        if ours != theirs and not is_known:
            found.append((change, f"engine: {ours}, transformers: {theirs}"))
    return found


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_reads_as_transformers_reads_it_or_both_refuse_it(tmp_path: Path, name: str) -> None:
    """Each family with its share of the changes; with all of them in the test below."""
    place = list(FAMILIES).index(name)
    assert not differing(tmp_path, name, CHANGES[place :: len(FAMILIES)])


@pytest.mark.long(reason="3,000 configs by two readers")
@pytest.mark.parametrize("name", FAMILIES)
def test_every_config_reads_as_transformers_reads_it(tmp_path: Path, name: str) -> None:
    assert not differing(tmp_path, name, CHANGES)


def test_many_of_the_changes_are_read_and_many_refused(tmp_path: Path) -> None:
    num_read = 0
    for change in CHANGES:
        (tmp_path / "config.json").write_text(json.dumps(head("Qwen3ForCausalLM") | SMALL | change))
        with contextlib.suppress(ConfigError):
            num_read += read_model_config(tmp_path) is not None
    assert len(CHANGES) / 4 < num_read < len(CHANGES) * 3 / 4
