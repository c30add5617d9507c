"""Against PEFT: what a converted row means is what PEFT adds to the base weights."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import (
    C3AConfig,
    FourierFTConfig,
    HRAConfig,
    IA3Config,
    LNTuningConfig,
    LoHaConfig,
    LoKrConfig,
    LoraConfig,
    OFTConfig,
    PeftConfig,
    PeftModel,
    PrefixTuningConfig,
    PromptTuningConfig,
    RandLoraConfig,
    ShiraConfig,
    VeraConfig,
    get_peft_model,
    save_as_lora,
)
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.numpy import save_file as save_numpy_file
from safetensors.torch import save_file
from support.expert_adapters import DOWN, GATE, PLAIN, UP, all_experts, numbered, random_factors, wrapped
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    BartConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    PreTrainedConfig,
    Starcoder2Config,
    T5Config,
)

from multilora_client import AdapterError, AdapterFiles, AdapterTensors, convert_peft, load_adapter
from multilora_client.tensors import adapter_tensors
from multilora_wire.adapter_origin import WrongBaseModel
from multilora_wire.config_sites import config_sites
from multilora_wire.peft_config import PEFT_WEIGHTS_FILE
from multilora_wire.sites import PLAIN_EXPERTS

MODULES = {
    1: "self_attn.q_proj",
    2: "self_attn.k_proj",
    3: "self_attn.v_proj",
    4: "self_attn.o_proj",
    5: "mlp.gate_proj",
    6: "mlp.down_proj",
    7: "mlp.up_proj",
}


def matrices(tensors: AdapterTensors, row: int, in_size: int, out_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A and B of a row, read as the wire format says. Whatever follows them is checked to be padding."""
    rank = int(tensors.config[row, 2])
    values = torch.from_numpy(tensors.weights[row])
    values = values.view(torch.bfloat16) if tensors.dtype == "BF16" else values
    assert not values[rank * (in_size + out_size) :].any()
    a, b = values[: rank * (in_size + out_size)].split([rank * in_size, out_size * rank])
    return a.view(rank, in_size), b.view(out_size, rank)


def assert_same_deltas(tensors: AdapterTensors, saved: Any) -> None:
    """Every row is the module PEFT has at that place, every module of PEFT has one row."""
    expected = saved.modules()
    for row, (module_id, layer, _, is_dora) in enumerate(tensors.config.tolist()):
        module = expected.pop(f"{layer}.{MODULES[module_id]}")
        a, b = matrices(tensors, row, module.in_features, module.out_features)
        torch.testing.assert_close(b @ a, module.get_delta_weight("default"), rtol=1e-5, atol=1e-6)
        assert is_dora == 0
    assert not expected


@pytest.mark.parametrize(
    "lora_config",
    [
        {},
        {"use_rslora": True},
        {"r": 1, "target_modules": ["v_proj"]},
        {"r": 37, "target_modules": ["k_proj", "gate_proj"]},
        {"rank_pattern": {"q_proj": 2, r".*\.1\.mlp\.up_proj": 9}, "alpha_pattern": {"mlp.down_proj": 3}},
        {"rank_pattern": {"^model.layers.0.self_attn.q_proj": 3, "q_proj": 7}, "alpha_pattern": {"k_proj|v_proj": 64}},
        {"use_rslora": True, "rank_pattern": {"o_proj": 4}, "alpha_pattern": {"layers.1.self_attn.o_proj": 1}},
        {"layers_to_transform": [1]},
    ],
)
def test_rows_are_what_peft_adds_to_the_weights(save_adapter: Callable[..., Any], lora_config: dict[str, Any]) -> None:
    saved = save_adapter(**lora_config)

    tensors = convert_peft(saved.directory)

    assert tensors.dtype == "FP32"
    assert_same_deltas(tensors, saved)


SETTINGS: dict[str, list[Any]] = {
    "task_type": ["CAUSAL_LM", "FEATURE_EXTRACTION"],
    "peft_type": ["ADALORA", "VERA"],
    "auto_mapping": [{"base_model_class": "LlamaForCausalLM", "parent_library": "transformers", "unsloth_fixed": True}],
    "peft_version": ["0.1"],
    "base_model_name_or_path": ["acme/base"],
    "revision": ["v2"],
    "inference_mode": [True],
    "r": [3],
    "target_modules": [["v_proj"], r".*\.1\.mlp\.up_proj", "all-linear"],
    "exclude_modules": [["q_proj"], ".*1.*"],
    "lora_alpha": [3, -2, 1.5],
    "lora_dropout": [0.5],
    "fan_in_fan_out": [True],
    "bias": ["all", "lora_only"],
    "use_rslora": [True],
    "modules_to_save": [["lm_head"]],
    "init_lora_weights": [
        *(False, "gaussian", "eva", "orthogonal", "mica"),
        *("olora", "pissa", "pissa_niter_2", "corda", "loftq", "lora_ga", "tomorrow"),
    ],
    "layers_to_transform": [[1], 0],
    "layers_pattern": ["layers", ["h", "layers"]],
    "rank_pattern": [{"q_proj": 2}],
    "alpha_pattern": [{"^model.layers.0.mlp.up_proj": 1}],
    "megatron_config": [{"tensor_model_parallel_size": 1}],
    "megatron_core": ["acme.core"],
    "trainable_token_indices": [[1], {"embed_tokens": [1]}],
    "loftq_config": [{"loftq_bits": 4}],
    "eva_config": [{"rho": 2.0}],
    "corda_config": [{"corda_method": "kpm"}],
    "lora_ga_config": [{"stable_gamma": 8}],
    "use_dora": [True],
    "velora_config": [{"num_groups": 4}, {}],
    "alora_invocation_tokens": [[3]],
    "use_qalora": [True],
    "qalora_group_size": [8],
    "monteclora_config": [{"num_samples": 4}, {}],
    "layer_replication": [[[0, 2], [1, 2]]],
    "runtime_config": [{"ephemeral_gpu_offload": True}],
    "lora_bias": [True],
    "target_parameters": [["k_proj.weight"]],
    "use_bdlora": [{"nblocks": 2, "target_modules_bd_a": ["o_proj"], "target_modules_bd_b": ["q_proj", "up_proj"]}],
    "arrow_config": [{"top_k": 2}, {}],
    "kasa_config": [{"beta": 1e-3}, {}],
    "ensure_weight_tying": [True],
}
"""Values that are not the default, of every field of PEFT's LoraConfig."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[LlamaForCausalLM, Path]:
    """A tiny model, and its checkpoint."""
    torch.manual_seed(1)
    sizes = {"hidden_size": 24, "intermediate_size": 56, "num_hidden_layers": 2, "head_dim": 10, "vocab_size": 11}
    model = LlamaForCausalLM(LlamaConfig(num_attention_heads=4, num_key_value_heads=2, **sizes)).eval()
    directory = tmp_path_factory.mktemp("base")
    model.save_pretrained(directory)
    return model, directory


def save_with(directory: Path, base: LlamaForCausalLM, field: str, value: Any) -> None:
    """An adapter with random matrices that PEFT made with this setting; or without, where PEFT cannot make it here.

    The configuration has the setting in any case.
    """
    sound = {"r": 4, "lora_alpha": 7, "target_modules": ["q_proj", "o_proj", "up_proj"]}
    extra = {"layers_to_transform": [1]} if field == "layers_pattern" else {}
    try:
        model = get_peft_model(copy.deepcopy(base), LoraConfig(**(sound | extra | {field: value})))
    except (ValueError, ImportError, AttributeError, TypeError):
        model = get_peft_model(copy.deepcopy(base), LoraConfig(**sound))
    for name, parameter in model.named_parameters():
        if "lora_" in name and "magnitude" not in name:
            parameter.data = torch.randn_like(parameter) * 0.1
    model.save_pretrained(directory)
    path = directory / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {field: value}))


def adapted(base: LlamaForCausalLM, tensors: AdapterTensors) -> LlamaForCausalLM:
    """The base with the rows of an adapter in its weights."""
    model = copy.deepcopy(base)
    for row, (module_id, layer, rank, is_dora) in enumerate(tensors.config.tolist()):
        linear = model.get_submodule(f"model.layers.{layer}.{MODULES[module_id]}")
        sizes = [rank * linear.in_features, rank * linear.out_features, linear.out_features if is_dora else 0]
        a, b, magnitude = torch.from_numpy(tensors.weights[row, : sum(sizes)]).split(sizes)
        linear.weight.data += b.view(-1, rank) @ a.view(rank, -1)
        if is_dora:
            linear.weight.data *= magnitude[:, None]
    return model


def test_every_field_of_pefts_configuration_has_a_setting_here() -> None:
    """A release of PEFT with a new field shows itself."""
    assert set(SETTINGS) == {field.name for field in dataclasses.fields(LoraConfig)}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in SETTINGS.items() for value in values])
def test_a_setting_is_served_as_peft_computes_it_or_refused_by_its_name(
    tmp_path: Path, base: tuple[LlamaForCausalLM, Path], field: str, value: Any
) -> None:
    model, checkpoint = base
    save_with(tmp_path, model, field, value)
    refusal = ""
    try:
        tensors = convert_peft(tmp_path, "float32", base_model=checkpoint)
    except AdapterError as error:
        refusal = str(error)
    if refusal:
        is_outside = field in ("modules_to_save", "trainable_token_indices")
        expected_text = "for which the wire's tensors have no place" if is_outside else f"{field} is "
        assert expected_text in refusal
        return
    tokens = torch.arange(11)[None]
    with torch.no_grad():
        expected = PeftModel.from_pretrained(copy.deepcopy(model), tmp_path).eval()(tokens).logits
        torch.testing.assert_close(adapted(model, tensors)(tokens).logits, expected)
        assert not torch.allclose(expected, model(tokens).logits, atol=1e-3)


def test_an_adapter_of_another_model_than_the_base_is_refused(
    tmp_path: Path, base: tuple[LlamaForCausalLM, Path], save_adapter: Callable[..., Any]
) -> None:
    other, checkpoint = save_adapter().directory, tmp_path / "base"
    config = json.loads((base[1] / "config.json").read_text())
    checkpoint.mkdir()
    (checkpoint / "config.json").write_text(json.dumps(config | {"hidden_size": 40, "head_dim": 6}))
    message = (
        "not for base: model.layers.0.self_attn.q_proj has 24 inputs and 40 outputs there, 40 inputs and 24 outputs"
    )
    with pytest.raises(AdapterError, match=message):
        convert_peft(other, base_model=checkpoint)
    assert convert_peft(other, base_model=base[1]).origin == convert_peft(other).origin


SERVED = {
    *("task_type", "bias", "fan_in_fan_out", "velora_config", "eva_config", "ensure_weight_tying", "use_dora"),
    *("monteclora_config", "use_bdlora"),
}
REFUSED = {"kasa_config", "arrow_config", "alora_invocation_tokens", "lora_bias"}


@pytest.mark.parametrize("field", sorted(SERVED | REFUSED))
def test_fields_are_not_refused_without_need(tmp_path: Path, base: Any, field: str) -> None:
    model, checkpoint = base
    for index, value in enumerate(SETTINGS[field]):
        save_with(tmp_path / str(index), model, field, value)
        if field in SERVED:
            assert len(convert_peft(tmp_path / str(index), base_model=checkpoint).config) == 6
        else:
            with pytest.raises(AdapterError, match=field):
                convert_peft(tmp_path / str(index), base_model=checkpoint)


_ON_Q: dict[str, Any] = {"target_modules": ["q_proj"]}
OTHER_KINDS: list[PeftConfig] = [
    C3AConfig(**_ON_Q, block_size=8),
    FourierFTConfig(**_ON_Q, n_frequency=20),
    HRAConfig(**_ON_Q, r=4),
    IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
    LNTuningConfig(target_modules=["input_layernorm"]),
    LoHaConfig(**_ON_Q, r=4),
    LoKrConfig(**_ON_Q, r=4),
    OFTConfig(**_ON_Q, oft_block_size=4),
    PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    RandLoraConfig(**_ON_Q, r=4),
    ShiraConfig(**_ON_Q, r=2),
    VeraConfig(**_ON_Q, r=4),
]


@pytest.mark.parametrize("config", OTHER_KINDS, ids=lambda config: str(config.peft_type.value))
def test_another_kind_is_refused_with_pefts_conversion_where_there_is_one(
    tmp_path: Path, base: tuple[LlamaForCausalLM, Path], config: PeftConfig
) -> None:
    model = get_peft_model(copy.deepcopy(base[0]), copy.deepcopy(config))
    model.save_pretrained(tmp_path / "trained")
    layers = [module for module in model.modules() if isinstance(module, BaseTunerLayer)]
    has_conversion = bool(layers) and all(layer.supports_lora_conversion() for layer in layers)
    with pytest.raises(
        AdapterError, match=f"peft_type is '{config.peft_type.value}'; only LORA and TRAINABLE_TOKENS are served"
    ) as caught:
        convert_peft(tmp_path / "trained")
    assert ("PEFT's save_as_lora" in str(caught.value)) == has_conversion
    if has_conversion:
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = torch.randn_like(parameter)
        save_as_lora(tmp_path / "converted", model, rank=4)
        assert len(convert_peft(tmp_path / "converted").config) == 2


def test_an_adapter_with_rotary_embeddings_of_its_own_goes_as_files_alone(tmp_path: Path, base: Any) -> None:
    save_with(tmp_path, base[0], "use_rslora", True)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"context_length": 4096}))
    with pytest.raises(AdapterError, match=r"has rotary embeddings, .*4096.*; send the PEFT files as they are"):
        convert_peft(tmp_path)


PHI3 = Phi3Config(
    vocab_size=11,
    hidden_size=24,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    pad_token_id=0,
)
STARCODER2 = Starcoder2Config(
    vocab_size=11,
    hidden_size=24,
    intermediate_size=56,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)


@pytest.mark.parametrize(
    ("config", "target", "module_id"),
    [
        (PHI3, "self_attn.qkv_proj", 0),
        (PHI3, "self_attn.o_proj", 4),
        (PHI3, "mlp.gate_up_proj", 18),
        (PHI3, "mlp.down_proj", 6),
        (STARCODER2, "self_attn.k_proj", 2),
        (STARCODER2, "mlp.c_fc", 5),
        (STARCODER2, "mlp.c_proj", 6),
    ],
)
def test_rows_of_other_families_are_what_peft_adds_to_the_weights(
    tmp_path: Path, config: Any, target: str, module_id: int
) -> None:
    torch.manual_seed(3)
    lora = LoraConfig(r=3, lora_alpha=7, target_modules=[target.split(".")[1]], init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_config(config), lora)
    model.save_pretrained(tmp_path)
    tensors = convert_peft(tmp_path)
    assert tensors.config.tolist() == [[module_id, layer, 3, 0] for layer in (0, 1)]
    for layer in (0, 1):
        module = model.get_submodule(f"base_model.model.model.layers.{layer}.{target}")
        a, b = matrices(tensors, layer, module.in_features, module.out_features)
        if module_id == 18:
            up, gate = b.chunk(2)
            b = torch.cat([gate, up])
        torch.testing.assert_close(b @ a, module.get_delta_weight("default"), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("storage", "dtype", "torch_dtype"),
    [("float16", "FP16", torch.float16), ("bfloat16", "BF16", torch.bfloat16), (None, "BF16", torch.bfloat16)],
)
def test_the_scale_goes_into_b_before_the_cast(
    save_adapter: Callable[..., Any], storage: Any, dtype: str, torch_dtype: torch.dtype
) -> None:
    saved = save_adapter(torch.bfloat16, target_modules=["down_proj"], layers_to_transform=[1])
    module = saved.modules()["1.mlp.down_proj"]

    tensors = convert_peft(saved.directory, storage)

    a, b = matrices(tensors, 0, module.in_features, module.out_features)
    assert tensors.dtype == dtype
    assert torch.equal(a, module.lora_A["default"].weight.to(torch_dtype))
    assert torch.equal(b, (module.lora_B["default"].weight.float() * (11 / 5)).to(torch_dtype))


def write_adapter(directory: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4} | config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def module_tensors(path: str, a: torch.Tensor, b: torch.Tensor) -> dict[str, torch.Tensor]:
    prefix = f"base_model.model.model.layers.3.{path}"
    return {f"{prefix}.lora_A.weight": a.contiguous(), f"{prefix}.lora_B.weight": b.contiguous()}


def test_fused_gate_up_changes_to_up_gate(tmp_path: Path) -> None:
    a, gate, up = torch.randn(2, 5), torch.randn(7, 2), torch.randn(7, 2)
    write_adapter(tmp_path, module_tensors("mlp.gate_up_proj", a, torch.cat([gate, up])))

    tensors = convert_peft(tmp_path)

    assert tensors.config.tolist() == [[18, 3, 2, 0]]
    _, b = matrices(tensors, 0, 5, 14)
    torch.testing.assert_close(b, torch.cat([up, gate]) * 2)


def test_fused_qkv_keeps_its_order(tmp_path: Path) -> None:
    a, b = torch.randn(2, 5), torch.randn(9, 2)
    write_adapter(tmp_path, module_tensors("self_attn.qkv_proj", a, b))

    tensors = convert_peft(tmp_path)

    assert tensors.config.tolist() == [[0, 3, 2, 0]]
    torch.testing.assert_close(matrices(tensors, 0, 5, 9)[1], b * 2)


def test_a_fused_gate_up_with_an_odd_number_of_outputs_is_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, module_tensors("mlp.gate_up_proj", torch.ones(2, 5), torch.ones(7, 2)))

    with pytest.raises(AdapterError, match=r"layers\.3\.mlp\.gate_up_proj has 7 outputs"):
        convert_peft(tmp_path)


def save_base(directory: Path, weights: dict[str, torch.Tensor], num_files: int) -> Path:
    directory.mkdir()
    if num_files == 1:
        save_file(weights, directory / "model.safetensors")
        return directory
    files = {name: f"model-{i % num_files}.safetensors" for i, name in enumerate(weights)}
    for file in set(files.values()):
        save_file({name: weights[name] for name in files if files[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return directory


@pytest.mark.parametrize(("base_dtype", "num_files"), [(torch.float32, 1), (torch.bfloat16, 3), (torch.float16, 2)])
def test_a_dora_row_ends_with_what_peft_scales_the_outputs_by(
    save_adapter: Callable[..., Any], tmp_path: Path, base_dtype: torch.dtype, num_files: int
) -> None:
    saved = save_adapter(use_dora=True, use_rslora=True, target_modules=["q_proj", "down_proj"])
    weights = {}
    for name, module in saved.modules().items():
        weights[f"model.layers.{name}.weight"] = module.base_layer.weight.data.to(base_dtype)
        module.base_layer.weight.data = module.base_layer.weight.data.to(base_dtype).float()
        module.lora_magnitude_vector["default"].weight.data *= torch.rand(module.out_features) + 0.5
    saved.model.save_pretrained(saved.directory)

    tensors = convert_peft(saved.directory, base_model=save_base(tmp_path / "base", weights, num_files))

    for row, (module_id, layer, rank, is_dora) in enumerate(tensors.config.tolist()):
        module = saved.modules()[f"{layer}.{MODULES[module_id]}"]
        x = torch.randn(3, module.in_features)
        num_ab = rank * (module.in_features + module.out_features)
        magnitude = torch.from_numpy(tensors.weights[row, num_ab : num_ab + module.out_features].copy())
        tensors.weights[row, num_ab : num_ab + module.out_features] = 0
        a, b = matrices(tensors, row, module.in_features, module.out_features)
        expected = module(x)
        torch.testing.assert_close((x @ module.base_layer.weight.T + x @ a.T @ b.T) * magnitude, expected)
        assert is_dora == 1


def test_dora_halves_are_exchanged_with_their_magnitudes(tmp_path: Path) -> None:
    a, b, weight, magnitude = torch.randn(2, 5), torch.randn(6, 2), torch.randn(6, 5), torch.rand(6)
    key = "base_model.model.model.layers.3.mlp.gate_up_proj.lora_magnitude_vector"
    tensors = module_tensors("mlp.gate_up_proj", a, b) | {key: magnitude}
    base = save_base(tmp_path / "base", {"model.layers.3.mlp.gate_up_proj.weight": weight}, 1)

    converted = convert_peft(write_adapter(tmp_path, tensors, use_dora=True), base_model=base)

    normalised = magnitude / (weight + 2 * b @ a).norm(dim=1)
    torch.testing.assert_close(
        torch.from_numpy(converted.weights[0, 10:]),
        torch.cat([2 * b.roll(3, 0).flatten(), normalised.roll(3)]),
    )


@pytest.mark.parametrize(
    ("base", "message"),
    [
        (None, r"q_proj is a DoRA module.*--base-model DIR"),
        ({}, r"model\.safetensors is missing"),
        ({"model.layers.3.self_attn.k_proj.weight": torch.ones(3, 5)}, r"has no model\.layers\.3\.self_attn\.q_proj"),
        (
            {"model.layers.3.self_attn.q_proj.weight": torch.ones(3, 4)},
            r"is \[3, 4\] in the base model and \[3, 5\] in",
        ),
        ({"model.layers.3.self_attn.q_proj.weight": torch.ones(3)}, r"is F32 \[3\]; a matrix of F16, BF16 or F32"),
        ({"model.layers.3.self_attn.q_proj.weight": -torch.ones(3, 5)}, "has a row of zeros"),
    ],
)
def test_dora_without_its_base_model_is_refused(
    tmp_path: Path, base: dict[str, torch.Tensor] | None, message: str
) -> None:
    path = "self_attn.q_proj"
    key = f"base_model.model.model.layers.3.{path}.lora_magnitude_vector.weight"
    tensors = module_tensors(path, torch.ones(2, 5), torch.full((3, 2), 0.25)) | {key: torch.ones(3)}
    write_adapter(tmp_path, tensors, use_dora=True)
    (tmp_path / "base").mkdir()
    if base:
        save_file(base, tmp_path / "base" / "model.safetensors")

    with pytest.raises(AdapterError, match=message):
        convert_peft(tmp_path, base_model=None if base is None else tmp_path / "base")


@pytest.mark.parametrize(("largest", "storage"), [(40_000.0, "float16"), (3e38, "bfloat16"), (3e38, "float32")])
def test_a_value_that_overflows_is_an_error_and_never_infinity(tmp_path: Path, largest: float, storage: Any) -> None:
    write_adapter(tmp_path, module_tensors("mlp.up_proj", torch.ones(2, 5), torch.full((3, 2), largest)))

    with pytest.raises(AdapterError, match=r"layers\.3\.mlp\.up_proj: .* does not fit into"):
        convert_peft(tmp_path, storage)


def test_mixed_dtypes_become_float32(tmp_path: Path) -> None:
    write_adapter(tmp_path, module_tensors("mlp.up_proj", torch.ones(2, 5).half(), torch.ones(3, 2).bfloat16()))

    assert convert_peft(tmp_path).dtype == "FP32"


def test_progress_is_reported_row_by_row(save_adapter: Callable[..., Any]) -> None:
    steps: list[tuple[int, int]] = []

    convert_peft(save_adapter().directory, on_progress=lambda done, total: steps.append((done, total)))

    assert steps == [(done, 14) for done in range(1, 15)]


def test_an_adapter_is_loaded_as_its_files_are_and_has_an_id_of_its_content(
    save_adapter: Callable[..., Any], tmp_path: Path
) -> None:
    directory = save_adapter().directory
    convert_peft(directory).save(tmp_path / "converted")

    files, converted = load_adapter(directory), load_adapter(tmp_path / "converted")

    assert isinstance(files.content, AdapterFiles)
    assert files.content.weights == (directory / "adapter_model.safetensors").read_bytes()
    assert isinstance(converted.content, AdapterTensors)
    assert files.lora_task_id == load_adapter(directory).lora_task_id < 2**63
    assert converted.lora_task_id not in (files.lora_task_id, load_adapter(directory, 7).lora_task_id)
    assert load_adapter(directory, 7).lora_task_id == 7


def test_a_folders_files_on_the_use_are_sent_along(save_adapter: Callable[..., Any], tmp_path: Path) -> None:
    directory = save_adapter().directory
    convert_peft(directory).save(tmp_path / "converted")
    for folder in (directory, tmp_path / "converted"):
        plain = load_adapter(folder)
        assert "lora_use" not in adapter_tensors(plain.content)
        (folder / "chat_template.jinja").write_text("{{ messages }}")
        (folder / "README.md").write_text("no file on its use")
        changed = load_adapter(folder)
        assert changed.lora_task_id != plain.lora_task_id
        assert changed.content.nbytes > plain.content.nbytes
        tensor = adapter_tensors(changed.content)["lora_use"]
        assert (tensor.datatype, tensor.shape) == ("BYTES", (1, 1))
        assert json.loads(changed.content.use) == {"chat_template.jinja": "{{ messages }}"}
        (folder / "chat_template.jinja").write_bytes(b"\xff")
        with pytest.raises(AdapterError, match=r"chat_template\.jinja is not valid UTF-8"):
            load_adapter(folder)


def test_a_converted_adapter_and_a_folders_gguf_file_keep_the_files_on_the_use(
    save_adapter: Callable[..., Any], tmp_path: Path
) -> None:
    directory = save_adapter().directory
    (directory / "chat_template.jinja").write_text("{{ messages }}ß")
    (directory / "multilora.json").write_text("{}")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    content = load_adapter(directory).content
    converted = convert_peft(directory)
    converted.save(tmp_path / "converted")
    read = load_adapter(tmp_path / "converted").content
    assert converted.use == content.use == read.use != b""
    assert converted.digest == read.digest
    converted.save(tmp_path / "converted")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "chat_template.jinja").write_text("of the model")
    with pytest.raises(AdapterError, match=r"chat_template\.jinja belongs to something else"):
        converted.save(tmp_path / "model")

    (directory / "adapter_config.json").unlink()
    (directory / "adapter_model.safetensors").rename(directory / "lora.gguf")
    assert load_adapter(directory).content.use == content.use
    assert load_adapter(directory / "lora.gguf").content.use == b""


def test_a_directory_that_is_no_adapter_is_refused(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match="is neither a PEFT adapter"):
        load_adapter(tmp_path)


def test_rows_are_ordered_and_typed_for_the_wire(save_adapter: Callable[..., Any]) -> None:
    config = convert_peft(save_adapter().directory).config

    assert config.dtype == np.int32
    assert config[:, :2].tolist() == [[module_id, layer] for layer in (0, 1) for module_id in range(1, 8)]


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["adapters.safetensors", "0000100_adapters.safetensors"], r"adapters\.safetensors: MLX wrote this adapter"),
        (["adapter_model.bin"], r"adapter_model\.bin is a pickle.*safe_serialization=True"),
        (["adapter_0.pt"], r"adapter_0\.pt is a pickle"),
        (["one-lora.gguf", "two-lora.gguf"], r"one-lora\.gguf is llama\.cpp's form"),
        (
            ["lora.safetensors"],
            r"lora\.safetensors is not in PEFT's form, which is adapter_config\.json with adapter_model",
        ),
    ],
)
@pytest.mark.parametrize("has_config", [True, False])
def test_folders_of_other_tools_are_told_by_what_they_are(
    tmp_path: Path, files: list[str], message: str, has_config: bool
) -> None:
    for name in files:
        (tmp_path / name).write_bytes(b"")
    if has_config:
        (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4}))
    with pytest.raises(AdapterError, match=message):
        load_adapter(tmp_path)


def test_a_checkpoint_a_file_and_a_folder_of_adapters_are_told_by_what_they_are(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-100").mkdir()
    write_adapter(tmp_path / "checkpoint-100", module_tensors("mlp.up_proj", torch.ones(2, 5), torch.ones(3, 2)))
    with pytest.raises(AdapterError, match=rf"is neither a PEFT adapter .*; {tmp_path / 'checkpoint-100'} is one"):
        load_adapter(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(AdapterError, match=r"config\.json belongs to the checkpoint of a whole model.*serve --model"):
        load_adapter(tmp_path)
    (tmp_path / "lora.bin").write_bytes(b"")
    with pytest.raises(
        AdapterError, match=r"lora\.bin is a file, and an adapter is a directory\. lora\.bin is a pickle"
    ):
        load_adapter(tmp_path / "lora.bin")


def test_a_gguf_file_is_an_adapter_by_itself_and_alone_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "lora.gguf").write_bytes(b"GGUF and more")
    for path in (tmp_path, tmp_path / "lora.gguf"):
        content = load_adapter(path).content
        assert isinstance(content, AdapterFiles)
        assert (content.config, content.weights) == (b"{}", b"GGUF and more")


def save_experts(directory: Path, tensors: Mapping[str, np.ndarray], **fields: Any) -> Path:
    directory.mkdir()
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "peft_version": "0.21.2"} | fields
    (directory / "adapter_config.json").write_text(json.dumps(config))
    save_numpy_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, directory / PEFT_WEIGHTS_FILE)
    return directory


def test_a_row_of_experts_is_all_a_then_all_b_with_zeros_for_the_experts_that_lack(tmp_path: Path) -> None:
    """Ranks differ: a row has one rank, that of its largest expert, and the rest is zero."""
    factors = random_factors(PLAIN, layers=[1])
    lacking = {place: pair for place, pair in factors.items() if place not in {(1, UP, 0), (1, DOWN, 2)}}
    a, b = lacking[1, GATE, 1]
    lacking[1, GATE, 1] = (a[:1], b[:, :1])
    patterns = {"rank_pattern": {"experts.1.gate_proj": 1}, "alpha_pattern": {"experts.1.gate_proj": 2}}
    saved = save_experts(tmp_path / "experts", numbered(lacking), **patterns)

    tensors = convert_peft(saved, "float32", sites=PLAIN)

    assert tensors.config.tolist() == [[GATE, 1, 3, 0], [DOWN, 1, 3, 0], [UP, 1, 3, 0]]
    for row, (module_id, layer, rank, _) in zip(tensors.weights, tensors.config.tolist(), strict=True):
        module = PLAIN.module_at[layer, module_id]
        values = np.zeros((module.experts, rank * module.in_size)), np.zeros((module.experts, module.out_size, rank))
        for expert in range(module.experts):
            if (pair := lacking.get((layer, module_id, expert))) is not None:
                values[0][expert, : pair[0].size] = pair[0].ravel()
                values[1][expert, :, : pair[1].shape[1]] = 2 * pair[1]
        expected = np.concatenate([part.ravel() for part in values])
        np.testing.assert_array_equal(row[: len(expected)], expected)
        assert not row[len(expected) :].any()
    assert tensors.origin is not None
    assert tensors.origin.fits(PLAIN)


def test_every_form_of_an_adapter_on_experts_is_converted_to_the_same_rows(tmp_path: Path) -> None:
    factors = random_factors(PLAIN)
    forms = [numbered(factors), wrapped(factors, PLAIN_EXPERTS), all_experts(factors, PLAIN_EXPERTS)]
    first, *others = (
        convert_peft(save_experts(tmp_path / str(index), form), sites=PLAIN) for index, form in enumerate(forms)
    )
    for other in others:
        np.testing.assert_array_equal(first.weights, other.weights)
        np.testing.assert_array_equal(first.config, other.config)


def test_experts_are_converted_with_the_base_alone(tmp_path: Path) -> None:
    saved = save_experts(tmp_path / "experts", numbered(random_factors(PLAIN)))

    with pytest.raises(AdapterError, match=r"config\.json: name its directory \(multilora convert --base-model DIR\)"):
        convert_peft(saved)


def test_the_config_json_of_the_base_is_enough_for_experts(tmp_path: Path) -> None:
    config = {"model_type": "mixtral", "num_local_experts": 4, "hidden_size": 20, "intermediate_size": 12}
    config |= {"num_hidden_layers": 3, "num_attention_heads": 2, "num_key_value_heads": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    factors = random_factors(PLAIN)

    tensors = convert_peft(save_experts(tmp_path / "experts", numbered(factors)), base_model=tmp_path)

    assert tensors.config[:, 0].tolist() == [GATE, DOWN, UP] * 2
    np.testing.assert_array_equal(tensors.weights, convert_peft(tmp_path / "experts", sites=PLAIN).weights)


ENCODER_DECODERS: dict[str, tuple[PreTrainedConfig, dict[int, list[str]], list[str]]] = {
    "t5": (
        T5Config(
            vocab_size=40, d_model=16, d_kv=5, num_heads=3, d_ff=24, num_layers=2, num_decoder_layers=3,
            feed_forward_proj="gated-gelu",
        ),
        dict(enumerate([f"SelfAttention.{name}" for name in "qkvo"], 1))
        | dict(enumerate([f"EncDecAttention.{name}" for name in "qkvo"], 9))
        | {5: "DenseReluDense.wi_0", 6: "DenseReluDense.wo", 7: "DenseReluDense.wi_1"},
        ["decoder.block", "encoder.block"],
    ),
    "bart": (
        BartConfig(
            vocab_size=40, d_model=16, encoder_layers=2, decoder_layers=3, encoder_attention_heads=4,
            decoder_attention_heads=2, encoder_ffn_dim=24, decoder_ffn_dim=20, max_position_embeddings=32,
        ),
        dict(enumerate([f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj")], 1))
        | dict(enumerate([f"encoder_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj")], 9))
        | {5: "fc1", 6: "fc2"},
        ["model.decoder.layers", "model.encoder.layers"],
    ),
}  # fmt: skip
"""Of each family: a model with 3 layers in its decoder and 2 in its encoder, its linears by module id, its lists."""


def save_encoder_decoder(folder: Path, family: str, **lora_config: Any) -> tuple[Path, Path, Any]:
    """A base model, and an adapter by PEFT with random values for it. Returns both folders and PEFT's model."""
    torch.manual_seed(7)
    base = AutoModelForSeq2SeqLM.from_config(ENCODER_DECODERS[family][0])
    base.save_pretrained(folder / "base")
    model = get_peft_model(base, LoraConfig(task_type="SEQ_2_SEQ_LM", **lora_config))
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            values = torch.randn(parameter.shape) / 4
            parameter.data = values.abs() + 0.1 if "magnitude" in name else values
    model.save_pretrained(folder / "adapter")
    return folder / "base", folder / "adapter", model


DEFAULT_IDS = {*((layer, module_id) for layer in range(5) for module_id in (1, 3))} | {
    *((layer, module_id) for layer in range(3) for module_id in (9, 11))
}
"""(layer, module id) of q and v: of all layers, and of cross attention in the decoder's."""


@pytest.mark.parametrize(
    ("lora_config", "family"),
    [
        ({}, "t5"),
        ({}, "bart"),
        ({"target_modules": r"decoder.*\.(wo|fc2|k|k_proj)"}, "t5"),
        ({"target_modules": r".*encoder\..*\.fc1"}, "bart"),
        ({"target_modules": "all-linear", "use_dora": True}, "t5"),
        ({"target_modules": "all-linear", "use_dora": True}, "bart"),
        ({"layers_to_transform": [1], "layers_pattern": "block"}, "t5"),
        ({"layers_to_transform": [1], "layers_pattern": "layer"}, "t5"),
        ({"layers_to_transform": [0]}, "t5"),
        ({"layers_to_transform": [1], "layers_pattern": ["h", "layers"]}, "bart"),
        ({"rank_pattern": {r"decoder.*\.q": 3}, "alpha_pattern": {"EncDecAttention.v": 3}, "use_rslora": True}, "t5"),
        ({"rank_pattern": {"encoder_attn.v_proj": 3}, "alpha_pattern": {r"encoder\.layers.*": 3}}, "bart"),
    ],
)
def test_rows_of_both_stacks_and_of_cross_attention_are_what_peft_adds(
    tmp_path: Path, family: str, lora_config: dict[str, Any]
) -> None:
    base, adapter, model = save_encoder_decoder(tmp_path, family, **lora_config)
    tensors = convert_peft(adapter, base_model=base)

    _, names, (decoder, encoder) = ENCODER_DECODERS[family]
    before = {name: module.weight.clone() for name, module in base_linears(base)}
    after = {name: module.weight for name, module in model.merge_and_unload().named_modules() if name in before}
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    for row, (module_id, layer, rank, is_dora) in enumerate(tensors.config.tolist()):
        start = f"{decoder}.{layer}." if layer < 3 else f"{encoder}.{layer - 3}."
        (name,) = (name for name in before if name.startswith(start) and name.endswith(f".{names[module_id]}"))
        changed.remove(name)
        out_size, in_size = before[name].shape
        sizes = [rank * in_size, out_size * rank, out_size * is_dora]
        values = torch.from_numpy(tensors.weights[row])
        a, b, magnitude, padding = values.split([*sizes, len(values) - sum(sizes)])
        adapted = before[name] + b.view(out_size, rank) @ a.view(rank, in_size)
        adapted = magnitude[:, None] * adapted if is_dora else adapted
        torch.testing.assert_close(adapted, after[name], rtol=1e-5, atol=1e-5)
        assert not padding.any()
    assert not changed
    if not lora_config:
        assert {(layer, module_id) for module_id, layer, *_ in tensors.config.tolist()} == DEFAULT_IDS


def base_linears(base: Path) -> list[tuple[str, torch.nn.Module]]:
    model = AutoModelForSeq2SeqLM.from_pretrained(base)
    linears = [(name, module) for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
    return [(name, module) for name, module in linears if name != "lm_head"]


@pytest.mark.parametrize(
    ("family", "lora_config", "says"),
    [
        ("t5", {"target_modules": ["q", "shared"]}, "shared.*belongs to the embeddings or the head, which adapters"),
        ("t5", {"modules_to_save": ["lm_head"]}, "lm_head.*belongs to the embeddings or the head, which adapters"),
        ("bart", {"modules_to_save": ["shared"]}, "shared.*belongs to the embeddings or the head, which adapters"),
        ("bart", {"target_modules": ["q_proj", "embed_tokens"]}, "embed_tokens.*belongs to the embeddings"),
        ("bart", {"modules_to_save": ["fc1"]}, "fc1"),
        ("t5", {"modules_to_save": ["final_layer_norm"]}, "final_layer_norm"),
        ("t5", {"target_modules": ["q", "relative_attention_bias"]}, "relative_attention_bias"),
        ("t5", {"bias": "all", "trainable_token_indices": {"shared": [3]}}, "shared.*belongs to the embeddings"),
    ],
)
def test_other_parts_of_encoder_decoders_are_refused_by_name(
    tmp_path: Path, family: str, lora_config: dict[str, Any], says: str
) -> None:
    base, adapter, _ = save_encoder_decoder(tmp_path, family, **lora_config)
    with pytest.raises(AdapterError, match=says):
        convert_peft(adapter, base_model=base)


def test_an_adapter_with_an_encoder_needs_its_model_which_must_have_its_layers(tmp_path: Path) -> None:
    base, adapter, _ = save_encoder_decoder(tmp_path, "t5", target_modules=["q", "wi_0"])
    with pytest.raises(AdapterError, match=r"encoder or of other names.*--base-model DIR"):
        convert_peft(adapter)
    fields = json.loads((base / "config.json").read_text())

    def convert(**changes: Any) -> AdapterTensors:
        (base / "config.json").write_text(json.dumps(fields | changes))
        return convert_peft(adapter, base_model=base)

    with pytest.raises(
        AdapterError, match=r"decoder\.block\.2\.\S+ is a layer there, and decoder.block here has 2 layers"
    ):
        convert(num_decoder_layers=2, num_layers=3)
    with pytest.raises(
        AdapterError, match=r"encoder\.block\.1\.\S+ is a layer there, and encoder.block here has 1 layers"
    ):
        convert(num_layers=1)
    with pytest.raises(
        AdapterError, match=r"DenseReluDense.wi_0 is a linear there, and decoder.block.0 here has layer\.0"
    ):
        convert(feed_forward_proj="relu")
    with pytest.raises(
        AdapterError, match=r"layer\.0\.SelfAttention\.q has 16 inputs and 15 outputs there, 16 .* 18 outputs"
    ):
        convert(d_kv=6)
    # The rows alone do not tell in which stack a layer is; what is kept beside them does.
    origin = convert().origin
    assert origin is not None
    origin.check(config_sites(fields))
    with pytest.raises(WrongBaseModel, match=r"encoder\.block\.0\.\S+ is layer 3 there, and layer 3 here has decoder"):
        origin.check(config_sites(fields | {"num_decoder_layers": 4}))
