"""Checkpoints that compressed-tensors itself writes hold the weights that it itself reads."""

from __future__ import annotations

import itertools
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors.pack_quantized import pack_to_int32, unpack_from_int32
from safetensors.torch import load_file, save_file
from support.compressed_checkpoints import change_config, save_compressed
from support.loaded_weights import CPU, LINEARS, assert_read_as, assert_same_weights, load, small_llama

from multilora_engine.errors import ConfigError
from multilora_engine.models.decoder import Decoder
from multilora_engine.models.loader import load_model, stored_dtype
from multilora_engine.models.weights import LinearWeight, Placement

WEIGHTS = "model.safetensors"
Q = "model.layers.0.self_attn.q_proj"
PER_TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
FP8_PER_TOKEN = PER_TOKEN | {"type": "float"}
FP8_PER_TENSOR = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}


def integers(bits: int, symmetric: bool, strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": strategy, **more}


def floats(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **more}


def groups(weights: dict[str, Any], *targets: str, **more: Any) -> dict[str, Any]:
    return {"group_0": {"targets": list(targets or ["Linear"]), "weights": weights, **more}}


STRATEGIES = [{"strategy": "tensor"}, {"strategy": "channel"}, {"strategy": "group", "group_size": 8}]


@pytest.mark.parametrize(
    ("bits", "symmetric", "strategy"),
    [
        pytest.param(*case, marks=[] if index % 5 == 0 else pytest.mark.long(reason="one of 42 combinations"))
        for index, case in enumerate(itertools.product(range(2, 9), [True, False], STRATEGIES))
    ],
)
def test_packed_integers(bits: int, symmetric: bool, strategy: dict[str, Any], tmp_path: Path) -> None:
    model = small_llama()
    # attention's o_proj has 24 inputs and the MLP's 40 and 56: groups of 8 divide them all.
    save_compressed(model, tmp_path, groups(integers(bits, symmetric, **strategy), "Linear", "Embedding"))
    assert_read_as(tmp_path, model)
    code = "int4" if bits <= 4 else "int8"
    assert set(load(tmp_path).weight_bytes) <= {f"{code} in groups of {size}" for size in (8, 24, 40, 56)}


@pytest.mark.parametrize(
    ("weights", "activations"),
    [
        (integers(8, True, "channel"), PER_TOKEN),
        (integers(8, False, "channel"), PER_TOKEN),
        (integers(4, True, "group", group_size=8), PER_TOKEN),
        (integers(8, True, "tensor"), PER_TOKEN | {"dynamic": False, "strategy": "tensor"}),
        (floats("tensor"), FP8_PER_TENSOR),
        (floats("channel"), FP8_PER_TOKEN),
        (floats("block", block_structure=[16, 8]), FP8_PER_TOKEN),
        (floats("channel"), None),
        (floats("group", group_size=8), None),
        (integers(4, True, "group", group_size=8, actorder="weight"), None),
    ],
)
def test_a_byte_a_code_with_activations_that_stay_floats(
    weights: dict[str, Any], activations: dict[str, Any] | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = small_llama()
    save_compressed(model, tmp_path, groups(weights, input_activations=activations), ignore=["lm_head"])
    with caplog.at_level(logging.WARNING):
        assert_read_as(tmp_path, model)
    is_said = "input_activations of 8 bits" in caplog.text and "they stay floats" in caplog.text
    assert is_said == (activations is not None)


def test_codes_are_not_multiplied_in_float16_on_a_cpu(tmp_path: Path) -> None:
    save_compressed(small_llama(), tmp_path, groups(integers(4, True, "group", group_size=8)), ignore=["lm_head"])
    with pytest.raises(ConfigError, match=r"parameter dtype=float16: on a CPU .* write one of these, or auto"):
        load_model(tmp_path, Placement(torch.float16, torch.float16, CPU))


def test_scales_of_16_bits_stay_as_they_are(tmp_path: Path) -> None:
    model = small_llama().to(torch.bfloat16)
    save_compressed(model, tmp_path, groups(integers(4, False, "group", group_size=8)), ignore=["lm_head"])
    loaded = load(tmp_path, torch.bfloat16)
    assert loaded.layers[0].attention.qkv.weight.layout.scale_dtype == torch.bfloat16
    # The library multiplies in bfloat16; we do not.
    assert_same_weights(loaded, model, rtol=2**-8)


def test_legacy_group_indices_give_each_input_its_own_group(tmp_path: Path) -> None:
    model = small_llama()
    save_compressed(model, tmp_path, groups(integers(4, False, "group", group_size=8)), ignore=["lm_head"])
    tensors = load_file(tmp_path / WEIGHTS)
    for index, name in enumerate(LINEARS):
        # q and k share an order of their inputs, v has another.
        generator = torch.Generator().manual_seed(max(index, 1))
        linear, stored = model.model.layers[0].get_submodule(name), f"model.layers.0.{name}"
        order = torch.randperm(linear.weight.shape[1], generator=generator)
        codes = unpack_from_int32(tensors[f"{stored}.weight_packed"], 4, linear.weight.shape)
        tensors[f"{stored}.weight_packed"] = pack_to_int32(codes[:, order], 4)
        tensors[f"{stored}.weight_g_idx"] = (order // 8).to(torch.int32)
        linear.weight.data = linear.weight[:, order]
    save_file(tensors, tmp_path / WEIGHTS)
    assert_read_as(tmp_path, model)


def test_a_group_index_with_groups_of_other_sizes_is_refused(tmp_path: Path) -> None:
    save_compressed(small_llama(), tmp_path, groups(integers(4, True, "group", group_size=8)), ignore=["lm_head"])
    change_tensors(tmp_path, {f"{Q}.weight_g_idx": torch.zeros(40, dtype=torch.int32)})
    with pytest.raises(ConfigError, match=rf"tensor {Q}\.weight_g_idx does not divide 40 inputs into 5 groups of 8"):
        load(tmp_path)


def test_a_group_index_of_minus_one_is_none(tmp_path: Path) -> None:
    model = small_llama()
    save_compressed(model, tmp_path, groups(integers(4, True, "group", group_size=8)), ignore=["lm_head"])
    change_tensors(tmp_path, {f"{Q}.weight_g_idx": torch.full((40,), -1, dtype=torch.int32)})
    assert_read_as(tmp_path, model)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.bfloat16])
def test_floats_of_8_bits_may_have_zero_points_of_zero(dtype: torch.dtype, tmp_path: Path) -> None:
    model = small_llama()
    save_compressed(model, tmp_path, groups(floats("channel")), ignore=["lm_head"])
    change_tensors(tmp_path, {f"{Q}.weight_zero_point": torch.zeros(24, 1).to(dtype)})
    assert_read_as(tmp_path, model)
    change_tensors(tmp_path, {f"{Q}.weight_zero_point": torch.ones(24, 1).to(dtype)})
    with pytest.raises(ConfigError, match=rf"{Q}.*weight_zero_point holds others than 0"):
        load(tmp_path)


def test_a_quantised_head_of_a_model_with_tied_embeddings_is_refused_with_the_way_out(tmp_path: Path) -> None:
    save_compressed(small_llama(), tmp_path, groups(integers(8, True, "channel")))
    config = json.loads((tmp_path / "config.json").read_text()) | {"tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=r"lm_head\.weight\w* is part of a head of its own .* write false there"):
        load(tmp_path)


def test_tensors_of_a_linear_may_lie_in_several_files_in_any_order(tmp_path: Path) -> None:
    model = small_llama()
    save_compressed(model, tmp_path, groups(integers(5, False, "group", group_size=8)), ignore=["lm_head"])
    tensors = load_file(tmp_path / WEIGHTS)
    (tmp_path / WEIGHTS).unlink()
    names = sorted(tensors, key=lambda name: name[::-1])
    files = {name: f"{index % 3}.safetensors" for index, name in enumerate(names)}
    for file in set(files.values()):
        save_file({name: tensors[name] for name in names if files[name] == file}, tmp_path / file)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    assert_read_as(tmp_path, model)


def test_targets_and_ignored_modules_by_class_name_and_pattern(tmp_path: Path) -> None:
    model = small_llama()
    schemes = {
        "by_class": {"targets": ["Linear"], "weights": integers(8, True, "channel")},
        "by_pattern": {"targets": ["re:.*self_attn.*"], "weights": integers(4, True, "group", group_size=8)},
        "by_name": {"targets": [Q], "weights": integers(3, False, "channel")},
    }
    save_compressed(model, tmp_path, schemes, ignore=["lm_head", "re:.*v_proj$", "model.layers.0.mlp.up_proj"])
    loaded = load(tmp_path)
    assert_same_weights(loaded, model)
    kinds = {name: set(weight.bytes_by_kind) for name, weight in linears(loaded).items()}
    assert kinds == {
        "qkv": {"int4 in groups of 40", "int4 in groups of 8", "float32"},
        "o": {"int4 in groups of 8"},
        "gate_up": {"int8 in groups of 40", "float32"},
        "down": {"int8 in groups of 56"},
    }


def linears(model: Decoder) -> dict[str, LinearWeight]:
    layer = model.layers[0]
    found = {"qkv": layer.attention.qkv, "o": layer.attention.o, "gate_up": layer.mlp.gate_up, "down": layer.mlp.down}
    return {name: linear.weight for name, linear in found.items()}


def test_tied_embeddings_of_codes_are_the_head_too(tmp_path: Path) -> None:
    model = small_llama(tie_word_embeddings=True)
    save_compressed(model, tmp_path, groups(integers(8, False, "channel"), "Embedding"))
    model.tie_weights()
    loaded = load(tmp_path)
    assert_same_weights(loaded, model)
    assert loaded._lm_head is loaded._embeddings
    change_tensors(tmp_path, {"lm_head.weight": torch.zeros(37, 40)})
    with pytest.raises(ConfigError, match=r"unexpected tensor lm_head\.weight"):
        load(tmp_path)


def test_tensors_that_round_activations_are_left_where_they_are(tmp_path: Path) -> None:
    model = small_llama()
    save_compressed(model, tmp_path, groups(floats("channel")), ignore=["lm_head"])
    attention = "model.layers.0.self_attn"
    suffixes = ("k_scale", "v_scale", "kv_scale", "prob_output_scale")
    extra = [f"{Q}.input_scale", f"{Q}.output_scale", *(f"{attention}.{suffix}" for suffix in suffixes)]
    change_tensors(tmp_path, dict.fromkeys(extra, torch.ones(1)))
    change_config(tmp_path, kv_cache_scheme={"num_bits": 8, "type": "float"})
    assert_read_as(tmp_path, model)


def test_a_symmetric_checkpoint_with_zero_points_uses_them(tmp_path: Path) -> None:
    model = small_llama()
    save_compressed(model, tmp_path, groups(integers(4, False, "group", group_size=8)), ignore=["lm_head"])
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"]["symmetric"] = True
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_read_as(tmp_path, model)


def test_scales_do_not_make_the_weights_that_stay_floats_wider(tmp_path: Path) -> None:
    save_compressed(small_llama(), tmp_path, groups(integers(4, True, "group", group_size=8)), ignore=["lm_head"])
    tensors = load_file(tmp_path / WEIGHTS)
    plain = {name: tensor.bfloat16() for name, tensor in tensors.items() if name.endswith((".weight", "norm.weight"))}
    change_tensors(tmp_path, plain)
    assert stored_dtype(tmp_path) == torch.bfloat16


def change_tensors(path: Path, changes: dict[str, torch.Tensor]) -> None:
    save_file({name: tensor.clone() for name, tensor in (load_file(path / WEIGHTS) | changes).items()}, path / WEIGHTS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({f"{Q}.weight_packed": torch.zeros(24, 4, dtype=torch.int32)}, r"\.weight_packed is I32 \[24, 4\]"),
        ({f"{Q}.weight_packed": torch.zeros(24, 5, dtype=torch.int64)}, r"\.weight_packed is I64 \[24, 5\]"),
        ({f"{Q}.weight_scale": torch.zeros(24, 4)}, r"asks for F16 or BF16 or F32 \[24, 5\]"),
        ({f"{Q}.weight_scale": torch.full((24, 5), torch.inf)}, "holds 120 scales that are not finite"),
        ({f"{Q}.weight_shape": torch.tensor([40, 24])}, r"q_proj: weight_shape holds \[40, 24\], expected \[24, 40\]"),
        ({f"{Q}.weight_zero_point": torch.zeros(3, 4, dtype=torch.int32)}, r"asks for I32 \[3, 5\]"),
        ({f"{Q}.weight": torch.zeros(24, 40)}, r"unexpected tensor model\.layers\.0\.self_attn\.q_proj\.weight"),
    ],
)
def test_a_tensor_that_does_not_fit_is_refused_by_name(
    changes: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    save_compressed(small_llama(), tmp_path, groups(integers(4, False, "group", group_size=8)), ignore=["lm_head"])
    change_tensors(tmp_path, changes)
    with pytest.raises(ConfigError, match=message) as caught:
        load(tmp_path)
    assert Q in str(caught.value)


@pytest.mark.parametrize("name", ["weight_packed", "weight_scale", "weight_shape", "weight_zero_point"])
def test_a_missing_tensor_is_refused_by_name(name: str, tmp_path: Path) -> None:
    save_compressed(small_llama(), tmp_path, groups(integers(4, False, "group", group_size=8)), ignore=["lm_head"])
    tensors = load_file(tmp_path / WEIGHTS)
    del tensors[f"{Q}.{name}"]
    save_file(tensors, tmp_path / WEIGHTS)
    with pytest.raises(ConfigError, match=rf"tensor {Q}\.{name} is missing"):
        load(tmp_path)
