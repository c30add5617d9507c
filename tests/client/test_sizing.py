"""Sizes of a checkpoint without a server, against the engine's own reading of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from multilora_client import InvalidRequest
from multilora_client.sizing import choose_linears, linear_names, read_layout, token_rows_shape
from multilora_engine.lora.checkpoint_layout import checkpoint_layout
from multilora_engine.models.registry import FAMILIES
from multilora_wire.pieces import StoredDtype

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 300,
    "vocab_size": 100,
}


def write_config(directory: Path, config: dict[str, Any]) -> Path:
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text", "smollm3", "cohere2", "starcoder2"])
def test_heads_are_tied_by_default_where_they_are_in_the_engine(tmp_path: Path, model_type: str) -> None:
    name = next(name for name, family in FAMILIES.items() if family.model_type == model_type)
    for changes, is_tied in (({}, True), ({"tie_word_embeddings": False}, False)):
        write_config(tmp_path, LLAMA | {"architectures": [name], "model_type": model_type, "head_dim": 32} | changes)
        layout = read_layout(tmp_path, 64, "float32")
        assert layout == checkpoint_layout(tmp_path, 64, "float32")
        assert layout.sites.outer is not None
        assert layout.sites.outer.is_tied == is_tied


@pytest.mark.parametrize(
    "changes", [{}, {"head_dim": 48}, {"intermediate_size": 4001}, {"hidden_size": 4096}, {"num_key_value_heads": 4}]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "fp8", "int4"])
def test_the_layout_of_a_checkpoint_is_the_engines(tmp_path: Path, changes: dict[str, int], dtype: StoredDtype) -> None:
    write_config(tmp_path, LLAMA | changes)
    assert read_layout(tmp_path, 64, dtype) == checkpoint_layout(tmp_path, 64, dtype)


MIXTURES: dict[str, dict[str, Any]] = {
    "Qwen3MoeForCausalLM": {"num_experts": 6, "moe_intermediate_size": 72, "mlp_only_layers": [1]},
    "Qwen2MoeForCausalLM": {
        "num_experts": 6,
        "moe_intermediate_size": 72,
        "shared_expert_intermediate_size": 200,
        "decoder_sparse_step": 2,
    },
    "OlmoeForCausalLM": {"num_experts": 6, "pad_token_id": 0, "eos_token_id": 0},
    "MixtralForCausalLM": {"num_local_experts": 6},
}


@pytest.mark.parametrize("name", MIXTURES)
def test_the_layout_of_a_mixture_is_the_engines(tmp_path: Path, name: str) -> None:
    fields = {"architectures": [name], "model_type": FAMILIES[name].model_type, "num_experts_per_tok": 2}
    write_config(tmp_path, LLAMA | fields | MIXTURES[name])
    layout = read_layout(tmp_path, 16, "bfloat16")
    assert layout == checkpoint_layout(tmp_path, 16, "bfloat16")
    assert {site.experts for site in layout.sites.sites} == {1, 6}


def test_a_text_part_within_a_model_of_several_kinds_of_input_is_read(tmp_path: Path) -> None:
    alone = read_layout(write_config(tmp_path, LLAMA), 64, "float32")
    assert read_layout(write_config(tmp_path, {"text_config": LLAMA}), 64, "float32") == alone


OUTER = ["embed_tokens", "lm_head"]


def test_embeddings_head_and_rows_of_tokens_count_by_their_values(tmp_path: Path) -> None:
    layout = read_layout(write_config(tmp_path, LLAMA | {"vocab_size": 30000}), 64, "float32")
    modules = choose_linears(layout, "q,lm_head,embed_tokens")
    assert [module.name for module in modules] == ["attn_q"] * 3 + ["lm_head", "embed_tokens"]
    plain = layout.place(p for m in modules[:3] for p in layout.pieces(m, 16, False)).shape.num_pages
    outer = token_rows_shape(layout, 16, False, modules, 0).num_pages
    whole = token_rows_shape(layout, 16, False, modules, 9000).num_pages
    for pages, num_values in ((outer - plain, 2 * 16 * (30000 + 128)), (whole - outer, 9000 * (128 + 1))):
        assert abs(pages * layout.page_bytes - 4 * num_values) <= 2 * layout.page_bytes


def test_rows_of_tokens_need_a_vocabulary(tmp_path: Path) -> None:
    layout = read_layout(write_config(tmp_path, LLAMA | {"vocab_size": 0}), 64, "float32")
    with pytest.raises(InvalidRequest, match="does not tell the size of its vocabulary"):
        token_rows_shape(layout, 16, False, layout.sites.plain_modules, 1)
    layout = read_layout(write_config(tmp_path, LLAMA), 64, "float32")
    with pytest.raises(InvalidRequest, match="--tokens is 101, and the vocabulary has 100 tokens"):
        token_rows_shape(layout, 16, False, layout.sites.plain_modules, 101)


def test_a_plain_mlp_has_linears_of_its_own(tmp_path: Path) -> None:
    layout = read_layout(write_config(tmp_path, LLAMA | {"model_type": "starcoder2"}), 64, "float32")
    assert linear_names(layout) == ["q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj", *OUTER]
    assert [module.module_id for module in choose_linears(layout, "c_fc,c_proj")] == [5, 6] * 3


def test_linears_of_experts_have_names_of_their_own(tmp_path: Path) -> None:
    """`gate` is the router, and elsewhere short for `gate_proj`. A dense layer stands beside the sparse ones."""
    sparse = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "mlp_only_layers": [1]}
    sizes = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 72, "head_dim": 32}
    layout = read_layout(write_config(tmp_path, LLAMA | sparse | sizes), 64, "float32")
    experts = ["experts.gate_proj", "experts.up_proj", "experts.down_proj"]
    dense = ["gate_proj", "up_proj", "down_proj"]
    assert linear_names(layout) == ["q_proj", "k_proj", "v_proj", "o_proj", "gate", *experts, *dense, *OUTER]
    chosen = choose_linears(layout, "gate,experts.up,up")
    assert [(module.name, module.layer) for module in chosen] == [
        ("moe_gate", 0),
        ("moe_router", 0),
        ("mlp_gate", 1),
        ("moe_gate", 2),
        ("moe_router", 2),
    ]
    pages = token_rows_shape(layout, 64, True, chosen, 0).num_pages
    values = 64 * (2 * 6 * (128 + 72) + 2 * (128 + 6) + 128 + LLAMA["intermediate_size"])
    assert abs(pages * layout.page_bytes - 4 * values) <= 2 * layout.page_bytes


def test_linears_are_chosen_by_short_or_whole_name(tmp_path: Path) -> None:
    layout = read_layout(write_config(tmp_path, LLAMA), 64, "float32")
    assert [module.name for module in choose_linears(layout, "v,up_proj")] == ["attn_v", "mlp_gate"] * 3
    for names in ("q,z", "", "q,q", "q,q_proj"):
        with pytest.raises(InvalidRequest, match="write some of q_proj,k_proj,v_proj,o_proj"):
            choose_linears(layout, names)


@pytest.mark.parametrize("dtype", ["float32", "int4"])
def test_an_adapter_of_both_stacks_counts_self_and_cross_attention(tmp_path: Path, dtype: StoredDtype) -> None:
    """PEFT's defaults are q and v of all three attentions."""
    fields = {"d_model": 256, "d_kv": 64, "num_heads": 5, "d_ff": 512, "num_layers": 2, "num_decoder_layers": 3}
    write_config(
        tmp_path,
        {
            "architectures": ["T5ForConditionalGeneration"],
            "model_type": "t5",
            "vocab_size": 9,
            "decoder_start_token_id": 0,
        }
        | fields,
    )
    layout = read_layout(tmp_path, 64, dtype)
    assert layout == checkpoint_layout(tmp_path, 64, dtype)
    chosen = choose_linears(layout, "q,v")
    places = [(layer, module_id) for layer in range(5) for module_id in ((1, 3, 9, 11) if layer < 3 else (1, 3))]
    assert [(module.layer, module.module_id) for module in chosen] == places
    assert linear_names(layout) == ["q", "k", "v", "o", "wi", "wo"]
    with pytest.raises(InvalidRequest, match="write some of q,k,v,o,wi,wo"):
        choose_linears(layout, "q,lm_head")


@pytest.mark.parametrize("content", [None, "no JSON", "[]", "{}"])
def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidRequest, match=r"config\.json"):
        read_layout(tmp_path, 64, "float32")
