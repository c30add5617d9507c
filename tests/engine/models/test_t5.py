"""T5's config.json and checkpoints as transformers reads them, and refusals for everything else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.encoder_decoders import (
    Decoding,
    assert_as_transformers_reads,
    change_json,
    make_model,
    random_tokens,
    run_alone,
)

from multilora_engine.errors import ConfigError
from multilora_engine.models.loader import load_model
from multilora_engine.models.registry import read_model_config
from multilora_engine.models.weights import Placement

CPU = torch.device("cpu")


@pytest.mark.parametrize("name", ["t5", "t5 v1.1", "mt5"])
@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": False, "scale_decoder_outputs": None},
        {"tie_word_embeddings": True, "scale_decoder_outputs": None},
        {"tie_word_embeddings": None, "scale_decoder_outputs": None},
        {"tie_word_embeddings": False, "scale_decoder_outputs": True},
        {"scale_decoder_outputs": False},
        {"layer_norm_epsilon": 0.5},
        {"relative_attention_max_distance": 40},
        {"dense_act_fn": None, "is_gated_act": None, "n_positions": 9, "dropout_rate": 0.3},
    ],
    ids=lambda changes: " ".join(f"{name} {value}" for name, value in changes.items()),
)
def test_fields_mean_what_they_mean_in_transformers(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """None is a field that the file lacks."""
    make_model(name).save_pretrained(tmp_path)
    change_json(tmp_path / "config.json", changes)
    assert_as_transformers_reads(tmp_path)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"feed_forward_proj": "gated-relu"}, "feed_forward_proj 'gated-relu' is not supported; supported are: relu"),
        ({"feed_forward_proj": "gated-gelu"}, "dense_act_fn 'relu' disagrees with feed_forward_proj 'gated-gelu'"),
        ({"dense_act_fn": "gelu"}, "dense_act_fn 'gelu' disagrees with feed_forward_proj 'relu'"),
        ({"is_gated_act": True}, "is_gated_act True disagrees"),
        ({"scale_decoder_outputs": "no"}, "scale_decoder_outputs 'no' must be true or false"),
        ({"is_decoder": True}, "is_decoder True is not supported"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder False is not supported"),
        ({"num_layers": 0}, "num_layers 0 must be positive"),
        ({"num_decoder_layers": -1}, "num_decoder_layers -1 must be positive"),
        ({"d_kv": "12"}, "d_kv"),
        ({"relative_attention_num_buckets": 3}, "relative_attention_num_buckets 3 must be 4 or more"),
        ({"relative_attention_max_distance": 4}, "its half less than relative_attention_max_distance 4"),
        ({"n_positions": 0}, "n_positions 0 must be a positive whole number"),
        ({"decoder_start_token_id": 103}, "decoder_start_token_id of .* must be a token of the vocabulary of 103"),
        ({"decoder_start_token_id": [0]}, "decoder_start_token_id of .* must be a token"),
        ({"decoder_start_token_id": None}, "decoder_start_token_id is missing"),
        ({"per_layer_config": {}}, "per_layer_config is not supported"),
        ({"dtype": "int8"}, "dtype 'int8' is not supported"),
    ],
)
def test_a_field_that_says_something_else_is_refused_by_name(
    changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    make_model("t5").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    change_json(tmp_path / "config.json", changes)
    with pytest.raises(ConfigError, match=expected):
        read_model_config(tmp_path)


def test_the_beginning_of_answers_is_that_of_generation_config_json_first(tmp_path: Path) -> None:
    make_model("t5").save_pretrained(tmp_path)
    source = read_model_config(tmp_path).source
    assert source is not None
    assert (source.max_tokens, source.decoder_start_token_id, source.forced_first_token_id) == (None, 0, None)
    change_json(tmp_path / "generation_config.json", {"decoder_start_token_id": 7, "forced_bos_token_id": 9})
    change_json(tmp_path / "config.json", {"forced_bos_token_id": 5, "pad_token_id": 3, "bos_token_id": 4})
    change_json(tmp_path / "generation_config.json", {"pad_token_id": None})
    source = read_model_config(tmp_path).source
    assert source is not None
    assert (source.decoder_start_token_id, source.forced_first_token_id, source.pad_token_id) == (7, 9, 3)


def test_config_json_begins_no_answer_where_generation_config_json_is_silent(tmp_path: Path) -> None:
    """As in transformers, whose `generate` reads the one file or the other."""
    make_model("t5").save_pretrained(tmp_path)
    change_json(tmp_path / "config.json", {"forced_bos_token_id": 5, "decoder_start_token_id": 6})
    for changes, expected in (
        ({"decoder_start_token_id": 7}, (7, None)),
        ({"decoder_start_token_id": None, "bos_token_id": 8}, (8, None)),
        ({"decoder_start_token_id": None, "bos_token_id": None}, (6, None)),
    ):
        change_json(tmp_path / "generation_config.json", changes)
        source = read_model_config(tmp_path).source
        assert source is not None
        assert (source.decoder_start_token_id, source.forced_first_token_id) == expected


@pytest.mark.parametrize("name", ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"])
def test_embeddings_may_be_stored_again_when_equal_or_under_that_name_alone(name: str, tmp_path: Path) -> None:
    model = make_model("t5")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    expected = run_alone(load(tmp_path), Decoding(random_tokens(9, 1), random_tokens(3, 2)))
    for changes in ({name: tensors["shared.weight"].clone()}, {name: tensors["shared.weight"], "shared.weight": None}):
        write(tmp_path, tensors, changes)
        assert run_alone(load(tmp_path), Decoding(random_tokens(9, 1), random_tokens(3, 2))).equal(expected)
    write(tmp_path, tensors, {name: tensors["shared.weight"] + 1})
    with pytest.raises(ConfigError, match=f"{name} differs from shared.weight: encoder and decoder must have the same"):
        load(tmp_path)


def test_a_head_is_used_where_the_checkpoint_has_one(tmp_path: Path) -> None:
    """transformers writes that embeddings and head are one matrix even then."""
    make_model("t5").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert load(tmp_path).config.tie_word_embeddings
    for head in (tensors["shared.weight"].clone(), torch.randn(tensors["shared.weight"].shape)):
        write(tmp_path, tensors, {"lm_head.weight": head})
        assert_as_transformers_reads(tmp_path)
        assert not load(tmp_path).config.tie_word_embeddings


def test_a_bias_of_cross_attention_is_passed_over_as_in_transformers(tmp_path: Path) -> None:
    make_model("t5").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    write(tmp_path, tensors, {name: torch.randn(8, 5)})
    assert_as_transformers_reads(tmp_path)


def load(path: Path) -> Any:
    return load_model(path, Placement(torch.float32, torch.float32, CPU))


def write(path: Path, tensors: Mapping[str, torch.Tensor], changes: Mapping[str, torch.Tensor | None]) -> None:
    merged = {**tensors, **changes}
    save_file({name: tensor for name, tensor in merged.items() if tensor is not None}, path / "model.safetensors")
