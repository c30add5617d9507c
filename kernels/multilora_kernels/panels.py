"""Weights in the form of the CPU's kernels: panels of columns. A column is some rows side by side, item by item."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch


def copy_rows_to_columns(columns: torch.Tensor, first: int, rows: torch.Tensor) -> None:
    """Store `rows` [n, items * parts] as the rows first .. first + n of `columns` [columns, items, lanes, parts]."""
    lanes, parts, end = columns.shape[2], columns.shape[3], first + len(rows)
    # All whole columns at once, then the parts of the columns before and after them.
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

    codes: [num_panels, items, columns, lanes]. In int8 or float8_e4m3fn an item is an input; in int32 an item is the
        4-bit codes of 8 neighbouring inputs, the first one lowest. Some products need [num_panels, items, columns,
        lanes, n], where an item is n neighbouring inputs: n is 2 for products of pairs and of one digit, 4 for int8
        with several digits, and 1 for int32 if activations are rounded to bfloat16.
    scales: [num_panels, groups, columns, lanes].
    zeros: int8 or float32, of the same shape; None if all are zero. Integer codes and zeros are less by half of the
        codes' range.
    digits: 0 if activations are multiplied as floats or bfloat16, else the digits of the integers that they become
        (cpu/activation_digits.h).
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    group_size: int
    in_features: int
    digits: int


Panels = torch.Tensor | QuantizedPanels
"""The weights of operators over packed weights."""
