"""Linears with weights stored as codes of 4 or 8 bits. Neighbouring inputs of an output share a scale.

On a CPU with compiled kernels, codes are multiplied as they lie. The weight is never written out as floats. Sums are
float32, and a row's result has the same bits whatever other rows there are. If activations stay floats, nothing but the
codes is rounded, and the result has the bits of `packed_linear` with the weight in float32.

If the processor multiplies integers faster, activations beside integer codes become integers: 32 to 128 neighbouring
inputs share a power of two, so that the largest of them has 23 bits. The products are exact, and the result is as near
to the exact one as the result of floats, with one exception: the neighbours of an activation that is hundreds of times
as large lose bits. This shows if the weights of the large activation are zero.

If activations may be rounded, as bfloat16 arithmetic does, they become integers of 15 bits. Or, if the processor
multiplies pairs of bfloat16, activations are rounded to the nearest bfloat16; the products of a group are added up, and
then its scale multiplies the sum.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial

import torch
import torch.nn.functional as F

from multilora_kernels.apply import updated
from multilora_kernels.code_order import in_order, in_tiles, tile_inputs
from multilora_kernels.cpu import (
    activation_digits,
    compiled_kernels,
    panel_shape,
    rounds_activations_of_codes,
)
from multilora_kernels.dispatch import gpu_operator
from multilora_kernels.huge_pages import HugePages
from multilora_kernels.interpreter import has_gpu_operators
from multilora_kernels.linear import PackedWeight
from multilora_kernels.panels import QuantizedPanels, copy_rows_to_columns, rows_of_columns
from multilora_kernels.segments import LoRASegments
from multilora_kernels.tables import LoRATables


class CodeType(Enum):
    """The meaning of a code: an unsigned integer of 4 or 8 bits, or the byte of a float8_e4m3fn.

    Integers of 2 and 3 bits are stored as INT4, integers of 5 to 7 bits as INT8, with the same values.
    """

    INT4 = "int4"
    INT8 = "int8"
    FP8 = "fp8"

    @property
    def bits(self) -> int:
        return 4 if self is CodeType.INT4 else 8


@dataclass
class _ZeroPoints:
    """The zeros of a weight, which its parts share. of_all: None while no zero of any part differs from zero."""

    of_all: torch.Tensor | None = None
    has_readers: bool = False


class QuantizedWeight:
    """W[o, i] = scales[o, i // group_size] * (codes[o, i] - zeros[o, i // group_size]) of shape [outputs, inputs].

    group_size: how many inputs share a scale; the last group of a row may be shorter. zeros: integers, or any numbers
    where a format has minimums; only integer codes have them.
    """

    def __init__(
        self,
        out_features: int,
        in_features: int,
        code_type: CodeType,
        group_size: int,
        scale_dtype: torch.dtype,
        device: torch.device,
        *,
        zero_dtype: torch.dtype = torch.int8,
        compute_dtype: torch.dtype = torch.float32,
        may_round: bool = False,
        pages: HugePages | None = None,
    ) -> None:
        """A weight that `copy_rows` fills.

        scale_dtype: the type of the stored scales: float32, bfloat16 or float16.
        zero_dtype: the type of the stored zeros: int8 for integers; float32, which no operator of a GPU takes.
        compute_dtype: the type of the activations. The weight is packed if there is a kernel for this type.
        may_round: whether the activations of a packed weight may be rounded. They are, if this processor multiplies
            rounded ones faster.
        pages: the memory for a packed weight, best the place after the weight that a step reads before this one. None:
            memory of its own.
        """
        assert 1 <= group_size <= in_features
        self.shape = torch.Size((out_features, in_features))
        self.code_type = code_type
        self.group_size = group_size
        self.num_groups = -(-in_features // group_size)
        panels = panel_shape() if device.type == "cpu" and compute_dtype == torch.float32 else None
        self._device, self._pages = device, (pages or HugePages()) if panels else None
        self._compute_dtype = compute_dtype
        columns, lanes = panels or (1, 1)
        self._panels = (-(-out_features // (columns * lanes)), columns, lanes)
        groups = (_MULTIPLIED[code_type], group_size, in_features)
        self._rounds_to_bfloat16 = self.is_packed and may_round and rounds_activations_of_codes(*groups)
        is_integer = self.is_packed and not self._rounds_to_bfloat16
        self._digits = activation_digits(*groups, may_round) if is_integer else 0
        self._tile = 0 if self.is_packed else tile_inputs(group_size, in_features)
        self._codes = self._empty_codes()
        self._scales = self._empty(self.num_groups, scale_dtype)
        self._zero_points = _ZeroPoints()
        self._own: slice | None = None
        self._zero_dtype = zero_dtype

    @property
    def nbytes(self) -> int:
        return self._codes.nbytes + self._scales.nbytes + (0 if self._zeros is None else self._zeros.nbytes)

    @property
    def unpacked_nbytes(self) -> int:
        """The memory that `unpacked` takes."""
        _, columns, lanes = self._panels
        num_panels = -(-self.shape[0] // (columns * lanes))
        return num_panels * columns * lanes * self.shape[1] * self._compute_dtype.itemsize

    @property
    def is_packed(self) -> bool:
        """Whether kernels multiply the weight's `panels`."""
        return self._pages is not None

    @property
    def panels(self) -> QuantizedPanels:
        """The panels that the kernels of a packed weight read. Ask only when the weight is filled: the first row with
        zeros makes the panel of zeros.
        """
        assert self.is_packed
        self._zero_points.has_readers = True
        codes = self._codes.view(_MULTIPLIED[self.code_type])
        return QuantizedPanels(codes, self._scales, self._zeros, self.group_size, self.shape[1], self._digits)

    @property
    def plain(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, int, int, int]:
        """The parts of a weight that is not packed: codes, scales, zeros, group_size, in_features, bits of a code.

        Codes, scales and zeros have a row for each output. Codes are in the order of `code_order`; a byte has two codes
        of 4 bits.
        """
        assert not self.is_packed
        codes = self._codes.flatten(1)
        if self.code_type is CodeType.INT4:
            codes = codes.view(torch.uint8)
        zeros = None if self._zeros is None else self._zeros.flatten(1)
        return codes, self._scales.flatten(1), zeros, self.group_size, self.shape[1], self.code_type.bits

    def part(self, first: int, count: int) -> QuantizedWeight:
        """The outputs first .. first + count as a weight in the same memory. They begin and end with panels."""
        _, columns, lanes = self._panels
        begin, end = first // (columns * lanes), -(-(first + count) // (columns * lanes))
        part = copy.copy(self)
        part.shape = torch.Size((count, self.shape[1]))
        part._codes, part._scales = self._codes[begin:end], self._scales[begin:end]
        before = self._own.start if self._own else 0
        part._own = slice(before + begin, before + end)
        return part

    def copy_rows(self, first: int, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> None:
        """Store the outputs first .. first + n.

        codes: [n, in_features] uint8. scales: [n, num_groups]. zeros: [n, num_groups] uint8, None for FP8; float64
        where they are stored as float32. For INT4, codes and uint8 zeros are below 16. Raises ValueError for a code of
        FP8 that is not a number.
        """
        assert (zeros is None) == (self.code_type is CodeType.FP8)
        copy_rows_to_columns(self._code_columns, first, self._stored(codes))
        copy_rows_to_columns(_columns(self._scales), first, scales)
        if zeros is not None:
            wide = torch.float64 if zeros.is_floating_point() else torch.int16
            self._copy_zeros(first, zeros.to(wide) - self._middle)

    def rows(self, first: int, count: int) -> torch.Tensor:
        """The outputs first .. first + count as [count, in_features] float32."""
        codes = rows_of_columns(self._code_columns, first, count)
        scales = rows_of_columns(_columns(self._scales), first, count)
        zeros = None if self._zeros is None else rows_of_columns(_columns(self._zeros), first, count)
        return self._weights(codes, scales, zeros)

    def unpacked(self) -> PackedWeight:
        """The weight as floats, in memory of its own."""
        dtype = self._compute_dtype
        weight = PackedWeight.empty(self.shape[0], self.shape[1], dtype, self._device, dtype, HugePages())
        for first in range(0, self.shape[0], _UNPACKED_ROWS):
            weight.copy_rows(first, self.rows(first, min(_UNPACKED_ROWS, self.shape[0] - first)))
        return weight

    def rows_at(self, outputs: torch.Tensor) -> torch.Tensor:
        """Some outputs of a weight that is not packed as [len(outputs), in_features] float32. outputs: int64."""
        assert not self.is_packed
        codes, scales = self._codes[outputs].flatten(1), self._scales[outputs].flatten(1)
        return self._weights(codes, scales, None if self._zeros is None else self._zeros[outputs].flatten(1))

    @property
    def _middle(self) -> int:
        """The middle of the range of the integer codes. Stored codes are less by this number, in two's complement."""
        return 1 << (self.code_type.bits - 1)

    @property
    def _code_columns(self) -> torch.Tensor:
        """The codes as the columns of panels.py. The parts of a column are the inputs of an item of 8 bits."""
        return self._codes.view(*self._codes.shape[:2], -1, self._codes.shape[4:].numel())

    def _empty_codes(self) -> torch.Tensor:
        dtype, unit = _STORED[self.code_type], self._tile or _WORD_INPUTS
        words = -(-self.shape[1] // unit) * unit // _WORD_INPUTS
        if self.code_type is CodeType.INT4:
            return self._empty(words, dtype, (1,) if self._rounds_to_bfloat16 else ())
        if self._rounds_to_bfloat16 or self._digits:
            inputs = _BYTE_ITEM if self._digits > 1 else _PAIR
            return self._empty(words * _WORD_INPUTS // inputs, dtype, (inputs,))
        return self._empty(words * _WORD_INPUTS if self._tile else self.shape[1], dtype)

    def _empty(self, items: int, dtype: torch.dtype, parts: tuple[int, ...] = ()) -> torch.Tensor:
        """Memory for the whole weight, also where this is a part of it."""
        panels, columns, lanes = self._panels
        shape = (panels, items, columns, lanes, *parts)
        return self._pages.zeros(shape, dtype) if self._pages else torch.zeros(shape, dtype=dtype, device=self._device)

    def _stored(self, codes: torch.Tensor) -> torch.Tensor:
        """codes: [n, in_features]. Returns [n, items], or items of several inputs as these inputs."""
        if self.code_type is CodeType.FP8:
            if ((codes & 0x7F) == 0x7F).any():
                raise ValueError("a code of float8_e4m3fn is not a number")
            return self._padded(codes)
        padded = self._padded(codes ^ self._middle)
        if self.code_type is CodeType.INT8:
            return padded.view(torch.int8)
        return (padded[:, 0::2] | padded[:, 1::2] << 4).view(torch.int32)

    def _padded(self, codes: torch.Tensor) -> torch.Tensor:
        """The codes of the inputs, in the order in which they are stored, with zeros for inputs beyond the last one."""
        if self._tile:
            return in_tiles(codes, self._tile, self.code_type.bits)
        inputs = self._codes[0, :, 0, 0].numel() * (_WORD_INPUTS if self.code_type is CodeType.INT4 else 1)
        return F.pad(codes, (0, inputs - codes.shape[1]))

    @property
    def _zeros(self) -> torch.Tensor | None:
        of_all = self._zero_points.of_all
        return of_all if of_all is None or self._own is None else of_all[self._own]

    def _copy_zeros(self, first: int, zeros: torch.Tensor) -> None:
        points = self._zero_points
        if points.of_all is None and zeros.any():
            assert not points.has_readers, "panels were read before the weight was filled"
            points.of_all = self._empty(self.num_groups, self._zero_dtype)
        if self._zeros is not None:
            copy_rows_to_columns(_columns(self._zeros), first, zeros)

    def _weights(self, codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> torch.Tensor:
        """codes: as `_stored`; scales, zeros: [n, num_groups]. Returns [n, in_features] float32."""
        groups = torch.arange(self.shape[1], device=codes.device) // self.group_size
        values = self._values(codes)
        values = (in_order(values, self._tile, self.code_type.bits) if self._tile else values)[:, : self.shape[1]]
        return (values if zeros is None else values - zeros.float()[:, groups]) * scales.float()[:, groups]

    def _values(self, codes: torch.Tensor) -> torch.Tensor:
        if self.code_type is CodeType.FP8:
            return codes.view(torch.float8_e4m3fn).float()
        if self.code_type is CodeType.INT8:
            return codes.float()
        pairs = codes.view(torch.uint8)
        values = torch.stack((pairs & 15, pairs >> 4), dim=-1).flatten(1)
        return (values ^ self._middle).float() - self._middle


_UNPACKED_ROWS = 1024
"""How many outputs are unpacked at a time. The int64 indices and copies of a whole weight would be several times its
size."""

_WORD_INPUTS = 8
"""The inputs in one word of 4-bit codes. For products of pairs, the inputs of all codes are padded to a multiple."""

_PAIR = 2
"""The inputs with 8-bit codes side by side, for products of pairs or of activations of one digit."""

_BYTE_ITEM = 4
"""The same for activations of several digits. A digit is a byte."""

_STORED = {CodeType.INT4: torch.int32, CodeType.INT8: torch.int8, CodeType.FP8: torch.uint8}
_MULTIPLIED = {**_STORED, CodeType.FP8: torch.float8_e4m3fn}
"""The type of an item as it is stored, and the type that kernels take."""


def _columns(data: torch.Tensor) -> torch.Tensor:
    """Panels as the columns of panels.py: [num_panels, items, outputs of a panel, 1]."""
    return data.view(*data.shape[:2], -1, 1)


def quantized_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x W^T + bias.

    x: [rows, in_features]; float32 if the weight is packed. bias: [out_features] in the dtype of x. Returns
    [rows, out_features] in the dtype of x.
    """
    if not weight.is_packed:
        if has_gpu_operators(x.device):
            return gpu_operator("quantized_linear")(x, weight, bias)  # type: ignore[no-any-return]
        return F.linear(x, weight.rows(0, weight.shape[0]).to(x.dtype), bias)
    y: torch.Tensor = compiled_kernels().packed_linear(x, weight.panels, weight.shape[0], bias)
    return y


def quantized_lora_linear(
    x: torch.Tensor,
    weight: QuantizedWeight,
    tables: LoRATables,
    first_slice: int,
    slice_sizes: Sequence[int],
    segments: LoRASegments,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`quantized_linear`, then `lora_apply`, then the bias. The arguments are theirs, and the result has the same bits.

    With packed weights all of it is one parallel region, as in `lora_linear`.
    """
    if not weight.is_packed:
        return updated(partial(quantized_linear, x, weight), x, tables, first_slice, slice_sizes, segments, bias)
    packed = (x, weight.panels, tables, first_slice, slice_sizes, segments, bias)
    return compiled_kernels().lora_linear(*packed)  # type: ignore[no-any-return]


def quantized_embedding(token_ids: torch.Tensor, weight: QuantizedWeight, dtype: torch.dtype) -> torch.Tensor:
    """The rows `token_ids` of W as `dtype`, [tokens, in_features].

    token_ids: [tokens] int64, within W. dtype: float32 if the weight is packed.
    """
    if not weight.is_packed:
        return weight.rows_at(token_ids).to(dtype)
    assert dtype == torch.float32
    return compiled_kernels().packed_embedding(token_ids, weight.panels, weight.shape[0])  # type: ignore[no-any-return]
