"""The memory that steps take beside weights, KV cache and adapters: measured on steps of the largest kinds.

They run on memory that holds nothing, before any of it is divided: every sequence reads and writes one block of a small
cache, and all tokens have an adapter of rank 0, whose work takes as much room as that of any other. An encoder-decoder
model also encodes as many tokens as it may in a step, the longest sources first. Where steps are captured, those of the
largest sizes are, once, for their memory.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from multilora_engine.batch.forward_batch import (
    CrossAttention,
    ForwardBatch,
    KVCache,
    OuterParts,
    SourceBatch,
    TokenLoRAs,
)
from multilora_engine.config import EngineConfig
from multilora_engine.engine_info import SourceFacts
from multilora_engine.models.model import Model, only_group
from multilora_kernels import LoRATables

Measure = Callable[[Callable[[], object]], int]
"""Runs a function, and tells the bytes by which the device's memory grew at the most meanwhile."""


class Kept(NamedTuple):
    """Bytes of the device's memory that something keeps: in torch's allocator, and beside it, in the driver."""

    in_torch: int
    in_driver: int


MeasureKept = Callable[[Callable[[], object]], Kept]
"""Runs a function, tells what its result keeps, and forgets the result."""

_OUTER = OuterParts(embedding_rows=None, head_rows=None, has_embedding_lora=True, has_head_lora=True)


@torch.inference_mode()
def step_memory(
    model: Model, config: EngineConfig, kv_dtype: torch.dtype, tables: LoRATables, max_len: int, measure: Measure
) -> int:
    """Bytes of the largest step, launched kernel by kernel.

    tables: of at least one adapter, which has rank 0. max_len: of a sequence. measure: `peak_growth` on a GPU.
    """
    kv_cache = trial_cache(model, config.block_size, kv_dtype, tables.rank.device)
    query_lens = step_lens(config.max_num_batched_tokens, config.max_num_seqs, max_len)
    lens = source_lens(model.config.source, config.max_num_encoder_tokens)
    step = partial(model.forward, trial_batch(query_lens, config.block_size, tables, lens), kv_cache)
    # Once unmeasured: libraries keep memory of their own, which does not come back either way.
    step()
    return measure(step)


def trial_cache(model: Model, block_size: int, kv_dtype: torch.dtype, device: torch.device) -> KVCache:
    """Of one block."""
    group = only_group(model.kv_groups)
    return KVCache(*(group.cache(block_size, kv_dtype, device) for _ in range(2)))


def graph_memory(capture: Callable[[list[int]], object], sizes: list[int], measure: MeasureKept) -> int:
    """Bytes that captured steps of all `sizes` keep, by captures of the largest one and of the two largest.

    capture: captures the steps of some sizes. sizes: ascending. measure: `kept_growth` on a GPU.

    The largest size is captured first, and the others compute in the same memory; but each may keep its results, a row
    a token. The driver's part is the kernels and their arguments, as many in a size as in another.
    """
    *others, largest = sizes
    one = measure(partial(capture, [largest]))
    if not others:
        return sum(one)
    two = measure(partial(capture, [others[-1], largest]))
    results = max(0, two.in_torch - one.in_torch) / others[-1] * sum(others)
    # Once a driver has memory for graphs, it may keep that for the next ones: then `two` is of one size.
    graphs = max(two.in_driver / 2, min(one.in_driver, two.in_driver)) * len(sizes)
    return one.in_torch + math.ceil(results) + math.ceil(graphs)


def step_lens(num_tokens: int, num_seqs: int, max_len: int) -> list[int]:
    """Tokens of each sequence of a largest step, single ones first: as many sequences as may run, as long as can be.

    max_len: of one of them.
    """
    lens = []
    for num_left in range(num_seqs, 0, -1):
        lens.append(min(max_len, num_tokens - (num_left - 1)))
        num_tokens -= lens[-1]
    return lens[::-1]


def source_lens(source: SourceFacts | None, max_num_tokens: int) -> list[int]:
    """Tokens of each source of a largest step; empty for a model without an encoder. max_num_tokens: of a step."""
    if source is None:
        return []
    longest = source.longest(max_num_tokens)
    return [longest] * (max_num_tokens // longest)


def peak_growth(device: torch.device) -> Measure:
    """The growth of what torch's allocator has of a GPU: its pieces are larger than what lies in them."""

    def measure(run: Callable[[], object]) -> int:
        before = _give_back(device)
        torch.cuda.reset_peak_memory_stats(device)
        run()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_reserved(device) - before.in_torch

    return measure


def kept_growth(device: torch.device) -> MeasureKept:
    """The growth on a GPU."""

    def measure(make: Callable[[], object]) -> Kept:
        before = _give_back(device)
        made = make()
        after = _give_back(device)
        del made
        return Kept(after.in_torch - before.in_torch, max(0, after.in_driver - before.in_driver))

    return measure


def _give_back(device: torch.device) -> Kept:
    """The memory that is in use, by whomever, after torch's allocator has given back what it keeps for later."""
    gc.collect()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    in_torch = torch.cuda.memory_reserved(device)
    return Kept(in_torch, total - free - in_torch)


def trial_batch(
    query_lens: list[int], block_size: int, tables: LoRATables, sources: Sequence[int] = ()
) -> ForwardBatch:
    """A step of the first tokens of sequences that all lie in block 0; the logits of each one's last row are wanted.

    sources: tokens of each source that is encoded, in an encoder-decoder model; all tokens attend to the first one.

    All tokens have the adapter of row 0, which may be of rank 0: it runs the kernels of any adapter, also
    of an adapter on embeddings and head.
    """
    device = tables.rank.device
    num_tokens = sum(query_lens)
    lens = torch.tensor(query_lens, device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in query_lens])
    max_blocks = -(-max(query_lens) // block_size)
    return ForwardBatch(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=positions,
        slot_mapping=positions % block_size,
        query_lens=query_lens,
        context_lens=query_lens,
        num_keys=lens,
        query_starts=torch.cat((lens.new_zeros(1), lens.cumsum(0))),
        block_tables=torch.zeros(len(query_lens), max_blocks, dtype=torch.int64, device=device),
        num_decodes=query_lens.count(1),
        logits_indices=lens.cumsum(0) - 1,
        block_size=block_size,
        lora=TokenLoRAs(tables, torch.zeros(num_tokens, dtype=torch.int64, device=device), None if sources else _OUTER),
        cross=_trial_sources(sources, num_tokens, block_size, tables) if sources else None,
    )


def _trial_sources(lens: Sequence[int], num_tokens: int, block_size: int, tables: LoRATables) -> CrossAttention:
    """Sources in block 0. num_tokens: of the decoder."""
    device = tables.rank.device
    rows, blocks = torch.arange(num_tokens + 1, device=device), -(-lens[0] // block_size)
    token_ids = torch.zeros(sum(lens), dtype=torch.int64, device=device)
    slots = torch.arange(sum(lens), device=device) % block_size
    return CrossAttention(
        block_tables=rows.new_zeros(num_tokens, blocks),
        num_keys=rows.new_full((num_tokens,), lens[0]),
        query_starts=rows,
        new=SourceBatch(token_ids, slots, list(lens), TokenLoRAs(tables, torch.zeros_like(token_ids))),
    )
