"""Fields of config.json as the engine completes them, against transformers' own config of the same file."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig, PretrainedConfig

from multilora_engine.errors import ConfigError
from multilora_engine.models import hf_config
from multilora_engine.models.hf_config import begin_completing
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


def head(name: str) -> dict[str, Any]:
    return {"architectures": [name], "model_type": FAMILIES[name].model_type}


def completed(raw: dict[str, Any]) -> dict[str, Any]:
    return begin_completing(raw)()


def outcome(path: Path, raw: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """The completed fields by the engine and by transformers; None where the engine refuses the file."""
    (path / "config.json").write_text(json.dumps(raw))
    try:
        read_model_config(path)
    except ConfigError:
        return None
    ours = completed(raw)
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    config.standardize_rope_params()  # as its layers do once more
    return ours, {name: getattr(config, name, None) for name in ours}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_field_that_is_left_out_has_the_default_of_transformers(tmp_path: Path, name: str) -> None:
    found = outcome(tmp_path, head(name))
    assert found is not None
    assert found[0] == found[1]


@pytest.mark.parametrize("name", FAMILIES)
def test_a_config_is_refused_or_reads_as_transformers_reads_it(tmp_path: Path, name: str) -> None:
    """Each family with its share of the changes."""
    changes = CHANGES[list(FAMILIES).index(name) :: len(FAMILIES)]
    if name == "Phi3ForCausalLM":  # Transformers refuses the old name of its longrope.
        changes = [change for change in changes if OLD_LONGROPE not in change.values()]
    outcomes = [(change, outcome(tmp_path, head(name) | SMALL | change)) for change in changes]
    read = [(change, found) for change, found in outcomes if found is not None]
    assert len(changes) / 4 < len(read) < len(changes)
    assert not [(change, *found) for change, found in read if without_type(found[0]) != without_type(found[1])]


def without_type(fields: dict[str, Any]) -> dict[str, Any]:
    """Without the old spelling of `rope_type`, which nobody reads once `rope_type` is there."""
    return fields | {"rope_parameters": {k: v for k, v in fields["rope_parameters"].items() if k != "type"}}


@pytest.mark.parametrize("name", FAMILIES)
def test_a_field_of_another_family_is_no_field(name: str) -> None:
    raw = head(name) | SMALL
    foreign = {"no_such_field": 1, "auto_map": {"AutoConfig": "remote.Config"}, "head_size": 3}
    assert completed(raw | foreign) == completed(raw)


def test_the_first_longrope_of_phi3_is_read_by_its_old_name() -> None:
    new = {"type": "longrope", **LONGROPE}
    old, renamed = (completed(head("Phi3ForCausalLM") | SMALL | {"rope_scaling": rope}) for rope in (OLD_LONGROPE, new))
    assert old == renamed


def test_a_field_that_only_transformers_knows_is_refused_unless_it_has_its_default(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raw = head("GraniteForCausalLM") | SMALL
    monkeypatch.setattr(hf_config, "_READ", hf_config._READ - {"embedding_multiplier"})
    assert "embedding_multiplier" not in completed(raw | {"embedding_multiplier": 1.0})
    with pytest.raises(ConfigError, match=r"config\.json: embedding_multiplier 2\.0 is not supported"):
        completed(raw | {"embedding_multiplier": 2.0})


@pytest.mark.parametrize("name", FAMILIES)
def test_all_fields_of_a_family_are_known(name: str) -> None:
    own = {field.name for field in dataclasses.fields(AutoConfig.for_model(FAMILIES[name].model_type))}
    of_all = {field.name for field in dataclasses.fields(PretrainedConfig)}
    assert own - of_all <= hf_config._READ | hf_config._WITHOUT_EFFECT


@pytest.mark.parametrize("change", [{}, {"rope_scaling": YARN, "rope_theta": 5e5}, {"vocab_size": "32"}])
def test_a_process_without_transformers_reads_the_same_by_a_child(
    change: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = head("LlamaForCausalLM") | SMALL | change
    here = fields_or_refusal(raw)
    monkeypatch.setattr(hf_config, "_is_imported", lambda: False)
    assert fields_or_refusal(raw) == here


def fields_or_refusal(raw: dict[str, Any]) -> dict[str, Any] | str:
    try:
        return completed(raw)
    except ConfigError as error:
        return str(error)
