"""Modules of ours in a tree of transformers': linears, embeddings and head with adapters, and paged attention.

transformers calls a module with its input alone. The rest of a step is in the `CurrentStep` that all modules of one
model share, and that the model sets for the time of one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from multilora_engine.batch.forward_batch import ForwardBatch, KVCache, LoRABatch, TokenLoRAs
from multilora_engine.models.decoder import adapt_logits, adapted_embeddings
from multilora_engine.models.linear import LoRALinear
from multilora_engine.models.rotary import Rotation
from multilora_engine.models.weights import EmbeddingWeight, ExpertWeights, LinearWeight
from multilora_kernels import AttentionOptions, ExpertLoRA, PagedSequences, expert_mlp, rotary_attention
from multilora_wire.sites import ModelSites


@dataclass(frozen=True)
class Step:
    """One pass through the body. sequences: by window. slots: as of `ForwardBatch.slot_mapping`."""

    batch: ForwardBatch
    cache: KVCache
    sequences: dict[int | None, PagedSequences]
    unrotated: Rotation
    lora: LoRABatch | None
    on_layer: Callable[[], None]


@dataclass(frozen=True)
class HeadRows:
    """One pass through the head. rows: of the body, [n, hidden_size]. mapping: of their adapters, [n] int64."""

    rows: torch.Tensor
    loras: TokenLoRAs | None
    mapping: torch.Tensor | None


@dataclass
class CurrentStep:
    """What the modules of one model compute now. step: nothing where transformers' own attention runs, too."""

    step: Step | None = None
    head: HeadRows | None = None

    @property
    def lora(self) -> LoRABatch | None:
        return None if self.step is None else self.step.lora


class LinearGroup:
    """Linears with adapters that get the same input, such as q, k and v: one product when the first is called."""

    def __init__(self, linear: LoRALinear, current: CurrentStep) -> None:
        self._linear, self._current = linear, current
        self._last = len(linear.slice_sizes) - 1
        self._input: torch.Tensor | None = None
        self._outputs: tuple[torch.Tensor, ...] = ()

    def output(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """[1, num_tokens, out_features] of a linear. x: [1, num_tokens, in_features]."""
        if x is not self._input:
            y = self._linear.forward(x.reshape(-1, x.shape[-1]), self._current.lora)
            self._input = x
            self._outputs = y.unflatten(0, x.shape[:-1]).split_with_sizes(self._linear.slice_sizes, dim=-1)
        chosen = self._outputs[index]
        if index == self._last:
            self._input, self._outputs = None, ()
        return chosen


class Linear(torch.nn.Module):
    """A linear of a group, in the place of one of transformers'."""

    def __init__(self, group: LinearGroup, index: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._group, self._index = group, index
        self.weight = torch.empty(0, dtype=dtype)  # modules read its type

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._group.output(self._index, x)


class PlainLinear(torch.nn.Module):
    """A linear that adapters do not change: the head is one, and linears that do not see each token once."""

    def __init__(self, weight: LinearWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> None:
        super().__init__()
        self._weight, self._bias = weight, bias
        self.weight = torch.empty(0, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [..., in_features]."""
        y = self._weight.product(x.reshape(-1, x.shape[-1]), self._bias)
        return y.view(*x.shape[:-1], y.shape[-1])


class Head(PlainLinear):
    """The head of a model, with adapters where the model has sites for them."""

    def __init__(
        self,
        weight: LinearWeight,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        sites: ModelSites,
        current: CurrentStep,
    ) -> None:
        super().__init__(weight, bias, dtype)
        self._sites, self._current = sites, current

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits, head = super().forward(x), self._current.head
        if head is None or head.loras is None or head.loras.outer is None or not head.loras.outer.changes_head:
            return logits
        assert head.mapping is not None
        adapt_logits(logits[0], x.reshape(-1, x.shape[-1]), head.loras, head.mapping, self._sites)
        return logits


class Embeddings(torch.nn.Embedding):
    """Embeddings with adapters. `replace_embeddings` makes a module of transformers' one of these."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input: token ids, [1, num_tokens]."""
        table: EmbeddingTable = self.table  # type: ignore[assignment]
        return table.look_up(input)


@dataclass(frozen=True)
class EmbeddingTable:
    """The weight of a model's embeddings. dtype: of the rows that are looked up."""

    weight: EmbeddingWeight
    dtype: torch.dtype
    sites: ModelSites
    current: CurrentStep

    def look_up(self, token_ids: torch.Tensor) -> torch.Tensor:
        """token_ids: [1, num_tokens]. Returns [1, num_tokens, hidden_size], with each token's adapter."""
        x = self.weight.embed(token_ids.reshape(-1), self.dtype)
        step = self.current.step
        if step is not None and step.batch.outer is not None and step.batch.outer.changes_embeddings:
            assert step.batch.lora is not None
            assert step.lora is not None
            x = adapted_embeddings(x, step.batch.input_ids, step.batch.lora, step.lora, self.sites)
        return x.unsqueeze(0)


def replace_embeddings(module: torch.nn.Embedding, table: EmbeddingTable) -> None:
    """Let the module look up rows in `table`. A class that does more, as to scale the rows, goes on to do that.

    Such a class calls its base class for the lookup, and `Embeddings` becomes that base class.
    """
    kind = type(module)
    module.__class__ = Embeddings if kind is torch.nn.Embedding else type(kind.__name__, (kind, Embeddings), {})
    # Modules read its type.
    module.weight = torch.nn.Parameter(torch.empty(0, dtype=table.dtype), requires_grad=False)
    module.table = table  # type: ignore[assignment]


class Body(torch.nn.Module):
    """In the place of the body while the head runs: it returns the rows that the body has made."""

    def __init__(self, current: CurrentStep) -> None:
        super().__init__()
        self._current = current
        self.output_class: type[Any] | None = None

    def forward(self, *_inputs: object, **_options: object) -> Any:
        assert self._current.head is not None
        assert self.output_class is not None
        return self.output_class(last_hidden_state=self._current.head.rows.unsqueeze(0))


@dataclass(frozen=True)
class Experts:
    """All experts of a layer. columns: the first of gate, up and down, where adapters may change them."""

    gate_up: ExpertWeights
    down: ExpertWeights
    columns: Sequence[int]
    current: CurrentStep

    def compute(self, x: torch.Tensor, expert_ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x: [num_tokens, hidden_size]. expert_ids, weights: [num_tokens, top_k]."""
        lora = self.current.lora if self.columns else None
        return expert_mlp(
            x.contiguous(),
            expert_ids.to(torch.int32).contiguous(),
            weights.float().contiguous(),
            self.gate_up.weight,
            self.down.weight,
            lora=None if lora is None else ExpertLoRA(lora.tables, lora.mapping, *self.columns),
        )


@dataclass(frozen=True)
class PagedAttention:
    """The attention of one layer over the paged cache."""

    layer: int
    window: int | None
    may_round: bool
    current: CurrentStep

    def attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        _mask: object,
        scaling: float | None = None,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **_options: object,
    ) -> torch.Tensor:
        """An `Attend`. The positions are in the queries and keys already."""
        step = self.current.step
        assert step is not None
        step.on_layer()
        qkv = torch.cat([x[0].transpose(0, 1).flatten(1) for x in (q, k, v)], dim=1)
        keys, values = step.cache.layers[self.layer]
        options = AttentionOptions(scaling, softcap or 0.0, s_aux, may_round=self.may_round)
        angles, slots = step.unrotated, step.batch.slot_mapping
        sequences = step.sequences[self.window]
        heads = rotary_attention(qkv, angles.cos, angles.sin, keys, values, slots, sequences, options)
        return heads.view(1, q.shape[2], q.shape[1], q.shape[3])
