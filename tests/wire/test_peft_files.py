"""An adapter is read as PEFT reads it; what the wire cannot hold, and what other tools write, is refused by name."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.tuners_utils import check_target_module_exists
from safetensors.torch import save_file

from multilora_wire.adapter_origin import WrongBaseModel
from multilora_wire.peft_config import PeftError
from multilora_wire.peft_files import LinearReader, PeftAdapter, open_peft_directory
from multilora_wire.sites import ModelSites, decoder_sites

PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"
A_KEY, B_KEY = f"{PREFIX}.lora_A.weight", f"{PREFIX}.lora_B.weight"
CONFIG: dict[str, Any] = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "bias": "none", "modules_to_save": None}


REFUSALS = (PeftError, WrongBaseModel)


class Zeros:
    """A base model without weights: the lengths of DoRA's rows are those of the update."""

    def tiles(self, name: str, shape: tuple[int, int]) -> Iterator[np.ndarray]:
        yield np.zeros(shape, np.float32)


def read(directory: Path, sites: ModelSites | None = None, model: str = "") -> PeftAdapter:
    """Read an adapter with all its values."""
    with open_peft_directory(directory, sites, model, trusts_patterns=True) as adapter:
        reader = LinearReader(adapter, Zeros())
        for linear in adapter.linears:
            assert list(reader.read(linear))
        return adapter


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

    (prefixed_module,) = read(write(tmp_path)).linears
    (bare_module,) = read(write(tmp_path, tensors=bare)).linears

    assert prefixed_module.name == bare_module.name == "model.layers.0.self_attn.q_proj"
    assert (bare_module.rank, bare_module.scaling) == (2, 2.0)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'; only LORA and TRAINABLE_TOKENS are served: train LoRA"),
        ({"peft_type": ["IA3"]}, r"peft_type is \['IA3'\]; only LORA and TRAINABLE_TOKENS are served: train LoRA"),
        ({"peft_type": "VERA"}, "peft_type is 'VERA'; .* PEFT's save_as_lora"),
        (
            {"use_dora": True},
            "use_dora is True, but .* has no lora_magnitude_vector of model.layers.0.self_attn.q_proj",
        ),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save names 'lm_head'"),
        ({"bias": "some"}, "bias is 'some'; expected none, all, lora_only"),
        ({"lora_bias": True}, "lora_bias is True"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"trainable_token_indices": [3]}, "names tokens of model.embed_tokens"),
        (
            {"target_parameters": ["mlp.experts.gate_up_proj"]},
            "target_parameters is .*, which leaves out model.layers.0.self_attn.q_proj",
        ),
        ({"alora_invocation_tokens": "<|check|>"}, "alora_invocation_tokens is .*; a list of token ids is expected"),
        ({"alora_invocation_tokens": [5, True]}, "a list of token ids is expected"),
        ({"alora_invocation_tokens": [5.0]}, "a list of token ids is expected"),
        ({"alora_invocation_tokens": 0}, "a list of token ids is expected"),
        ({"alora_invocation_tokens": [5], "use_dora": True}, "and use_dora is set, too: PEFT has no such variant"),
        ({"alora_invocation_tokens": [5], "use_bdlora": {}}, "and use_bdlora is set, too"),
        ({"use_qalora": True}, "use_qalora"),
        (
            {"invocation_string": "<|start_of_role|>check"},
            "invocation_string is '<|start_of_role|>check'; .*activated LoRA .*train it with PEFT".replace("|", r"\|"),
        ),
        ({"context_length": 0}, "context_length is 0, a whole number from 1 to 1073741824 is expected"),
        ({"context_length": "16k"}, "context_length is '16k', a whole number"),
        ({"context_length": True}, "context_length is True, a whole number"),
        ({"rope_parameters": [3]}, r"rope_parameters is \[3\], an object is expected"),
        ({"rope_parameters": {"factor": 2.0}, "context_length": 64}, "has context_length and rope_parameters"),
        ({"rope_parameters": {"rope_type": "yarn", "context_length": 64}}, "rope_parameters has context_length"),
        ({"rope_parameters": {"rope_theta": math.nan}}, "rope_parameters is {'rope_theta': nan}; only finite numbers"),
        ({"rope_parameters": {"factors": [math.inf]}}, "only finite numbers are legal"),
        ({"tomorrow_config": {"depth": 3}}, "tomorrow_config is {'depth': 3}, and this field"),
        ({"tomorrow": "x" * 5000}, r"tomorrow is 'x{199}\.\.\., and this field"),
        ({"fine_tune_type": "lora", "lora_parameters": {"rank": 8, "scale": 20.0}}, "MLX wrote this adapter"),
        (
            {"target_modules": ["k_proj"]},
            r"target_modules is \['k_proj'\], which leaves out model.layers.0.self_attn.q_p",
        ),
        (
            {"exclude_modules": ["self_attn.q_proj"]},
            "exclude_modules is .*, which leaves out model.layers.0.self_attn.q_p",
        ),
        ({"target_modules": ["q_proj"], "layers_to_transform": 1}, "layers_to_transform is 1, which leaves out"),
        ({"init_lora_weights": "tomorrow"}, "init_lora_weights is 'tomorrow', which is not known"),
        ({"init_lora_weights": ["pissa"]}, r"init_lora_weights is \['pissa'\], which is not known"),
        ({"init_lora_weights": "pissa_niter_16"}, "'pissa_niter_16', .* path_initial_model_for_weight_conversion"),
        ({"init_lora_weights": "OLoRA"}, "init_lora_weights is 'OLoRA'"),
        ({"init_lora_weights": "loftq"}, "'loftq', .* belongs to the weights that LoftQ made"),
        ({"r": 3}, f"{A_KEY} has rank 2, but adapter_config.json says 3"),
        ({"rank_pattern": {"q_proj": 4}}, "has rank 2, but adapter_config.json says 4"),
        ({"r": None}, "r of model.layers.0.self_attn.q_proj is None"),
        ({"lora_alpha": "16"}, "lora_alpha of model.layers.0.self_attn.q_proj is '16'"),
        ({"lora_alpha": float("nan")}, "lora_alpha of model.layers.0.self_attn.q_proj is beyond 1e"),
        ({"lora_alpha": 10**400}, "lora_alpha of model.layers.0.self_attn.q_proj is beyond 1e"),
        ({"rank_pattern": ["q_proj"]}, r"rank_pattern is \['q_proj'\], an object is expected"),
        ({"alpha_pattern": {"(": 4}}, r"alpha_pattern has the invalid pattern '\('"),
    ],
)
def test_a_config_that_cannot_be_served_is_refused(tmp_path: Path, config: dict[str, Any], message: str) -> None:
    with pytest.raises(REFUSALS, match=message):
        read(write(tmp_path, config))


@pytest.mark.parametrize(("tokens", "expected"), [(None, ()), ([], ()), ([0, 7, 7], (0, 7, 7))])
def test_the_tokens_that_activate_an_adapter_are_read(tmp_path: Path, tokens: Any, expected: tuple[int, ...]) -> None:
    assert read(write(tmp_path, {"alora_invocation_tokens": tokens})).config.invocation_tokens == expected


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"context_length": None, "rope_parameters": None}, ""),
        ({"rope_parameters": {}}, ""),
        ({"context_length": 16384}, '{"context_length":16384}'),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, '{"factor":4.0,"rope_type":"yarn"}'),
    ],
)
def test_the_rotary_embeddings_of_an_adapter_are_read(tmp_path: Path, fields: dict[str, Any], expected: str) -> None:
    assert read(write(tmp_path, fields)).config.rope == expected


@pytest.mark.parametrize("initialisation", [True, False, "gaussian", "mica", "eva", "orthogonal"])
def test_an_initialisation_that_leaves_the_base_alone_is_served(tmp_path: Path, initialisation: object) -> None:
    assert read(write(tmp_path, {"init_lora_weights": initialisation})).linears


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
        ({"base_model.model.lm_head.lora_A.weight": torch.ones(2, 5)}, "lm_head.* no tensors of the wire"),
        (
            {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 5)},
            "lora_embedding_A belongs to .*embeddings",
        ),
        ({A_KEY.replace("model.layers", "encoder.layers"): torch.ones(2, 5)}, "is not a LoRA matrix"),
        ({A_KEY.replace("model.layers", "model.model.layers"): torch.ones(2, 5)}, "is not a LoRA matrix"),
        ({f"{PREFIX}.lora_magnitude_vector.weight": torch.ones(3)}, "lora_magnitude_vector.weight has no lora_A"),
        (
            sound_tensors() | {f"{PREFIX}.lora_magnitude_vector": torch.ones(3)},
            "use_dora is False, but .* has .*vector",
        ),
        ({f"{PREFIX}.lora_B.bias": torch.ones(3)}, "lora_B.bias: biases"),
        (
            {"base_model.model.lm_head.weight": torch.ones(9, 5)},
            "lm_head.weight belongs to the embeddings or the head",
        ),
        ({"base_model.model.model.embed_tokens.base_layer.weight": torch.ones(9, 5)}, "multilora upload"),
        ({"base_model.model.model.norm.weight": torch.ones(5)}, "model.norm.weight: whole saved norms"),
        (
            {"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta": torch.ones(1, 5)},
            "trainable_tokens_delta belongs",
        ),
        ({"base_model.model.score.modules_to_save.weight": torch.ones(2, 5)}, "whole saved modules"),
        ({"model.layers.0.self_attn.q_proj.lora_a": torch.ones(5, 2)}, "lora_a is MLX's form of a matrix.*transposed"),
        ({"base_model.model.model.visual.blocks.0.attn.qkv.lora_A.weight": torch.ones(2, 5)}, "reads pictures"),
        ({A_KEY.replace("layers.0", "layers." + "1" * 5000): torch.ones(2, 5)}, r"1{100,200} is not a LoRA matrix"),
        ({f"{PREFIX}.base_layer.weight": torch.ones(3, 5)}, "base_layer.weight is not a LoRA matrix"),
        ({A_KEY.replace("q_proj", "c_attn"): torch.ones(2, 5)}, "unknown module 'self_attn.c_attn'; supported are"),
        ({A_KEY.replace("self_attn.q_proj", "mlp.experts.0.up_proj"): torch.ones(2, 5)}, "belongs to experts, which"),
        ({A_KEY.replace("model.layers", "vision_tower.layers"): torch.ones(2, 5)}, "reads pictures"),
        ({A_KEY.replace("model.layers", "vision_tower.model.layers"): torch.ones(2, 5)}, "reads pictures"),
    ],
)
def test_tensors_that_cannot_be_served_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], message: str
) -> None:
    with pytest.raises(REFUSALS, match=message):
        read(write(tmp_path, tensors=tensors))


@pytest.mark.parametrize(
    ("magnitude", "message"),
    [
        (torch.ones(2), r"has shape \[2\], expected \[3\]"),
        (torch.full((3,), torch.inf), "holds NaN or infinite values"),
    ],
)
def test_a_magnitude_that_does_not_fit_is_refused(tmp_path: Path, magnitude: torch.Tensor, message: str) -> None:
    tensors = sound_tensors() | {f"{PREFIX}.lora_magnitude_vector.weight": magnitude}
    with pytest.raises(REFUSALS, match=f"lora_magnitude_vector.weight {message}"):
        read(write(tmp_path, {"use_dora": True}, tensors))


def test_one_unknown_key_among_sound_ones_is_not_dropped(tmp_path: Path) -> None:
    stray = f"{PREFIX}.lora_C.weight"

    with pytest.raises(REFUSALS, match=stray):
        read(write(tmp_path, tensors=sound_tensors() | {stray: torch.ones(1)}))


def test_pickled_weights_are_refused_with_the_way_out(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")

    with pytest.raises(REFUSALS, match=r"adapter_model\.bin is a pickle.*only safetensors is read"):
        read(tmp_path)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(REFUSALS, match=r"adapter_config\.json is missing"):
        read(tmp_path)
    write(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"not a tensor in sight")
    with pytest.raises(REFUSALS, match=r"adapter_model\.safetensors is not a safetensors file"):
        read(tmp_path)
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(REFUSALS, match=r"adapter_model\.safetensors is missing"):
        read(tmp_path)
    write(tmp_path)
    (tmp_path / "adapter_config.json").write_text("[]")
    with pytest.raises(REFUSALS, match="is not a JSON object"):
        read(tmp_path)
    (tmp_path / "adapter_config.json").write_bytes(b"\xff{")
    with pytest.raises(REFUSALS, match="is not JSON"):
        read(tmp_path)


def test_a_link_is_followed_to_a_file_and_refused_to_a_folder(tmp_path: Path) -> None:
    """Model hubs keep their files as links into a store."""
    (tmp_path / "store").mkdir()
    (tmp_path / "adapter").mkdir()
    write(tmp_path / "store")
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (tmp_path / "adapter" / name).symlink_to(tmp_path / "store" / name)

    assert len(read(tmp_path / "adapter").linears) == 1

    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    (tmp_path / "adapter" / "adapter_model.safetensors").symlink_to(tmp_path / "store")
    with pytest.raises(REFUSALS, match=r"adapter_model\.safetensors is missing"):
        read(tmp_path / "adapter")


TEXT_PARTS = [
    "base_model.model.model.language_model.layers.",  # Gemma 3 and others of transformers since 4.52
    "base_model.model.language_model.model.layers.",  # the same before
    "base_model.model.model.text_model.layers.",  # SmolVLM
    "base_model.model.language_model.layers.",
    "model.language_model.layers.",
]


@pytest.mark.parametrize("prefix", TEXT_PARTS)
def test_the_text_part_of_a_model_with_pictures_is_read_as_the_text_model(tmp_path: Path, prefix: str) -> None:
    tensors = {key.replace("base_model.model.model.layers.", prefix): value for key, value in sound_tensors().items()}
    patterns = {"alpha_pattern": {f"{prefix.removeprefix('base_model.model.')}0.self_attn.q_proj": 6}}

    (module,) = read(write(tmp_path, patterns, tensors), sites=SITES).linears

    assert (module.name, module.module_id, module.layer) == ("model.layers.0.self_attn.q_proj", 1, 0)
    assert module.scaling == 3.0


def test_one_linear_under_two_names_is_refused(tmp_path: Path) -> None:
    twice = {key.replace("model.layers.", "language_model.layers."): value for key, value in sound_tensors().items()}

    with pytest.raises(REFUSALS, match=r"model\.layers\.0.* and .*language_model\.layers\.0.* are the same matrix"):
        read(write(tmp_path, tensors=sound_tensors() | twice))


SITES = decoder_sites(num_layers=2, hidden_size=5, q_size=3, kv_size=2, intermediate_size=7)


@given(
    in_size=st.integers(1, 9),
    out_size=st.integers(1, 9),
    layer=st.integers(0, 3),
    path=st.sampled_from(["self_attn.q_proj", "self_attn.o_proj", "mlp.down_proj", "self_attn.qkv_proj", "mlp.c_fc"]),
)
def test_an_adapter_is_read_for_a_model_exactly_when_both_sides_fit(
    in_size: int, out_size: int, layer: int, path: str
) -> None:
    sides = {
        "self_attn.q_proj": (5, 3),
        "self_attn.o_proj": (3, 5),
        "mlp.down_proj": (7, 5),
        "self_attn.qkv_proj": (5, 7),
    }
    key = f"base_model.model.model.layers.{layer}.{path}"
    tensors = {f"{key}.lora_A.weight": torch.ones(2, in_size), f"{key}.lora_B.weight": torch.zeros(out_size, 2)}
    with TemporaryDirectory() as folder:
        write(Path(folder), {"base_model_name_or_path": "acme/other"}, tensors)
        if layer < 2 and (in_size, out_size) == sides.get(path):
            assert read(Path(folder), SITES, "tiny").linears
        else:
            with pytest.raises(REFUSALS, match=rf"made for acme/other, not for tiny: model\.layers\.{layer}\.{path} "):
                read(Path(folder), SITES, "tiny")


NAMES = st.sampled_from(["q_proj", "self_attn.q_proj", "model.layers.1.self_attn.q_proj", "proj", "up_proj", "mlp", ""])


@settings(max_examples=40)
@given(
    targets=st.lists(NAMES, min_size=1, max_size=3),
    excluded=st.none() | st.lists(NAMES, max_size=2),
    layers=st.none() | st.integers(0, 2) | st.lists(st.integers(0, 2), max_size=2),
    patterns=st.none() | st.sampled_from(["layers", "h", "", ["h", "layers"], ["h"], []]),
)
def test_modules_that_pefts_configuration_leaves_out_are_not_served(
    targets: list[str], excluded: list[str] | None, layers: int | list[int] | None, patterns: str | list[str] | None
) -> None:
    if layers is None:
        patterns = None
    config = {"target_modules": targets, "exclude_modules": excluded, "layers_to_transform": layers}
    config["layers_pattern"] = patterns
    reference = LoraConfig(**config)
    modules = [f"model.layers.{layer}.{path}" for layer in (0, 1) for path in ("self_attn.q_proj", "mlp.up_proj")]
    for module in modules:
        key = f"base_model.model.{module}"
        tensors = {f"{key}.lora_A.weight": torch.ones(2, 5), f"{key}.lora_B.weight": torch.ones(3, 2)}
        with TemporaryDirectory() as folder:
            write(Path(folder), config, tensors)
            if check_target_module_exists(reference, module) is True:
                assert read(Path(folder)).linears
            else:
                with pytest.raises(REFUSALS, match=f"which leaves out {module}, and"):
                    read(Path(folder))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@example(config={"target_modules": ["q_proj"], "layers_to_transform": 0, "layers_pattern": 5})
@example(config={"target_modules": ["q_proj"], "layers_to_transform": {"0": 0}})
@example(config={"rank_pattern": {"q_proj": [2]}})
@example(config={"base_model_name_or_path": ["acme"], "bias": [], "init_lora_weights": {}})
@given(config=st.dictionaries(st.sampled_from([*(field.name for field in fields(LoraConfig)), "tomorrow"]), JSON))
def test_whatever_stands_in_the_configuration_is_read_or_refused(config: dict[str, Any]) -> None:
    with TemporaryDirectory() as folder:
        write(Path(folder), config)
        with suppress(*REFUSALS):
            assert read(Path(folder), SITES).linears


UNPRINTABLE = "\ud800\n\x00"


@pytest.mark.parametrize("where", ["field", "value", "key", "base model", "pattern", "dtype", "twice"])
def test_a_refusal_can_be_printed_and_sent_whatever_it_quotes(tmp_path: Path, where: str) -> None:
    fields: dict[str, Any] = {}
    header: Any = {A_KEY: {"dtype": "F16", "shape": [1, 1], "data_offsets": [0, 2]}}
    match where:
        case "field":
            fields = {UNPRINTABLE: 1}
        case "value":
            fields = {"invocation_string": UNPRINTABLE}
        case "pattern":
            fields = {"rank_pattern": {UNPRINTABLE: 1}}
        case "base model":
            fields = {"base_model_name_or_path": UNPRINTABLE}
        case "key":
            header = {UNPRINTABLE: header[A_KEY]}
        case "dtype":
            header[A_KEY]["dtype"] = UNPRINTABLE
    write(tmp_path, fields)
    text = json.dumps(header)
    if where == "twice":
        name = json.dumps(UNPRINTABLE)
        text = f"{{{name}: 1, {name}: 2}}"
    if where != "base model":
        data = len(text).to_bytes(8, "little") + text.encode() + bytes(2)
        (tmp_path / "adapter_model.safetensors").write_bytes(data)
    with pytest.raises(REFUSALS) as caught, open_peft_directory(tmp_path, decoder_sites(2, 8, 8, 8, 8)):
        pass
    assert str(caught.value).isprintable()


@given(config=JSON)
def test_whatever_is_in_the_place_of_the_configuration_is_read_or_refused(config: Any) -> None:
    with TemporaryDirectory() as folder:
        write(Path(folder))
        (Path(folder) / "adapter_config.json").write_text(json.dumps(config))
        with suppress(*REFUSALS):
            assert read(Path(folder), SITES).linears
