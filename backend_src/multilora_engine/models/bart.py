"""BART (arXiv:1910.13461) and mBART (arXiv:2001.08210): learned positions, layer norms and biases of all linears."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from multilora_engine.errors import ConfigError
from multilora_engine.models.builder import Builder
from multilora_engine.models.decoder import Architecture
from multilora_engine.models.encoder_decoder import (
    CrossDecoderLayer,
    EncoderAttention,
    EncoderDecoderArchitecture,
    EncoderDecoderAttention,
    EncoderLayer,
    Residual,
    no_norm,
    post_norm,
    pre_norm,
)
from multilora_engine.models.layers import Attention, PlainMLP
from multilora_engine.models.model_config import (
    Activation,
    Encoder,
    ModelConfig,
    encoder_decoder_config,
    read_size,
)
from multilora_engine.models.norms import LayerNorm

_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "relu": "relu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_FIRST_POSITION = 2
"""The row of the first position; those before it have been for padding."""
_NORM_EPS = 1e-5
"""PyTorch's own, which no field changes."""
_MLP = ("fc1", "fc2")
_VERSIONS = frozenset({"model.encoder.version", "model.decoder.version"})
"""Of the format, in checkpoints that Fairseq saved first."""


@dataclass(frozen=True)
class LearnedPositions:
    """norm(embeddings + the row of each position)"""

    rows: torch.Tensor
    norm: LayerNorm

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        normed, _ = self.norm.add(x, self.rows.index_select(0, positions + _FIRST_POSITION))
        return normed


def _positions(builder: Builder, stack: str) -> LearnedPositions:
    config, outside = builder.config, builder.under(f"model.{stack}.")
    num_rows = config.max_position_embeddings + _FIRST_POSITION
    rows = outside.vector("embed_positions.weight", num_rows, config.hidden_size)
    return LearnedPositions(rows, outside.layer_norm("layernorm_embedding", has_bias=True))


def _attention_linears(path: str) -> list[str]:
    return [f"{path}.{name}" for name in ("q_proj", "k_proj", "v_proj", "out_proj")]


def _norm(builder: Builder, path: str) -> LayerNorm:
    return builder.layer_norm(path, has_bias=True)


def _decoder_layer(residual: Residual) -> Callable[[Builder, int], CrossDecoderLayer]:
    return lambda builder, layer: CrossDecoderLayer(
        residual,
        Attention(builder, layer, linears=_attention_linears("self_attn")),
        EncoderDecoderAttention(builder, _attention_linears("encoder_attn")),
        PlainMLP(builder, _MLP),
        (
            _norm(builder, "self_attn_layer_norm"),
            _norm(builder, "encoder_attn_layer_norm"),
            _norm(builder, "final_layer_norm"),
        ),
    )


def _encoder_layer(residual: Residual) -> Callable[[Builder], EncoderLayer]:
    return lambda builder: EncoderLayer(
        residual,
        EncoderAttention(builder, _attention_linears("self_attn")),
        PlainMLP(builder, _MLP),
        (_norm(builder, "self_attn_layer_norm"), _norm(builder, "final_layer_norm")),
    )


def _final_norm(stack: str) -> Callable[[Builder], LayerNorm]:
    return lambda builder: _norm(builder.under(f"model.{stack}."), "layer_norm")


def read(path: Path, raw: Mapping[str, Any], fields: Mapping[str, Any], architecture: str) -> ModelConfig:
    """The numbers of BART and mBART."""
    activation = fields["activation_function"]
    if activation not in _ACTIVATIONS:
        supported = ", ".join(_ACTIVATIONS)
        raise ConfigError(
            f"config.json: activation_function {activation!r} is not supported; supported are: {supported}"
        )
    d_model, max_positions = read_size(fields, "d_model"), read_size(fields, "max_position_embeddings")
    heads = {stack: read_size(fields, f"{stack}_attention_heads") for stack in ("encoder", "decoder")}
    for stack, num_heads in heads.items():
        if d_model % num_heads:
            raise ConfigError(
                f"config.json: d_model {d_model} is not a multiple of {stack}_attention_heads {num_heads}"
            )
    old_name = raw["model_type"] == "bart" and raw.get("force_bos_token_to_be_generated")
    if old_name and raw.get("forced_bos_token_id") is None:
        raw = {**raw, "forced_bos_token_id": fields["bos_token_id"]}  # as transformers reads BART's config.json alone
    return encoder_decoder_config(
        path,
        raw,
        fields,
        architecture,
        Encoder(
            read_size(fields, "encoder_layers"),
            heads["encoder"],
            d_model // heads["encoder"],
            "model.shared",
            ("model.encoder.embed_tokens", "model.decoder.embed_tokens"),
        ),
        max_source_tokens=max_positions,
        num_layers=read_size(fields, "decoder_layers"),
        num_heads=heads["decoder"],
        head_dim=d_model // heads["decoder"],
        intermediate_size=read_size(fields, "decoder_ffn_dim"),
        max_position_embeddings=max_positions,
        norm_eps=_NORM_EPS,
        activation=_ACTIVATIONS[activation],
        embedding_scale=math.sqrt(d_model) if fields["scale_embedding"] else 1.0,
        qkv_bias=True,
        output_bias=True,
        mlp_bias=True,
    )


BART = EncoderDecoderArchitecture(
    Architecture(_decoder_layer(post_norm), no_norm),
    _encoder_layer(post_norm),
    no_norm,
    _positions,
    has_logits_bias=True,
    unused=_VERSIONS,
)
MBART = EncoderDecoderArchitecture(
    Architecture(_decoder_layer(pre_norm), _final_norm("decoder")),
    _encoder_layer(pre_norm),
    _final_norm("encoder"),
    _positions,
    has_logits_bias=True,
    unused=_VERSIONS,
)
