"""Experts that are stored in several ways are refused by name; test_quantized_parity.py has the experts of one way."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from support.checkpoint_modules import checkpoint_modules
from support.gptq_awq import Codes, gptq_config, gptq_tensors, quantized, save_linears
from support.loaded_weights import load
from transformers import MixtralConfig, MixtralForCausalLM

from multilora_engine.errors import ConfigError
from multilora_engine.models import checkpoint

EXPERTS = "model.layers.0.block_sparse_moe.experts"
SHAPE = {
    "vocab_size": 37,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_local_experts": 4,
    "max_position_embeddings": 64,
}
Make = Callable[[str, torch.Tensor], Codes | None]


def save(path: Path, make: Make, **config: object) -> None:
    """make: the codes of a linear; None for floats."""

    def store(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor] | None:
        codes = make(name, weight)
        return None if codes is None else (gptq_tensors(codes), codes.weight())

    torch.manual_seed(3)
    with checkpoint_modules(MixtralForCausalLM(MixtralConfig(**SHAPE))) as modules:
        save_linears(path, modules, gptq_config(4, 8, **config), store)


def except_for(other: str, codes: Codes | None, name: str, weight: torch.Tensor) -> Codes | None:
    if name == other:
        return codes
    return quantized(weight, 4, 8) if ".experts." in name else None


@pytest.mark.parametrize("group_size", [8, -1])
def test_experts_of_different_layouts_are_refused(group_size: int, tmp_path: Path) -> None:
    other = f"{EXPERTS}.2.w3"
    codes = quantized(torch.randn(56, 40), 8, group_size)
    dynamic = {rf"+:{other}": {"bits": 8, "group_size": group_size}}
    save(tmp_path, partial(except_for, other, codes), dynamic=dynamic)
    message = rf"{EXPERTS}.0.w1 is stored as int4 in groups of 8 \S+ \S+ \S+ float16 and {other} as int8 in groups"
    with pytest.raises(ConfigError, match=message):
        load(tmp_path)


def test_a_float_expert_among_codes_is_refused(tmp_path: Path) -> None:
    other = f"{EXPERTS}.3.w2"
    save(tmp_path, partial(except_for, other, None))
    with pytest.raises(ConfigError, match=rf"{EXPERTS}.0.w2 is stored as int4 .* and {other} as floats"):
        load(tmp_path)


def test_inputs_of_experts_grouped_by_activations_are_refused_unless_they_lie_in_order(tmp_path: Path) -> None:
    def codes(act_order: bool, name: str, weight: torch.Tensor) -> Codes | None:
        return quantized(weight, 4, 8, act_order=act_order) if ".experts." in name else None

    save(tmp_path / "in order", partial(codes, False), desc_act=True)
    assert "int4 in groups of 8" in load(tmp_path / "in order").weight_bytes
    save(tmp_path / "any order", partial(codes, True), desc_act=True)
    with pytest.raises(ConfigError, match=rf"{EXPERTS}.0.w1.g_idx groups inputs by .* desc_act false"):
        load(tmp_path / "any order")


def test_a_file_is_not_opened_for_each_tensor_of_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mixture has thousands of them, and whoever opens a file reads the names of all its tensors."""
    save(tmp_path, lambda name, weight: quantized(weight, 4, 8) if ".experts." in name else None)
    files = []

    def counted(file: Path, **options: object) -> object:
        files.append(file)
        return safe_open(file, **options)

    monkeypatch.setattr(checkpoint, "safe_open", counted)
    load(tmp_path)
    assert len(files) == 3  # for the shapes, the groups and the weights


def test_a_router_of_codes_is_refused(tmp_path: Path) -> None:
    router = "model.layers.0.block_sparse_moe.gate"
    save(tmp_path, lambda name, weight: quantized(weight, 4, 8) if name == router else None)
    with pytest.raises(ConfigError, match=rf"{router} is quantised"):
        load(tmp_path)
