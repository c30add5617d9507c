"""T5 (arXiv:1910.10683), T5 v1.1, Flan-T5 and ByT5, and mT5: biases of scores by distance, and no biases of linears."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
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
    pre_norm,
)
from multilora_engine.models.layers import MLP, Attention, GatedMLP, PlainMLP, mlp_paths
from multilora_engine.models.model_config import (
    Activation,
    DistanceBuckets,
    Encoder,
    ModelConfig,
    encoder_decoder_config,
    read_size,
)
from multilora_engine.models.norms import RMSNorm
from multilora_engine.models.weights import FLOAT_DTYPES

_FEED_FORWARD: dict[str, tuple[Activation, str]] = {
    "relu": ("relu", "relu"),
    "gelu": ("gelu", "gelu"),
    "gated-gelu": ("gelu_tanh", "gelu_new"),
    "gated-silu": ("silu", "silu"),
}
"""The activation by feed_forward_proj: its name here, and in the field dense_act_fn."""
_POSITIONS = 512
"""Of models that name no n_positions. Any number is right: scores depend on distances."""


class DistanceBias:
    """The place of a checkpoint's biases by bucket, [num_buckets, num_heads], which it keeps by distance.

    of_distances: float32 [num_heads, num_distances].
    """

    dtypes = FLOAT_DTYPES

    def __init__(self, bucket_of: torch.Tensor, num_buckets: int, num_heads: int, device: torch.device) -> None:
        """bucket_of: [num_distances] int64."""
        self.shape = torch.Size((num_buckets, num_heads))
        self.of_distances = torch.empty(num_heads, len(bucket_of), dtype=torch.float32, device=device)
        self._bucket_of = bucket_of

    def copy_(self, values: torch.Tensor, /) -> None:
        self.of_distances.copy_(values.float()[self._bucket_of].T)


class SourceDistanceBias:
    """The biases of an encoder's scores, by distance in both directions."""

    def __init__(self, builder: Builder) -> None:
        assert builder.config.encoder is not None
        assert builder.config.encoder.distances is not None
        distances = builder.config.encoder.distances
        self._farthest = distances.max_distance
        offsets = torch.arange(-self._farthest, self._farthest + 1)
        half = DistanceBuckets(distances.num_buckets // 2, distances.max_distance)
        bucket_of = _bucket_of(offsets.abs(), half) + half.num_buckets * (offsets > 0)
        self._dtype, device = builder.placement.activation_dtype, builder.placement.device
        self._place = DistanceBias(bucket_of, distances.num_buckets, builder.config.encoder.num_heads, device)
        builder.tensors[_bias_name(builder, builder.config.num_layers)] = self._place

    def of_source(self, num_tokens: int) -> torch.Tensor:
        """A view of 2 num_tokens - 1 numbers a head: query i and key num_tokens - 1 - j have number i + j."""
        offsets = torch.arange(num_tokens - 1, -num_tokens, -1, device=self._place.of_distances.device)
        columns = offsets.clamp_(-self._farthest, self._farthest) + self._farthest
        biases = self._place.of_distances.index_select(1, columns).to(self._dtype)
        view = biases.as_strided((len(biases), num_tokens, num_tokens), (biases.shape[1], 1, 1))
        # PyTorch's attention on a GPU takes rows at multiples of 16 bytes only.
        return view if view.device.type == "cpu" else view.contiguous()


def _bucket_of(distances: torch.Tensor, buckets: DistanceBuckets) -> torch.Tensor:
    """The bucket of each distance >= 0. float32 decides at a bucket's edge, as it does in transformers."""
    exact = buckets.num_buckets // 2
    share = torch.log(distances.clamp(min=1).float() / exact) / math.log(buckets.max_distance / exact)
    far = exact + (share * (buckets.num_buckets - exact)).long()
    return torch.where(distances < exact, distances, far.clamp(max=buckets.num_buckets - 1))


def _bias_name(builder: Builder, first_layer: int) -> str:
    """The checkpoint's name of the biases of a stack, which its first layer has."""
    return f"{builder.layer(first_layer).prefix}layer.0.SelfAttention.relative_attention_bias.weight"


def _decoder_bias(builder: Builder) -> torch.Tensor:
    """[num_heads, num_distances], one for all layers of the decoder."""
    name = _bias_name(builder, 0)
    place = builder.tensors.get(name)
    if place is None:
        assert builder.config.encoder is not None
        assert builder.config.encoder.distances is not None
        distances = builder.config.encoder.distances
        bucket_of = _bucket_of(torch.arange(distances.max_distance + 1), distances)
        place = DistanceBias(bucket_of, distances.num_buckets, builder.config.num_heads, builder.placement.device)
        builder.tensors[name] = place
    assert isinstance(place, DistanceBias)
    return place.of_distances


def _attention_linears(path: str) -> list[str]:
    return [f"{path}.{name}" for name in ("q", "k", "v", "o")]


def _mlp(builder: Builder, path: str) -> MLP:
    """Raises ConfigError for float16, which the outputs of `wo` overflow: transformers keeps it in float32 there."""
    if builder.placement.dtype == torch.float16:
        raise ConfigError(
            "parameter dtype=float16: numbers within T5 and mT5 grow beyond float16; write bfloat16 or float32"
        )
    if builder.has(f"{path}.wi"):
        return PlainMLP(builder, mlp_paths(("wi", "wo"), path))
    return GatedMLP(builder, linears=mlp_paths(("wi_0", "wi_1", "wo"), path))


def _decoder_layer(builder: Builder, layer: int) -> CrossDecoderLayer:
    linears = _attention_linears("layer.0.SelfAttention")
    return CrossDecoderLayer(
        pre_norm,
        Attention(builder, layer, linears=linears, distance_bias=_decoder_bias(builder)),
        EncoderDecoderAttention(builder, _attention_linears("layer.1.EncDecAttention")),
        _mlp(builder, "layer.2.DenseReluDense"),
        (
            builder.rms_norm("layer.0.layer_norm"),
            builder.rms_norm("layer.1.layer_norm"),
            builder.rms_norm("layer.2.layer_norm"),
        ),
    )


def _encoder_layer(builder: Builder) -> EncoderLayer:
    return EncoderLayer(
        pre_norm,
        EncoderAttention(builder, _attention_linears("layer.0.SelfAttention")),
        _mlp(builder, "layer.1.DenseReluDense"),
        (builder.rms_norm("layer.0.layer_norm"), builder.rms_norm("layer.1.layer_norm")),
    )


def _final_norm(stack: str) -> Callable[[Builder], RMSNorm]:
    return lambda builder: builder.under(f"{stack}.").rms_norm("final_layer_norm")


def read(path: Path, raw: Mapping[str, Any], fields: Mapping[str, Any], architecture: str) -> ModelConfig:
    """The numbers of T5 and mT5."""
    activation = _read_activation(raw, fields)
    d_model, num_heads, head_dim = (read_size(fields, name) for name in ("d_model", "num_heads", "d_kv"))
    is_scaled = raw["model_type"] == "t5" and _scales_outputs(raw)
    return encoder_decoder_config(
        path,
        raw,
        fields,
        architecture,
        Encoder(
            read_size(fields, "num_layers"),
            num_heads,
            head_dim,
            "shared",
            ("encoder.embed_tokens", "decoder.embed_tokens"),
            _read_distances(fields),
        ),
        max_source_tokens=None,
        num_layers=read_size(fields, "num_decoder_layers"),
        num_heads=num_heads,
        head_dim=head_dim,
        intermediate_size=read_size(fields, "d_ff"),
        max_position_embeddings=read_size({"n_positions": _POSITIONS, **raw}, "n_positions"),
        norm_eps=float(fields["layer_norm_epsilon"]),
        activation=activation,
        attention_scale=1.0,
        logit_scale=d_model**-0.5 if is_scaled else 1.0,
    )


def _read_activation(raw: Mapping[str, Any], fields: Mapping[str, Any]) -> Activation:
    """Of feed_forward_proj, with which two more fields must agree: transformers obeys them where they are."""
    projection = fields["feed_forward_proj"]
    if projection not in _FEED_FORWARD:
        raise ConfigError(
            f"config.json: feed_forward_proj {projection!r} is not supported; supported are: {', '.join(_FEED_FORWARD)}"
        )
    activation, name = _FEED_FORWARD[projection]
    for field, expected in (("dense_act_fn", name), ("is_gated_act", projection.startswith("gated"))):
        if raw.get(field, expected) != expected:
            raise ConfigError(f"config.json: {field} {raw[field]!r} disagrees with feed_forward_proj {projection!r}")
    return activation


def _scales_outputs(raw: Mapping[str, Any]) -> bool:
    """Whether logits are scaled: unless the file says that embeddings and head differ, as T5 v1.1's do.

    transformers itself ignores that field otherwise. It saves true, and the scaling in a field of its own.
    """
    is_scaled = raw.get("scale_decoder_outputs", raw.get("tie_word_embeddings") is not False)
    if type(is_scaled) is not bool:
        raise ConfigError(f"config.json: scale_decoder_outputs {is_scaled!r} must be true or false")
    return is_scaled


def _read_distances(fields: Mapping[str, Any]) -> DistanceBuckets:
    names = "relative_attention_num_buckets", "relative_attention_max_distance"
    num_buckets, max_distance = (read_size(fields, name) for name in names)
    if num_buckets < 4 or max_distance <= num_buckets // 2:
        raise ConfigError(
            f"config.json: {names[0]} {num_buckets} must be 4 or more, and its half less than {names[1]} {max_distance}"
        )
    return DistanceBuckets(num_buckets, max_distance)


T5 = EncoderDecoderArchitecture(
    Architecture(_decoder_layer, _final_norm("decoder")),
    _encoder_layer,
    _final_norm("encoder"),
    source_bias=SourceDistanceBias,
    unused=frozenset({"decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"}),
)
