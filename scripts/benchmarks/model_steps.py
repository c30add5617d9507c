"""Whole steps of a model with random weights in a known shape, and the bytes and flops that they cannot do without."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.lora_workloads import Step
from benchmarks.model_shapes import BLOCK_SIZE, VOCAB_SIZE
from multilora_engine.execution.forward_batch import ForwardBatch, KVCache, TokenLoRAs
from multilora_engine.models.decoder import Decoder
from multilora_engine.models.llama import LLAMA
from multilora_engine.models.model_config import ModelConfig
from multilora_engine.models.rope_config import Rope
from multilora_engine.models.weights import FloatFormat, Placement
from multilora_kernels import LoRATables

RANK = 16

_MOST_ADAPTERS = 128
"""Of a step that is measured: more would take the memory of its keys and values."""


def llama_config(
    num_layers: int, hidden: int, num_heads: int, num_kv_heads: int, ffn: int, vocab_size: int
) -> ModelConfig:
    """A Llama by its sizes."""
    return ModelConfig(
        architecture="LlamaForCausalLM",
        num_layers=num_layers,
        hidden_size=hidden,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=hidden // num_heads,
        intermediate_size=ffn,
        vocab_size=vocab_size,
        max_position_embeddings=131072,
        norm_eps=1e-5,
        ropes={"all": Rope(500000.0, hidden // num_heads, 131072)},
        layer_ropes=("all",) * num_layers,
        sliding_window=(None,) * num_layers,
        tie_word_embeddings=False,
        dtype="bfloat16",
        end_token_ids=(),
    )


ONE_BILLION = llama_config(16, hidden=2048, num_heads=32, num_kv_heads=8, ffn=8192, vocab_size=VOCAB_SIZE)
EIGHT_BILLION = llama_config(32, hidden=4096, num_heads=32, num_kv_heads=8, ffn=14336, vocab_size=VOCAB_SIZE)
TINY = llama_config(2, hidden=64, num_heads=4, num_kv_heads=2, ffn=96, vocab_size=300)


@dataclass(frozen=True)
class Sizes:
    """The sizes of a measurement. batches: sequences of a decode step; each with a context of `context` tokens."""

    batches: Sequence[int]
    context: int
    prompt: int

    def adapters(self, batch: int) -> list[int]:
        """How many distinct adapters a batch is measured with."""
        return [n for n in sorted({0, 1, *self.batches}) if n <= min(batch, _MOST_ADAPTERS)]


class Workbench:
    """A model with random weights, a KV cache that is full of contexts, and adapters on all linears."""

    def __init__(self, config: ModelConfig, sizes: Sizes, dtype: torch.dtype, device: torch.device) -> None:
        self.config, self.sizes, self.device = config, sizes, device
        self.model = Decoder(config, LLAMA, FloatFormat(Placement(dtype, dtype, device)))
        for place in self.model.checkpoint_tensors().values():
            place.copy_(torch.randn(tuple(place.shape), dtype=dtype, device=device) * 0.02)
        self._max_blocks = -(-max(sizes.context, sizes.prompt) // BLOCK_SIZE)
        num_slots = max(sizes.batches) * self._max_blocks * BLOCK_SIZE
        shape = (config.num_layers, num_slots, config.num_kv_heads, config.head_dim)
        self._cache = KVCache(*(torch.randn(shape, dtype=dtype, device=device) for _ in range(2)))
        self.tables = random_tables(config, max(sizes.adapters(max(sizes.batches))), dtype, device)

    def decode(self, batch: int, num_adapters: int) -> Step:
        """A step of `batch` sequences; sequence s has adapter s % num_adapters, or none for 0."""
        mapping = torch.arange(batch, device=self.device) % max(num_adapters, 1)
        lora = TokenLoRAs(self.tables, mapping) if num_adapters else None
        return self._step(torch.full((batch, 1), self.sizes.context - 1), lora)

    def prefill(self, num_prompts: int = 1, has_adapters: bool = False) -> Step:
        """A step of whole prompts, at most as many as the largest batch; has_adapters: each with one of its own."""
        mapping = torch.arange(num_prompts, device=self.device).repeat_interleave(self.sizes.prompt)
        lora = TokenLoRAs(self.tables, mapping) if has_adapters else None
        return self._step(torch.arange(self.sizes.prompt).repeat(num_prompts, 1), lora)

    def _step(self, positions: torch.Tensor, lora: TokenLoRAs | None) -> Step:
        """positions: [sequences, tokens], of the tokens that are computed."""
        num_seqs, num_tokens = positions.shape
        positions = positions.to(self.device)
        block_tables = torch.arange(num_seqs * self._max_blocks, device=self.device).view(num_seqs, -1)
        slots = block_tables.gather(1, positions // BLOCK_SIZE) * BLOCK_SIZE + positions % BLOCK_SIZE
        batch = ForwardBatch(
            input_ids=torch.arange(positions.numel(), device=self.device) % self.config.vocab_size,
            positions=positions.flatten(),
            slot_mapping=slots.flatten(),
            query_lens=[num_tokens] * num_seqs,
            context_lens=(positions[:, -1] + 1).tolist(),
            num_keys=positions[:, -1] + 1,
            query_starts=torch.arange(num_seqs + 1, device=self.device) * num_tokens,
            block_tables=block_tables,
            num_decodes=num_seqs if num_tokens == 1 else 0,
            logits_indices=torch.arange(num_tokens - 1, positions.numel(), num_tokens, device=self.device),
            block_size=BLOCK_SIZE,
            lora=lora,
        )

        @torch.inference_mode()
        def step() -> None:
            self.model.forward(batch, self._cache)

        return step

    def decode_work(self, batch: int, num_adapters: int) -> tuple[float, float]:
        """Bytes and flops of a decode step."""
        weights = self.num_layer_weights + self._num_head_weights
        keys_and_values = 2 * batch * self.sizes.context * self.config.num_layers * self.config.kv_size
        adapters = num_adapters * self.tables.arena.numel() / len(self.tables.rank)
        return (weights + keys_and_values + adapters) * self.tables.arena.itemsize, 2.0 * weights * batch

    @property
    def num_layer_weights(self) -> int:
        """Elements of the linears of all layers."""
        return sum(outputs * inputs for inputs, outputs in linears(self.config)) * self.config.num_layers

    @property
    def _num_head_weights(self) -> int:
        return self.config.vocab_size * self.config.hidden_size


def linears(config: ModelConfig) -> list[tuple[int, int]]:
    """in_features, out_features of a layer's seven linears, in the order of the adapters' slices."""
    hidden, q, kv, ffn = config.hidden_size, config.q_size, config.kv_size, config.intermediate_size
    return [(hidden, q), (hidden, kv), (hidden, kv), (q, hidden), (hidden, ffn), (hidden, ffn), (ffn, hidden)]


def random_tables(config: ModelConfig, num_adapters: int, dtype: torch.dtype, device: torch.device) -> LoRATables:
    """Adapters of rank `RANK` on all linears of all layers, one after another."""
    shapes = linears(config) * config.num_layers
    sizes = [RANK * size for shape in shapes for size in shape]
    starts = torch.tensor([0, *itertools.accumulate(sizes)], device=device)
    first = torch.arange(num_adapters, device=device)[:, None] * starts[-1]
    offsets = first + starts[:-1]
    rank = torch.full((num_adapters, len(shapes)), RANK, dtype=torch.int32, device=device)
    arena = torch.empty(num_adapters * sum(sizes), dtype=dtype, device=device).normal_(std=0.01)
    a_offset, b_offset = offsets[:, ::2].contiguous(), offsets[:, 1::2].contiguous()
    return LoRATables(arena, rank, a_offset, b_offset, torch.full_like(a_offset, -1), RANK)
