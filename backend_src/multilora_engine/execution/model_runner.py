"""`ModelRunner`: weights and KV tensors on the device; turns a scheduled step into a choice of tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from multilora_engine.batch.forward_batch import CrossAttention, ForwardBatch, KVCache, SourceBatch, TokenLoRAs
from multilora_engine.batch.transfer import arrays_to_device, to_device
from multilora_engine.execution.cuda_graphs import DecodeGraphs
from multilora_engine.execution.piecewise_graphs import PiecewiseGraphs
from multilora_engine.lora.device_tier import DeviceTier
from multilora_engine.models.model import Model
from multilora_engine.sampling.sampler import Best, Choice
from multilora_engine.sampling.token_counts import DeviceTokens, TokenCounts
from multilora_engine.sequences.prompt_log_probs import PromptLogProbs
from multilora_engine.sequences.sequence import BlockCopy, BlockTable, ScheduledSequence, Sequence, Source
from multilora_kernels import MemoryAhead, copy_blocks


class ModelRunner:
    """Owns the model and the KV cache's memory; knows nothing of queues and requests' ends."""

    def __init__(
        self,
        model: Model,
        kv_cache: KVCache,
        block_size: int,
        loras: DeviceTier,
        graphs: DecodeGraphs | None = None,
        pieces: PiecewiseGraphs | None = None,
        kv_memory: MemoryAhead | None = None,
        counts: TokenCounts | None = None,
    ) -> None:
        """graphs, pieces: of the model's steps over this cache; other steps are computed kernel by kernel.

        kv_memory: of this cache, if its memory is taken as it is used. counts: None where the host knows every token
        before the next one is chosen, and counts.
        """
        self._model = model
        self._kv_cache = kv_cache
        self._block_size = block_size
        self._loras = loras
        self._graphs = graphs
        self._pieces = pieces
        self._kv_memory = kv_memory
        self._counts = counts
        self._device = kv_cache.keys.device

    def take_kv_memory(self) -> None:
        """Take the memory of the whole KV cache now, if it is taken as it is used."""
        if self._kv_memory is not None:
            self._kv_memory.take_all()

    @property
    def kv_cache_bytes(self) -> int:
        return self._kv_cache.num_bytes

    @property
    def num_graphs(self) -> int:
        """How many sizes of steps are replayed as CUDA graphs."""
        return sum(len(graphs.sizes) for graphs in (self._graphs, self._pieces) if graphs is not None)

    @property
    def prompt_sizes(self) -> list[int]:
        """The tokens of the steps with prompts that are replayed as CUDA graphs, ascending."""
        return [] if self._pieces is None else self._pieces.sizes

    @torch.inference_mode()
    def launch(
        self,
        step: list[ScheduledSequence],
        on_layer: Callable[[], None] = lambda: None,
        before: Choice | None = None,
    ) -> Choice:
        """Start a step: the choice of the next token of each of its sequences that `is_sampled`, in their order.

        A GPU computes while the host goes on; on a CPU the step has been computed when this returns. before: of the
        step before, whose tokens are pending.
        """
        batch = self.build_batch(step, before)
        forward = partial(self._forward_whole_prompts, step) if reads_whole_prompts(step) else self._forward
        logits, best = forward(batch, on_layer)
        sampled = [scheduled.sequence for scheduled in step if scheduled.is_sampled]
        tokens = None
        if self._counts is not None:
            tokens = DeviceTokens(self._counts, batch.input_ids, batch.logits_indices)
        best = None if best is None else best.first(len(sampled))
        return Choice(logits, sampled, self._model.config.end_token_ids, tokens, best)

    def _forward(self, batch: ForwardBatch, on_layer: Callable[[], None]) -> tuple[torch.Tensor, Best | None]:
        """The logits of the wanted rows, and their `Best` where it is part of a graph."""
        if batch.own_ropes:  # Graphs have the base's angles.
            return self._model.forward(batch, self._kv_cache, on_layer), None
        if self._graphs is not None and self._graphs.serves(batch):
            on_layer()
            return self._graphs.run(batch)
        if self._pieces is not None and self._pieces.serves(batch):
            return self._model.logits(self._pieces.run(batch, on_layer), batch.logits_indices, batch.lora), None
        return self._model.forward(batch, self._kv_cache, on_layer), None

    def _forward_whole_prompts(
        self, step: list[ScheduledSequence], batch: ForwardBatch, on_layer: Callable[[], None]
    ) -> tuple[torch.Tensor, None]:
        """`_forward` of a step that has to tell of prompts, too."""
        if self._pieces is not None and not batch.own_ropes and self._pieces.serves(batch):
            hidden_states = self._pieces.run(batch, on_layer)
        else:
            hidden_states = self._model.hidden_states(batch, self._kv_cache, on_layer)

        def logits_of(rows: torch.Tensor) -> torch.Tensor:
            return self._model.logits(hidden_states, rows, batch.lora)

        score_prompts(step, logits_of, self._device)
        keep_context_logits(step, logits_of, self._device)
        return self._model.logits(hidden_states, batch.logits_indices, batch.lora), None

    @torch.inference_mode()
    def copy_blocks(self, copies: list[BlockCopy]) -> None:
        """Copy keys and values of whole blocks of the KV cache, in all layers; no block is a source and a target."""
        pairs = to_device(torch.tensor([(copy.source, copy.target) for copy in copies]), self._device)
        sources, targets = pairs.unbind(1)
        for cache in (self._kv_cache.keys, self._kv_cache.values):
            copy_blocks(cache, self._block_size, sources, targets)

    def build_batch(self, step: list[ScheduledSequence], before: Choice | None = None) -> ForwardBatch:
        """The tensors of a step. `step`: the tokens of answers first, as scheduled. before: as for `launch`."""
        block_size = self._block_size
        query_lens = [scheduled.num_tokens for scheduled in step]
        context_lens = [scheduled.start + scheduled.num_tokens for scheduled in step]
        ends = list(accumulate(query_lens))
        block_tables = _block_tables([scheduled.sequence.block_table for scheduled in step])
        if self._kv_memory is not None and any(_begins_block(scheduled, block_size) for scheduled in step):
            self._kv_memory.note_use((int(block_tables.max()) + 1) * block_size)
        # NumPy, because a torch call on a handful of numbers takes several times as long.
        has_prompts = ends[-1] > len(step)
        arrays = {
            **(_tokens(step, block_tables, block_size) if has_prompts else _single_tokens(step, block_size)),
            "num_keys": np.array(context_lens),
            "query_starts": np.array([0, *ends]),
            "block_tables": block_tables,
            "logits_indices": _logits_indices(step, ends),
        }
        lora_indices = [self._lora_index(scheduled) for scheduled in step]
        if any(index >= 0 for index in lora_indices):
            arrays["lora_mapping"] = _lora_mapping(step, lora_indices)
        if any(scheduled.sequence.num_pending_tokens for scheduled in step):
            arrays["pending"] = _pending(step, before)
        sent = dict(zip(arrays, arrays_to_device(list(arrays.values()), self._device), strict=True))
        lora_mapping, pending = sent.pop("lora_mapping", None), sent.pop("pending", None)
        if pending is not None:
            assert before is not None
            targets, sources = pending
            sent["input_ids"][targets] = before.token_ids[sources]
        return ForwardBatch(
            **sent,
            query_lens=query_lens,
            context_lens=context_lens,
            num_decodes=sum(scheduled.is_decode for scheduled in step),
            block_size=block_size,
            lora=None
            if lora_mapping is None
            else TokenLoRAs(self._loras.tables, lora_mapping, self._loras.outer_parts(lora_indices)),
            own_ropes=self._own_ropes(step, query_lens),
            cross=None if self._model.config.source is None else self._cross(step, query_lens, lora_indices),
        )

    def _cross(self, step: list[ScheduledSequence], query_lens: list[int], lora_indices: list[int]) -> CrossAttention:
        """The sources that the tokens of a step attend to. lora_indices: of the last token of each sequence."""
        tables = _block_tables([_source_of(scheduled).block_table for scheduled in step])
        if self._kv_memory is not None and any(scheduled.encodes_source for scheduled in step):
            self._kv_memory.note_use((int(tables.max()) + 1) * self._block_size)
        rows = [row for row, scheduled in enumerate(step) if scheduled.encodes_source]
        lens = [len(_source_of(step[row]).token_ids) for row in rows]
        arrays = {
            "block_tables": np.repeat(tables, query_lens, axis=0),
            "num_keys": np.repeat([len(_source_of(scheduled).token_ids) for scheduled in step], query_lens),
            "query_starts": np.arange(sum(query_lens) + 1),
        }
        if rows:
            token_ids = chain.from_iterable(_source_of(step[row]).token_ids for row in rows)
            arrays["input_ids"] = np.fromiter(token_ids, np.int64)
            arrays["slot_mapping"] = _slots(tables[rows], lens, self._block_size)
            arrays["lora_mapping"] = np.repeat([lora_indices[row] for row in rows], lens)
        sent = dict(zip(arrays, arrays_to_device(list(arrays.values()), self._device), strict=True))
        new = None
        if rows:
            mapping = sent["lora_mapping"]
            loras = TokenLoRAs(self._loras.tables, mapping) if any(lora_indices[row] >= 0 for row in rows) else None
            new = SourceBatch(sent["input_ids"], sent["slot_mapping"], lens, loras)
        return CrossAttention(sent["block_tables"], sent["num_keys"], sent["query_starts"], new)

    def _own_ropes(self, step: list[ScheduledSequence], query_lens: list[int]) -> list[tuple[str, torch.Tensor]]:
        """The rotary embeddings of adapters that have their own, and the rows of their tokens."""
        adapters = [scheduled.sequence.adapter for scheduled in step]
        ropes = ["" if adapter is None else adapter.traits.rope for adapter in adapters]
        if not any(ropes):
            return []
        of_rows = np.repeat(np.array(ropes, dtype=object), query_lens)
        chosen = [rope for rope in dict.fromkeys(ropes) if rope]
        rows = arrays_to_device([np.flatnonzero(of_rows == rope) for rope in chosen], self._device)
        return list(zip(chosen, rows, strict=True))

    def _lora_index(self, scheduled: ScheduledSequence) -> int:
        """The row in the tables of the adapter that computes the last of these tokens, -1 for the base model."""
        sequence = scheduled.sequence
        if sequence.adapter is None or scheduled.start + scheduled.num_tokens <= sequence.lora_start:
            return -1
        return self._loras.lora_index(sequence.adapter)


def _lora_mapping(step: list[ScheduledSequence], lora_indices: list[int]) -> NDArray[np.int64]:
    """Each token's row in the tables, -1 for the base model. lora_indices: of the last token of each sequence."""
    mapping = np.repeat(lora_indices, [scheduled.num_tokens for scheduled in step])
    end = 0
    for scheduled in step:
        start, end = end, end + scheduled.num_tokens
        if scheduled.start < scheduled.sequence.lora_start:
            mapping[start : start + scheduled.num_base_tokens] = -1
    return mapping


def _begins_block(scheduled: ScheduledSequence, block_size: int) -> bool:
    """Whether any of the tokens is the first of a block."""
    return -scheduled.start % block_size < scheduled.num_tokens


def _single_tokens(step: list[ScheduledSequence], block_size: int) -> dict[str, NDArray[np.int64]]:
    """`_tokens` where each sequence computes one, in plain Python.

    On a CPU, the weights of the step before have driven NumPy's code out of the caches: each function takes 10 us.
    """
    slots = [scheduled.sequence.block_table.slot(scheduled.start, block_size) for scheduled in step]
    return {
        "input_ids": np.array([_input_ids(scheduled)[0] for scheduled in step]),
        "positions": np.array([scheduled.start for scheduled in step]),
        "slot_mapping": np.array(slots),
    }


def _tokens(
    step: list[ScheduledSequence], block_tables: NDArray[np.int64], block_size: int
) -> dict[str, NDArray[np.int64]]:
    """The tokens of a step, and their places in their sequences and in the KV cache."""
    lengths = np.array([scheduled.num_tokens for scheduled in step])
    starts = np.array([scheduled.start for scheduled in step])
    ends = lengths.cumsum()
    positions = np.arange(ends[-1]) - np.repeat(ends - lengths - starts, lengths)
    sequence_of_token = np.repeat(np.arange(len(step)), lengths)
    return {
        "input_ids": np.fromiter(chain.from_iterable(map(_input_ids, step)), np.int64),
        "positions": positions,
        "slot_mapping": block_tables[sequence_of_token, positions // block_size] * block_size + positions % block_size,
    }


def _input_ids(scheduled: ScheduledSequence) -> list[int]:
    return scheduled.token_ids or [0]


def _pending(step: list[ScheduledSequence], before: Choice | None) -> NDArray[np.int64]:
    """[2, n]: the rows whose tokens are known to the device only, and the place of each in the choice `before`."""
    # A pending token is the only one that its sequence computes, and such sequences come first: row i is theirs.
    rows = [row for row, scheduled in enumerate(step) if scheduled.sequence.num_pending_tokens]
    assert before is not None
    assert all(step[row].is_decode for row in rows)
    places = {sequence: place for place, sequence in enumerate(before.sequences)}
    return np.array([rows, [places[step[row].sequence] for row in rows]])


def _logits_indices(step: list[ScheduledSequence], ends: list[int]) -> NDArray[np.int64]:
    """The last row of each sequence that is sampled. ends: for each sequence the row after its last one."""
    return np.array([end - 1 for scheduled, end in zip(step, ends, strict=True) if scheduled.is_sampled], np.int64)


ROWS_AT_ONCE = 64
"""The rows of a prompt's logits that exist at once: more would take memory, and fewer would read the head's weights
more often.
"""


def reads_whole_prompts(step: list[ScheduledSequence]) -> bool:
    """Whether the logits or log-probs of any prompt's tokens follow from this step."""
    return any(scheduled.context_positions or scheduled.scored_positions for scheduled in step)


def keep_context_logits(
    step: list[ScheduledSequence], logits_of: Callable[[torch.Tensor], torch.Tensor], device: torch.device
) -> None:
    """Append the logits of the step's `context_positions` to the reports of its sequences. Waits for the device.

    logits_of: float32 [n, vocab] of rows of the step's batch, int64 [n] on the device.
    """
    wanted = _rows_of(step, [scheduled.context_positions for scheduled in step])
    if not wanted:
        return
    pieces = to_device(torch.tensor(wanted), device).split(ROWS_AT_ONCE)
    rows, end = np.concatenate([logits_of(piece).cpu().numpy() for piece in pieces]), 0
    for scheduled in step:
        if num_rows := len(scheduled.context_positions):
            start, end = end, end + num_rows
            try:
                scheduled.sequence.prompt_report.append_logits(rows[start:end].tobytes(), num_rows)
            except Exception as error:
                scheduled.sequence.failure = error


def _source_of(scheduled: ScheduledSequence) -> Source:
    source = scheduled.sequence.source
    assert source is not None, "a request without a source"
    return source


def _slots(block_tables: NDArray[np.int64], lens: list[int], block_size: int) -> NDArray[np.int64]:
    """The places in the KV cache of the first `lens` tokens of each table, one table after another."""
    places = zip(block_tables, map(np.arange, lens), strict=True)
    return np.concatenate([table[at // block_size] * block_size + at % block_size for table, at in places])


def _block_tables(rows: list[BlockTable]) -> NDArray[np.int64]:
    """[num_seqs, longest table], padded with -1."""
    tables = np.empty((len(rows), max([row.length for row in rows])), np.int64)
    tables.fill(-1)
    for i, row in enumerate(rows):
        tables[i, : row.length] = row.ids
    return tables


def _rows_of(step: list[ScheduledSequence], positions: list[range]) -> list[int]:
    """The rows of a step's batch that some positions of each of its sequences have."""
    rows, end = [], 0
    for scheduled, wanted in zip(step, positions, strict=True):
        rows += [end + position - scheduled.start for position in wanted]
        end += scheduled.num_tokens
    return rows


def score_prompts(
    step: list[ScheduledSequence], logits_of: Callable[[torch.Tensor], torch.Tensor], device: torch.device
) -> None:
    """Append the step's values to the `prompt_log_probs` of its sequences. Waits for the device.

    logits_of: float32 [n, vocab] of rows of the step's batch, int64 [n] on the device.
    """
    if not (scored := _scored(step)):
        return
    num_top = max(log_probs.num_top for _, log_probs, _ in scored)
    numbers = to_device(_rows_and_next_tokens(step), device)
    pieces = [
        _log_probs(logits_of(rows), token_ids, num_top)
        for rows, token_ids in zip(*(column.split(ROWS_AT_ONCE) for column in numbers), strict=True)
    ]
    _keep(scored, *(torch.cat(column).cpu().numpy() for column in zip(*pieces, strict=True)))


def _scored(step: list[ScheduledSequence]) -> list[tuple[Sequence, PromptLogProbs, range]]:
    """The reports that the step adds to, and the positions of their new values."""
    return [
        (scheduled.sequence, scheduled.sequence.prompt_report.log_probs, positions)
        for scheduled in step
        if scheduled.sequence.prompt_report.log_probs is not None and (positions := scheduled.scored_positions)
    ]


def _rows_and_next_tokens(step: list[ScheduledSequence]) -> torch.Tensor:
    """int64 [2, n]: the row of each scored position in the step's batch, and the token after it."""
    scored = [scheduled.scored_positions for scheduled in step]
    token_ids: list[int] = []
    for scheduled, positions in zip(step, scored, strict=True):
        token_ids += scheduled.sequence.request.prompt_token_ids[positions.start + 1 : positions.stop + 1]
    return torch.tensor([_rows_of(step, scored), token_ids])


def _log_probs(
    logits: torch.Tensor, token_ids: torch.Tensor, num_top: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probs of a token a row, float32 [n]; log-probs and ids of the likeliest tokens, [n, num_top], best first."""
    whole = logits.logsumexp(dim=-1, keepdim=True)
    chosen = logits.gather(1, token_ids.unsqueeze(1)) - whole
    top = logits.topk(num_top, dim=-1)
    return chosen.squeeze(1), top.values - whole, top.indices


def _keep(
    scored: list[tuple[Sequence, PromptLogProbs, range]],
    values: NDArray[Any],
    top_values: NDArray[Any],
    top_ids: NDArray[Any],
) -> None:
    """Hand each prompt its rows, cut to as many of the likeliest as it asked for."""
    end = 0
    for sequence, log_probs, positions in scored:
        start, end = end, end + len(positions)
        top = (slice(start, end), slice(log_probs.num_top))
        try:
            log_probs.append(values[start:end], top_values[top], top_ids[top])
        except Exception as error:
            sequence.failure = error
