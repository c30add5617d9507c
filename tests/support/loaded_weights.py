"""What a loaded model multiplies with, whatever it is stored as, beside a transformers model of the same weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from multilora_client.base_weights import BaseWeights
from multilora_engine.models.decoder import Decoder
from multilora_engine.models.loader import load_model
from multilora_engine.models.weights import LinearWeight, Placement

CPU = torch.device("cpu")
SHAPE = {
    "vocab_size": 37,
    "hidden_size": 40,
    "intermediate_size": 56,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
}
"""Widths of which no stream of 3, 5 or 7 bits fills whole words."""
QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
LINEARS = (*QKV, "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


def small_llama(**changes: object) -> LlamaForCausalLM:
    torch.manual_seed(11)
    return LlamaForCausalLM(LlamaConfig(**SHAPE | changes)).eval()


def load(path: Path, weight_dtype: torch.dtype = torch.float32) -> Decoder:
    model = load_model(path, Placement(torch.float32, weight_dtype, CPU))
    assert isinstance(model, Decoder)
    return model


def dense(weight: LinearWeight) -> torch.Tensor:
    """W: what the unit vectors give."""
    in_features = getattr(weight, "weights", [weight])[0].weight.shape[1]
    return weight.product(torch.eye(in_features), None).T


def assert_read_as(path: Path, model: LlamaForCausalLM) -> None:
    """Engine and converter read the weights of `model` out of the checkpoint, bit for bit."""
    assert_same_weights(load(path), model)
    base = BaseWeights(path)
    for name in LINEARS:
        expected = model.model.layers[0].get_submodule(name).weight
        rows = np.concatenate(list(base.tiles(f"model.layers.0.{name}", tuple(expected.shape))))
        torch.testing.assert_close(torch.from_numpy(rows), expected.detach().float(), rtol=0, atol=0)


def assert_same_weights(loaded: Decoder, model: LlamaForCausalLM, rtol: float = 0.0) -> None:
    """All linears and embeddings, bit for bit or with a tolerance."""
    layer, expected = loaded.layers[0], model.model.layers[0]
    for weight, names in (
        (layer.attention.qkv.weight, QKV),
        (layer.attention.o.weight, LINEARS[3:4]),
        (layer.mlp.gate_up.weight, LINEARS[4:6]),
        (layer.mlp.down.weight, LINEARS[6:]),
    ):
        _assert_close(weight, [expected.get_submodule(name) for name in names], rtol)
    _assert_close(loaded._lm_head, [model.lm_head], rtol)
    rows = loaded._embeddings.embed(torch.arange(SHAPE["vocab_size"]), torch.float32)
    torch.testing.assert_close(rows, model.model.embed_tokens.weight.float(), rtol=rtol, atol=0)


def _assert_close(weight: LinearWeight, modules: Sequence[torch.nn.Module], rtol: float) -> None:
    expected = torch.cat([module.weight for module in modules]).detach().float()
    torch.testing.assert_close(dense(weight), expected, rtol=rtol, atol=0)
