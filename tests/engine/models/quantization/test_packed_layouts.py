"""Checkpoints of GPTQ, AWQ and fine-grained FP8, packed by hand, hold the weights that were packed."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.entrypoints.convert.converters.autoawq import AutoAWQConverter
from safetensors.torch import load_file, save_file
from support.gptq_awq import (
    Codes,
    awq_tensors,
    fp8_tensors,
    gptq_config,
    gptq_tensors,
    in_layers,
    quantized,
    save_linears,
)
from support.loaded_weights import assert_read_as, assert_same_weights, load, small_llama

from multilora_engine.errors import ConfigError

WEIGHTS = "model.safetensors"
Q = "model.layers.0.self_attn.q_proj"
UP = "model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    ("bits", "group_size", "version"),
    [
        pytest.param(*case, marks=[] if index % 5 == 0 else pytest.mark.long(reason="one of 28 combinations"))
        for index, case in enumerate(itertools.product(range(2, 9), [8, -1], [1, 2]))
    ],
)
def test_gptq(bits: int, group_size: int, version: int, tmp_path: Path) -> None:
    model = small_llama()
    config = gptq_config(bits, group_size, checkpoint_format="gptq" if version == 1 else "gptq_v2")
    store = in_layers(lambda _, w: quantized(w, bits, group_size), lambda codes: gptq_tensors(codes, version))
    save_linears(tmp_path, model, config, store)
    assert_read_as(tmp_path, model)


def test_symmetric_gptq_of_version_1_shows_the_known_zeros(tmp_path: Path) -> None:
    model = small_llama()
    store = in_layers(lambda _, w: quantized(w, 4, 8, symmetric=True), gptq_tensors)
    save_linears(tmp_path, model, gptq_config(4, 8, sym=True), store)
    assert load_file(tmp_path / WEIGHTS)[f"{Q}.qzeros"].unique().tolist() == [0x77777777]
    assert_read_as(tmp_path, model)


@pytest.mark.parametrize("same_order", [True, False])
def test_gptq_with_inputs_grouped_by_activations(same_order: bool, tmp_path: Path) -> None:
    model = small_llama()
    seeds = dict.fromkeys(("q_proj", "k_proj", "v_proj"), 0) if same_order else {"k_proj": 5}

    def codes(name: str, weight: torch.Tensor) -> Codes:
        seed = seeds.get(name.rpartition(".")[2], len(name))
        return quantized(weight, 4, 8, act_order=True, seed=seed)

    save_linears(tmp_path, model, gptq_config(4, 8, desc_act=True), in_layers(codes, gptq_tensors))
    loaded = load(tmp_path)
    assert_same_weights(loaded, model)
    assert hasattr(loaded.layers[0].attention.qkv.weight, "order") == same_order


def test_gptq_overrides_of_single_modules_heads_and_old_zero_biases(tmp_path: Path) -> None:
    model = small_llama()
    dynamic = {
        r"-:.*mlp\.up_proj": {},
        r"+:.*self_attn\.[qk]_proj": {"bits": 8, "group_size": 4},
        r".*o_proj": {"group_size": -1},
        r".*": {},
    }
    settings = {"q_proj": (8, 4), "k_proj": (8, 4), "o_proj": (3, -1)}

    def store(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor] | None:
        if name == UP:
            return None
        codes = quantized(weight, *settings.get(name.rpartition(".")[2], (3, 8)))
        return gptq_tensors(codes) | {"bias": torch.zeros(len(weight), dtype=torch.float16)}, codes.weight()

    save_linears(tmp_path, model, gptq_config(3, 8, dynamic=dynamic, lm_head=True), store)
    loaded = load(tmp_path)
    assert_same_weights(loaded, model)
    assert set(loaded._lm_head.bytes_by_kind) == {"int4 in groups of 8"}


def test_a_bias_that_a_model_without_one_would_lose_is_refused(tmp_path: Path) -> None:
    def store(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        codes = quantized(weight, 4, 8)
        return gptq_tensors(codes) | {"bias": torch.ones(len(weight))}, codes.weight()

    save_linears(tmp_path, small_llama(), gptq_config(4, 8), store)
    with pytest.raises(ConfigError, match=r"unexpected tensor \S+\.bias"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("file", "config"),
    [
        ("quantize_config.json", {"bits": 4, "group_size": 8, "desc_act": False}),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 8, "zero_point": True, "version": "GEMM"}),
    ],
)
def test_the_files_of_old_versions_are_read(file: str, config: dict[str, Any], tmp_path: Path) -> None:
    model = small_llama(head_dim=8)
    pack = gptq_tensors if file == "quantize_config.json" else awq_tensors
    save_linears(tmp_path, model, {}, in_layers(lambda _, w: quantized(w, 4, 8), pack))
    (tmp_path / file).write_text(json.dumps(config))
    assert_read_as(tmp_path, model)


@pytest.mark.parametrize(("group_size", "has_zeros"), [(8, True), (-1, True), (8, False)])
def test_awq(group_size: int, has_zeros: bool, tmp_path: Path) -> None:
    model = small_llama(head_dim=8)

    def pack(codes: Codes) -> dict[str, torch.Tensor]:
        tensors = awq_tensors(codes)
        assert_compressed_tensors_reads(tensors, codes)
        return tensors if has_zeros else {name: t for name, t in tensors.items() if name != "qzeros"}

    config = {"quant_method": "awq", "bits": 4, "group_size": group_size, "zero_point": has_zeros, "version": "gemm"}
    save_linears(
        tmp_path, model, config, in_layers(lambda _, w: quantized(w, 4, group_size, symmetric=not has_zeros), pack)
    )
    assert_read_as(tmp_path, model)


def assert_compressed_tensors_reads(tensors: dict[str, torch.Tensor], codes: Codes) -> None:
    """The packer of this test packs as AutoAWQ does: the library's converter undoes it."""
    weight, scale, zero_point = AutoAWQConverter()._convert_gemm_module(
        tensors["qweight"], tensors["scales"], tensors["qzeros"]
    )
    assert zero_point is not None
    group = codes.group
    values = (weight.float() - zero_point.float()[:, group]) * scale.float()[:, group]
    torch.testing.assert_close(values, codes.weight())


@pytest.mark.parametrize("scale_name", ["weight_scale_inv", "weight_scale"])
def test_fine_grained_fp8(scale_name: str, tmp_path: Path) -> None:
    model = small_llama()
    block = [16, 8] if scale_name == "weight_scale_inv" else None

    def store(name: str, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor] | None:
        return None if name in ("lm_head", UP) else fp8_tensors(weight, block)

    config = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": block}
    save_linears(tmp_path, model, config, store)
    assert_read_as(tmp_path, model)
    tensors = load_file(tmp_path / WEIGHTS)
    tensors[f"{Q}.weight"].view(torch.uint8)[3, 5] = 0xFF
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(ConfigError, match=rf"{Q}: weight holds NaN in the outputs 0 to 23"):
        load(tmp_path)


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_a_missing_qweight_is_refused_by_its_name(layout: str, tmp_path: Path) -> None:
    if layout == "gptq":
        store = in_layers(lambda _, w: quantized(w, 4, 8), gptq_tensors)
        save_linears(tmp_path, small_llama(), gptq_config(4, 8), store)
    else:
        config = {"quant_method": "awq", "bits": 4, "group_size": 8, "zero_point": True, "version": "gemm"}
        store = in_layers(lambda _, w: quantized(w, 4, 8), awq_tensors)
        save_linears(tmp_path, small_llama(head_dim=8), config, store)
    tensors = load_file(tmp_path / "model.safetensors")
    missing = "model.layers.0.self_attn.q_proj.qweight"
    del tensors[missing]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=f"tensor {missing} is missing"):
        load(tmp_path)
