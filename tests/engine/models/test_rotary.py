"""Angles and rotations against transformers, with the scalings that published checkpoints use."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from multilora_engine.batch.forward_batch import ForwardBatch
from multilora_engine.models.registry import read_model_config
from multilora_engine.models.rotary import RotaryEmbedding, Rotation

CPU = torch.device("cpu")
SHAPE = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
SCALINGS: dict[str, dict[str, Any]] = {
    "default, theta 1e6": {"rope_type": "default", "rope_theta": 1e6},
    "Llama 3.1": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_theta": 500000.0,
    },
    "Qwen2.5 yarn": {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "rope_theta": 1e6,
    },
    "yarn, own attention factor": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 4096,
        "attention_factor": 0.9,
        "rope_theta": 10000.0,
    },
    "linear": {"rope_type": "linear", "factor": 2.5, "rope_theta": 10000.0},
}
POSITIONS = [0, 1, 2, 777, 4096, 32767, 131071]


@pytest.mark.parametrize("name", SCALINGS)
def test_rotated_heads_match_transformers(name: str, tmp_path: Path) -> None:
    hf_config = write_config(tmp_path, SCALINGS[name], max_position_embeddings=131072)
    q = torch.randn(len(POSITIONS), 2, 128, generator=torch.Generator().manual_seed(0))
    rotation = rotation_of(tmp_path, POSITIONS)
    turned = q * rotation.cos + q.roll(64, -1) * rotation.sin
    torch.testing.assert_close(turned, reference(hf_config, q), atol=1e-3, rtol=0)


def test_dynamic_scaling_follows_each_sequence_of_a_batch_by_its_own_length(tmp_path: Path) -> None:
    write_config(tmp_path, {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}, max_position_embeddings=16)
    rotary = RotaryEmbedding(read_model_config(tmp_path).ropes["all"], CPU)
    together = rotary.rotation(batch([99, 3, 4, 5], query_lens=[1, 3], context_lens=[100, 6]), torch.float32)
    long = rotary.rotation(batch([99], query_lens=[1], context_lens=[100]), torch.float32)
    short = rotary.rotation(batch([3, 4, 5], query_lens=[3], context_lens=[16]), torch.float32)
    torch.testing.assert_close(together.cos, torch.cat((long.cos, short.cos)), atol=0, rtol=0)
    torch.testing.assert_close(together.sin, torch.cat((long.sin, short.sin)), atol=0, rtol=0)


def write_config(path: Path, rope_parameters: dict[str, Any], max_position_embeddings: int) -> LlamaConfig:
    config = LlamaConfig(
        **SHAPE,
        architectures=["LlamaForCausalLM"],
        max_position_embeddings=max_position_embeddings,
        rope_parameters=rope_parameters,
    )
    config.save_pretrained(path)
    return config


def rotation_of(path: Path, positions: list[int]) -> Rotation:
    rotary = RotaryEmbedding(read_model_config(path).ropes["all"], CPU)
    return rotary.rotation(batch(positions, [len(positions)], [positions[-1] + 1]), torch.float32)


def reference(config: LlamaConfig, q: torch.Tensor) -> torch.Tensor:
    cos, sin = LlamaRotaryEmbedding(config)(q, torch.tensor([POSITIONS]))
    rotated, _ = apply_rotary_pos_emb(q.transpose(0, 1)[None], q.transpose(0, 1)[None], cos, sin)
    return rotated[0].transpose(0, 1)


def batch(positions: list[int], query_lens: list[int], context_lens: list[int]) -> ForwardBatch:
    """Only what angles depend on; the rest is empty."""
    empty = torch.empty(0, dtype=torch.int64)
    return ForwardBatch(
        input_ids=empty,
        positions=torch.tensor(positions),
        slot_mapping=empty,
        query_lens=query_lens,
        context_lens=context_lens,
        num_keys=torch.tensor(context_lens),
        query_starts=empty,
        block_tables=empty,
        num_decodes=query_lens.count(1),
        logits_indices=empty,
        block_size=1,
    )
