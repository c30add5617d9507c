"""`ForwardBatch`: all inputs of one forward pass, passed as an argument, never kept in a global."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from multilora_kernels import KVRows, LoRASegments, LoRATables, PagedSequences, TokenRowTables, step_segments


@dataclass(frozen=True)
class LoRABatch:
    """The adapters of one step, in the form that linears read: where the weights lie, and which tokens use them.

    mapping: of `TokenLoRAs`, which `segments` are made of.
    """

    tables: LoRATables
    segments: LoRASegments
    mapping: torch.Tensor


@dataclass(frozen=True)
class OuterParts:
    """The parts of a step's adapters outside the layers: at least one of them is there.

    embedding_rows, head_rows: rows of tokens; None where no adapter of the step has any.
    has_embedding_lora, has_head_lora: whether an adapter of the step has a rank there.
    """

    embedding_rows: TokenRowTables | None
    head_rows: TokenRowTables | None
    has_embedding_lora: bool
    has_head_lora: bool

    @property
    def changes_embeddings(self) -> bool:
        return self.embedding_rows is not None or self.has_embedding_lora

    @property
    def changes_head(self) -> bool:
        return self.head_rows is not None or self.has_head_lora


@dataclass(frozen=True)
class TokenLoRAs:
    """The adapters of one step.

    mapping: [num_tokens] int64, each token's row in the tables, -1 for the base model.
    outer: None where the step's adapters change linears of layers alone.
    """

    tables: LoRATables
    mapping: torch.Tensor
    outer: OuterParts | None = None

    def batched(self, has_prompts: bool = True) -> LoRABatch:
        """Computed on the device, so that a CUDA graph reads the values that `mapping` has when the graph runs."""
        return LoRABatch(self.tables, step_segments(self.mapping, self.tables, has_prompts), self.mapping)


@dataclass(frozen=True)
class SourceBatch:
    """The sources that one step of an encoder-decoder model encodes, one after another, each whole.

    input_ids, slot_mapping: [num_source_tokens] int64. A slot is the place of the token's keys and values of cross
        attention, the same in every layer of the decoder.
    lens: host list, tokens of each source.
    lora: of these tokens; None if none of them has an adapter.
    """

    input_ids: torch.Tensor
    slot_mapping: torch.Tensor
    lens: list[int]
    lora: TokenLoRAs | None = None


@dataclass(frozen=True)
class CrossAttention:
    """The sources that the tokens of a step attend to, in an encoder-decoder model.

    Each token is a decode of its own: it reads all keys of its source, wherever it stands in its sequence.

    block_tables: [num_tokens, most blocks of a source] int64, padded with -1. num_keys: [num_tokens] int64, tokens of
        the source. query_starts: [num_tokens + 1] int64, 0, 1, 2 and so on.
    new: the sources that this step encodes before its tokens attend to them; None if it encodes none.
    """

    block_tables: torch.Tensor
    num_keys: torch.Tensor
    query_starts: torch.Tensor
    new: SourceBatch | None = None

    def sequences(self, block_size: int) -> PagedSequences:
        """The tokens as attention takes them."""
        return PagedSequences(self.block_tables, self.query_starts, self.num_keys, len(self.num_keys), block_size, None)


@dataclass(frozen=True)
class ForwardBatch:
    """The tokens of one step, one sequence after another. Sequences that decode come before sequences that prefill.

    Worked example, block_size 4: sequence X decodes its 6th token, sequence Y prefills 3 tokens from position 0.

        input_ids       [x5, y0, y1, y2]
        positions       [ 5,  0,  1,  2]
        slot_mapping    [ 9, 12, 13, 14]     X has blocks 0 and 2, Y has block 3
        query_lens      [1, 3]
        context_lens    [6, 3]               keys each sequence attends to after this step, its own new ones included
        block_tables    [[0, 2], [3, -1]]    padded with -1
        query_starts    [0, 1, 4]
        num_decodes     1
        logits_indices  [0, 3]               the rows whose next token is wanted

    input_ids, positions, slot_mapping: [num_tokens] int64.  block_tables: [num_seqs, max blocks] int64.
    logits_indices: [num_logits] int64.  query_lens, context_lens: host lists, [num_seqs].
    num_keys: `context_lens` on the device, [num_seqs] int64.
    query_starts: [num_seqs + 1] int64, the first row of each sequence, then the end of the last one.
    lora: None if no token of the step has an adapter. Such a step does no LoRA work at all.
    own_ropes: the rotary embeddings of adapters that have their own (`AdapterTraits.rope`), with the rows [any] int64
        of their tokens; empty in nearly all steps.
    cross: None for a model without an encoder.
    """

    input_ids: torch.Tensor
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    query_lens: list[int]
    context_lens: list[int]
    num_keys: torch.Tensor
    query_starts: torch.Tensor
    block_tables: torch.Tensor
    num_decodes: int
    logits_indices: torch.Tensor
    block_size: int
    lora: TokenLoRAs | None = None
    own_ropes: Sequence[tuple[str, torch.Tensor]] = ()
    cross: CrossAttention | None = None

    @property
    def outer(self) -> OuterParts | None:
        """The parts of the step's adapters outside the layers."""
        return None if self.lora is None else self.lora.outer

    @property
    def has_prompts(self) -> bool:
        """Whether a sequence has several tokens, or one that is no decode."""
        return self.num_decodes < len(self.positions)

    def lora_batch(self) -> LoRABatch | None:
        """The adapters of the step as linears read them."""
        return None if self.lora is None else self.lora.batched(self.has_prompts)

    @property
    def wants_all_rows(self) -> bool:
        """Whether logits_indices are all rows in order: all tokens decode, and each needs a next token."""
        return len(self.positions) == self.num_decodes == len(self.logits_indices)

    def sequences(self, window: int | None) -> PagedSequences:
        """The sequences as attention takes them. window: the newest keys that a query attends to; None is all keys."""
        return PagedSequences(
            self.block_tables, self.query_starts, self.num_keys, self.num_decodes, self.block_size, window
        )


@dataclass(frozen=True)
class KVCache:
    """Keys and values of every layer, addressed by slot: slot = block * block_size + position inside the block.

    keys, values: [num_layers, num_blocks * block_size, num_kv_heads, head_dim], in a floating dtype, or as int8 or
    float8_e4m3fn codes with scales: see `multilora_kernels.kv_rows`.
    """

    keys: KVRows
    values: KVRows

    @property
    def rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as a CPU has them."""
        assert isinstance(self.keys, torch.Tensor)
        assert isinstance(self.values, torch.Tensor)
        return self.keys, self.values

    @property
    def num_bytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes

    @cached_property
    def layers(self) -> list[tuple[KVRows, KVRows]]:
        """Keys and values of each layer. They are made once: to make the views takes as long as some kernels."""
        return [(self.keys[layer], self.values[layer]) for layer in range(len(self.keys))]
