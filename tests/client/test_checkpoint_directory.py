"""Paths that are no checkpoints; the way out of GGUF is tried with a file of a tiny model."""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from multilora_client.base_weights import BaseWeights
from multilora_client.errors import AdapterError
from multilora_engine.errors import ConfigError
from multilora_engine.models.registry import read_model_config
from multilora_engine.tritonserver.checkpoint import check_checkpoint
from multilora_wire.checkpoint_directory import why_no_checkpoint

HIDDEN, WIDTH, HEADS, TOKENS = 32, 64, 2, [*map(chr, range(ord("!"), ord("~"))), "ab", "<|end|>"]


def write_gguf(path: Path) -> None:
    """A random Llama of one layer, in float32."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(1)
    writer.add_feed_forward_length(WIDTH)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_vocab_size(len(TOKENS))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([gguf.TokenType.NORMAL] * (len(TOKENS) - 1) + [gguf.TokenType.CONTROL])
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(len(TOKENS) - 1)
    random = np.random.default_rng(0)
    shapes = {
        "token_embd": (len(TOKENS), HIDDEN),
        "output_norm": (HIDDEN,),
        "blk.0.attn_norm": (HIDDEN,),
        "blk.0.ffn_norm": (HIDDEN,),
        **{f"blk.0.attn_{name}": (HIDDEN, HIDDEN) for name in ("q", "k", "v", "output")},
        "blk.0.ffn_gate": (WIDTH, HIDDEN),
        "blk.0.ffn_up": (WIDTH, HIDDEN),
        "blk.0.ffn_down": (HIDDEN, WIDTH),
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", random.standard_normal(shape, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_the_advice_about_gguf_makes_a_checkpoint(tmp_path: Path) -> None:
    file = tmp_path / "it's a model" / "tiny.gguf"
    file.parent.mkdir()
    write_gguf(file)
    with pytest.raises(ConfigError) as refused:
        check_checkpoint(file)
    arguments = str(refused.value).partition(": python ")[2]
    subprocess.run(f"{shlex.quote(sys.executable)} {arguments}", cwd=tmp_path, check=True, shell=True)
    checkpoint = tmp_path / "checkpoint"
    check_checkpoint(checkpoint)
    assert read_model_config(checkpoint).architecture == "LlamaForCausalLM"
    assert (checkpoint / "tokenizer.json").is_file()
    rows = next(iter(BaseWeights(checkpoint).tiles("model.layers.0.mlp.down_proj", (HIDDEN, WIDTH))))
    assert rows.dtype == np.float32
    assert torch.from_numpy(rows).std() > 0.5


@pytest.mark.parametrize("door", [check_checkpoint, read_model_config, BaseWeights], ids=["serve", "engine", "client"])
@pytest.mark.parametrize("as_directory", [False, True])
def test_every_door_names_the_gguf_file(tmp_path: Path, door: type, as_directory: bool) -> None:
    (tmp_path / "Q4.gguf").touch()
    with pytest.raises((ConfigError, AdapterError), match=r"Q4\.gguf is GGUF, which is not served"):
        door(tmp_path if as_directory else tmp_path / "Q4.gguf")


def test_what_is_not_a_checkpoint_is_told_by_what_it_is(tmp_path: Path) -> None:
    assert why_no_checkpoint(tmp_path / "nothing") == (
        f"{tmp_path / 'nothing'} is not there; give the directory of a Hugging Face checkpoint"
    )
    assert str(why_no_checkpoint(tmp_path)).startswith(f"{tmp_path} has no config.json; give")
    (tmp_path / "adapter_config.json").touch()
    assert "is an adapter (adapter_config.json); name its base model" in str(why_no_checkpoint(tmp_path))
    assert str(why_no_checkpoint(tmp_path / "adapter_config.json")).startswith(
        f"{tmp_path}/adapter_config.json is a file"
    )
    (tmp_path / "config.json").touch()
    (tmp_path / "Q4.gguf").touch()
    assert why_no_checkpoint(tmp_path) is None
