"""The yardstick of what a machine multiplies leaves torch as it was."""

from __future__ import annotations

import torch

from benchmarks.matrix_rate import matrix_rate


def test_threads_multiply_each_by_itself_and_torch_has_as_many_as_before() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert matrix_rate(seconds=0.001) > 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
