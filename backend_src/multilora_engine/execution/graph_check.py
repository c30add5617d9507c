"""Captured steps compared with the same steps launched kernel by kernel, once at start.

A graph that reads other memory than it should, or work that was not captured, would give wrong tokens and no error. So
the compared steps have what serving has: adapters of the largest rank, which come to the device after the capture;
contexts of many blocks, in orders of their own, long enough for every split of attention; padding; and other numbers
each time.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, cycle

import torch

from multilora_engine.batch.forward_batch import ForwardBatch, KVCache, TokenLoRAs
from multilora_engine.execution.cuda_graphs import DecodeGraphs
from multilora_engine.execution.piecewise_graphs import PiecewiseGraphs
from multilora_engine.lora.device_tier import DeviceTier
from multilora_engine.lora.format import random_adapter, ranks_of
from multilora_engine.lora.layout import PackedAdapter
from multilora_engine.models.model import Model
from multilora_kernels.comparisons import TOLERANCES

_logger = logging.getLogger(__name__)

_BASE_MODEL = -1
_PRIME = 7919
"""Spreads tokens over the vocabulary."""

_FIRST_TOKENS = 256
"""Of the prompt whose keys and values all compared sequences have, at most."""

_MOST_KEYS = 4500
"""Of a compared sequence. Every split of attention has keys then, and the last one has other numbers of them."""

_CONTEXTS = (1.0, 0.0, 0.5, 0.125, 0.06)
"""Of the compared sequences, as parts of the largest."""

_QUERY_LENS = (1, 3, 1, 70, 17, 260)
"""Tokens of the sequences of steps with prompts."""


class GraphFault(Exception):
    """A captured step gives other logits than its kernels one by one."""


class GraphCheck:
    """Compares captured steps of a model with its own, over a KV cache that holds nothing yet."""

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        loras: DeviceTier,
        num_blocks: int,
        block_size: int,
        max_len: int,
    ) -> None:
        """num_blocks: that a step may write. max_len: of a sequence."""
        self._model, self._kv_cache, self._loras = model, kv_cache, loras
        self._num_blocks, self._block_size = num_blocks, block_size
        self._max_len = min(max_len, _MOST_KEYS)
        self._num_first = min(-(-_FIRST_TOKENS // block_size), num_blocks // 2, self._max_len // block_size)
        self._number = 0

    @torch.inference_mode()
    def check_decodes(self, graphs: DecodeGraphs) -> None:
        """Every size of decode steps. Raises GraphFault."""
        with self._rows("decode steps", graphs.sizes) as rows:
            for size, num_rows, loras in _runs(graphs.sizes, rows):
                sequences = self._decodes(size)
                # The kernels one by one are those of a whole step, as the graph's are: other numbers of rows may have
                # other ones.
                batch, whole = self._batch(sequences[:num_rows], loras), self._batch(sequences, loras)
                actual, best = graphs.run(batch)
                self._compare(actual, self._forward(whole)[:num_rows], batch, f"{size} sequences")
                likeliest = actual.gather(1, best.token_ids.clamp(0, actual.shape[1] - 1)[:, None])[:, 0]
                if not torch.equal(likeliest, actual.amax(dim=1)):
                    raise GraphFault(f"the CUDA graph of {size} sequences chooses other tokens than the likeliest")

    @torch.inference_mode()
    def check_pieces(self, graphs: PiecewiseGraphs) -> None:
        """Every size of steps with prompts, of which some tokens belong to decodes. Raises GraphFault."""
        with self._rows("steps with prompts", graphs.sizes) as rows:
            for size, num_tokens, loras in _runs(graphs.sizes, rows):
                batch = self._batch(self._prompts(num_tokens), loras)
                actual = self._model.logits(graphs.run(batch), batch.logits_indices, batch.lora)
                self._compare(actual, self._forward(batch), batch, f"{size} tokens")

    @cached_property
    def _adapters(self) -> list[PackedAdapter]:
        """One of the largest rank that fits, and beside it one with DoRA, where the device has room for both."""
        layout, loras = self._loras.layout, self._loras
        first = random_adapter(layout, layout.max_rank, loras.fits)
        if first is None:
            _logger.warning("no adapter fits on the device: CUDA graphs with adapters are compared without any")
            return []
        if loras.max_loras == 1:
            return [first]
        with loras.scratch_adapter(first):
            rank = max(1, ranks_of(first.rows)[-1] // 2)
            second = random_adapter(layout, rank, loras.fits, is_dora=True)
        return [first] if second is None else [first, second]

    def _forward(self, batch: ForwardBatch) -> torch.Tensor:
        return self._model.forward(batch, self._kv_cache)

    @contextmanager
    def _rows(self, steps: str, sizes: Sequence[int]) -> Iterator[list[int]]:
        """The rows of the adapters in the tables while they are there, and the keys that all sequences have."""
        started = time.monotonic()
        with ExitStack() as stack:
            rows = [stack.enter_context(self._loras.scratch_adapter(adapter)) for adapter in self._adapters]
            if self._num_first:
                first = _Sequence(0, self._num_first * self._block_size, list(range(self._num_first)), 0)
                self._forward(self._batch([first], rows))
            # Without any, all graphs are compared all the same: row 0 is of rank 0.
            yield rows or [0]
        ranks = [ranks_of(adapter.rows)[-1] for adapter in self._adapters]
        _logger.info(
            "CUDA graphs of %s of %d sizes give the logits of their kernels one by one, with adapters of ranks %s and "
            "up to %d keys; compared in %.1f s",
            *(steps, len(sizes), ranks, self._max_len, time.monotonic() - started),
        )

    def _decodes(self, count: int) -> list[_Sequence]:
        """Sequences of one token each. Where blocks are too few, some are the same sequence, which writes the same."""
        num_own = self._num_blocks - self._num_first
        return [self._sequence(number, 1, [self._num_first + number]) for number in (n % num_own for n in range(count))]

    def _prompts(self, num_tokens: int) -> list[_Sequence]:
        """Decodes and prompts, some of which have a beginning in the cache; as many tokens in all."""
        own = iter(range(self._num_first, self._num_blocks))
        num_left = self._num_blocks - self._num_first
        sequences: list[_Sequence] = []
        for number, length in enumerate(cycle(_QUERY_LENS)):
            length = min(length, num_tokens, self._max_len)
            num_blocks = -(-length // self._block_size)
            if not num_tokens or num_blocks > num_left:
                break
            sequences.append(self._sequence(number, length, [next(own) for _ in range(num_blocks)]))
            num_left, num_tokens = num_left - num_blocks, num_tokens - length
        # Where blocks are too few, the same sequences again, which write the same.
        for sequence in cycle(list(sequences)):
            if not num_tokens:
                return sorted(sequences, key=lambda one: one.length > 1)
            sequences.append(sequence.beginning(min(sequence.length, num_tokens)))
            num_tokens -= sequences[-1].length
        raise AssertionError("there is no sequence")

    def _sequence(self, number: int, length: int, own_blocks: list[int]) -> _Sequence:
        """Its last tokens lie in blocks of its own, after whole blocks of the first prompt in an order of its own."""
        size, part = self._block_size, _CONTEXTS[number % len(_CONTEXTS)]
        num_before = int(part * ((self._max_len - length) // size)) if self._num_first else 0
        # A single token anywhere in its block.
        at = (3 * number + 5 * self._number) % size if length == 1 else 0
        start = min(num_before * size + at, self._max_len - length)
        before = [(number + 3 * block) % self._num_first for block in range(num_before)]
        return _Sequence(start, length, before + own_blocks, number)

    def _batch(self, sequences: Sequence[_Sequence], rows: Sequence[int]) -> ForwardBatch:
        """rows: of the adapters in the tables; none for a step without."""
        tables, size = self._loras.tables, self._block_size
        positions = [[*range(one.start, one.end)] for one in sequences]
        slots = [[one.blocks[p // size] * size + p % size for p in range(one.start, one.end)] for one in sequences]
        tokens = [
            [(one.number * 31 + p + self._number * 17 + 1) * _PRIME % self._model.config.vocab_size for p in of]
            for one, of in zip(sequences, positions, strict=True)
        ]
        of_rows = [*rows, _BASE_MODEL]
        mapping = [[of_rows[one.number % len(of_rows)]] * one.length for one in sequences]
        most = max(len(one.blocks) for one in sequences)
        block_tables = [one.blocks + [-1] * (most - len(one.blocks)) for one in sequences]
        ends = [*accumulate(one.length for one in sequences)]

        def sent(numbers: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
            return torch.tensor(numbers, device=tables.rank.device)

        return ForwardBatch(
            input_ids=sent([*chain(*tokens)]),
            positions=sent([*chain(*positions)]),
            slot_mapping=sent([*chain(*slots)]),
            query_lens=[one.length for one in sequences],
            context_lens=[one.end for one in sequences],
            num_keys=sent([one.end for one in sequences]),
            query_starts=sent([0, *ends]),
            block_tables=sent(block_tables),
            num_decodes=sum(one.length == 1 for one in sequences),
            logits_indices=sent([end - 1 for end in ends]),
            block_size=size,
            lora=TokenLoRAs(tables, sent([*chain(*mapping)])) if rows else None,
        )

    def _compare(self, actual: torch.Tensor, expected: torch.Tensor, batch: ForwardBatch, size: str) -> None:
        allowed = TOLERANCES[self._model.dtype] * expected.abs().max()
        errors = (actual - expected).abs().amax(dim=1) / allowed
        # A NaN is the largest number of all.
        row = int(errors.argmax())
        self._number += 1
        if not (error := float(errors[row])) <= 1:
            raise GraphFault(
                f"the CUDA graph of {size} {'without' if batch.lora is None else 'with'} adapters gives other logits "
                f"than its kernels one by one: the largest difference is {error:.3g} times the allowed one, after "
                f"{batch.context_lens[row]} tokens in sequence {row + 1} of {len(batch.context_lens)}"
            )


@dataclass(frozen=True)
class _Sequence:
    """The tokens from `start` on that a step computes. blocks: from position 0 on. number: decides on token ids."""

    start: int
    length: int
    blocks: list[int]
    number: int

    @property
    def end(self) -> int:
        return self.start + self.length

    def beginning(self, length: int) -> _Sequence:
        return _Sequence(self.start, length, self.blocks, self.number)


def _runs(sizes: Sequence[int], rows: list[int]) -> Iterator[tuple[int, int, list[int]]]:
    """Size of a graph, how much of it a step has, and the adapters of the step: full and with padding."""
    for size in sizes:
        padded = max(1, size - 1)
        yield from [(size, size, rows), (size, padded, rows), (size, padded, [])]
