"""The Llama architecture and those that differ from it by configuration only: Mistral, Qwen2, Qwen3.

Weights are uninitialised until `loader.load_model` fills the views that `checkpoint_tensors` names.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from multilora_engine.execution.forward_batch import ForwardBatch, KVCache, LoRABatch
from multilora_engine.models.attention import AttentionPlan, attend, attention_plan
from multilora_engine.models.layers import (
    SLICES_PER_LAYER,
    Destination,
    LoRALinear,
    Placement,
    WeightRows,
    rms_norm,
)
from multilora_engine.models.model_config import ModelConfig
from multilora_engine.models.rotary import RotaryEmbedding, Rotation
from multilora_kernels import (
    LayerStep,
    PackedLayer,
    PagedSequences,
    add_rms_norm,
    decoder_layers,
    packed_embedding,
    packed_linear,
    silu_mul,
)

HiddenStates = tuple[torch.Tensor, torch.Tensor]
"""The residual stream behind a layer, and what that layer still has to add to it: [num_tokens, hidden_size] both."""


@dataclass(frozen=True)
class Step:
    """What all layers of one forward pass share.

    plans: one for each window size among the layers. packed: the same for layers in one call, where there is a kernel.
    """

    rotation: Rotation
    plans: dict[int | None, AttentionPlan]
    lora: LoRABatch | None
    packed: dict[int | None, LayerStep]


class Attention:
    """Grouped-query attention with a fused q, k, v projection, and per-head normalisation of q and k in Qwen3."""

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        first_slice = layer * SLICES_PER_LAYER
        self._config = config
        self.window = config.sliding_window[layer]
        qkv_sizes = (config.q_size, config.kv_size, config.kv_size)
        self.qkv = LoRALinear(config.hidden_size, qkv_sizes, first_slice, config.qkv_bias, placement)
        self.o = LoRALinear(config.q_size, [config.hidden_size], first_slice + 3, config.output_bias, placement)
        self._norms = placement.vectors(2, config.head_dim) if config.qk_norm else None

    def forward(self, x: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: Step) -> torch.Tensor:
        qkv = self._normalised(self.qkv.forward(x, step.lora))
        heads = attend(qkv, step.rotation, keys, values, step.plans[self.window])
        return self.o.forward(heads, step.lora)

    def checkpoint_tensors(self) -> dict[str, Destination]:
        tensors = {**self.qkv.checkpoint_tensors("q_proj", "k_proj", "v_proj"), **self.o.checkpoint_tensors("o_proj")}
        if self._norms is not None:
            tensors |= {"q_norm.weight": self._norms[0], "k_norm.weight": self._norms[1]}
        return tensors

    def _normalised(self, qkv: torch.Tensor) -> torch.Tensor:
        """With the heads of q and k normalised, where the model does that."""
        if self._norms is None:
            return qkv
        num_q, num_kv, eps = self._config.num_heads, self._config.num_kv_heads, self._config.rms_norm_eps
        q, k, v = qkv.view(qkv.shape[0], -1, self._config.head_dim).split_with_sizes((num_q, num_kv, num_kv), dim=1)
        return torch.cat((rms_norm(q, self._norms[0], eps), rms_norm(k, self._norms[1], eps), v), dim=1).flatten(1)


class MLP:
    """down(silu(gate(x)) * up(x)), gate and up fused."""

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        first_slice = layer * SLICES_PER_LAYER
        size = config.intermediate_size
        self.gate_up = LoRALinear(config.hidden_size, (size, size), first_slice + 4, config.mlp_bias, placement)
        self.down = LoRALinear(size, [config.hidden_size], first_slice + 6, config.mlp_bias, placement)

    def forward(self, x: torch.Tensor, lora: LoRABatch | None) -> torch.Tensor:
        return self.down.forward(silu_mul(self.gate_up.forward(x, lora)), lora)

    def checkpoint_tensors(self) -> dict[str, Destination]:
        return {
            **self.gate_up.checkpoint_tensors("gate_proj", "up_proj"),
            **self.down.checkpoint_tensors("down_proj"),
        }


class LlamaLayer:
    """x += attention(norm(x)); x += mlp(norm(x)).

    packed: its weights for `decoder_layers`; None where only its operators, one by one, can compute it.
    """

    def __init__(self, config: ModelConfig, layer: int, placement: Placement) -> None:
        self._eps = config.rms_norm_eps
        self.attention = Attention(config, layer, placement)
        self.mlp = MLP(config, layer, placement)
        self.attention_norm, self.mlp_norm = placement.vectors(2, config.hidden_size).unbind()
        self.packed = self._in_one_call() if self.mlp.down.weight.is_packed and not config.qk_norm else None

    def forward(
        self, x: torch.Tensor, update: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, step: Step
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, and what the layer before still has to add to it; returns the same for the next layer."""
        normed, x = add_rms_norm(x, update, self.attention_norm, self._eps)
        update = self.attention.forward(normed, keys, values, step)
        normed, x = add_rms_norm(x, update, self.mlp_norm, self._eps)
        return x, self.mlp.forward(normed, step.lora)

    def _in_one_call(self) -> PackedLayer:
        return PackedLayer(
            attention_norm=self.attention_norm,
            qkv=self.attention.qkv.packed(),
            o=self.attention.o.packed(),
            mlp_norm=self.mlp_norm,
            gate_up=self.mlp.gate_up.packed(),
            down=self.mlp.down.packed(),
            eps=self._eps,
        )

    def checkpoint_tensors(self) -> dict[str, Destination]:
        norms: dict[str, Destination] = {
            "input_layernorm.weight": self.attention_norm,
            "post_attention_layernorm.weight": self.mlp_norm,
        }
        attention = {f"self_attn.{name}": tensor for name, tensor in self.attention.checkpoint_tensors().items()}
        mlp = {f"mlp.{name}": tensor for name, tensor in self.mlp.checkpoint_tensors().items()}
        return norms | attention | mlp


class LlamaModel:
    """The whole model: embeddings, layers, final norm and language-model head (the embeddings again when tied)."""

    def __init__(self, config: ModelConfig, placement: Placement) -> None:
        self.config = config
        self.dtype = placement.dtype
        self.lm_head = placement.weight(config.vocab_size, config.hidden_size)
        self.embed_tokens = self.lm_head if config.tie_word_embeddings else placement.embeddings(*self.lm_head.shape)
        self.norm = placement.vectors(config.hidden_size)
        self.layers = [LlamaLayer(config, i, placement) for i in range(config.num_layers)]
        self._rotary = RotaryEmbedding(config, placement.device)

    def forward(
        self, batch: ForwardBatch, kv_cache: KVCache, on_layer: Callable[[], None] = lambda: None
    ) -> torch.Tensor:
        """Logits of the wanted rows, [num_logits, vocab_size] float32. Writes the batch's keys and values.

        on_layer: called before each layer.
        """
        return self.logits(self.hidden_states(batch, kv_cache, on_layer), batch.logits_indices)

    def hidden_states(
        self, batch: ForwardBatch, kv_cache: KVCache, on_layer: Callable[[], None] = lambda: None
    ) -> HiddenStates:
        """`forward` up to the head: what the last layer makes of all rows."""
        x = packed_embedding(batch.input_ids, self.embed_tokens, self.dtype)
        return self._run_layers(x, torch.zeros_like(x), kv_cache, self._step(batch), on_layer)

    def logits(self, hidden_states: HiddenStates, rows: torch.Tensor) -> torch.Tensor:
        """float32 [len(rows), vocab_size]. rows: [any] int64."""
        x, update = (tensor.index_select(0, rows) for tensor in hidden_states)
        normed, _ = add_rms_norm(x, update, self.norm, self.config.rms_norm_eps)
        return packed_linear(normed, self.lm_head).float()

    def checkpoint_tensors(self) -> dict[str, Destination]:
        """Every tensor of a checkpoint under its Hugging Face name: where to copy it to. Tied heads have none."""
        vocab_size = self.config.vocab_size
        tensors: dict[str, Destination] = {
            "model.embed_tokens.weight": WeightRows(self.embed_tokens, 0, vocab_size),
            "model.norm.weight": self.norm,
        }
        if not self.config.tie_word_embeddings:
            tensors["lm_head.weight"] = WeightRows(self.lm_head, 0, vocab_size)
        for i, layer in enumerate(self.layers):
            tensors |= {f"model.layers.{i}.{name}": tensor for name, tensor in layer.checkpoint_tensors().items()}
        return tensors

    @property
    def num_weight_bytes(self) -> int:
        """Memory of the linears and embeddings, which is all but some megabytes of the model's."""
        linears = [
            linear
            for layer in self.layers
            for linear in (layer.attention.qkv, layer.attention.o, layer.mlp.gate_up, layer.mlp.down)
        ]
        weights = {*(linear.weight for linear in linears), self.lm_head, self.embed_tokens}
        return sum(weight.data.nbytes for weight in weights)

    def _run_layers(
        self, x: torch.Tensor, update: torch.Tensor, kv_cache: KVCache, step: Step, on_layer: Callable[[], None]
    ) -> HiddenStates:
        layers = list(zip(self.layers, kv_cache.layers, strict=True))
        packed = [
            (layer.packed, keys, values, step.packed[layer.attention.window])
            for layer, (keys, values) in layers
            if layer.packed is not None and step.packed
        ]
        if packed:
            assert len(packed) == len(layers), "layers of one model are packed or not, all of them"
            if (done := decoder_layers(packed, x, update, on_layer)) is not None:
                return done
        for layer, (keys, values) in layers:
            on_layer()
            x, update = layer.forward(x, update, keys, values, step)
        return x, update

    def _step(self, batch: ForwardBatch) -> Step:
        windows = set(self.config.sliding_window)
        rotation = self._rotary.rotation(batch, self.dtype)
        plans = {window: attention_plan(batch, window, self.dtype) for window in windows}
        lora = None if batch.lora is None else batch.lora.batched()
        packed = {
            window: self._packed_step(rotation, plan.slot_mapping, plan.all_sequences, lora)
            for window, plan in plans.items()
            if plan.all_sequences is not None
        }
        return Step(rotation, plans, lora, packed)

    def _packed_step(
        self, rotation: Rotation, slots: torch.Tensor, sequences: PagedSequences, lora: LoRABatch | None
    ) -> LayerStep:
        return LayerStep(
            cos=rotation.cos,
            sin=rotation.sin,
            slots=slots,
            sequences=sequences,
            scale=self.config.head_dim**-0.5,
            tables=None if lora is None else lora.tables,
            segments=None if lora is None else lora.segments,
        )
