"""`DecodeGraphs`: decode steps captured at start, one CUDA graph for each number of sequences, replayed for any.

A step of a model is some hundred kernels, and launching them one by one takes a GPU longer than running them. A graph
launches all at once, but always the same ones on the same memory. So a decode step is padded to the next captured size,
its inputs are copied to where the graph looks for them, and there are two graphs a size: with the adapters' work, of
which one serves any mix since the work lists have a fixed capacity (`lora_segments`), and without it.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import logging
import time
from collections.abc import Callable

import torch

from multilora_engine.batch.forward_batch import ForwardBatch, TokenLoRAs
from multilora_engine.sampling.sampler import Best
from multilora_kernels import LoRATables, StepInputs, fill_step_inputs
from multilora_kernels.streams import capture_graph

_logger = logging.getLogger(__name__)

Run = Callable[[], None]
Capture = Callable[[Run], Run]
"""Makes a replay of a function: it does the same work again, on the same memory."""

Forward = Callable[[ForwardBatch, torch.Tensor], object]
"""Writes the logits of a batch to a tensor, float32 [num_logits, vocab_size]."""

_SIZES = (1, 2, 4)
_SIZE_STEP = 8
_MAX_SIZE = 256
"""Kernels of more sequences take longer than their launch."""

_MIB = 1 << 20


def graph_sizes(max_num_seqs: int) -> list[int]:
    """The numbers of sequences that graphs are captured for: 1, 2, 4, 8, 16, 24 and so on.

    The last is `max_num_seqs`, or the largest that is worth it.
    """
    last = min(max_num_seqs, _MAX_SIZE)
    sizes = [*_SIZES, *range(_SIZE_STEP, last, _SIZE_STEP)]
    return [size for size in sizes if size < last] + [last]


class DecodeInputs:
    """The memory that graphs read a step's inputs from: those of `ForwardBatch`, for up to `max_num_seqs` sequences.

    scratch_block: a block of the KV cache that no sequence ever has. Rows of padding decode a token 0 of the base model
        there, at position 0; nobody looks at their logits.
    max_blocks: blocks of the longest sequence.
    """

    def __init__(
        self,
        max_num_seqs: int,
        max_blocks: int,
        block_size: int,
        scratch_block: int,
        tables: LoRATables,
    ) -> None:
        self._block_size = block_size
        self._scratch_block = scratch_block
        self._tables = tables
        zeros = functools.partial(torch.zeros, dtype=torch.int64, device=tables.rank.device)
        n = max_num_seqs
        self._rows = StepInputs(zeros(n), zeros(n), zeros(n), zeros(n), zeros(n), zeros(n), zeros(n, max_blocks))
        self._query_starts = torch.arange(max_num_seqs + 1, device=tables.rank.device)

    def fill(self, batch: ForwardBatch, size: int) -> None:
        """Copy a decode step to the first rows, and make the others up to `size` padding."""
        self._fill(step_inputs(batch), size)

    def pad(self, size: int) -> None:
        """Make the first rows padding."""
        self._fill(self._first(0), size)

    def _fill(self, inputs: StepInputs, size: int) -> None:
        fill_step_inputs(self._rows, inputs, size, self._scratch_block, self._block_size)

    def _first(self, size: int) -> StepInputs:
        """The first `size` rows."""
        return StepInputs(*(getattr(self._rows, field.name)[:size] for field in dataclasses.fields(StepInputs)))

    def batch(self, size: int, has_adapters: bool) -> ForwardBatch:
        """The first `size` rows, as they are by the time that the model reads them.

        `context_lens`, which the host knows at capture only, are those of padding: no operator of a graph reads them.
        """
        inputs = vars(self._first(size))
        mapping = inputs.pop("lora_mapping")
        return ForwardBatch(
            **inputs,
            query_lens=[1] * size,
            context_lens=[1] * size,
            query_starts=self._query_starts[: size + 1],
            num_decodes=size,
            block_size=self._block_size,
            lora=TokenLoRAs(self._tables, mapping) if has_adapters else None,
        )


def step_inputs(batch: ForwardBatch) -> StepInputs:
    """All that graphs of decode steps read of a step."""
    return StepInputs(
        batch.input_ids,
        batch.positions,
        None if batch.lora is None else batch.lora.mapping,
        batch.slot_mapping,
        batch.num_keys,
        batch.logits_indices,
        batch.block_tables,
    )


class DecodeGraphs:
    """Decode steps of up to the largest of `sizes` sequences, each captured when this is made."""

    @torch.inference_mode()
    def __init__(
        self,
        forward: Forward,
        inputs: DecodeInputs,
        sizes: list[int],
        vocab_size: int,
        device: torch.device,
        capture: Capture,
    ) -> None:
        """capture: `capture_graph` on a GPU."""
        self._inputs = inputs
        self._sizes = sizes
        self._logits = torch.empty(sizes[-1], vocab_size, device=device)
        self._best = Best.empty(sizes[-1], vocab_size, device)
        # The largest first: the others fit into the memory that it leaves.
        self._replays = {
            (size, has_adapters): self._captured(forward, size, has_adapters, capture)
            for has_adapters in (True, False)
            for size in reversed(sizes)
        }

    @property
    def sizes(self) -> list[int]:
        """The numbers of sequences that graphs are captured for."""
        return self._sizes

    def serves(self, batch: ForwardBatch) -> bool:
        """Whether a batch is a decode step: one token of each of not too many answers, and no more rows wanted.

        Graphs know nothing of adapters that change embeddings or head.
        """
        n = len(batch.query_lens)
        return batch.outer is None and n == batch.num_decodes <= self._sizes[-1] and len(batch.logits_indices) <= n

    @torch.inference_mode()
    def run(self, batch: ForwardBatch) -> tuple[torch.Tensor, Best]:
        """Logits of the wanted rows, float32 [num_logits, vocab_size], and their `Best`; the next step overwrites both.

        Most steps choose the most probable tokens: in the graph that takes no launch. The others read the logits once
        for nothing.
        """
        n = len(batch.query_lens)
        size = self._sizes[bisect.bisect_left(self._sizes, n)]
        self._inputs.fill(batch, size)
        self._replays[size, batch.lora is not None]()
        num_rows = len(batch.logits_indices)
        return self._logits[:num_rows], self._best.first(num_rows)

    def _captured(self, forward: Forward, size: int, has_adapters: bool, capture: Capture) -> Run:
        batch, logits, best = self._inputs.batch(size, has_adapters), self._logits[:size], self._best.first(size)

        def run() -> None:
            forward(batch, logits)
            best.write(logits)

        self._inputs.pad(size)
        return capture(run)


def capture_decode(
    forward: Forward,
    inputs: DecodeInputs,
    sizes: list[int],
    vocab_size: int,
    device: torch.device,
) -> DecodeGraphs:
    """The graphs on a GPU, which takes some seconds; logs their sizes, the time it took, and their memory."""
    _logger.info("capturing CUDA graphs of decode steps of %s sequences", sizes)
    start = time.monotonic()
    free, _ = torch.cuda.mem_get_info(device)
    capture = functools.partial(capture_graph, pool=torch.cuda.graph_pool_handle())
    graphs = DecodeGraphs(forward, inputs, sizes, vocab_size, device, capture)
    left, _ = torch.cuda.mem_get_info(device)
    _logger.info("CUDA graphs: %.0f MiB, captured in %.1f s", (free - left) / _MIB, time.monotonic() - start)
    return graphs
