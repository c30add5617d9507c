"""`Decoder`: embeddings, the layers of some family, a final norm and the language-model head.

Weights are uninitialised until `loader.load_model` fills the places that `checkpoint_tensors` names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

import torch

from multilora_engine.batch.forward_batch import ForwardBatch, KVCache, LoRABatch, TokenLoRAs
from multilora_engine.models.builder import Builder
from multilora_engine.models.layers import Attend, Layer, LayerInputs
from multilora_engine.models.model import HiddenStates, KVGroup, kv_groups
from multilora_engine.models.model_config import ModelConfig
from multilora_engine.models.norms import Norm, RMSNorm
from multilora_engine.models.rope_config import AdapterRopes, Rope
from multilora_engine.models.rotary import RotaryEmbedding, Rotation
from multilora_engine.models.weights import (
    Destination,
    ReadablePlace,
    StoredPart,
    StoredWeight,
    WeightFormat,
    WeightSwitch,
)
from multilora_kernels import (
    LayerStep,
    PackedDecoder,
    PackedHead,
    PagedSequences,
    decoder_layers,
    decoder_logits,
    lora_apply,
    lora_embedding,
    lora_expand,
    step_segments,
)
from multilora_wire.sites import ModelSites

_ROTARY_BUFFER = re.compile(r"(model\.layers\.\d+\.self_attn|model)\.rotary_emb\.inv_freq")
"""Stored by old versions of transformers; it follows from config.json."""

_MAX_OWN_ROPES = 64
"""Rotary embeddings of adapters that are kept: each is some numbers for each pair of a head's elements."""


def _rms_norm(builder: Builder) -> Norm:
    return builder.rms_norm("norm")


@dataclass(frozen=True)
class Architecture:
    """The parts in which the decoders of one family differ.

    layer: makes layer `index`. final_norm: makes the norm before the head.
    """

    layer: Callable[[Builder, int], Layer]
    final_norm: Callable[[Builder], Norm] = _rms_norm


class Decoder:
    """A model of any family: `Model`'s methods over the layers that its architecture makes."""

    def __init__(self, config: ModelConfig, architecture: Architecture, weights: WeightFormat) -> None:
        self.config = config
        self.dtype = weights.placement.dtype
        self.activation_dtype = weights.placement.activation_dtype
        self._may_round = weights.placement.keeps_float32
        self.adapter_sites = config.sites
        self._device = weights.placement.device
        names = config.embeddings_name, config.head_name
        embeddings, head = (StoredPart(name, 0, config.vocab_size) for name in names)
        self._lm_head = weights.head(embeddings if config.tie_word_embeddings else head, config.hidden_size)
        self._embeddings = (
            self._lm_head if config.tie_word_embeddings else weights.embeddings(embeddings, config.hidden_size)
        )
        self._builder = Builder(config, self.adapter_sites.site_named, weights)
        self._norm = architecture.final_norm(self._builder)
        # Made here, since a CUDA graph can copy nothing from the host. It is rounded as transformers rounds it: to the
        # type of the embeddings.
        self._embedding_scale = torch.tensor(config.embedding_scale, dtype=self.activation_dtype, device=self._device)
        self.layers = [architecture.layer(self._builder.layer(i), i) for i in range(config.num_layers)]
        self._packed_decoder: PackedDecoder | None = None
        self.limit_length(config.max_position_embeddings)

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        return kv_groups(self.config)

    @property
    def weight_bytes(self) -> dict[str, int]:
        num_bytes: Counter[str] = Counter()
        for weight in self._weights:
            num_bytes.update(weight.bytes_by_kind)
        return dict(num_bytes.most_common())

    @property
    def weight_switches(self) -> list[WeightSwitch]:
        multiplied = [*self._builder.weights, self._lm_head]
        return [switch for weight in multiplied for switch in weight.switches]

    def note_switch(self) -> None:
        self._packed_decoder = None

    def limit_length(self, max_model_len: int) -> None:
        self._rotary = self._rotary_embeddings(self.config.ropes, max_model_len)
        self._own_rotary: dict[str, dict[str, RotaryEmbedding]] = {}

    def _rotary_embeddings(self, ropes: Mapping[str, Rope], max_length: int) -> dict[str, RotaryEmbedding]:
        return {name: RotaryEmbedding(rope, self._device, max_length) for name, rope in ropes.items()}

    def _rotary_of(self, own_rope: str) -> dict[str, RotaryEmbedding]:
        """The rotary embeddings of an adapter that has its own."""
        if own_rope not in self._own_rotary:
            if len(self._own_rotary) == _MAX_OWN_ROPES:
                self._own_rotary.clear()
            own = AdapterRopes(self.config.ropes).read(own_rope)
            self._own_rotary[own_rope] = self._rotary_embeddings(own.ropes, own.max_length)
        return self._own_rotary[own_rope]

    def checkpoint_tensors(self) -> dict[str, Destination]:
        outer = self._lm_head.checkpoint_tensors() | self._embeddings.checkpoint_tensors()
        return {**outer, **self._builder.tensors}

    def embedding_rows(self) -> ReadablePlace | None:
        return self._embeddings.readable()

    def ignores(self, name: str) -> bool:
        return _ROTARY_BUFFER.fullmatch(name) is not None

    def forward(
        self, batch: ForwardBatch, kv_cache: KVCache, on_layer: Callable[[], None] = lambda: None
    ) -> torch.Tensor:
        inputs = self._inputs(batch)
        x = self._embedded(batch, inputs.lora)
        has_own_head = batch.outer is not None and batch.outer.changes_head
        if inputs.layer_steps and not has_own_head and (decoder := self._packed()).has_head:
            rows = None if batch.wants_all_rows else batch.logits_indices
            logits = decoder_logits(decoder, inputs.layer_steps, kv_cache.rows, x, rows, on_layer)
            if logits is not None:
                return self._finished(logits)
        return self.logits(self._run_layers(x, kv_cache, inputs, on_layer), batch.logits_indices, batch.lora)

    def hidden_states(
        self,
        batch: ForwardBatch,
        kv_cache: KVCache,
        on_layer: Callable[[], None] = lambda: None,
        attend: Attend | None = None,
    ) -> HiddenStates:
        inputs = (
            self._inputs(batch) if attend is None else LayerInputs({}, {}, batch.lora_batch(), attend_elsewhere=attend)
        )
        return self._run_layers(self._embedded(batch, inputs.lora), kv_cache, inputs, on_layer)

    def attention_inputs(self, batch: ForwardBatch) -> LayerInputs:
        return LayerInputs(self._rotations(batch), self._sequences(batch), None, batch.slot_mapping)

    def logits(
        self,
        hidden_states: HiddenStates,
        rows: torch.Tensor,
        lora: TokenLoRAs | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x, update = (tensor.index_select(0, rows) for tensor in hidden_states)
        normed, _ = self._norm.add(x, update)
        logits = self._lm_head.logits(normed, out)
        if len(rows) and lora is not None and lora.outer is not None and lora.outer.changes_head:
            adapt_logits(logits, normed, lora, lora.mapping.index_select(0, rows), self.adapter_sites)
        return self._finished(logits)

    def _embedded(self, batch: ForwardBatch, lora: LoRABatch | None) -> torch.Tensor:
        x = self._embeddings.embed(batch.input_ids, self.activation_dtype)
        if batch.outer is not None and batch.outer.changes_embeddings:
            assert batch.lora is not None
            assert lora is not None
            x = adapted_embeddings(x, batch.input_ids, batch.lora, lora, self.adapter_sites)
        return self._scaled(x)

    def _scaled(self, x: torch.Tensor) -> torch.Tensor:
        """x: embeddings."""
        return x if self.config.embedding_scale == 1.0 else x * self._embedding_scale

    def _finished(self, logits: torch.Tensor) -> torch.Tensor:
        """logits: the head's product, changed in place."""
        if self.config.logit_scale != 1.0:
            logits *= self.config.logit_scale
        if self.config.logit_softcap:
            logits = logits.div_(self.config.logit_softcap).tanh_().mul_(self.config.logit_softcap)
        return logits

    def _run_layers(
        self, x: torch.Tensor, kv_cache: KVCache, inputs: LayerInputs, on_layer: Callable[[], None]
    ) -> HiddenStates:
        update = torch.zeros_like(x)
        if inputs.layer_steps:
            done = decoder_layers(self._packed(), inputs.layer_steps, kv_cache.rows, x, update, on_layer)
            if done is not None:
                return done
        for layer, (keys, values) in zip(self.layers, kv_cache.layers, strict=True):
            on_layer()
            x, update = layer.forward(x, update, keys, values, inputs)
        return x, update

    @property
    def _weights(self) -> list[StoredWeight]:
        outer = {id(weight): weight for weight in (self._lm_head, self._embeddings)}
        return [*self._builder.weights, *outer.values()]

    def _packed(self) -> PackedDecoder:
        """The layers for `decoder_layers`, which must be able to compute them all, and the head if that can be."""
        if self._packed_decoder is None:
            layers = [
                (packed, self._packed_kinds.index((layer.attention.rope, layer.attention.window)))
                for layer in self.layers
                if (packed := layer.packed()) is not None
            ]
            self._packed_decoder = PackedDecoder(layers, self._packed_head())
        return self._packed_decoder

    def _packed_head(self) -> PackedHead | None:
        weight = self._lm_head.packed()
        if weight is None or not isinstance(self._norm, RMSNorm):
            return None
        return PackedHead.of(self._norm.weight, self._norm.eps, weight)

    def _inputs(self, batch: ForwardBatch) -> LayerInputs:
        rotations, sequences, lora = self._rotations(batch), self._sequences(batch), batch.lora_batch()
        steps = self._layer_steps(rotations, sequences, batch.slot_mapping, lora)
        return LayerInputs(rotations, sequences, lora, batch.slot_mapping, steps)

    def _rotations(self, batch: ForwardBatch) -> dict[str | None, Rotation]:
        rotations: dict[str | None, Rotation] = {
            name: rotary.rotation(batch, self.activation_dtype) for name, rotary in self._rotary.items()
        }
        for own_rope, rows in batch.own_ropes:
            for name, rotary in self._rotary_of(own_rope).items():
                rotations[name].replace(rows, rotary.rotation(batch, self.activation_dtype))
        if None in self.config.layer_ropes:
            rotations[None] = Rotation.none(batch, self.activation_dtype)
        return rotations

    def _sequences(self, batch: ForwardBatch) -> dict[int | None, PagedSequences]:
        return {window: batch.sequences(window) for window in set(self.config.sliding_window)}

    @cached_property
    def _packed_kinds(self) -> list[tuple[str | None, int | None]]:
        """The kinds of layers, if `decoder_layers` can compute them all. Known when the weights are loaded."""
        if any(layer.packed() is None for layer in self.layers):
            return []
        return list({(layer.attention.rope, layer.attention.window): None for layer in self.layers})

    def _layer_steps(
        self,
        rotations: dict[str | None, Rotation],
        sequences: dict[int | None, PagedSequences],
        slots: torch.Tensor,
        lora: LoRABatch | None,
    ) -> tuple[LayerStep, ...]:
        """Of each of the packed kinds."""
        return tuple(
            LayerStep(
                cos=rotations[rope].cos,
                sin=rotations[rope].sin,
                slots=slots,
                sequences=sequences[window],
                scale=self.config.attention_scale or self.config.head_dim**-0.5,
                may_round=self._may_round,
                tables=None if lora is None else lora.tables,
                segments=None if lora is None else lora.segments,
            )
            for rope, window in self._packed_kinds
        )


def adapted_embeddings(
    x: torch.Tensor, token_ids: torch.Tensor, loras: TokenLoRAs, lora: LoRABatch, sites: ModelSites
) -> torch.Tensor:
    """x with each token's adapter: its own row in the place of the base's, then its LoRA on top.

    x: embeddings of `token_ids`, [num_tokens, hidden_size].
    """
    assert loras.outer is not None
    assert sites.outer is not None
    if loras.outer.embedding_rows is not None:
        x = loras.outer.embedding_rows.replace_embeddings(x, token_ids, loras.mapping)
    if loras.outer.has_embedding_lora:
        site = sites.outer.embeddings
        v = lora_embedding(token_ids, loras.mapping, lora.tables, site.column)
        lora_expand(v, x, lora.tables, site.column, (site.out_size,), lora.segments)
    return x


def adapt_logits(
    logits: torch.Tensor, normed: torch.Tensor, loras: TokenLoRAs, mapping: torch.Tensor, sites: ModelSites
) -> None:
    """Change each row's logits in place: its adapter's own rows in the place of the base's, then its LoRA on top.

    logits, normed: rows of the head's product and of its input. mapping: their adapters.
    """
    assert loras.outer is not None
    assert sites.outer is not None
    if loras.outer.head_rows is not None:
        loras.outer.head_rows.replace_logits(logits, normed, mapping)
    if loras.outer.has_head_lora:
        head = sites.outer.head
        segments = step_segments(mapping, loras.tables, has_prompts=False)
        lora_apply(normed, logits, loras.tables, head.column, (head.out_size,), segments)
