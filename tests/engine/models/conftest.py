"""A paged KV cache driven by hand: what the engine's scheduler and block allocator do, in its plainest form."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch

from multilora_engine.batch.forward_batch import ForwardBatch, KVCache
from multilora_engine.models.model import Model


@dataclass
class PagedSequence:
    """The tokens of a sequence, how many of them are in the cache, and its blocks."""

    token_ids: list[int]
    num_computed: int = 0
    blocks: list[int] = field(default_factory=list)


class PagedRunner:
    """Feeds sequences through a model; blocks are handed out in random order and the cache starts as NaN."""

    def __init__(self, model: Model, num_blocks: int = 64, block_size: int = 4, seed: int = 0) -> None:
        config = model.config
        shape = (config.num_layers, num_blocks * block_size, config.num_kv_heads, config.head_dim)
        self._model = model
        self._block_size = block_size
        self._cache = KVCache(*(torch.full(shape, float("nan"), dtype=model.dtype) for _ in range(2)))
        self._free = list(range(num_blocks))
        random.Random(seed).shuffle(self._free)

    def step(self, work: list[tuple[PagedSequence, int]]) -> list[torch.Tensor]:
        """Compute the next `n` tokens of each sequence. Returns their logits [n, vocab] in the order of `work`."""
        order = sorted(range(len(work)), key=lambda i: work[i][1] > 1)
        batch = self.batch([work[i] for i in order])
        with torch.inference_mode():
            logits = self._model.forward(batch, self._cache)
        parts = dict(zip(order, logits.split(batch.query_lens), strict=True))
        return [parts[i] for i in range(len(work))]

    def batch(self, work: list[tuple[PagedSequence, int]]) -> ForwardBatch:
        rows = [(s, p) for s, n in work for p in range(s.num_computed, s.num_computed + n)]
        for sequence, n in work:
            self._advance(sequence, n)
        width = max(len(s.blocks) for s, _ in work) + 1
        return ForwardBatch(
            input_ids=torch.tensor([s.token_ids[p] for s, p in rows]),
            positions=torch.tensor([p for _, p in rows]),
            slot_mapping=torch.tensor([self._slot(s, p) for s, p in rows]),
            query_lens=[n for _, n in work],
            context_lens=[s.num_computed for s, _ in work],
            num_keys=torch.tensor([s.num_computed for s, _ in work]),
            query_starts=torch.tensor([0, *(n for _, n in work)]).cumsum(0),
            block_tables=torch.tensor([s.blocks + [-1] * (width - len(s.blocks)) for s, _ in work]),
            num_decodes=sum(n == 1 for _, n in work),
            logits_indices=torch.arange(len(rows)),
            block_size=self._block_size,
        )

    def _advance(self, sequence: PagedSequence, n: int) -> None:
        sequence.num_computed += n
        while len(sequence.blocks) * self._block_size < sequence.num_computed:
            sequence.blocks.append(self._free.pop())

    def _slot(self, sequence: PagedSequence, position: int) -> int:
        return sequence.blocks[position // self._block_size] * self._block_size + position % self._block_size


@pytest.fixture
def paged_runner() -> Callable[..., PagedRunner]:
    return PagedRunner


@pytest.fixture
def paged_sequence() -> Callable[[list[int]], PagedSequence]:
    return PagedSequence
