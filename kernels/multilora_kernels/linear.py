"""Linears whose weights are packed once, at load, so that a step reads each of them once however few rows it has.

On a CPU a decode step costs what its weights' bytes cost, if they are read in the order in which they lie. Libraries'
matrix products reach that for neither one row nor sixteen; `packed_linear` does, and takes weights of 16 bits as they
are stored. A row's result is the same bits whatever other rows there are.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from multilora_kernels import operators
from multilora_kernels.cpu import (
    packed_embedding_directly,
    packed_linear_directly,
    panel_width,
    panels_are_tiles,
)
from multilora_kernels.dispatch import load_operators
from multilora_kernels.huge_pages import HugePages


class PackedWeight:
    """The weight [out_features, in_features] of a linear or of an embedding, in the layout of its device.

    data: on a CPU with compiled kernels [num_panels, in_features, panel_width]: panel p holds the outputs from
    p * panel_width on, input by input, and zeros beyond `out_features`; with `is_tiled` in the order of `_tiles`.
    Elsewhere [out_features, in_features].
    """

    def __init__(self, data: torch.Tensor, out_features: int, is_tiled: bool = False) -> None:
        self.data = data
        self.shape = torch.Size((out_features, data.shape[1]))
        self.is_tiled = is_tiled

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
        """A weight to be filled by `copy_rows`, stored as `dtype`, for activations of `compute_dtype`.

        It is packed where a kernel for that exists: on a CPU for float32 activations, if there is a compiler.
        pages: where a packed one lies, best behind the one that a step reads before it.
        """
        width = panel_width() if device.type == "cpu" and compute_dtype == torch.float32 else None
        if width is None:
            return cls(torch.empty(out_features, in_features, dtype=dtype, device=device), out_features)
        panels = pages.zeros((-(-out_features // width), in_features, width), dtype)
        return cls(panels, out_features, panels_are_tiles(dtype, in_features))

    @property
    def is_packed(self) -> bool:
        """Whether `data` is panels."""
        return self.data.dim() == 3

    def copy_rows(self, first: int, rows: torch.Tensor) -> None:
        """Store `rows` [n, in_features], of any float dtype, as the outputs first .. first + n."""
        if not self.is_packed:
            self.data[first : first + len(rows)].copy_(rows)
            return
        width, end = self.data.shape[2], first + len(rows)
        for panel in range(first // width, -(-end // width)):
            begin, stop = max(first, panel * width), min(end, (panel + 1) * width)
            self._copy_lanes(panel, begin - panel * width, rows[begin - first : stop - first])

    def rows(self, first: int, count: int) -> torch.Tensor:
        """A copy of the outputs first .. first + count, [count, in_features] in the storage dtype."""
        if not self.is_packed:
            return self.data[first : first + count].clone()
        width = self.data.shape[2]
        panels = self.data[first // width : -(-(first + count) // width)]
        outputs = _tiles(panels).permute(0, 1, 4, 2, 3, 5) if self.is_tiled else panels.transpose(1, 2)
        return outputs.reshape(-1, self.shape[1])[first % width :][:count].clone()

    def _copy_lanes(self, panel: int, first: int, rows: torch.Tensor) -> None:
        """Store some outputs of a panel, from its output `first` on."""
        if not self.is_tiled:
            self.data[panel, :, first : first + len(rows)].copy_(rows.T)
            return
        tiles, end = _tiles(self.data)[panel], first + len(rows)
        num_outputs = tiles.shape[3]
        for column in range(first // num_outputs, -(-end // num_outputs)):
            begin, stop = max(first, column * num_outputs), min(end, (column + 1) * num_outputs)
            lanes = slice(begin - column * num_outputs, stop - column * num_outputs)
            pairs = rows[begin - first : stop - first].reshape(stop - begin, *tiles.shape[1:3], 2)
            tiles[column, :, :, lanes].copy_(pairs.permute(1, 2, 0, 3))


def _tiles(panels: torch.Tensor) -> torch.Tensor:
    """[num_panels, panel_width / 16, in_features / 32, 16, 16, 2]: what a matrix unit's registers hold, one tile each.

    A tile is the weights of 32 inputs for 16 outputs: by pairs of inputs, the two weights of every output side by side,
    as `tdpbf16ps` takes them (Intel 64 and IA-32 Architectures Software Developer's Manual, volume 2).
    """
    num_panels, in_features, width = panels.shape
    return panels.view(num_panels, width // 16, in_features // 32, 16, 16, 2)


def packed_linear(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + bias in the arithmetic of x, whatever the weight is stored as.

    x: [rows, in_features]; float32 where the weight is packed. bias: [out_features] in the dtype of x.
    Returns [rows, out_features] in the dtype of x.
    """
    if not weight.is_packed:
        return F.linear(x, weight.data.to(x.dtype), bias)
    y = _multiply_panels(x, weight)
    return y if bias is None else y.add_(bias)


def _multiply_panels(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    out_features = weight.shape[0]
    if not torch.compiler.is_compiling() and (y := packed_linear_directly(x, weight.data, out_features)) is not None:
        return y
    load_operators(x)
    return operators.call_packed_linear(x, weight.data, out_features)


def packed_embedding(token_ids: torch.Tensor, weight: PackedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The rows `token_ids` of W as `dtype`, [tokens, in_features]: a head's weights serve a tied embedding as they lie.

    token_ids: [tokens] int64, within W; dtype: float32 where the weight is packed.
    """
    if not weight.is_packed:
        return F.embedding(token_ids, weight.data).to(dtype)
    assert dtype == torch.float32
    num_embeddings = weight.shape[0]
    is_eager = not torch.compiler.is_compiling()
    if is_eager and (rows := packed_embedding_directly(token_ids, weight.data, num_embeddings)) is not None:
        return rows
    load_operators(weight.data)
    return operators.call_packed_embedding(token_ids, weight.data, num_embeddings)
