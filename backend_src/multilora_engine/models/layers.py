"""The pieces that the layers of most families share: attention, MLPs, and the usual layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.nn.functional as F

from multilora_engine.batch.forward_batch import LoRABatch
from multilora_engine.models.builder import Builder
from multilora_engine.models.model_config import Activation
from multilora_engine.models.norms import Norm
from multilora_engine.models.rotary import Rotation
from multilora_engine.models.weights import ExpertStack
from multilora_kernels import (
    AttentionOptions,
    ExpertLoRA,
    KVRows,
    LayerStep,
    PackedLayer,
    PagedSequences,
    expert_mlp,
    gelu,
    gelu_tanh,
    gelu_tanh_mul,
    rotary_attention,
    route,
    silu_mul,
)
from multilora_kernels.interpreter import has_gpu_operators
from multilora_wire.sites import GATED_MLP, PLAIN_MLP

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


def mlp_paths(linears: Sequence[str], mlp: str = "mlp") -> tuple[str, ...]:
    """The paths of the linears of an MLP. mlp: its own path."""
    return tuple(f"{mlp}.{name}" for name in linears)


Attend = Callable[["Attention", torch.Tensor, KVRows, KVRows], torch.Tensor]
"""The heads of an attention's queries, from its queries, keys and values side by side, and its layer's cache."""


@dataclass(frozen=True)
class LayerInputs:
    """The inputs that all layers of one forward pass share.

    rotations: by the names of the model's rotary embeddings, None for layers without. sequences: by window size.
    slots: [num_tokens] int64, the places of this step's keys and values in the cache; None with `attend_elsewhere`.
    layer_steps: of each kind of layers, for all of them in one call; empty where there is no kernel for that.
    attend_elsewhere: called in place of the attention operator.
    cross: the sources of the step's tokens; None for a model without an encoder.
    """

    rotations: dict[str | None, Rotation]
    sequences: dict[int | None, PagedSequences]
    lora: LoRABatch | None
    slots: torch.Tensor | None = None
    layer_steps: tuple[LayerStep, ...] = ()
    attend_elsewhere: Attend | None = None
    cross: PagedSequences | None = None

    def attend(
        self,
        layer: Attention,
        qkv: torch.Tensor,
        keys: KVRows,
        values: KVRows,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Turn queries and keys, store keys and values, then softmax(scale q K^T + mask) V over each sequence's keys.

        qkv: [num_tokens, q_size + 2 kv_size]. keys, values: of the layer, written in place. Attention reads
        keys and values as they are stored, this step's own, too: the chunks of a prompt change no value.
        Returns [num_tokens, q_size], in `out` if there is one.
        """
        if self.attend_elsewhere is not None:
            return self.attend_elsewhere(layer, qkv, keys, values)
        assert self.slots is not None
        rotation, sequences = self.rotations[layer.rope], self.sequences[layer.window]
        step = (qkv, rotation.cos, rotation.sin, keys, values, self.slots)
        return rotary_attention(*step, sequences, layer.options, rotation.is_interleaved, out)


class QKNorm(Protocol):
    """Normalises queries and keys before they are turned."""

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """q: [num_tokens, q_size], k: [num_tokens, kv_size]; returns the same shapes."""
        ...


@dataclass(frozen=True)
class HeadNorm:
    """Each head by itself, as in Qwen 3 and Gemma 3."""

    q: Norm
    k: Norm
    head_dim: int

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        heads_q, heads_k = (x.unflatten(-1, (-1, self.head_dim)) for x in (q, k))
        return self.q.forward(heads_q).flatten(1), self.k.forward(heads_k).flatten(1)


@dataclass(frozen=True)
class WholeNorm:
    """All heads together, as in OLMo 2."""

    q: Norm
    k: Norm

    def forward(self, q: torch.Tensor, k: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.q.forward(q), self.k.forward(k)


class Attention:
    """Grouped-query attention with a fused q, k, v projection."""

    def __init__(
        self,
        builder: Builder,
        layer: int,
        qk_norm: QKNorm | None = None,
        stored_as: str = "",
        has_sinks: bool = False,
        linears: Sequence[str] = (*QKV, "self_attn.o_proj"),
        distance_bias: torch.Tensor | None = None,
    ) -> None:
        """stored_as: path of the one linear that the checkpoint has in place of q, k and v.

        has_sinks: whether the softmax has one score more a head, as in gpt-oss.
        linears: paths of q, k, v and the output. distance_bias: see `AttentionOptions`.
        """
        *qkv, output = linears
        config = builder.config
        self.window = config.sliding_window[layer]
        self.rope = config.layer_ropes[layer]
        self.qkv = builder.linear(qkv, config.qkv_bias, stored_as)
        self.o = builder.linear([output], config.output_bias)
        self.qk_norm = qk_norm
        self.options = AttentionOptions(
            config.attention_scale,
            config.attention_softcap,
            builder.vector("self_attn.sinks", config.num_heads) if has_sinks else None,
            distance_bias=distance_bias,
            may_round=builder.placement.keeps_float32,
        )
        self._sizes = (config.q_size, config.kv_size, config.kv_size)

    def forward(self, x: torch.Tensor, keys: KVRows, values: KVRows, inputs: LayerInputs) -> torch.Tensor:
        """x: [num_tokens, hidden_size]. keys, values: this layer's cache, written in place."""
        qkv = self._normalised(self.qkv.forward(x, inputs.lora))
        return self.o.forward(inputs.attend(self, qkv, keys, values), inputs.lora)

    def _normalised(self, qkv: torch.Tensor) -> torch.Tensor:
        if self.qk_norm is None:
            return qkv
        q, k, v = qkv.split_with_sizes(self._sizes, dim=1)
        return torch.cat((*self.qk_norm.forward(q, k), v), dim=1)


class MLP(Protocol):
    """The second half of a layer."""

    def forward(self, x: torch.Tensor, lora: LoRABatch | None) -> torch.Tensor: ...


class GatedMLP:
    """down(activation(gate(x)) * up(x)), gate and up fused."""

    def __init__(self, builder: Builder, stored_as: str = "", linears: Sequence[str] = mlp_paths(GATED_MLP)) -> None:
        """stored_as: path of the one linear that the checkpoint has in place of gate and up.

        linears: paths of gate, up and down.
        """
        config = builder.config
        gate, up, down = linears
        self.gate_up = builder.linear([gate, up], config.mlp_bias, stored_as)
        self.down = builder.linear([down], config.mlp_bias)
        self._activation = config.activation
        self._product = _PRODUCTS[config.activation]

    def forward(self, x: torch.Tensor, lora: LoRABatch | None) -> torch.Tensor:
        return self.down.forward(self._activated(x, lora), lora)

    def _activated(self, x: torch.Tensor, lora: LoRABatch | None) -> torch.Tensor:
        # A GPU updates and activates in one launch, which neither adds a bias nor writes gate and up.
        if lora is not None and self.gate_up.bias is None and has_gpu_operators(x.device):
            return self.gate_up.forward_activated(x, lora, self._activation)
        return self._product(self.gate_up.forward(x, lora))


class PlainMLP:
    """second(activation(first(x)))."""

    def __init__(self, builder: Builder, linears: Sequence[str] = mlp_paths(PLAIN_MLP)) -> None:
        """linears: paths of the first and the second."""
        first, second = linears
        self._first = builder.linear([first], builder.config.mlp_bias)
        self._second = builder.linear([second], builder.config.mlp_bias)
        self._activation = _ACTIVATIONS[builder.config.activation]

    def forward(self, x: torch.Tensor, lora: LoRABatch | None) -> torch.Tensor:
        return self._second.forward(self._activation(self._first.forward(x, lora)), lora)


class SharedExpert:
    """sigmoid(gate(x)) * mlp(x), for all tokens, as in Qwen 2's mixtures."""

    PATH = "mlp.shared_expert"

    def __init__(self, builder: Builder) -> None:
        self._mlp = GatedMLP(builder, linears=mlp_paths(GATED_MLP, self.PATH))
        self._gate = builder.linear([f"{self.PATH}_gate"], has_bias=False)

    def forward(self, x: torch.Tensor, lora: LoRABatch | None) -> torch.Tensor:
        gate = self._gate.forward(x, lora)
        # torch.sigmoid computes the last elements of a tensor by another function: the bits would depend on the batch.
        share = torch.cat((gate, torch.zeros_like(gate)), dim=1).softmax(dim=1)[:, :1]
        return self._mlp.forward(x, lora) * share


@dataclass(frozen=True)
class ExpertNames:
    """A checkpoint's names of a mixture and of each expert's linears.

    path: of the mixture. linears: gate, up and down. router: within the mixture. is_interleaved: see `ExpertStack`.
    """

    path: str
    linears: tuple[str, str, str]
    router: str = "gate"
    is_interleaved: bool = False


STACKED_EXPERTS = ExpertNames("mlp", GATED_MLP)
"""The names in checkpoints with one tensor of all experts, whatever the family."""


class SparseMLP:
    """The weighted sum of the MLPs that a router chooses for each token, and a shared expert where the model has one.

    The router computes in float32: the difference between two experts may be small.
    """

    def __init__(self, builder: Builder, names: ExpertNames = STACKED_EXPERTS) -> None:
        config = builder.config
        assert config.routing is not None
        self._routing, self._clamp_limit = config.routing, config.clamp_limit
        gate, up, down = mlp_paths(GATED_MLP, "mlp.experts")
        stacks = [ExpertStack(f"mlp.experts.{name}", names.is_interleaved) for name in ("gate_up_proj", "down_proj")]
        if builder.stores(stacks[0].name):
            names = replace(names, path=STACKED_EXPERTS.path)
        *inner, outer = (f"{names.path}.experts.{{}}.{linear}" for linear in names.linears)
        self._router = builder.router("mlp.gate", f"{names.path}.{names.router}", config.mlp_bias)
        self._gate_up = builder.experts([gate, up], inner, stacks[0])
        self._down = builder.experts([down], [outer], stacks[1])
        self._gate_up_bias = builder.expert_biases([gate, up], stacks[0]) if config.mlp_bias else None
        self._down_bias = builder.expert_biases([down], stacks[1]) if config.mlp_bias else None
        self._columns = [builder.site(path).column for path in (gate, up, down)]
        self._shared = SharedExpert(builder) if builder.has(f"{SharedExpert.PATH}_gate") else None

    def forward(self, x: torch.Tensor, lora: LoRABatch | None) -> torch.Tensor:
        logits = self._router.forward(x.float(), lora)
        expert_ids, weights = route(logits, self._routing.top_k, self._routing.is_normalised)
        adapters = None if lora is None else ExpertLoRA(lora.tables, lora.mapping, *self._columns)
        y = expert_mlp(
            x,
            expert_ids,
            weights,
            self._gate_up.weight,
            self._down.weight,
            self._gate_up_bias,
            self._down_bias,
            self._clamp_limit,
            adapters,
        )
        return y if self._shared is None else y + self._shared.forward(x, lora)


class Layer(Protocol):
    """One layer of a decoder.

    attention: its rotary embeddings and window say which inputs of a step it reads.
    """

    @property
    def attention(self) -> Attention: ...

    def packed(self) -> PackedLayer | None:
        """Its weights for `decoder_layers`, asked for when they are loaded.

        None where only its operators, one by one, can compute it.
        """
        ...

    def forward(
        self, x: torch.Tensor, update: torch.Tensor, keys: KVRows, values: KVRows, inputs: LayerInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x, and the update that the layer before owes it; returns the same for the next layer."""
        ...


class PreNormLayer:
    """x += scale * attention(norm(x)); x += scale * mlp(norm(x)), with the config's residual_scale."""

    def __init__(self, builder: Builder, attention: Attention, mlp: MLP, norms: tuple[Norm, Norm]) -> None:
        self.attention, self.mlp = attention, mlp
        self.attention_norm, self.mlp_norm = norms
        self._scale = builder.config.residual_scale

    def packed(self) -> PackedLayer | None:
        return None

    def forward(
        self, x: torch.Tensor, update: torch.Tensor, keys: KVRows, values: KVRows, inputs: LayerInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, x = self.attention_norm.add(x, update)
        update = self._scaled(self.attention.forward(normed, keys, values, inputs))
        normed, x = self.mlp_norm.add(x, update)
        return x, self._scaled(self.mlp.forward(normed, inputs.lora))

    def _scaled(self, update: torch.Tensor) -> torch.Tensor:
        return update if self._scale == 1.0 else update * self._scale


class SandwichLayer:
    """x += norm(attention(norm(x))); x += norm(mlp(norm(x))), as in Gemma 2 and GLM-4."""

    def __init__(self, attention: Attention, mlp: MLP, before: tuple[Norm, Norm], after: tuple[Norm, Norm]) -> None:
        """before, after: norms of attention and MLP."""
        self.attention, self.mlp = attention, mlp
        self._before, self._after = before, after

    def packed(self) -> PackedLayer | None:
        return None

    def forward(
        self, x: torch.Tensor, update: torch.Tensor, keys: KVRows, values: KVRows, inputs: LayerInputs
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, x = self._before[0].add(x, update)
        update = self._after[0].forward(self.attention.forward(normed, keys, values, inputs))
        normed, x = self._before[1].add(x, update)
        return x, self._after[1].forward(self.mlp.forward(normed, inputs.lora))


_PRODUCTS = {"silu": silu_mul, "gelu_tanh": gelu_tanh_mul}
_ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu_tanh": gelu_tanh,
    "gelu": gelu,
    "relu": torch.relu_,  # In place: the product of the linear before it is used by nothing else.
}
