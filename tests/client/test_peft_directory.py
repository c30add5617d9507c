"""Everything the wire format cannot hold is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from multilora_client import AdapterError
from multilora_client.peft_directory import read_peft_directory

PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"
A_KEY, B_KEY = f"{PREFIX}.lora_A.weight", f"{PREFIX}.lora_B.weight"
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "modules_to_save": None}


def sound_tensors() -> dict[str, torch.Tensor]:
    return {A_KEY: torch.ones(2, 5), B_KEY: torch.ones(3, 2)}


def write(
    directory: Path, config: dict[str, Any] | None = None, tensors: dict[str, torch.Tensor] | None = None
) -> Path:
    (directory / "adapter_config.json").write_text(json.dumps(CONFIG | (config or {})))
    save_file(sound_tensors() if tensors is None else tensors, directory / "adapter_model.safetensors")
    return directory


def test_a_sound_adapter_is_read_with_and_without_pefts_prefix(tmp_path: Path) -> None:
    bare = {key.removeprefix("base_model.model."): tensor for key, tensor in sound_tensors().items()}

    (prefixed_module,) = read_peft_directory(write(tmp_path)).modules
    (bare_module,) = read_peft_directory(write(tmp_path, tensors=bare)).modules

    assert prefixed_module.name == bare_module.name == "model.layers.0.self_attn.q_proj"
    assert (bare_module.rank, bare_module.scaling) == (2, 2.0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        (
            {"use_dora": True},
            "use_dora is True, but .* has no lora_magnitude_vector of model.layers.0.self_attn.q_proj",
        ),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save is \['lm_head'\]"),
        ({"bias": "some"}, "bias is 'some'; expected none, all, lora_only"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens"),
        ({"use_qalora": True}, "use_qalora"),
        ({"init_lora_weights": "pissa_niter_16"}, "'pissa_niter_16', .* path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "OLoRA"}, "init_lora_weights is 'OLoRA'"),
        ({"init_lora_weights": "loftq"}, "'loftq', .* belongs to the weights that LoftQ made"),
        ({"r": 3}, f"{A_KEY} has rank 2, but adapter_config.json says 3"),
        ({"rank_pattern": {"q_proj": 4}}, "has rank 2, but adapter_config.json says 4"),
        ({"r": None}, "r of model.layers.0.self_attn.q_proj is None"),
        ({"lora_alpha": "16"}, "lora_alpha of model.layers.0.self_attn.q_proj is '16'"),
        ({"lora_alpha": 10**400}, "lora_alpha of model.layers.0.self_attn.q_proj is beyond 1e"),
        ({"rank_pattern": ["q_proj"]}, r"rank_pattern is \['q_proj'\], an object is expected"),
        ({"alpha_pattern": {"(": 4}}, r"alpha_pattern has the invalid pattern '\('"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(AdapterError, match=message):
        read_peft_directory(write(tmp_path, config))


@pytest.mark.parametrize("initialisation", [True, False, "gaussian", "mica", "eva", "orthogonal"])
def test_an_initialisation_that_leaves_the_base_alone_is_served(tmp_path: Path, initialisation: object) -> None:
    assert read_peft_directory(write(tmp_path, {"init_lora_weights": initialisation})).modules


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "holds no tensors"),
        ({A_KEY: torch.ones(2, 5)}, f"{A_KEY} has no lora_B beside it"),
        ({B_KEY: torch.ones(3, 2)}, f"{B_KEY} has no lora_A beside it"),
        ({A_KEY: torch.ones(2, 5), B_KEY: torch.ones(3, 4)}, "have different ranks"),
        ({A_KEY: torch.ones(2, 5), B_KEY: torch.ones(3, 2, 1, 1)}, f"{B_KEY} has shape"),
        ({A_KEY: torch.ones(2, 0), B_KEY: torch.ones(3, 2)}, f"{A_KEY} has shape"),
        ({A_KEY: torch.full((2, 5), torch.nan), B_KEY: torch.ones(3, 2)}, f"{A_KEY} holds NaN"),
        ({A_KEY: torch.ones(2, 5).double(), B_KEY: torch.ones(3, 2)}, f"{A_KEY} is F64"),
        (sound_tensors() | {A_KEY.removeprefix("base_model.model."): torch.ones(2, 5)}, "are the same matrix"),
        ({"base_model.model.lm_head.lora_A.weight": torch.ones(2, 5)}, "lm_head.* on the output head"),
        ({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 5)}, "lora_embedding_A: .*embeddings"),
        ({A_KEY.replace("model.layers", "encoder.layers"): torch.ones(2, 5)}, "is not a LoRA matrix"),
        ({A_KEY.replace("model.layers", "model.model.layers"): torch.ones(2, 5)}, "is not a LoRA matrix"),
        ({f"{PREFIX}.lora_magnitude_vector.weight": torch.ones(3)}, "lora_magnitude_vector.weight has no lora_A"),
        (
            sound_tensors() | {f"{PREFIX}.lora_magnitude_vector": torch.ones(3)},
            "use_dora is False, but .* has .*vector",
        ),
        ({f"{PREFIX}.lora_B.bias": torch.ones(3)}, "lora_B.bias: biases"),
        ({f"{PREFIX}.base_layer.weight": torch.ones(3, 5)}, "base_layer.weight is not a LoRA matrix"),
        ({A_KEY.replace("q_proj", "c_attn"): torch.ones(2, 5)}, "unknown module 'self_attn.c_attn'; supported are"),
        ({A_KEY.replace("self_attn.q_proj", "mlp.experts.0.up_proj"): torch.ones(2, 5)}, "unknown module"),
        ({A_KEY.replace("model.layers", "vision_tower.layers"): torch.ones(2, 5)}, "reads pictures"),
        ({A_KEY.replace("model.layers", "vision_tower.model.layers"): torch.ones(2, 5)}, "reads pictures"),
    ],
)
def test_tensors_that_cannot_be_served_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(AdapterError, match=message):
        read_peft_directory(write(tmp_path, tensors=tensors))


@pytest.mark.parametrize(
    ("magnitude", "message"),
    [
        (torch.ones(2), r"has shape \[2\], expected \[3\]"),
        (torch.full((3,), torch.inf), "holds NaN or infinite values"),
    ],
)
def test_a_magnitude_that_does_not_fit_is_refused(tmp_path: Path, magnitude: torch.Tensor, message: str) -> None:
    tensors = sound_tensors() | {f"{PREFIX}.lora_magnitude_vector.weight": magnitude}
    with pytest.raises(AdapterError, match=f"lora_magnitude_vector.weight {message}"):
        read_peft_directory(write(tmp_path, {"use_dora": True}, tensors))


def test_one_unknown_key_among_sound_ones_is_not_dropped(tmp_path: Path) -> None:
    stray = f"{PREFIX}.lora_C.weight"

    with pytest.raises(AdapterError, match=stray):
        read_peft_directory(write(tmp_path, tensors=sound_tensors() | {stray: torch.ones(1)}))


def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")

    with pytest.raises(AdapterError, match=r"adapter_model\.bin is a pickle.*only safetensors is read"):
        read_peft_directory(tmp_path)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"adapter_config\.json is missing"):
        read_peft_directory(tmp_path)
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"not a tensor in sight")
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors is not a safetensors file"):
        read_peft_directory(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors is missing"):
        read_peft_directory(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(AdapterError, match="is not a JSON object"):
        read_peft_directory(tmp_path)
    (tmp_path / "adapter_config.json").write_bytes(b"\xff{")
    with pytest.raises(AdapterError, match="is not JSON"):
        read_peft_directory(tmp_path)


def test_a_link_is_followed_to_a_file_and_refused_to_a_folder(tmp_path: Path) -> None:
    """Model hubs keep their files as links into a store."""
    (tmp_path / "store").mkdir()
    (tmp_path / "adapter").mkdir()
    write(tmp_path / "store")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "adapter" / name).symlink_to(tmp_path / "store" / name)

    assert len(read_peft_directory(tmp_path / "adapter").modules) == 1

    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter" / "adapter_model.safetensors").symlink_to(tmp_path / "store")
    with pytest.raises(AdapterError, match=r"adapter_model\.safetensors is missing"):
        read_peft_directory(tmp_path / "adapter")
