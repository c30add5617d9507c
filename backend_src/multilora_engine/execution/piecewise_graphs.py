"""`PiecewiseGraphs`: steps with prompts as CUDA graphs around their attention.

Attention depends on how the tokens of a step are cut into sequences. All between two attentions depends on the number
of tokens alone, so it is captured, once for each of some sizes, and the step is padded to the next. By arithmetic,
steps of more tokens than the largest size keep a GPU busy for longer than the host takes to launch them: an 8B for some
50 ms.
"""

from __future__ import annotations

import bisect
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch

from multilora_engine.batch.forward_batch import ForwardBatch, KVCache, TokenLoRAs
from multilora_engine.execution.cuda_graphs import Run
from multilora_engine.models.layers import Attention
from multilora_engine.models.model import HiddenStates, Model
from multilora_kernels import KVRows, LoRATables, StepInputs, fill_step_inputs

_logger = logging.getLogger(__name__)

_SIZE_STEPS = {512: 64, 1024: 128, 2048: 256}
"""Between sizes up to a size: padding is an eighth of a larger step at most, and on average a sixteenth."""

_CAPTURE_S = 20.0
"""Captures that take longer are ended, and steps are padded to the sizes that there are."""

_BASE_MODEL = -1


class Pieces(Protocol):
    """Captures one piece after the other."""

    def stream(self) -> AbstractContextManager[Any]:
        """In which pieces are captured."""
        ...

    def begin(self) -> None: ...

    def end(self) -> Run:
        """The replay of all that was computed since `begin`."""
        ...


def piece_sizes(max_num_tokens: int) -> list[int]:
    """The numbers of tokens that steps with prompts are captured for."""
    sizes, start = list[int](), 0
    for last, step in _SIZE_STEPS.items():
        sizes += range(start + step, last + 1, step)
        start = last
    largest = min(max_num_tokens, start)
    return [*(size for size in sizes if size < largest), largest]


def _in_order(sizes: list[int]) -> list[int]:
    """Sizes as they are captured: the largest, each that is at most half of the one before, and then the others.

    The first ones serve every step with at most twice its tokens, however many follow. The largest comes first, since
    the others fit into the memory that it leaves.
    """
    first: list[int] = []
    for size in reversed(sizes):
        if not first or 2 * size <= first[-1]:
            first.append(size)
    return first + [size for size in reversed(sizes) if size not in first]


@dataclass(frozen=True)
class _Capture:
    """The pieces of one size, the attention between each two with its cache, and the rows after the last layer."""

    pieces: list[Run]
    attentions: list[tuple[Attention, KVRows, KVRows]]
    hidden_states: HiddenStates


class PiecewiseGraphs:
    """Steps of up to the largest of `sizes` tokens, each size captured when this is made, with adapters and without."""

    @torch.inference_mode()
    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        tables: LoRATables,
        sizes: list[int],
        pieces: Pieces,
        limit_s: float = _CAPTURE_S,
    ) -> None:
        """limit_s: no capture is begun later, except that of the largest size."""
        self._model, self._kv_cache, self._tables = model, kv_cache, tables
        device = tables.rank.device
        self._inputs = StepInputs(*torch.zeros(3, sizes[-1], dtype=torch.int64, device=device))
        config, dtype = model.config, model.activation_dtype
        # One for all layers and sizes: graphs would keep the memory of each.
        self._qkv = torch.empty(sizes[-1], config.q_size + 2 * config.kv_size, dtype=dtype, device=device)
        self._heads = torch.zeros(sizes[-1], config.q_size, dtype=dtype, device=device)
        self._hidden_states: HiddenStates | None = None
        self._captures: dict[tuple[int, bool], _Capture] = {}
        started = time.monotonic()
        with pieces.stream():
            for size in _in_order(sizes):
                if self._captures and time.monotonic() - started > limit_s:
                    break
                for has_adapters in (True, False):
                    self._captures[size, has_adapters] = self._captured(size, has_adapters, pieces)
        self._sizes = sorted({size for size, _ in self._captures})
        log = _logger.info if len(self._sizes) == len(sizes) else _logger.warning
        log(
            "CUDA graphs of steps with prompts: %d of %d sizes, up to %d tokens, captured in %.1f s",
            *(len(self._sizes), len(sizes), self._sizes[-1], time.monotonic() - started),
        )

    @property
    def sizes(self) -> list[int]:
        return self._sizes

    def serves(self, batch: ForwardBatch) -> bool:
        """Whether a batch has few enough tokens, and no adapter that changes embeddings, which the first piece has."""
        changes_embeddings = batch.outer is not None and batch.outer.changes_embeddings
        return not changes_embeddings and len(batch.input_ids) <= self._sizes[-1]

    @torch.inference_mode()
    def run(self, batch: ForwardBatch, on_layer: Callable[[], None] = lambda: None) -> HiddenStates:
        """`Model.hidden_states`. The next step overwrites the rows. Rows after this step's tokens mean nothing."""
        num_tokens = len(batch.input_ids)
        size = self._sizes[bisect.bisect_left(self._sizes, num_tokens)]
        self._fill(batch, size)
        capture = self._captures[size, batch.lora is not None]
        inputs = self._model.attention_inputs(batch)
        capture.pieces[0]()
        for (layer, keys, values), piece in zip(capture.attentions, capture.pieces[1:], strict=True):
            on_layer()
            inputs.attend(layer, self._qkv[:num_tokens], keys, values, out=self._heads[:num_tokens])
            piece()
        return capture.hidden_states

    def _fill(self, batch: ForwardBatch, size: int) -> None:
        """Copy a step to the first rows. Those of padding are a token 0 of the base model, which nobody attends to."""
        mapping = None if batch.lora is None else batch.lora.mapping
        step = StepInputs(batch.input_ids, batch.positions, mapping)
        fill_step_inputs(self._inputs, step, size, scratch_block=0, block_size=0)

    def _captured(self, size: int, has_adapters: bool, pieces: Pieces) -> _Capture:
        capture = _Capture([], [], (self._heads, self._heads))
        batch = self._batch(size, has_adapters)

        def interrupt(layer: Attention, qkv: torch.Tensor, keys: KVRows, values: KVRows) -> torch.Tensor:
            self._qkv[:size] = qkv
            capture.pieces.append(pieces.end())
            capture.attentions.append((layer, keys, values))
            pieces.begin()
            return self._heads[:size]

        # Once outside: compiles kernels, and allocates the memory that libraries keep.
        x, update = self._model.hidden_states(batch, self._kv_cache, attend=lambda *_: self._heads[:size])
        if self._hidden_states is None:
            # Of the largest size: each would keep its own.
            self._hidden_states = torch.empty_like(x), torch.empty_like(update)
        kept_x, kept_update = (kept[:size] for kept in self._hidden_states)
        pieces.begin()
        x, update = self._model.hidden_states(batch, self._kv_cache, attend=interrupt)
        kept_x.copy_(x)
        kept_update.copy_(update)
        capture.pieces.append(pieces.end())
        return replace(capture, hidden_states=(kept_x, kept_update))

    def _batch(self, size: int, has_adapters: bool) -> ForwardBatch:
        """The first `size` rows as one sequence; no piece reads of which sequence a row is."""
        assert self._inputs.lora_mapping is not None
        mapping, positions = self._inputs.lora_mapping[:size], self._inputs.positions[:size]
        mapping.fill_(_BASE_MODEL)
        ends = torch.tensor([0, size], device=mapping.device)
        return ForwardBatch(
            input_ids=self._inputs.input_ids[:size],
            positions=positions,
            slot_mapping=positions,
            query_lens=[size],
            context_lens=[size],
            num_keys=ends[1:],
            query_starts=ends,
            block_tables=ends.new_zeros(1, 1),
            num_decodes=0,
            logits_indices=ends[:0],
            block_size=size,
            lora=TokenLoRAs(self._tables, mapping) if has_adapters else None,
        )


class CudaPieces:
    """Captures on a GPU. pool: a handle of the memory that graphs share, one running at a time."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._graph: Any = None

    @contextmanager
    def stream(self) -> Iterator[None]:
        torch.cuda.synchronize()
        # In a capture the allocator gives back nothing of what it keeps for the steps of another stream.
        torch.cuda.empty_cache()
        with torch.cuda.stream(torch.cuda.Stream()):
            try:
                yield
            finally:
                if self._graph is not None:
                    # It failed halfway. As long as it is open, this thread may allocate nothing.
                    with suppress(RuntimeError):
                        self.end()
        # The steps outside captures share work memory with those of the stream that comes back.
        torch.cuda.synchronize()

    def begin(self) -> None:
        self._graph = torch.cuda.CUDAGraph()
        # Other threads of the engine may go on using the device while this one captures.
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Run:
        graph, self._graph = self._graph, None
        graph.capture_end()
        replay: Run = graph.replay
        return replay
