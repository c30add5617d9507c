"""`PiecewiseGraphs`: steps with prompts as CUDA graphs around their attention.

Attention depends on how the tokens of a step are cut into sequences. All between two attentions depends on the number
of tokens alone, so it is captured, once for each of some sizes, and the step is padded to the next. Steps of more
tokens than the largest size keep a GPU busy for longer than the host takes to launch them.
"""

from __future__ import annotations

import bisect
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

_SIZE_STEP, _MAX_SIZE = 64, 512
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
    last = min(max_num_tokens, _MAX_SIZE)
    return [*range(_SIZE_STEP, last, _SIZE_STEP), last]


@dataclass(frozen=True)
class _Capture:
    """The pieces of one size, the attention between each two with its cache, and the rows after the last layer."""

    pieces: list[Run]
    attentions: list[tuple[Attention, KVRows, KVRows]]
    hidden_states: HiddenStates


class PiecewiseGraphs:
    """Steps of up to the largest of `sizes` tokens, each size captured when this is made, with adapters and without."""

    @torch.inference_mode()
    def __init__(self, model: Model, kv_cache: KVCache, tables: LoRATables, sizes: list[int], pieces: Pieces) -> None:
        self._model, self._kv_cache, self._tables = model, kv_cache, tables
        self._sizes = sizes
        device = tables.rank.device
        self._inputs = StepInputs(*torch.zeros(3, sizes[-1], dtype=torch.int64, device=device))
        config, dtype = model.config, model.activation_dtype
        # One for all layers and sizes: graphs would keep the memory of each.
        self._qkv = torch.empty(sizes[-1], config.q_size + 2 * config.kv_size, dtype=dtype, device=device)
        self._heads = torch.zeros(sizes[-1], config.q_size, dtype=dtype, device=device)
        # The largest first: the others fit into the memory that it leaves.
        with pieces.stream():
            self._captures = {
                (size, has_adapters): self._captured(size, has_adapters, pieces)
                for size in reversed(sizes)
                for has_adapters in (True, False)
            }

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
        self._model.hidden_states(batch, self._kv_cache, attend=lambda *_: self._heads[:size])
        pieces.begin()
        hidden_states = self._model.hidden_states(batch, self._kv_cache, attend=interrupt)
        capture.pieces.append(pieces.end())
        return replace(capture, hidden_states=hidden_states)

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
