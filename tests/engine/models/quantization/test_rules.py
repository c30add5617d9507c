"""An adapter on a module that the checkpoint's author rules out is refused by its name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from support.loaded_weights import small_llama

from multilora_engine.errors import ConfigError, InvalidRequest
from multilora_engine.lora.checkpoint_layout import checkpoint_layout
from multilora_engine.lora.format import check_rows, pack_adapter
from multilora_engine.models.quantization.format import sites_ruled_out
from multilora_engine.models.registry import read_model_config
from multilora_wire.module_names import ATTN_Q, ATTN_QKV, MLP_4H_TO_H


def test_an_adapter_on_a_module_that_is_ruled_out_is_refused(tmp_path: Path) -> None:
    small_llama().save_pretrained(tmp_path)
    open_layout = checkpoint_layout(tmp_path, 4, "float32")
    config = json.loads((tmp_path / "config.json").read_text()) | {"lora_target_modules": ["q_proj", "down_proj"]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    layout = checkpoint_layout(tmp_path, 4, "float32")
    weights = torch.ones(1, 500)
    weights[0, 88:] = 0
    row = torch.tensor([[ATTN_QKV, 0, 1]], dtype=torch.int32)
    with pytest.raises(InvalidRequest, match=r"attn_qkv\) of layer 0 adapts layers\.0\.self_attn\.k_proj, layers\.0"):
        pack_adapter(weights, row, layout)
    stored = pack_adapter(weights, row, open_layout)
    with pytest.raises(ValueError, match="which the checkpoint rules out"):
        check_rows(stored.rows, len(stored.pages), layout)
    for module_id, width in ((ATTN_Q, 64), (MLP_4H_TO_H, 96)):
        pack_adapter(torch.ones(1, width), torch.tensor([[module_id, 0, 1]], dtype=torch.int32), layout)


@pytest.mark.parametrize(
    ("targets", "ruled_out"),
    [
        (["qkv_proj", "gate_up_proj"], {"o_proj", "down_proj"}),
        (["re:.*qkv_proj", "down_proj"], {"o_proj", "gate_proj", "up_proj"}),
        (["q_proj"], {"k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}),
    ],
)
def test_parts_of_a_fused_linear_may_be_named_by_it(targets: list[str], ruled_out: set[str], tmp_path: Path) -> None:
    small_llama().save_pretrained(tmp_path)
    (tmp_path / "lora_metadata.json").write_text(json.dumps({"lora_target_modules": targets}))
    sites = read_model_config(tmp_path).sites
    names = {name.rpartition(".")[2] for name in sites_ruled_out(tmp_path, sites)}
    assert names == ruled_out | {"embed_tokens", "lm_head"}


@pytest.mark.parametrize("targets", [["lm_head"], ["re:.*head"], ["q_proj", "lm_head"]])
def test_the_head_may_be_named(targets: list[str], tmp_path: Path) -> None:
    small_llama().save_pretrained(tmp_path)
    (tmp_path / "lora_metadata.json").write_text(json.dumps({"lora_target_modules": targets}))
    ruled_out = sites_ruled_out(tmp_path, read_model_config(tmp_path).sites)
    assert "lm_head" not in ruled_out
    assert "embed_tokens" in ruled_out


def test_a_pattern_that_is_no_regular_expression_is_refused_by_file_and_key(tmp_path: Path) -> None:
    small_llama().save_pretrained(tmp_path)
    (tmp_path / "lora_metadata.json").write_text(json.dumps({"lora_target_modules": ["re:("]}))
    with pytest.raises(ConfigError, match=r"lora_metadata\.json: lora_target_modules: '\(' is no regular expression"):
        checkpoint_layout(tmp_path, 4, "float32")
