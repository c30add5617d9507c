"""Decode steps padded to the sizes of graphs, without a GPU: a captured step is one that is computed again."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from multilora_engine.batch.forward_batch import ForwardBatch
from multilora_engine.execution.cuda_graphs import DecodeGraphs, DecodeInputs, graph_sizes
from multilora_kernels import LoRATables


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (4, [1, 2, 4]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 9]), (32, [1, 2, 4, 8, 16, 24, 32])],
)
def test_sizes_are_few_and_end_with_the_largest_step(max_num_seqs: int, sizes: list[int]) -> None:
    assert graph_sizes(max_num_seqs) == sizes


def test_steps_of_more_sequences_than_pay_are_not_captured() -> None:
    assert graph_sizes(4096)[-1] == 256


@pytest.mark.parametrize("wanted", [[0, 1, 2], [2, 0], [1, 2, 0], []])
def test_the_rows_that_are_wanted_come_in_their_order_whatever_they_were_before(wanted: list[int]) -> None:
    graphs = make_graphs()
    graphs.run(decode_step([7, 8, 9], [0, 2, 1]))
    batch = decode_step([4, 5, 6], wanted)
    assert graphs.serves(batch)
    logits, best = graphs.run(batch)
    assert logits.tolist() == [[4.0 + row] * 2 for row in wanted]
    assert torch.equal(best.token_ids, logits.argmax(dim=1))
    assert best.probes.tolist() == [[4.0 + row] * 3 for row in wanted]


def test_a_small_step_after_a_large_one_asks_for_no_row_of_the_large_one() -> None:
    inputs = make_inputs()
    inputs.fill(decode_step([1, 2, 3, 4], [3, 3, 3]), size=4)
    inputs.fill(decode_step([5, 6], [1]), size=2)
    assert inputs.batch(2, has_adapters=False).logits_indices.tolist() == [1, 0]


def test_more_sequences_or_rows_than_are_captured_are_not_served() -> None:
    graphs = make_graphs()
    assert not graphs.serves(decode_step([1, 2, 3, 4, 5], [0]))
    assert not graphs.serves(decode_step([1, 2], [0, 1, 1]))
    assert not graphs.serves(dataclasses.replace(decode_step([1, 2], [0]), query_lens=[2]))


def make_inputs() -> DecodeInputs:
    """For up to four sequences."""
    tables = LoRATables(torch.empty(0), *torch.zeros(4, 1, 1, dtype=torch.int64), max_rank=1)
    return DecodeInputs(4, max_blocks=2, block_size=1, scratch_block=9, tables=tables)


def make_graphs() -> DecodeGraphs:
    """Of a model of two logits, each the token itself."""

    def forward(batch: ForwardBatch, logits: torch.Tensor) -> None:
        logits.copy_(batch.input_ids[batch.logits_indices].float()[:, None].expand(-1, 2))

    return DecodeGraphs(forward, make_inputs(), [1, 2, 4], 2, torch.device("cpu"), lambda run: run)


def decode_step(token_ids: list[int], logits_indices: list[int]) -> ForwardBatch:
    n = len(token_ids)
    return ForwardBatch(
        input_ids=torch.tensor(token_ids),
        positions=torch.zeros(n, dtype=torch.int64),
        slot_mapping=torch.arange(n),
        query_lens=[1] * n,
        context_lens=[1] * n,
        num_keys=torch.ones(n, dtype=torch.int64),
        query_starts=torch.arange(n + 1),
        block_tables=torch.arange(n)[:, None],
        num_decodes=n,
        logits_indices=torch.tensor(logits_indices, dtype=torch.int64),
        block_size=1,
    )
