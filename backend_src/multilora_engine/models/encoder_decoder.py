"""`EncoderDecoder`: an encoder reads each source whole, and each layer of the decoder attends to the encoder's output.

A source's keys and values of cross attention lie in the cache of the decoder's layers, in blocks of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F

from multilora_engine.batch.forward_batch import ForwardBatch, KVCache, LoRABatch, SourceBatch
from multilora_engine.models.builder import Builder
from multilora_engine.models.decoder import Architecture, Decoder
from multilora_engine.models.layers import MLP, Attend, Attention, LayerInputs
from multilora_engine.models.model import HiddenStates
from multilora_engine.models.model_config import ModelConfig
from multilora_engine.models.norms import Norm
from multilora_engine.models.weights import WeightFormat
from multilora_kernels import AttentionOptions, KVRows, PackedLayer, paged_attention, store_rows

_LOGITS_BIAS = "final_logits_bias"

_LARGEST_FLOAT16 = 64504.0
"""The largest of float16 less 1000. transformers holds the residual stream within it."""

Part = Callable[[torch.Tensor], torch.Tensor]
"""A layer's attention or MLP: [num_tokens, hidden_size] both."""

Residual = Callable[[torch.Tensor, torch.Tensor, Sequence[tuple[Norm, Part]]], HiddenStates]
"""Adds the parts of a layer, each with its norm, to x. It takes and returns x, and the update that x is owed."""


def pre_norm(x: torch.Tensor, update: torch.Tensor, parts: Sequence[tuple[Norm, Part]]) -> HiddenStates:
    """x += part(norm(x))"""
    for norm, part in parts:
        normed, x = _add(norm, x, update)
        update = part(normed)
    return x, update


def post_norm(x: torch.Tensor, update: torch.Tensor, parts: Sequence[tuple[Norm, Part]]) -> HiddenStates:
    """x = norm(x + part(x)). The update stays as it is: zero."""
    for norm, part in parts:
        x, _ = norm.add(x, part(x))
    return x, update


def _add(norm: Norm, x: torch.Tensor, update: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`norm.add`, with sums that float16 can hold, as transformers holds those of mBART's encoder."""
    if x.dtype != torch.float16:
        return norm.add(x, update)
    x = (x + update).clamp_(-_LARGEST_FLOAT16, _LARGEST_FLOAT16)
    return norm.forward(x), x


@dataclass(frozen=True)
class SourceInputs:
    """The inputs that all layers of an encoder share.

    lens: tokens of each source, one source after another. biases: of each source's scores (`SourceBias`); None for each
    source of a model without.
    """

    lens: Sequence[int]
    biases: Sequence[torch.Tensor | None]
    lora: LoRABatch | None


class EncoderAttention:
    """Attention of each token of a source to all tokens of that source, in plain PyTorch."""

    def __init__(self, builder: Builder, linears: Sequence[str]) -> None:
        """linears: paths of q, k, v and the output."""
        config = builder.config
        assert config.encoder is not None
        *qkv, output = linears
        self._qkv = builder.linear(qkv, config.qkv_bias)
        self._o = builder.linear([output], config.output_bias)
        self._heads = (3, config.encoder.num_heads, config.encoder.head_dim)
        self._scale = config.attention_scale

    def forward(self, x: torch.Tensor, inputs: SourceInputs) -> torch.Tensor:
        """x: [num_tokens, hidden_size]."""
        sources = self._qkv.forward(x, inputs.lora).split_with_sizes(list(inputs.lens))
        heads = [self._attended(qkv, bias) for qkv, bias in zip(sources, inputs.biases, strict=True)]
        return self._o.forward(heads[0] if len(heads) == 1 else torch.cat(heads), inputs.lora)

    def _attended(self, qkv: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """One source alone, copied: the bits of a product may depend on its size and on its place in memory."""
        q, k, v = qkv.unflatten(1, self._heads).permute(1, 2, 0, 3).contiguous().unsqueeze(1).unbind()
        if bias is not None:
            k, v, bias = k.flip(2), v.flip(2), bias[None]
        heads = F.scaled_dot_product_attention(q, k, v, bias, scale=self._scale)
        return heads[0].transpose(0, 1).flatten(1)


class EncoderLayer:
    """Attention to the own source, then an MLP."""

    def __init__(self, residual: Residual, attention: EncoderAttention, mlp: MLP, norms: tuple[Norm, Norm]) -> None:
        self._residual, self._attention, self._mlp, self._norms = residual, attention, mlp, norms

    def forward(self, x: torch.Tensor, update: torch.Tensor, inputs: SourceInputs) -> HiddenStates:
        """x, and the update that the layer before owes it; returns the same for the next layer."""
        parts: tuple[Part, ...] = (
            lambda y: self._attention.forward(y, inputs),
            lambda y: self._mlp.forward(y, inputs.lora),
        )
        return self._residual(x, update, tuple(zip(self._norms, parts, strict=True)))


class EncoderDecoderAttention:
    """Attention of each token of the decoder to all tokens of its source."""

    def __init__(self, builder: Builder, linears: Sequence[str]) -> None:
        """linears: paths of q, k, v and the output."""
        config = builder.config
        query, *key_value, output = linears
        self._q = builder.linear([query], config.qkv_bias)
        self._kv = builder.linear(key_value, config.qkv_bias)
        self._o = builder.linear([output], config.output_bias)
        self._options = AttentionOptions(config.attention_scale, may_round=builder.placement.keeps_float32)
        self._heads, self._key_value_heads = (
            (config.num_heads, config.head_dim),
            (2, config.num_kv_heads, config.head_dim),
        )

    def store(
        self,
        encoded: torch.Tensor,
        keys: KVRows,
        values: KVRows,
        slots: torch.Tensor,
        lora: LoRABatch | None,
    ) -> None:
        """Write keys and values of new sources. encoded: the encoder's output. keys, values: this layer's cache."""
        k, v = self._kv.forward(encoded, lora).unflatten(1, self._key_value_heads).unbind(1)
        store_rows(k, keys, slots)
        store_rows(v, values, slots)

    def forward(self, x: torch.Tensor, keys: KVRows, values: KVRows, inputs: LayerInputs) -> torch.Tensor:
        """x: [num_tokens, hidden_size]. keys, values: this layer's cache, which has the sources."""
        assert inputs.cross is not None
        q = self._q.forward(x, inputs.lora).unflatten(1, self._heads)
        return self._o.forward(paged_attention(q, keys, values, inputs.cross, self._options), inputs.lora)


class CrossDecoderLayer:
    """Attention to the tokens so far, attention to the source, then an MLP."""

    def __init__(
        self,
        residual: Residual,
        attention: Attention,
        cross: EncoderDecoderAttention,
        mlp: MLP,
        norms: tuple[Norm, Norm, Norm],
    ) -> None:
        self.attention, self.cross = attention, cross
        self._residual, self._mlp, self._norms = residual, mlp, norms

    def packed(self) -> PackedLayer | None:
        return None

    def forward(
        self, x: torch.Tensor, update: torch.Tensor, keys: KVRows, values: KVRows, inputs: LayerInputs
    ) -> HiddenStates:
        parts: tuple[Part, ...] = (
            lambda y: self.attention.forward(y, keys, values, inputs),
            lambda y: self.cross.forward(y, keys, values, inputs),
            lambda y: self._mlp.forward(y, inputs.lora),
        )
        return self._residual(x, update, tuple(zip(self._norms, parts, strict=True)))


class PositionEmbedding(Protocol):
    """Adds positions to embeddings."""

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, hidden_size]. positions: [num_tokens] int64, within the source or the sequence."""
        ...


class SourceBias(Protocol):
    """Biases of an encoder's scores."""

    def of_source(self, num_tokens: int) -> torch.Tensor:
        """[num_heads, num_tokens, num_tokens], by query and key, the last key first. In the type of queries."""
        ...


class NoNorm:
    """The end of layers that normalise their own output."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def add(self, x: torch.Tensor, update: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + update
        return x, x


def no_norm(_builder: Builder) -> Norm:
    """The final norm of such layers."""
    return NoNorm()


@dataclass(frozen=True)
class EncoderDecoderArchitecture:
    """The parts in which the models of one family differ.

    decoder: its layers are `CrossDecoderLayer`s.
    encoder_layer: makes a layer of the encoder. encoder_norm: makes the norm after these layers.
    positions: makes the position embeddings of the stack `encoder` or `decoder`; None for a model without.
    source_bias: makes the biases of the encoder's scores, after its layers; None for a model without.
    has_logits_bias: whether a checkpoint may have a bias of logits, as BART's.
    unused: names of tensors of old checkpoints that nothing reads.
    """

    decoder: Architecture
    encoder_layer: Callable[[Builder], EncoderLayer]
    encoder_norm: Callable[[Builder], Norm]
    positions: Callable[[Builder, str], PositionEmbedding] | None = None
    source_bias: Callable[[Builder], SourceBias] | None = None
    has_logits_bias: bool = False
    unused: frozenset[str] = frozenset()


class EncoderDecoder(Decoder):
    """A decoder of any family with an encoder before it."""

    def __init__(self, config: ModelConfig, architecture: EncoderDecoderArchitecture, weights: WeightFormat) -> None:
        config = _as_stored(config, weights)
        super().__init__(config, architecture.decoder, weights)
        assert config.encoder is not None
        builder, first = self._builder, config.num_layers
        self._cross = [layer.cross for layer in self.layers if isinstance(layer, CrossDecoderLayer)]
        self._encoder_layers = [
            architecture.encoder_layer(builder.layer(first + i)) for i in range(config.encoder.num_layers)
        ]
        self._encoder_norm = architecture.encoder_norm(builder)
        make = architecture.positions
        self._positions, self._source_positions = (
            None if make is None else make(builder, stack) for stack in ("decoder", "encoder")
        )
        self._source_bias = None if architecture.source_bias is None else architecture.source_bias(builder)
        self._unused = architecture.unused
        outside = builder.under("")
        has_bias = architecture.has_logits_bias and outside.stores(_LOGITS_BIAS)
        self._logits_bias = outside.vector(_LOGITS_BIAS, 1, config.vocab_size) if has_bias else None

    def ignores(self, name: str) -> bool:
        return name in self._unused

    def forward(
        self, batch: ForwardBatch, kv_cache: KVCache, on_layer: Callable[[], None] = lambda: None
    ) -> torch.Tensor:
        self._encode_new(batch, kv_cache, on_layer)
        return super().forward(batch, kv_cache, on_layer)

    def hidden_states(
        self,
        batch: ForwardBatch,
        kv_cache: KVCache,
        on_layer: Callable[[], None] = lambda: None,
        attend: Attend | None = None,
    ) -> HiddenStates:
        assert attend is None, "steps of models with an encoder are not captured in pieces"
        self._encode_new(batch, kv_cache, on_layer)
        return super().hidden_states(batch, kv_cache, on_layer)

    def _encode_new(self, batch: ForwardBatch, kv_cache: KVCache, on_layer: Callable[[], None]) -> None:
        """Write keys and values of the sources that the step is the first to read."""
        assert batch.cross is not None
        if (new := batch.cross.new) is None:
            return
        lora = None if new.lora is None else new.lora.batched()
        encoded = self._encoded(new, lora, on_layer)
        for cross, (keys, values) in zip(self._cross, kv_cache.layers, strict=True):
            cross.store(encoded, keys, values, new.slot_mapping, lora)

    def _encoded(self, new: SourceBatch, lora: LoRABatch | None, on_layer: Callable[[], None]) -> torch.Tensor:
        """The encoder's output, [num_source_tokens, hidden_size]."""
        x = self._scaled(self._embeddings.embed(new.input_ids, self.activation_dtype))
        if self._source_positions is not None:
            positions = torch.cat([torch.arange(length, device=x.device) for length in new.lens])
            x = self._source_positions.forward(x, positions)
        inputs = SourceInputs(new.lens, self._biases(new.lens), lora)
        update = torch.zeros_like(x)
        for layer in self._encoder_layers:
            on_layer()
            x, update = layer.forward(x, update, inputs)
        return _add(self._encoder_norm, x, update)[0]

    def _biases(self, lens: Sequence[int]) -> list[torch.Tensor | None]:
        if self._source_bias is None:
            return [None for _ in lens]
        of_length = {length: self._source_bias.of_source(length) for length in set(lens)}
        return [of_length[length] for length in lens]

    def _embedded(self, batch: ForwardBatch, lora: LoRABatch | None) -> torch.Tensor:
        x = super()._embedded(batch, lora)
        return x if self._positions is None else self._positions.forward(x, batch.positions)

    def _inputs(self, batch: ForwardBatch) -> LayerInputs:
        assert batch.cross is not None
        return replace(super()._inputs(batch), cross=batch.cross.sequences(batch.block_size))

    def _finished(self, logits: torch.Tensor) -> torch.Tensor:
        logits = super()._finished(logits)
        return logits if self._logits_bias is None else logits.add_(self._logits_bias)


def _as_stored(config: ModelConfig, weights: WeightFormat) -> ModelConfig:
    """The config with the names that the checkpoint has: it may store a head, or the embeddings under a copy's name.

    transformers gives the head the embeddings only where a checkpoint has no head, whatever config.json says.
    """
    assert config.encoder is not None
    names = (config.encoder.embeddings, *config.encoder.copies)
    embeddings = next((name for name in names if weights.stores(f"{name}.weight")), names[0])
    encoder = replace(config.encoder, embeddings=embeddings, copies=tuple(name for name in names if name != embeddings))
    is_tied = config.tie_word_embeddings and not weights.stores(f"{config.head_name}.weight")
    return replace(config, encoder=encoder, tie_word_embeddings=is_tied)
