"""Whole steps of a model with random weights in a known shape, and the bytes and flops that they cannot do without."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.lora_workloads import BLOCK_SIZE, VOCAB_SIZE, Step, fill_with_codes
from multilora_engine.batch.forward_batch import ForwardBatch, KVCache, TokenLoRAs
from multilora_engine.models.decoder import Decoder
from multilora_engine.models.llama import LLAMA
from multilora_engine.models.model_config import ModelConfig
from multilora_engine.models.quantization.part import Layout
from multilora_engine.models.quantization.weights import CodedWeight
from multilora_engine.models.rope_config import Rope
from multilora_engine.models.weights import (
    EmbeddingWeight,
    ExpertStack,
    ExpertWeights,
    FloatFormat,
    LinearWeight,
    Placement,
    StoredPart,
    WeightFormat,
    num_outputs,
)
from multilora_kernels import CodeType, LoRATables
from multilora_kernels.adapter_codes import CODE_BITS, a_bytes, b_bytes
from multilora_wire.sites import decoder_sites

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
        sites=decoder_sites(
            num_layers, hidden, hidden, num_kv_heads * (hidden // num_heads), ffn, vocab_size=vocab_size
        ),
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


@dataclass(frozen=True)
class Storage:
    """The dtypes of a measurement. dtype: of activations, keys and values, and of weights that are floats.

    code_type, group_size: of the linears of all layers; None: floats. lora_dtype: of adapters; int8, float8_e4m3fn and
    uint8 hold codes, as `adapter_codes` says.
    """

    dtype: torch.dtype
    lora_dtype: torch.dtype
    code_type: CodeType | None = None
    group_size: int = 128

    def weights(self, device: torch.device) -> WeightFormat:
        placement = Placement(self.dtype, self.dtype, device)
        if self.code_type is None:
            return FloatFormat(placement)
        return RandomCodes(placement, self.code_type, self.group_size)


@dataclass(frozen=True)
class RandomCodes:
    """Linears of random codes; routers, experts, the head and the embeddings are floats."""

    placement: Placement
    code_type: CodeType
    group_size: int

    def stores(self, name: str) -> bool:
        return False

    def linear(self, parts: Sequence[StoredPart], in_features: int) -> LinearWeight:
        layout = Layout(self.code_type, min(self.group_size, in_features), self.placement.activation_dtype)
        shape = (num_outputs(parts), in_features)
        weight = self.placement.quantized_weight(*shape, layout.code_type, layout.group_size, layout.scale_dtype)
        fill_with_codes(weight, self.placement.device, scale=0.01)
        return CodedWeight(weight, layout, [], None)

    def router(self, part: StoredPart, in_features: int) -> LinearWeight:
        return FloatFormat(self.placement).router(part, in_features)

    def experts(self, parts: Sequence[Sequence[StoredPart]], in_features: int, stack: ExpertStack) -> ExpertWeights:
        return FloatFormat(self.placement).experts(parts, in_features, stack)

    def head(self, part: StoredPart, in_features: int) -> EmbeddingWeight:
        return FloatFormat(self.placement).head(part, in_features)

    def embeddings(self, part: StoredPart, in_features: int) -> EmbeddingWeight:
        return FloatFormat(self.placement).embeddings(part, in_features)

    def ignores(self, name: str, tensor: torch.Tensor) -> bool:
        return False


class Workbench:
    """A model with random weights, a KV cache that is full of contexts, and adapters on all linears."""

    def __init__(self, config: ModelConfig, sizes: Sizes, storage: Storage, device: torch.device) -> None:
        self.config, self.sizes, self.device, dtype = config, sizes, device, storage.dtype
        self.model = Decoder(config, LLAMA, storage.weights(device))
        for place in self.model.checkpoint_tensors().values():
            place.copy_(torch.randn(tuple(place.shape), dtype=dtype, device=device) * 0.02)
        self._max_blocks = -(-max(sizes.context, sizes.prompt) // BLOCK_SIZE)
        self._num_slots = max(sizes.batches) * self._max_blocks * BLOCK_SIZE
        shape = (config.num_layers, self._num_slots, config.num_kv_heads, config.head_dim)
        self._cache = KVCache(*(torch.randn(shape, dtype=dtype, device=device) for _ in range(2)))
        self.tables = random_tables(config, max(sizes.adapters(max(sizes.batches))), storage.lora_dtype, device)

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

    def set_adapters(self, dtype: torch.dtype) -> None:
        """Adapters of this dtype in the place of those that steps had so far."""
        num_adapters = len(self.tables.rank)
        del self.tables
        self.tables = random_tables(self.config, num_adapters, dtype, self.device)

    def decode_work(self, batch: int, num_adapters: int) -> tuple[float, float]:
        """Bytes and flops of a decode step."""
        head = self._num_head_weights * self.itemsize
        keys_and_values = self._cache.num_bytes / self._num_slots * batch * self.sizes.context
        adapters = num_adapters * self.tables.arena.nbytes / len(self.tables.rank)
        flops = 2.0 * (self.num_layer_weights + self._num_head_weights) * batch
        return self._layer_bytes + head + keys_and_values + adapters, flops

    @property
    def _layer_bytes(self) -> int:
        """Of the linears of all layers."""
        codes = self.model.weight_bytes.keys() - {str(self._cache.keys.dtype).removeprefix("torch.")}
        if codes:
            return sum(self.model.weight_bytes[kind] for kind in codes)
        return self.num_layer_weights * self.itemsize

    @property
    def num_layer_weights(self) -> int:
        """Elements of the linears of all layers."""
        return sum(outputs * inputs for inputs, outputs in linears(self.config)) * self.config.num_layers

    @property
    def itemsize(self) -> int:
        """Bytes of an activation, of a key and of a value."""
        return self._cache.keys.dtype.itemsize

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
    sizes = [size for shape in shapes for size in _adapter_sizes(*shape, dtype)]
    starts = torch.tensor([0, *itertools.accumulate(sizes)], device=device)
    first = torch.arange(num_adapters, device=device)[:, None] * starts[-1]
    offsets = first + starts[:-1]
    rank = torch.full((num_adapters, len(shapes)), RANK, dtype=torch.int32, device=device)
    arena = torch.empty(num_adapters * sum(sizes), dtype=dtype, device=device)
    if dtype in CODE_BITS:
        # Small bytes are small codes, and as scales small numbers.
        arena.view(torch.uint8).random_(0, 8)
    else:
        arena.normal_(std=0.01)
    a_offset, b_offset = offsets[:, ::2].contiguous(), offsets[:, 1::2].contiguous()
    return LoRATables(arena, rank, a_offset, b_offset, torch.full_like(a_offset, -1), RANK)


def _adapter_sizes(in_features: int, out_features: int, dtype: torch.dtype) -> tuple[int, int]:
    """Elements of A and of B in an arena."""
    if dtype not in CODE_BITS:
        return RANK * in_features, RANK * out_features
    sizes = a_bytes(RANK, in_features, CODE_BITS[dtype]), b_bytes(out_features, RANK, CODE_BITS[dtype])
    a, b = (-(-size // _CODE_ALIGNMENT) * _CODE_ALIGNMENT for size in sizes)
    return a, b


_CODE_ALIGNMENT = 16
"""An A and a B of codes begin at multiples of so many elements."""
