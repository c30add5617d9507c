"""The oracle itself, against the textbook formula token by token."""

from __future__ import annotations

import pytest
import torch
from support.lora_cases import ODD, make_case

from multilora_kernels import reference


def _matrix(tables, offsets, lora_index, s, rows, cols):
    offset = offsets[lora_index, s]
    return tables.arena[offset : offset + rows * cols].double().reshape(rows, cols)


def _textbook(case):
    """y + B (A x), times the magnitude where there is one, for one token after the other."""
    tables, y = case.tables, case.y.double()
    for token, lora_index in enumerate(case.mapping.tolist()):
        start = 0
        for s, size in enumerate(case.shape.slice_sizes):
            rank = int(tables.rank[lora_index, s]) if lora_index >= 0 else 0
            if rank:
                a = _matrix(tables, tables.a_offset, lora_index, s, rank, case.shape.in_features)
                b = _matrix(tables, tables.b_offset, lora_index, s, size, rank)
                y[token, start : start + size] += b @ (a @ case.x[token].double())
                if tables.magnitude_offset[lora_index, s] >= 0:
                    m = _matrix(tables, tables.magnitude_offset, lora_index, s, 1, size)
                    y[token, start : start + size] *= m[0]
            start += size
    return y


@pytest.mark.parametrize("magnitudes", [False, True])
@pytest.mark.parametrize("popularity", ["zipf", "skewed"])
def test_shrink_and_expand_together_are_the_textbook_update(popularity, magnitudes):
    case = make_case(popularity, 19, ODD, magnitudes=magnitudes)
    v, y = case.expected_v(), case.y.double()
    reference.lora_expand(v, y, case.tables, 0, ODD.slice_sizes, case.segments)
    torch.testing.assert_close(y, _textbook(case))
