"""The GPU operators of adapters over all linears of a batch, with tiles to try."""

from __future__ import annotations

import torch

from benchmarks.lora_workloads import Batch
from multilora_kernels.cuda import lora_expand, lora_shrink
from multilora_kernels.cuda.block_sizes import BlockSizes
from multilora_kernels.cuda.update import is_one_launch, lora_update


def shrink_all(batch: Batch, sizes: BlockSizes | None = None) -> list[torch.Tensor]:
    """The v of every linear. sizes: to try others than the table's."""
    return [
        lora_shrink(batch.x[i], batch.tables, column, shape.num_slices, batch.segments, sizes)
        for column, i, shape in batch.linears
    ]


def expand_all(batch: Batch, v: list[torch.Tensor], sizes: BlockSizes | None = None) -> None:
    """The update of every linear. sizes: as of `shrink_all`."""
    for (column, i, shape), v_of_linear in zip(batch.linears, v, strict=True):
        lora_expand(v_of_linear, batch.y[i], batch.tables, column, shape.slice_sizes, batch.segments, sizes)


def update_all(batch: Batch, sizes: BlockSizes) -> None:
    """Shrink and expand in one launch a linear, of the linears that this serves."""
    for column, i, shape in batch.linears:
        if is_one_launch(shape.in_features, batch.tables.max_rank, batch.segments.chunk_size):
            lora_update(batch.x[i], batch.y[i], batch.tables, column, shape.slice_sizes, batch.segments, sizes)
