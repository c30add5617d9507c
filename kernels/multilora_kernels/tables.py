"""The places of the weights of every adapter of a step: one arena of pages, and tables of offsets and ranks into it."""

from __future__ import annotations

from typing import NamedTuple

import torch


class LoRATables(NamedTuple):
    """Static tensors. They are written only when an adapter comes or goes; a step only reads them.

    Column `s` of a table is one *slice*: one output of one linear of one layer. The outputs of a fused linear, such as
    q, k and v, are neighbours; otherwise the order is the model's. Row `l` is a `lora_index`. The slice's A is
    `arena[a_offset : a_offset + rank * in]` read as `[rank, in]` row-major, its B is
    `arena[b_offset : b_offset + out * rank]` read as `[out, rank]` row-major; the scaling is already in B. Slices of a
    fused row share one A. An arena of int8, float8_e4m3fn or uint8 holds codes of 8, 8 or 4 bits there, as
    `adapter_codes` says, from multiples of 16 elements on.

    arena: [num_elements], on the device, in the adapters' dtype: float32, bfloat16, float16, or a dtype of codes.
    rank: [max_loras, num_slices], int32; 0 means the adapter does not touch the slice: no work, offsets undefined.
    a_offset, b_offset: [max_loras, num_slices], int64, in elements of `arena`.
    magnitude_offset: [max_loras, num_slices], int64, the place of DoRA's normalised magnitude `[out]`, or -1 without
        one. Beside codes the magnitude is float32 and begins at a multiple of 4 elements.
    max_rank: no rank in the table is larger.

    A tuple, because every linear of a step hands it to C++, where ten attributes take a fifth of a microsecond to read.
    """

    arena: torch.Tensor
    rank: torch.Tensor
    a_offset: torch.Tensor
    b_offset: torch.Tensor
    magnitude_offset: torch.Tensor
    max_rank: int


class ExpertLoRA(NamedTuple):
    """The adapters of the experts of one layer. Expert e has the column `gate_column + e` of the tables, and so on.

    mapping: [num_tokens] int64, the row of the tables for each token, or -1 for the base model.
    """

    tables: LoRATables
    mapping: torch.Tensor
    gate_column: int
    up_column: int
    down_column: int
