"""Decode steps padded to the sizes of graphs, without a GPU: a captured step is one that is computed again."""

from __future__ import annotations

import pytest

from multilora_engine.cuda_graphs import graph_sizes


@pytest.mark.parametrize(
    ("max_num_seqs", "sizes"),
    [(1, [1]), (3, [1, 2, 3]), (4, [1, 2, 4]), (8, [1, 2, 4, 8]), (9, [1, 2, 4, 8, 9]), (32, [1, 2, 4, 8, 16, 24, 32])],
)
def test_sizes_are_few_and_end_with_the_largest_step(max_num_seqs: int, sizes: list[int]) -> None:
    assert graph_sizes(max_num_seqs) == sizes


def test_steps_of_more_sequences_than_pay_are_not_captured() -> None:
    assert graph_sizes(4096)[-1] == 256
