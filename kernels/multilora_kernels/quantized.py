"""Linears whose weights are stored as codes of 4 or 8 bits, with a scale for some neighbouring inputs of each output.

Codes are multiplied as they lie; nothing of the size of the weight is ever written as floats. The rounding that made
the codes is the only one: activations stay floats, sums are float32, and a row's result is the same bits whatever other
rows there are.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum

import torch
import torch.nn.functional as F

from multilora_kernels.apply import lora_apply
from multilora_kernels.segments import LoRASegments
from multilora_kernels.tables import LoRATables


class CodeType(Enum):
    """The meaning of a code: an unsigned integer of 4 or 8 bits, or a float8_e4m3fn's byte.

    Integers of 2 and 3 bits are stored as INT4, those of 5 to 7 as INT8, with the same values.
    """

    INT4 = "int4"
    INT8 = "int8"
    FP8 = "fp8"

    @property
    def bits(self) -> int:
        return 4 if self is CodeType.INT4 else 8


class QuantizedWeight:
    """W[o, i] = scales[o, i // group_size] * (codes[o, i] - zeros[o, i // group_size]) of shape [outputs, inputs].

    group_size: inputs that share a scale; the last group of a row may be shorter. zeros: integers, of the integer codes
    only. scale_dtype: of the stored scales.
    """

    def __init__(
        self,
        out_features: int,
        in_features: int,
        code_type: CodeType,
        group_size: int,
        scale_dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """An uninitialised weight, to be filled by `copy_rows`."""
        assert 1 <= group_size <= in_features
        self.shape = torch.Size((out_features, in_features))
        self.code_type = code_type
        self.group_size = group_size
        self.num_groups = -(-in_features // group_size)
        columns = -(-in_features // 2) if code_type is CodeType.INT4 else in_features
        self._codes = torch.empty(out_features, columns, dtype=torch.uint8, device=device)
        self._scales = torch.empty(out_features, self.num_groups, dtype=scale_dtype, device=device)
        self._zeros = torch.empty(out_features, self.num_groups, dtype=torch.uint8, device=device)

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes + self._zeros.nbytes

    def copy_rows(self, first: int, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> None:
        """Store the outputs first .. first + n.

        codes: [n, in_features] uint8, below 16 for INT4. scales: [n, num_groups]. zeros: [n, num_groups] uint8, None
        for FP8.
        """
        rows = slice(first, first + len(codes))
        if self.code_type is CodeType.INT4:
            even = F.pad(codes, (0, codes.shape[1] % 2))
            codes = even[:, 0::2] | even[:, 1::2] << 4
        self._codes[rows] = codes
        self._scales[rows] = scales
        self._zeros[rows] = 0 if zeros is None else zeros

    def rows(self, first: int, count: int) -> torch.Tensor:
        """The outputs first .. first + count as [count, in_features] float32."""
        rows = slice(first, first + count)
        values = self._values(self._codes[rows])
        groups = torch.arange(self.shape[1], device=values.device) // self.group_size
        return (values - self._zeros[rows].float()[:, groups]) * self._scales[rows].float()[:, groups]

    def _values(self, codes: torch.Tensor) -> torch.Tensor:
        if self.code_type is CodeType.FP8:
            return codes.view(torch.float8_e4m3fn).float()
        if self.code_type is CodeType.INT4:
            codes = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)[:, : self.shape[1]]
        return codes.float()


def quantized_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + bias.

    x: [rows, in_features], bias: [out_features] in the dtype of x. Returns [rows, out_features] in the dtype of x.
    """
    return F.linear(x, weight.rows(0, weight.shape[0]).to(x.dtype), bias)


def quantized_lora_linear(
    x: torch.Tensor,
    weight: QuantizedWeight,
    tables: LoRATables,
    first_slice: int,
    slice_sizes: Sequence[int],
    segments: LoRASegments,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`quantized_linear`, then `lora_apply`, then the bias, with their arguments and, bit for bit, their result."""
    y = quantized_linear(x, weight)
    lora_apply(x, y, tables, first_slice, slice_sizes, segments)
    return y if bias is None else y.add_(bias)


def quantized_embedding(token_ids: torch.Tensor, weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The rows `token_ids` of W as `dtype`, [tokens, in_features]. token_ids: [tokens] int64, within W."""
    rows = [weight.rows(token, 1) for token in token_ids.tolist()]
    return torch.cat(rows).to(dtype) if rows else torch.empty(0, weight.shape[1], dtype=dtype)
