"""The directory that is made for a GGUF file, and files that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.gguf_files import write_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from multilora_engine.errors import ConfigError
from multilora_engine.gguf.checkpoint import prepare_gguf
from multilora_engine.models.loader import load_model
from multilora_engine.models.registry import read_model_config
from multilora_engine.models.weights import Placement
from multilora_engine.text.tokenizer import Tokenizer
from multilora_engine.tritonserver.checkpoint import resolve_checkpoint

PLACEMENT = Placement(torch.float32, torch.float32, torch.device("cpu"))
TEMPLATE = "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}{% endfor %}"


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("multilora_engine.gguf.checkpoint._cache_directory", lambda: tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=300,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
            eos_token_id=299,
        )
    )


def write(path: Path, model: PreTrainedModel, **metadata: Any) -> Path:
    write_model(path, model, metadata={key.replace("__", "."): value for key, value in metadata.items()})
    return path


def test_a_directory_is_made_once_for_each_state_of_a_file(tmp_path: Path, model: PreTrainedModel) -> None:
    file = write(tmp_path / "tiny.gguf", model)
    directory = resolve_checkpoint(str(file))
    made = (directory / "config.json").stat().st_ino
    assert directory.name == "tiny"
    assert (resolve_checkpoint(str(file)), resolve_checkpoint(str(tmp_path))) == (directory, directory)
    assert (directory / "config.json").stat().st_ino == made
    write(file, model, llama__context_length=64)
    other = resolve_checkpoint(str(file))
    assert other != directory
    assert read_model_config(other).max_position_embeddings == 64


def test_metadata_become_the_files_of_a_checkpoint(tmp_path: Path, model: PreTrainedModel) -> None:
    more = {"tokenizer.chat_template": TEMPLATE, "general.sampling.temp": 0.7, "somebody.note": "x"}
    directory = prepare_gguf(write(tmp_path / "tiny.gguf", model, **more))
    config = read_model_config(directory)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.end_token_ids) == (4, 2, 8, (299,))
    tokenizer = Tokenizer(directory)
    text = tokenizer.decode(tokenizer.apply_chat_template([{"role": "user", "content": "hi"}]))
    assert text == "<user>hi"


def test_several_models_in_a_directory_are_not_guessed_from(tmp_path: Path, model: PreTrainedModel) -> None:
    for name in ("one", "two"):
        write(tmp_path / f"{name}.gguf", model)
    with pytest.raises(ConfigError, match=r"2 GGUF files of different models, such as one\.gguf and two\.gguf"):
        resolve_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"general.architecture": "mamba"},
            "general.architecture 'mamba' is not supported; supported are: llama, qwen2",
        ),
        ({"general.type": "adapter"}, "general.type is 'adapter', and a model is expected"),
        ({"general.quantization_version": 3}, "quantization_version 3"),
        ({"llama.expert_count": 8}, "llama.expert_count 8 is not supported; supported is: 0"),
        ({"llama.nonsense": 8}, "llama.nonsense 8 is not supported: nobody here knows this key"),
        ({"llama.embedding_length": "many"}, "llama.embedding_length is 'many', and one int is expected"),
        ({"llama.attention.head_count": 0}, "head_count 0 must be positive"),
        ({"llama.attention.value_length": 16}, "llama.attention.value_length 16 is not supported; supported is: 8"),
        ({"llama.rope.dimension_count": 4}, "rope.dimension_count 4 is not supported"),
        ({"llama.rope.scaling.type": "magic"}, "rope.scaling.type 'magic' with factor None is not supported"),
        ({"llama.vocab_size": 17}, "llama.vocab_size 17 is not supported; supported is: 300"),
        ({"llama.attention.layer_norm_rms_epsilon": float("nan")}, "layer_norm_rms_epsilon is nan"),
        ({"split.count": 2}, "is file 0 of 2, and by its name the first of 1"),
    ],
)
def test_what_nobody_understands_is_refused_by_name(
    tmp_path: Path, cache: Path, model: PreTrainedModel, metadata: dict[str, Any], message: str
) -> None:
    file = write(tmp_path / "tiny.gguf", model, **metadata)
    with pytest.raises(ConfigError, match=message):
        prepare_gguf(file)
    assert not any(cache.rglob("config.json"))


def test_a_crossed_or_cut_file_is_refused_by_name(tmp_path: Path, model: PreTrainedModel) -> None:
    file = write(tmp_path / "tiny.gguf", model)
    directory = prepare_gguf(file)
    (tmp_path / "cut.gguf").write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ConfigError, match=r"cannot read .*cut\.gguf: \S+ ends at byte"):
        prepare_gguf(tmp_path / "cut.gguf")
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(fields | {"intermediate_size": 96}))

    with pytest.raises(ConfigError, match=r"gate_proj\.weight has shape \[64, 32\], config.json asks for \[96, 32\]"):
        load_model(directory, PLACEMENT)


def test_a_tensor_without_a_place_is_refused_by_name(tmp_path: Path, model: PreTrainedModel) -> None:
    file = tmp_path / "tiny.gguf"
    write(file, model)
    data = file.read_bytes()
    assert data.count(b"blk.0.ffn_up.weight") == 1
    file.write_bytes(data.replace(b"blk.0.ffn_up.weight", b"blk.0.ffn_xx.weight"))
    with pytest.raises(ConfigError, match=r"unexpected tensor blk\.0\.ffn_xx\.weight"):
        load_model(prepare_gguf(file), PLACEMENT)
