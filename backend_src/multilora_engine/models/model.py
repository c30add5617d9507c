"""`Model`: the engine's requirements of a model of any family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from multilora_engine.batch.forward_batch import ForwardBatch, KVCache, TokenLoRAs
from multilora_engine.models.kv_groups import KVGroup
from multilora_engine.models.layers import Attend, LayerInputs
from multilora_engine.models.model_config import ModelConfig
from multilora_engine.models.weights import Destination, ReadablePlace, WeightSwitch
from multilora_wire.sites import ModelSites

HiddenStates = tuple[torch.Tensor, torch.Tensor]
"""The residual stream behind a layer, and the update that the next addition owes it: [num_tokens, hidden_size] both."""


class Model(Protocol):
    """A decoder with its weights.

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
        """`forward` up to the head: the rows behind the last layer.

        attend: called in the place of each layer's attention; without one the layers attend themselves.
        """
        ...

    def attention_inputs(self, batch: ForwardBatch) -> LayerInputs:
        """The part of a step's inputs that its attention takes, for `LayerInputs.attend`."""
        ...

    def logits(self, hidden_states: HiddenStates, rows: torch.Tensor, lora: TokenLoRAs | None) -> torch.Tensor:
        """float32 [len(rows), vocab_size]. rows: [any] int64. lora: of the batch of `hidden_states`."""
        ...
