"""Captured steps compared with the same steps launched kernel by kernel, once at start.

A graph that reads other memory than it should, or work that was not captured, gives wrong tokens and no error.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, product

import torch

from multilora_engine.batch.forward_batch import ForwardBatch, KVCache, TokenLoRAs
from multilora_engine.execution.cuda_graphs import DecodeGraphs
from multilora_engine.execution.piecewise_graphs import PiecewiseGraphs
from multilora_engine.models.model import Model
from multilora_kernels import LoRATables
from multilora_kernels.self_test import TOLERANCES

_PRIME = 7919
"""Spreads tokens over the vocabulary."""


class GraphFault(Exception):
    """A captured step gives other logits than its kernels one by one."""


@torch.inference_mode()
def check_graphs(
    graphs: DecodeGraphs,
    forward: Callable[[ForwardBatch], torch.Tensor],
    tables: LoRATables,
    num_blocks: int,
    block_size: int,
    vocab_size: int,
    dtype: torch.dtype,
) -> None:
    """Every graph, full and with a row of padding, with two sets of tokens. Raises GraphFault.

    forward: computes a step at once. num_blocks: of a cache that holds nothing yet. dtype: of the model.
    """
    for size, tokens_of, has_adapters in product(graphs.sizes, (1, 2), (True, False)):
        num_rows = size if tokens_of == 1 else max(1, size - 1)
        batch = _first_step(num_rows, tokens_of, tables, num_blocks, block_size, vocab_size, has_adapters)
        _compare(graphs.run(batch), forward(batch), dtype, f"{size} sequences", has_adapters)


@torch.inference_mode()
def check_pieces(graphs: PiecewiseGraphs, model: Model, kv_cache: KVCache, tables: LoRATables, block_size: int) -> None:
    """Every size of steps with prompts, full and with padding, with two sets of tokens. Raises GraphFault."""
    for size, tokens_of, has_adapters in product(graphs.sizes, (1, 2), (True, False)):
        num_tokens = size if tokens_of == 1 else max(1, size - 1)
        batch = _prompts(num_tokens, tokens_of, tables, block_size, model.config.vocab_size, has_adapters)
        expected = model.forward(batch, kv_cache)
        actual = model.logits(graphs.run(batch), batch.logits_indices, batch.lora)
        _compare(actual, expected, model.dtype, f"{size} tokens", has_adapters)


def _compare(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype, size: str, has_adapters: bool) -> None:
    error = ((actual - expected).abs().max() / (TOLERANCES[dtype] * expected.abs().max())).item()
    # So that a NaN is an error, too.
    if not error <= 1:
        raise GraphFault(
            f"the CUDA graph of {size} {'with' if has_adapters else 'without'} adapters gives other logits than its "
            f"kernels one by one: the largest difference is {error:.3g} times the allowed one"
        )


def _prompts(
    num_tokens: int, tokens_of: int, tables: LoRATables, block_size: int, vocab_size: int, has_adapters: bool
) -> ForwardBatch:
    """First tokens of sequences of a block each, all in block 0: those of one position are the same, and so write the
    same.
    """
    tokens = torch.arange(num_tokens, device=tables.rank.device)
    positions = tokens % block_size
    lens = [min(block_size, num_tokens - start) for start in range(0, num_tokens, block_size)]
    ends = torch.tensor([0, *accumulate(lens)], device=tokens.device)
    return ForwardBatch(
        input_ids=(positions + tokens_of) * _PRIME % vocab_size,
        positions=positions,
        slot_mapping=positions,
        query_lens=lens,
        context_lens=lens,
        num_keys=ends.diff(),
        query_starts=ends,
        block_tables=ends.new_zeros(len(lens), 1),
        num_decodes=0,
        logits_indices=ends[1:] - 1,
        block_size=block_size,
        lora=TokenLoRAs(tables, torch.zeros_like(tokens)) if has_adapters else None,
    )


def _first_step(
    num_rows: int,
    tokens_of: int,
    tables: LoRATables,
    num_blocks: int,
    block_size: int,
    vocab_size: int,
    has_adapters: bool,
) -> ForwardBatch:
    """A first token of each row's sequence. Rows that share a block have one token and adapter, and write the same."""
    rows = torch.arange(num_rows, device=tables.rank.device)
    blocks = rows % num_blocks
    return ForwardBatch(
        input_ids=(blocks + tokens_of) * _PRIME % vocab_size,
        positions=torch.zeros_like(rows),
        slot_mapping=blocks * block_size,
        query_lens=[1] * num_rows,
        context_lens=[1] * num_rows,
        num_keys=torch.ones_like(rows),
        query_starts=torch.arange(num_rows + 1, device=rows.device),
        block_tables=blocks[:, None],
        num_decodes=num_rows,
        logits_indices=rows,
        block_size=block_size,
        lora=TokenLoRAs(tables, blocks % len(tables.rank)) if has_adapters else None,
    )
