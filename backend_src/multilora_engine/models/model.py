"""`Model`: the engine's requirements of a model of any family."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from multilora_engine.batch.forward_batch import ForwardBatch, KVCache, TokenLoRAs
from multilora_engine.models.layers import Attend, LayerInputs
from multilora_engine.models.model_config import ModelConfig
from multilora_engine.models.weights import Destination, ReadablePlace, WeightSwitch
from multilora_kernels import KVCodes, KVRows, kv_row_size
from multilora_kernels.interpreter import has_gpu_operators
from multilora_kernels.kv_rows import LARGEST_CODES
from multilora_wire.sites import ModelSites


@dataclass(frozen=True)
class KVGroup:
    """Layers whose keys and values have one shape and lie in the same blocks of the KV cache.

    Every family that is served has one group, of all its layers: a block holds the keys and values of its tokens in
    every layer, from their computation to the end of the sequence. A layer with a window keeps every token, too: a
    window saves time, and no memory. Groups of their own, for layers with windows or other heads, would each need a
    pool of blocks, a block table of each sequence and keys of prefixes; `only_group` refuses them.

    Each layer keeps `num_kv_heads` keys and values of `head_dim` elements for each token.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int

    def cache_shape(self, num_slots: int, dtype: torch.dtype) -> tuple[int, int, int, int]:
        """The shape of a `KVCache`'s keys, and of its values, in a dtype."""
        return self.num_layers, num_slots, self.num_kv_heads, kv_row_size(self.head_dim, dtype)

    def cache(
        self, num_slots: int, dtype: torch.dtype, device: torch.device, zeros: Callable[..., torch.Tensor] | None = None
    ) -> KVRows:
        """The keys of a `KVCache`, or its values, full of zeros. zeros: makes a tensor of a shape and a dtype."""
        shape = self.cache_shape(num_slots, dtype)
        if dtype in LARGEST_CODES and has_gpu_operators(device):
            return KVCodes.zeros(shape, dtype, device)
        return torch.zeros(shape, dtype=dtype, device=device) if zeros is None else zeros(shape, dtype)

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one token keeps in all layers of the group, keys and values together."""
        return 2 * math.prod(self.cache_shape(1, dtype)) * dtype.itemsize


def kv_groups(config: ModelConfig) -> tuple[KVGroup, ...]:
    """The groups of a model, layers in order."""
    return (KVGroup(config.num_layers, config.num_kv_heads, config.head_dim),)


def only_group(groups: Sequence[KVGroup]) -> KVGroup:
    """The group of all layers of a model. The KV cache has room for no other."""
    assert len(groups) == 1, f"the KV cache holds one group of layers, and the model has {len(groups)}"
    return groups[0]


HiddenStates = tuple[torch.Tensor, torch.Tensor]
"""The residual stream after a layer, and the update that the next addition owes it: [num_tokens, hidden_size] both."""


class Model(Protocol):
    """A decoder with its weights, and its encoder where it has one.

    config: its numbers. dtype: of its arithmetic, its keys and its values.
    """

    @property
    def config(self) -> ModelConfig: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def activation_dtype(self) -> torch.dtype:
        """Of the numbers that flow between its linears, which on a CPU may differ from `dtype`."""
        ...

    @property
    def adapter_sites(self) -> ModelSites:
        """The linears, embeddings and head that adapters may change."""
        ...

    @property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """The shapes of keys and values, layers in order."""
        ...

    @property
    def weight_bytes(self) -> dict[str, int]:
        """Memory of linears and embeddings by the type they are stored in: all but some megabytes of the model's."""
        ...

    @property
    def weight_switches(self) -> Sequence[WeightSwitch]:
        """The weights of codes that may be kept as floats, too: all that are multiplied. Embeddings are looked up."""
        ...

    def note_switch(self) -> None:
        """A `WeightSwitch` was changed. Between two steps only."""
        ...

    def checkpoint_tensors(self) -> dict[str, Destination]:
        """The place of every tensor of a checkpoint, by its Hugging Face name. Tied heads have none."""
        ...

    def embedding_rows(self) -> ReadablePlace | None:
        """The place of the embeddings, which a checkpoint may repeat as the tied head; None where they are codes."""
        ...

    def ignores(self, name: str) -> bool:
        """Whether a tensor of a checkpoint that has no place here follows from config.json, and is passed over."""
        ...

    def limit_length(self, max_model_len: int) -> None:
        """The longest sequence has so many tokens. Called once, before the first step."""
        ...

    def forward(
        self, batch: ForwardBatch, kv_cache: KVCache, on_layer: Callable[[], None] = lambda: None
    ) -> torch.Tensor:
        """Logits of the wanted rows, [num_logits, vocab_size] float32. Writes the batch's keys and values.

        on_layer: called before the first layer, and on its way through the others: see `decoder_layers`.
        """
        ...

    def hidden_states(
        self,
        batch: ForwardBatch,
        kv_cache: KVCache,
        on_layer: Callable[[], None] = lambda: None,
        attend: Attend | None = None,
    ) -> HiddenStates:
        """`forward` up to the head: the rows after the last layer.

        attend: called in the place of each layer's attention; without one the layers attend themselves.
        """
        ...

    def attention_inputs(self, batch: ForwardBatch) -> LayerInputs:
        """The part of a step's inputs that its attention takes, for `LayerInputs.attend`."""
        ...

    def logits(
        self,
        hidden_states: HiddenStates,
        rows: torch.Tensor,
        lora: TokenLoRAs | None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """float32 [len(rows), vocab_size], in `out` if there is one.

        rows: [any] int64. lora: of the batch of `hidden_states`.
        """
        ...
