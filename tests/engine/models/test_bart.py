"""BART's config.json and checkpoints as transformers reads them, and refusals for everything else."""

from __future__ import annotations

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
STACKS = ("encoder", "decoder")


@pytest.mark.parametrize("name", ["bart", "mbart"])
@pytest.mark.parametrize(
    "changes",
    [
        {"scale_embedding": True},
        {"scale_embedding": False},
        {"activation_function": "gelu_new"},
        {"activation_function": "relu"},
        {"encoder_attention_heads": 3},
        {"decoder_attention_heads": 2},
        {"normalize_before": True, "normalize_embedding": False, "add_final_layer_norm": True},
        {"forced_eos_token_id": None, "dropout": 0.4, "encoder_layerdrop": 0.5},
    ],
    ids=lambda changes: " ".join(f"{name} {value}" for name, value in changes.items()),
)
def test_fields_mean_what_they_mean_in_transformers(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    make_model(name).save_pretrained(tmp_path)
    change_json(tmp_path / "config.json", changes)
    assert_as_transformers_reads(tmp_path)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"activation_function": "silu"}, "activation_function 'silu' is not supported; supported are: gelu, relu"),
        ({"encoder_attention_heads": 5}, "d_model 48 is not a multiple of encoder_attention_heads 5"),
        ({"decoder_attention_heads": 7}, "d_model 48 is not a multiple of decoder_attention_heads 7"),
        ({"decoder_attention_heads": None}, "decoder_attention_heads None must be a positive whole number"),
        ({"encoder_layers": 0}, "encoder_layers 0 must be positive"),
        ({"max_position_embeddings": 0}, "max_position_embeddings 0 must be positive"),
        ({"is_decoder": True}, "is_decoder True is not supported"),
        ({"decoder_start_token_id": -1}, "decoder_start_token_id of .* must be a token of the vocabulary of 103"),
    ],
)
def test_a_field_that_says_something_else_is_refused_by_name(
    changes: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    make_model("bart").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    raw = change_json(tmp_path / "config.json", changes)
    if None in changes.values():
        change_json(tmp_path / "config.json", raw | changes, keeps_none=True)
    with pytest.raises(ConfigError, match=expected):
        read_model_config(tmp_path)


def test_positions_limit_both_stacks_and_the_model_type_has_its_own_beginning(tmp_path: Path) -> None:
    make_model("bart").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    change_json(tmp_path / "config.json", {"decoder_start_token_id": None, "pad_token_id": None})
    config = read_model_config(tmp_path)
    assert config.source is not None
    assert (config.max_position_embeddings, config.source.max_tokens) == (64, 64)
    assert (config.source.decoder_start_token_id, config.source.pad_token_id) == (2, 1)
    assert (config.source.forced_first_token_id, config.source.forced_last_token_id) == (None, 2)


def test_a_model_type_without_a_beginning_begins_as_a_text(tmp_path: Path) -> None:
    """mBART's languages differ, so that requests give the beginning. transformers takes the token of all texts else."""
    make_model("mbart").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").unlink()
    change_json(tmp_path / "config.json", {"decoder_start_token_id": None, "bos_token_id": 5, "forced_bos_token_id": 8})
    source = read_model_config(tmp_path).source
    assert source is not None
    assert (source.decoder_start_token_id, source.forced_first_token_id) == (5, 8)


@pytest.mark.parametrize(("name", "expected"), [("bart", 5), ("mbart", None)])
def test_barts_old_name_of_a_forced_first_token_counts(name: str, expected: int | None, tmp_path: Path) -> None:
    make_model(name).save_pretrained(tmp_path)
    change_json(tmp_path / "config.json", {"force_bos_token_to_be_generated": True, "bos_token_id": 5})
    for file in ("generation_config.json", "none"):  # transformers reads the name where the file is missing
        source = read_model_config(tmp_path).source
        assert source is not None
        assert source.forced_first_token_id == (None if file == "generation_config.json" else expected)
        (tmp_path / "generation_config.json").unlink(missing_ok=True)


@pytest.mark.parametrize("name", ["bart", "mbart"])
def test_a_checkpoint_may_lack_the_bias_of_logits(name: str, tmp_path: Path) -> None:
    make_model(name).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["final_logits_bias"]
    save_file(tensors, tmp_path / "model.safetensors")
    assert_as_transformers_reads(tmp_path)


def test_sums_beyond_float16_stay_finite(tmp_path: Path) -> None:
    model = make_model("mbart")
    with torch.no_grad():
        model.model.encoder.layers[0].fc2.weight *= 3e4
    model.half().save_pretrained(tmp_path)
    loaded = load_model(tmp_path, Placement(torch.float16, torch.float16, CPU))
    decoding = Decoding(random_tokens(9, 1), random_tokens(5, 2))
    assert run_alone(loaded, decoding).isfinite().all()
    with torch.inference_mode():
        hidden = model.float().model.encoder(torch.tensor([decoding.source_ids]), output_hidden_states=True)
    assert max(float(x.abs().max()) for x in hidden.hidden_states[:-1]) > torch.finfo(torch.float16).max


def test_a_head_of_its_own_must_be_stored(tmp_path: Path) -> None:
    make_model("bart").save_pretrained(tmp_path)
    change_json(tmp_path / "config.json", {"tie_word_embeddings": False})
    tensors = load_file(tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"1 tensors are missing from the checkpoint: lm_head\.weight"):
        load_model(tmp_path, Placement(torch.float32, torch.float32, torch.device("cpu")))
    shared = {f"model.{stack}.embed_tokens.weight": tensors["model.shared.weight"].clone() for stack in STACKS}
    save_file(tensors | shared | {"lm_head.weight": torch.randn(103, 48)}, tmp_path / "model.safetensors")
    assert_as_transformers_reads(tmp_path)


def test_versions_that_fairseq_wrote_are_passed_over(tmp_path: Path) -> None:
    make_model("bart").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    versions = {f"model.{stack}.version": torch.tensor([3.0]) for stack in STACKS}
    save_file(tensors | versions, tmp_path / "model.safetensors")
    assert_as_transformers_reads(tmp_path)


def test_a_tensor_of_another_model_is_refused_by_name(tmp_path: Path) -> None:
    """A final norm is mBART's."""
    make_model("bart").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors | {"model.encoder.layer_norm.weight": torch.ones(48)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"unexpected tensor model\.encoder\.layer_norm\.weight"):
        load_model(tmp_path, Placement(torch.float32, torch.float32, torch.device("cpu")))
