"""Linears with weights that are packed once, at load, so that a step reads each weight once, even for few rows.

On a CPU, a decode step can be as fast as its weights' bytes come from memory, if it reads them in order. Libraries'
matrix products reach this neither for one row nor for sixteen. `packed_linear` reaches it, and takes weights of 16 bits
as they are stored. A row's result has the same bits whatever other rows there are.

In bfloat16 a packed linear takes and returns float32 and adds its products in float32. If the processor multiplies
pairs of bfloat16 faster than floats, the linear rounds its activations to the nearest bfloat16. Nothing else is
rounded: values between linears need no rounding, and rounding them would save nothing.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from multilora_kernels.cpu import (
    compiled_kernels,
    panel_shape,
    panels_are_tiles,
    rounds_activations,
)
from multilora_kernels.huge_pages import HugePages
from multilora_kernels.panels import copy_rows_to_columns, rows_of_columns


class PackedWeight:
    """The weight [out_features, in_features] of a linear or of an embedding, in the layout of its device.

    data: on a CPU with compiled kernels, panels [num_panels, columns, in_features, lanes]. A column holds `lanes`
    outputs, input by input, or by pairs of inputs if `is_tiled`, and zeros beyond `out_features`. All columns of a
    panel are read side by side, because a processor prefetches some lines for each place at which it reads. If
    activations are rounded to bfloat16, panels are [num_panels, columns, in_features / 2, lanes, 2], always by pairs.
    On other devices data is [out_features, in_features].
    """

    def __init__(self, data: torch.Tensor, out_features: int, is_tiled: bool = False) -> None:
        self.data = data
        in_features = data.shape[1] if data.dim() == 2 else data.shape[2] * data.shape[4:].numel()
        self.shape = torch.Size((out_features, in_features))
        self.is_tiled = is_tiled or data.dim() == 5

    @classmethod
    def empty(
        cls,
        out_features: int,
        in_features: int,
        dtype: torch.dtype,
        device: torch.device,
        compute_dtype: torch.dtype,
        pages: HugePages,
    ) -> PackedWeight:
        """A weight stored as `dtype`, for products in `compute_dtype`. `copy_rows` fills it.

        It is packed if a kernel takes activations of the `activation_dtype`: float32, on a CPU with a compiler.

        pages: the memory for a packed weight. Best is the place after the weight that a step reads before this one.
        """
        takes_float32 = device.type == "cpu" and activation_dtype(compute_dtype, device) == torch.float32
        shape = panel_shape() if takes_float32 else None
        if shape is None:
            return cls(torch.empty(out_features, in_features, dtype=dtype, device=device), out_features)
        columns, lanes = shape
        num_panels = -(-out_features // (columns * lanes))
        if compute_dtype == torch.bfloat16 and rounds_activations(dtype, in_features):
            return cls(pages.zeros((num_panels, columns, in_features // 2, lanes, 2), dtype), out_features)
        panels = pages.zeros((num_panels, columns, in_features, lanes), dtype)
        return cls(panels, out_features, panels_are_tiles(dtype, in_features))

    @property
    def is_packed(self) -> bool:
        """Whether `data` is panels."""
        return self.data.dim() > 2

    def part(self, first: int, count: int) -> PackedWeight:
        """The outputs first .. first + count as a weight in the same memory. They begin and end with panels."""
        if not self.is_packed:
            return PackedWeight(self.data[first : first + count], count)
        width = self.data.shape[1] * self.data.shape[3]
        panels = self.data[first // width : -(-(first + count) // width)]
        return PackedWeight(panels, count, self.is_tiled)

    def copy_rows(self, first: int, rows: torch.Tensor) -> None:
        """Store `rows` [n, in_features], of any float dtype, as the outputs first .. first + n."""
        if not self.is_packed:
            self.data[first : first + len(rows)].copy_(rows)
            return
        copy_rows_to_columns(self._columns, first, rows)

    def rows(self, first: int, count: int) -> torch.Tensor:
        """A copy of the outputs first .. first + count, [count, in_features] in the storage dtype."""
        if not self.is_packed:
            return self.data[first : first + count].clone()
        return rows_of_columns(self._columns, first, count)

    @property
    def _columns(self) -> torch.Tensor:
        """[columns of all panels, in_features / n, lanes, n]: n neighbouring inputs of an output lie side by side.

        n is 1, or 2 if `is_tiled`: a matrix unit's tile is the weights of 32 inputs for 16 outputs, as `tdpbf16ps`
        takes them (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2).
        """
        inputs = 2 if self.is_tiled else 1
        return self.data.view(-1, self.shape[1] // inputs, self.data.shape[3], inputs)


def activation_dtype(compute_dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The type of the activations around linears that compute in `compute_dtype`.

    float32 for bfloat16 on a CPU with compiled kernels; else `compute_dtype`.
    """
    is_packed = compute_dtype == torch.bfloat16 and device.type == "cpu" and panel_shape() is not None
    return torch.float32 if is_packed else compute_dtype


def packed_linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + bias in the arithmetic of x, or in the arithmetic for which the weight is packed.

    x: [rows, in_features]; float32 if the weight is packed. bias: [out_features] in the dtype of x.
    Returns [rows, out_features] in the dtype of x. With packed weights a product differs from the exact one by at most
    in_features * 2^-24 * sum_k |x_k W_k|, apart from parts below the normal numbers. If x is rounded, "exact" means
    the product of the rounded x.
    """
    if not weight.is_packed:
        return F.linear(x, weight.data.to(x.dtype), bias)
    y: torch.Tensor = compiled_kernels().packed_linear(x, weight.data, weight.shape[0], bias)
    return y


def float32_linear(x: torch.Tensor, weight: PackedWeight, out: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T in float32, [rows, out_features]: the logits of a head. x: as of `packed_linear`.

    out: for the result. A GPU writes its sums there as they are, without a product in the type of x between.
    """
    if not _sums_into_float32(x):
        y = packed_linear(x, weight).float()
        return y if out is None else out.copy_(y)
    matrix = weight.data.to(x.dtype).T
    if x.dtype == torch.float32:
        return torch.mm(x, matrix, out=out)
    return torch.mm(x, matrix, out_dtype=torch.float32, out=out)


def _sums_into_float32(x: torch.Tensor) -> bool:
    """Whether torch multiplies matrices of 16 bits into one of float32 there."""
    return x.is_cuda


def packed_embedding(token_ids: torch.Tensor, weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The rows `token_ids` of W as `dtype`, [tokens, in_features]. So a tied embedding uses the head's weights.

    token_ids: [tokens] int64, within W. dtype: float32 if the weight is packed.
    """
    if not weight.is_packed:
        return F.embedding(token_ids, weight.data).to(dtype)
    assert dtype == torch.float32
    return compiled_kernels().packed_embedding(token_ids, weight.data, weight.shape[0])  # type: ignore[no-any-return]
