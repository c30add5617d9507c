"""`quantization_config` in all its spellings: forms that are served, and forms that are refused with a way out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from multilora_wire.quantized.compressed import Float8, PackedIntegers, PlainIntegers, Scales
from multilora_wire.quantized.mxfp4 import MXFP4
from multilora_wire.quantized.names import ModuleClass
from multilora_wire.quantized.quantization import Quantization, read_quantization
from multilora_wire.quantized.scheme import QuantizationError, Scheme

W4 = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128}
FP4 = {"num_bits": 4, "type": "float", "symmetric": True, "strategy": "tensor_group", "group_size": 16}
Q = "model.layers.3.self_attn.q_proj"


def write(path: Path, quantization: Any, **others: Any) -> Quantization:
    (path / "config.json").write_text(json.dumps({"quantization_config": quantization, **others}))
    return read_quantization(path)


def compressed(weights: dict[str, Any], storage: str = "pack-quantized", **more: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights}
    return {"quant_method": "compressed-tensors", "format": storage, "config_groups": {"group_0": group}, **more}


def scheme_of(found: Quantization, name: str = Q, module_class: ModuleClass = "Linear") -> Scheme | None:
    return found.scheme(name, module_class, lambda suffix: True)


@pytest.mark.parametrize(
    ("weights", "storage", "expected"),
    [
        (W4, "pack-quantized", PackedIntegers(4, Scales(1, 128), True)),
        (W4 | {"group_size": -1, "strategy": "channel"}, "pack-quantized", PackedIntegers(4, Scales(1, None), True)),
        ({"num_bits": 4, "group_size": 32}, "pack-quantized", PackedIntegers(4, Scales(1, 32), True)),
        ({"num_bits": 8}, "int-quantized", PlainIntegers(8, Scales(None, None), True)),
        (W4 | {"actorder": "group"}, "pack-quantized", PackedIntegers(4, Scales(1, 128, is_ordered=True), True)),
        (W4 | {"actorder": "weight"}, "pack-quantized", PackedIntegers(4, Scales(1, 128), True)),
        (
            W4
            | {"observer": "mse", "observer_kwargs": {"steps": 3}, "dynamic": False, "scale_dtype": None, "new": None},
            "pack-quantized",
            PackedIntegers(4, Scales(1, 128), True),
        ),
        (
            {"num_bits": 8, "type": "FLOAT", "strategy": "block", "block_structure": "128x64"},
            "naive-quantized",
            Float8(Scales(128, 64)),
        ),
    ],
)
def test_schemes_of_compressed_tensors(weights: dict[str, Any], storage: str, expected: Scheme, tmp_path: Path) -> None:
    assert scheme_of(write(tmp_path, compressed(weights, storage))) == expected


def test_the_most_exact_target_decides_and_ignored_modules_stay_floats(tmp_path: Path) -> None:
    groups = {
        name: {"targets": targets, "weights": W4 | {"num_bits": bits}}
        for name, targets, bits in (
            ("a", ["Linear"], 8),
            ("b", ["re:.*self_attn.*", "re:.*q_proj"], 6),
            ("c", [Q], 3),
            ("d", ["Embedding"], 5),
        )
    }
    config = compressed(W4) | {"config_groups": groups, "ignore": ["lm_head", "re:.*layers.4.*"]}
    found = write(tmp_path, config)

    def bits(name: str, module_class: ModuleClass = "Linear") -> int | None:
        scheme = scheme_of(found, name, module_class)
        assert scheme is None or isinstance(scheme, PackedIntegers)
        return None if scheme is None else scheme.bits

    assert [bits(f"model.layers.3.{name}") for name in ("self_attn.q_proj", "self_attn.k_proj", "mlp.up_proj")] == [
        3,
        6,
        8,
    ]
    assert [bits("lm_head"), bits("model.layers.4.mlp.up_proj"), bits("model.embed_tokens", "Embedding")] == [
        None,
        None,
        5,
    ]


def test_linears_of_gpt_oss_are_codes_where_a_checkpoint_has_blocks(tmp_path: Path) -> None:
    found = write(tmp_path, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    assert scheme_of(found) == MXFP4()
    assert found.scheme(Q, "Linear", lambda suffix: suffix == "weight") is None


def test_a_group_may_have_a_format_of_its_own(tmp_path: Path) -> None:
    config = compressed(W4, "mixed-precision")
    config["config_groups"]["group_0"]["format"] = "pack-quantized"
    assert scheme_of(write(tmp_path, config)) == PackedIntegers(4, Scales(1, 128), True)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            compressed(FP4, "nvfp4-pack-quantized"),
            r"group_0: format 'nvfp4-pack-quantized' is not served.*llm-compressor",
        ),
        (compressed(FP4, "mxfp4-pack-quantized"), "format 'mxfp4-pack-quantized' is not served"),
        (compressed(W4, "marlin-24"), "format 'marlin-24' is not served"),
        (compressed(W4, "mixed-precision"), "format 'mixed-precision' is not served"),
        (compressed(W4, sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config.format 'sparse-24-bitmask'"),
        (compressed(W4, transform_config={"config_groups": {"u": {}}}), "transform_config is not served"),
        (compressed(W4 | {"num_bits": 1}), "weights.num_bits 1 is not served, only 2, 3, 4, 5, 6, 7, 8"),
        (compressed(W4 | {"num_bits": "four"}), "num_bits must be an integer, got 'four'"),
        (compressed(W4 | {"symmetric": 1}), "symmetric must be true or false, got 1"),
        (compressed(W4 | {"group_size": -2}), "group_size must be positive"),
        (compressed(W4 | {"strategy": "tensor_group"}), "weights.strategy 'tensor_group' is not served"),
        (compressed(W4 | {"strategy": "block", "block_structure": [0, 4]}), "block_structure must be two positive"),
        (compressed(W4, "float-quantized"), "format of integers 'float-quantized' is not served"),
        (compressed({"num_bits": 8, "type": "float"}, "pack-quantized"), "format of floats 'pack-quantized'"),
        (compressed(W4) | {"config_groups": {"W4A16": ["Linear"]}}, "config_groups.W4A16 must be an object"),
        (compressed(W4 | {"hadamard": 64}), "group_0: weights.hadamard 64 is not served: it is not known"),
        (
            compressed(W4) | {"config_groups": {"a": {"targets": ["Linear"], "weights": W4, "rotation": "x"}}},
            "config_groups.a: rotation 'x' is not served: it is not known",
        ),
        (compressed(W4, moe_sparsity_config={"method": "prune"}), "moe_sparsity_config is not served"),
        (compressed(W4, ignore=["re:("]), r"'\(' is no regular expression"),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            "quant_method 'bitsandbytes' is not served.*again with",
        ),
        ({"quant_method": "auto-round"}, "quant_method 'auto-round' is not served"),
        ({"quant_method": "gptq", "bits": 9}, "bits 9 is not served"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size must be positive, or -1"),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "checkpoint_format 'marlin' is not served"),
        ({"quant_method": "gptq", "is_marlin_format": True}, "is_marlin_format is not served"),
        ({"quant_method": "gptq", "dynamic": {"+:(": {}}}, "is no regular expression"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv' is not served, only 'gemm'"),
        ({"quant_method": "awq", "bits": 8}, "bits 8 is not served, only 4"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size must be two positive integers"),
        ({"load_in_8bit": True}, "quant_method 'bitsandbytes' is not served"),
        ({"group_size": 64, "bits": 4}, "quant_method '' is not served"),
        ([1], "expected an object, got"),
    ],
)
def test_what_is_not_served_is_refused_by_name(config: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(QuantizationError, match=message) as caught:
        scheme_of(write(tmp_path, config))
    assert "config.json" in str(caught.value) or "regular" in str(caught.value)


def test_what_is_not_followed_is_told(tmp_path: Path) -> None:
    config = compressed(W4, kv_cache_scheme={"num_bits": 8})
    config["config_groups"]["group_0"]["input_activations"] = {"num_bits": 8, "type": "float"}
    found = write(tmp_path, config)
    assert found.schemes is not None
    assert found.schemes.notes == (
        "input_activations of 8 bits (float) are not rounded: they stay floats",
        "kv_cache_scheme is not followed: keys and values are stored as kv_cache_dtype says",
    )


@pytest.mark.parametrize(
    ("others", "metadata", "allowed"),
    [
        ({}, {}, {"q_proj", "up_proj", "down_proj"}),
        ({"lora_target_modules": ["q_proj", "re:.*up_proj"]}, {}, {"q_proj", "up_proj"}),
        ({"lora_compatible": True}, {"lora_target_modules": ["down_proj"]}, {"down_proj"}),
        ({"lora_target_modules": ["q_proj", "up_proj"]}, {"lora_target_modules": ["up_proj"]}, {"up_proj"}),
        ({"lora_target_modules": ["q_proj", "up_proj"]}, {"lora_target_modules": ["re:.*(up|down)_proj"]}, {"up_proj"}),
        ({"lora_target_modules": ["x.q_proj", "model.layers.0.x.up_proj"]}, {}, {"q_proj", "up_proj"}),
        ({"lora_compatible": False}, {}, set()),
        ({}, {"lora_compatible": False}, set()),
    ],
)
def test_modules_that_adapters_may_change(
    others: dict[str, Any], metadata: dict[str, Any], allowed: set[str], tmp_path: Path
) -> None:
    (tmp_path / "lora_metadata.json").write_text(json.dumps(metadata))
    for found in (write(tmp_path, compressed(W4), **others), write(tmp_path, compressed(W4) | others)):
        names = ("q_proj", "up_proj", "down_proj")
        assert {name for name in names if found.rules.allow(f"model.layers.0.x.{name}")} == allowed


@pytest.mark.parametrize(
    ("file", "values", "message"),
    [
        ("config.json", {"quantization": {"group_size": 64, "bits": 4}}, "config.json: .*'MLX' is not served.*again"),
        (
            "hf_quant_config.json",
            {"quantization": {"quant_algo": "NVFP4"}},
            "hf_quant_config.json: .*'modelopt' is not",
        ),
    ],
)
def test_formats_that_tell_of_themselves_elsewhere_are_refused_by_name(
    file: str, values: dict[str, Any], message: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / file).write_text(json.dumps(values))
    with pytest.raises(QuantizationError, match=message):
        read_quantization(tmp_path)
