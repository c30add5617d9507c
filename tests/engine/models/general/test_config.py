"""Which decoders of transformers are read, with which sites, and which are refused with which reason."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints.tiny_decoders import tiny_config, write_config
from multilora_engine.errors import ConfigError, InvalidRequest
from multilora_engine.lora.format import pack_adapter
from multilora_engine.models.general import config as general_config
from multilora_engine.models.general import trace
from multilora_engine.models.registry import read_model_config
from multilora_engine.models.rope_config import AdapterRopes
from multilora_wire.layout import adapter_layout

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0] * 6, "long_factor": [2.0] * 6, "rope_theta": 10000.0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}


def changed(directory: Path, **changes: Any) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


def test_a_decoder_is_described_by_its_modules(tmp_path: Path) -> None:
    config = read_model_config(write_config(tiny_config("ministral"), tmp_path), "auto")
    assert (config.implementation, config.architecture) == ("transformers", "MinistralForCausalLM")
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (3, 6, 2, 12)
    assert (config.hidden_size, config.vocab_size, config.max_position_embeddings) == (48, 311, 512)
    assert (config.end_token_ids, config.tie_word_embeddings) == ((2,), False)
    assert set(config.sliding_window) <= {24, None}
    assert 24 in config.sliding_window


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "gemma3_text", "phi3"])
def test_families_of_ours_are_read_as_transformers_modules_where_that_is_asked_for(
    model_type: str, tmp_path: Path
) -> None:
    path = write_config(tiny_config(model_type), tmp_path)
    native, general = read_model_config(path, "auto"), read_model_config(path, "transformers")
    assert (native.implementation, general.implementation) == ("native", "transformers")
    for field in ("num_layers", "num_heads", "num_kv_heads", "head_dim", "vocab_size", "sliding_window"):
        assert getattr(general, field) == getattr(native, field), field
    if model_type != "phi3":
        assert general.sites.module_names == native.sites.module_names


def test_without_layers_of_its_own_the_engine_refuses_if_it_may_take_no_others(tmp_path: Path) -> None:
    path = write_config(tiny_config("gpt_neox"), tmp_path)
    with pytest.raises(ConfigError, match=r"GPTNeoXForCausalLM.* is not supported; supported are: Llama"):
        read_model_config(path, "native")


def test_usual_linears_have_ids_of_the_wire_and_others_their_names_alone(tmp_path: Path) -> None:
    usual = read_model_config(write_config(tiny_config("stablelm"), tmp_path / "a"), "auto").sites
    assert list(usual.module_names) == [0, 1, 2, 3, 4, 5, 6, 7, 18]
    assert usual.outer is not None
    own = read_model_config(write_config(tiny_config("gpt_neox"), tmp_path / "b"), "auto").sites
    assert set(own.module_names.values()) == {
        *("attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h")
    }
    assert all(module_id <= -6 for module_id in own.module_names)
    assert own.full_name("layers.2.attention.dense") == "gpt_neox.layers.2.attention.dense"
    mixed = read_model_config(write_config(tiny_config("phi"), tmp_path / "c"), "auto").sites
    own_names = {-8: "mlp.fc2", -7: "mlp.fc1", -6: "self_attn.dense"}
    assert mixed.module_names == own_names | {0: "attn_qkv", 1: "attn_q", 2: "attn_k", 3: "attn_v"}


def test_routers_are_no_sites(tmp_path: Path) -> None:
    sites = read_model_config(write_config(tiny_config("hunyuan_v1_moe"), tmp_path), "auto").sites
    assert not [name for name in sites.site_named if name.endswith("gate.wg")]
    assert {"layers.1.mlp.shared_mlp.up_proj", "layers.1.mlp.experts.up_proj"} <= sites.site_named.keys()
    assert set(sites.module_names) >= {13, 14, 15}
    assert 16 not in sites.module_names


def test_no_row_of_the_wire_names_a_linear_without_an_id(tmp_path: Path) -> None:
    sites = read_model_config(write_config(tiny_config("gpt_neox"), tmp_path), "auto").sites
    layout = adapter_layout(sites, 8, "float32")
    module = sites.modules[0]
    weights = torch.zeros(1, module.in_size + module.out_size)
    for module_id in (module.module_id, 1):
        with pytest.raises(InvalidRequest, match=f"lora module {module_id} not enabled.* no module with an id"):
            pack_adapter(weights, torch.tensor([[module_id, 0, 1]], dtype=torch.int32), layout)


def test_code_of_a_checkpoint_is_refused(tmp_path: Path) -> None:
    path = write_config(tiny_config("gpt_neox"), tmp_path)
    (path / "modeling_mine.py").write_text("raise SystemExit('it ran')")
    changed(path, auto_map={"AutoModelForCausalLM": "modeling_mine.Mine", "AutoConfig": "modeling_mine.MyConfig"})
    with pytest.raises(ConfigError, match=r"GPTNeoXForCausalLM brings code of its own \(auto_map\), which never runs"):
        read_model_config(path, "auto")


def test_attention_that_a_config_asks_for_is_not_loaded(tmp_path: Path) -> None:
    path = write_config(tiny_config("gpt_neox"), tmp_path)
    changed(path, attn_implementation="nobody/kernel", _attn_implementation="nobody/kernel")
    assert read_model_config(path, "auto").num_layers == 3


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"architectures": ["NewestForCausalLM"]},
            r"architectures \['NewestForCausalLM'\].* no decoder of transformers",
        ),
        ({"architectures": ["GPTNeoXForQuestionAnswering"]}, "no decoder of transformers"),
        ({"model_type": "newest"}, "model_type 'newest' is not supported"),
        ({"architectures": []}, "must be a list of one name"),
        ({"num_attention_heads": 7}, "transformers refuses it: .*hidden.size"),
        ({"rope_parameters": {"rope_type": "mystery", "rope_theta": 1.0}}, "refuses it"),
        ({"hidden_act": "mystery"}, "refuses it"),
    ],
)
def test_what_transformers_does_not_know_is_refused(changes: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = changed(write_config(tiny_config("gpt_neox"), tmp_path), **changes)
    with pytest.raises(ConfigError, match=reason):
        read_model_config(path, "auto")


@pytest.mark.parametrize(
    ("model_type", "changes", "reason"),
    [
        ("mamba", {}, trace.NOT_BY_TOKEN),
        ("jamba", {}, trace.NOT_BY_TOKEN),
        ("lfm2", {}, trace.NOT_BY_TOKEN),
        ("falcon", {}, trace.NO_INTERFACE),
        ("gptj", {}, trace.NO_INTERFACE),
        ("deepseek_v3", {"first_k_dense_replace": 3}, trace.OTHER_WIDTHS),
        ("bert", {"is_decoder": False}, trace.OTHER_MASK),
        ("roberta", {}, general_config.OTHER_POSITIONS),
        ("gemma4_text", {}, trace.OTHER_HEADS),
        ("diffllama", {}, trace.OTHER_ORDER),
        ("bart", {}, general_config.OTHER_PARTS),
        ("gemma3", {}, general_config.OTHER_PARTS),
        ("gemma3n_text", {}, general_config.SHARED_KEYS),
        ("llama", {"rope_parameters": LONGROPE}, general_config.ROPE_OF_THE_BATCH),
        ("ministral", {"rope_parameters": DYNAMIC}, general_config.ROPE_OF_THE_BATCH),
        ("gpt_bigcode", {"add_cross_attention": True}, general_config.OTHER_PARTS),
        ("llama", {"is_causal": False}, trace.OTHER_MASK),
        ("gpt_oss", {}, trace.OTHER_EXPERTS),
        ("ernie4_5_moe", {"hidden_act": "gelu"}, trace.OTHER_EXPERTS),
    ],
)
def test_what_cannot_run_is_refused_with_its_reason(
    model_type: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    path = changed(write_config(tiny_config(model_type), tmp_path), **changes)
    with pytest.raises(ConfigError, match=r"config.json: \w+ is not served: ") as caught:
        read_model_config(path, "transformers")
    assert reason in str(caught.value)


def test_rotary_embeddings_of_an_adapter_are_refused(tmp_path: Path) -> None:
    config = read_model_config(write_config(tiny_config("gpt_neox"), tmp_path), "auto")
    with pytest.raises(InvalidRequest, match="has 0 kinds of rotary embeddings"):
        AdapterRopes(config.ropes).check('{"context_length": 1024}')
