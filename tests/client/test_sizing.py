"""Sizes of a checkpoint without a server, against the engine's own reading of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from multilora_client import InvalidRequest
from multilora_client.sizing import choose_linears, linear_names, read_layout
from multilora_engine.lora.checkpoint_layout import checkpoint_layout
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


@pytest.mark.parametrize(
    "changes", [{}, {"head_dim": 48}, {"intermediate_size": 4001}, {"hidden_size": 4096}, {"num_key_value_heads": 4}]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "fp8", "int4"])
def test_the_layout_of_a_checkpoint_is_the_engines(tmp_path: Path, changes: dict[str, int], dtype: StoredDtype) -> None:
    write_config(tmp_path, LLAMA | changes)
    assert read_layout(tmp_path, 64, dtype) == checkpoint_layout(tmp_path, 64, dtype)


def test_a_text_part_within_a_model_of_several_kinds_of_input_is_read(tmp_path: Path) -> None:
    alone = read_layout(write_config(tmp_path, LLAMA), 64, "float32")
    assert read_layout(write_config(tmp_path, {"text_config": LLAMA}), 64, "float32") == alone


def test_a_plain_mlp_has_linears_of_its_own(tmp_path: Path) -> None:
    layout = read_layout(write_config(tmp_path, LLAMA | {"model_type": "starcoder2"}), 64, "float32")
    assert linear_names(layout) == ["q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"]
    assert [module.module_id for module in choose_linears(layout, "c_fc,c_proj")] == [5, 6] * 3


def test_linears_are_chosen_by_short_or_whole_name(tmp_path: Path) -> None:
    layout = read_layout(write_config(tmp_path, LLAMA), 64, "float32")
    assert [module.name for module in choose_linears(layout, "v,up_proj")] == ["attn_v", "mlp_gate"] * 3
    for names in ("q,z", "", "q,q", "q,q_proj"):
        with pytest.raises(InvalidRequest, match="write some of q_proj,k_proj,v_proj,o_proj"):
            choose_linears(layout, names)


@pytest.mark.parametrize("content", [None, "no JSON", "[]", "{}"])
def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidRequest, match=r"config\.json"):
        read_layout(tmp_path, 64, "float32")
