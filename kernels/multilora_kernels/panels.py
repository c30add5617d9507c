"""Weights as the CPU's kernels read them, in panels of columns: a column is some rows side by side, item by item."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch


def copy_rows_to_columns(columns: torch.Tensor, first: int, rows: torch.Tensor) -> None:
    """Store `rows` [n, items * parts] as the rows first .. first + n of `columns` [columns, items, lanes, parts]."""
    lanes, parts, end = columns.shape[2], columns.shape[3], first + len(rows)
    # All whole columns at once, and the parts of others before and behind them.
    edges = {first, min(-(-first // lanes) * lanes, end), max(end // lanes * lanes, first), end}
    for begin, stop in itertools.pairwise(sorted(edges)):
        some = columns[begin // lanes : -(-stop // lanes)]
        width = (stop - begin) // len(some)
        part = rows[begin - first : stop - first].reshape(len(some), width, -1, parts)
        some[:, :, begin % lanes : begin % lanes + width].copy_(part.transpose(1, 2))


def rows_of_columns(columns: torch.Tensor, first: int, count: int) -> torch.Tensor:
    """A copy of the rows first .. first + count of `columns` [columns, items, lanes, parts]: [count, items * parts]."""
    lanes = columns.shape[2]
    some = columns[first // lanes : -(-(first + count) // lanes)]
    rows = some.transpose(1, 2).flatten(2).flatten(0, 1)[first % lanes :][:count]
    return rows.clone(memory_format=torch.contiguous_format)


class QuantizedPanels(NamedTuple):
    """The panels of a quantised weight, as the CPU's operators take them.

    codes: [num_panels, items, columns, lanes]; int8 or float8_e4m3fn, an item an input, or int32, an item the codes of
    4 bits of 8 neighbouring inputs, the first one lowest. For other products [num_panels, items, columns, lanes, n]
    with the neighbouring inputs of an item: n is 2 for those of pairs and of one digit, 4 for int8 and those of several
    digits, and 1 for int32 where activations are rounded to bfloat16. scales:
    [num_panels, groups, columns, lanes]. zeros: the same in int8, or None where all are zero. Integer codes and zeros
    are less by half of the codes' range. digits: 0 where activations are multiplied as floats or as bfloat16, else
    those of the integers that they become (cpu/activation_digits.h).
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_size: int
    in_features: int
    digits: int


Panels = torch.Tensor | QuantizedPanels
"""The weights that the operators over packed weights multiply with."""
