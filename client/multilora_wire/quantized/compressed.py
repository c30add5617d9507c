"""The storage formats of the compressed-tensors library (vllm-project/compressed-tensors 0.20.0, `compressors/`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from multilora_wire.quantized.bits import num_words, unpack
from multilora_wire.quantized.scheme import (
    SCALE_DTYPES,
    Array,
    CodeName,
    Expected,
    QuantizationError,
    QuantizedRows,
    Shape,
    StoredTensor,
    groups_of,
    ordered,
)

_ZERO_POINT = "weight_zero_point"
_GROUP_INDEX = "weight_g_idx"


@dataclass(frozen=True)
class Scales:
    """Which weights share a scale: blocks of `rows` outputs and `group_size` inputs, None for all of them.

    is_ordered: whether a checkpoint must have the group of each input.
    """

    rows: int | None
    group_size: int | None
    is_ordered: bool = False

    def shapes(self, shape: tuple[int, int]) -> tuple[Shape, ...]:
        """The shapes of the stored scales; a lone number comes with any number of dimensions."""
        out_features, in_features = shape
        num_groups = groups_of(in_features, self.group_size)[1]
        if self.rows is None and self.group_size is None:
            return (1,), (), (1, 1)
        num_rows = -(-out_features // (self.rows or out_features))
        return ((num_rows, num_groups), (num_rows,)) if num_groups == 1 else ((num_rows, num_groups),)

    def spread(self, values: Array, shape: tuple[int, int]) -> Array:
        """The stored values for every output, [out_features, groups]."""
        out_features, in_features = shape
        num_groups = groups_of(in_features, self.group_size)[1]
        rows = values.reshape(-1, num_groups)
        return rows if self.rows == 1 else np.repeat(rows, self.rows or out_features, axis=0)[:out_features]


@dataclass(frozen=True)
class _Integers:
    """The fields that both ways to store integers have. bits: of a code. is_symmetric: there are no zero points."""

    bits: int
    scales: Scales
    is_symmetric: bool
    scale_name: str = "weight_scale"
    group_index_name: str | None = _GROUP_INDEX

    @property
    def code_name(self) -> CodeName:
        return "int4" if self.bits <= 4 else "int8"

    @property
    def group_size(self) -> int | None:
        return self.scales.group_size


@dataclass(frozen=True)
class PackedIntegers(_Integers):
    """`pack-quantized`: integers in dense streams along the inputs, zero points in streams along the outputs.

    is_symmetric: then there are no zero points; files of old versions have some, and those count.
    """

    def tensors(self, shape: tuple[int, int], stored: Callable[[str], StoredTensor | None]) -> dict[str, Expected]:
        out_features, in_features = shape
        shapes = self.scales.shapes(shape)
        tensors = {
            "weight_packed": Expected(((out_features, num_words(self.bits, in_features)),), ("I32",)),
            self.scale_name: Expected(shapes, SCALE_DTYPES),
            "weight_shape": Expected(((2,),), ("I64", "I32")),
        }
        zero_point = stored(_ZERO_POINT)
        if zero_point is not None and zero_point.dtype == "I8":
            tensors[_ZERO_POINT] = Expected(shapes, ("I8",))
        elif zero_point is not None or not self.is_symmetric:
            packed = (num_words(self.bits, out_features), groups_of(in_features, self.group_size)[1])
            tensors[_ZERO_POINT] = Expected((packed,), ("I32",))
        if self.scales.is_ordered or stored(_GROUP_INDEX) is not None:
            tensors[_GROUP_INDEX] = Expected(((in_features,),), ("I32", "I64"))
        return tensors

    def rows(self, shape: tuple[int, int], tensors: Mapping[str, Array], order: Array | None) -> QuantizedRows:
        if tuple(tensors["weight_shape"].tolist()) != shape:
            raise QuantizationError(f"weight_shape holds {tensors['weight_shape'].tolist()}, expected {list(shape)}")
        packed = tensors["weight_packed"]

        def codes(first: int, count: int) -> npt.NDArray[np.uint8]:
            return unpack(packed[first : first + count], self.bits, shape[1])

        scales = self.scales.spread(tensors[self.scale_name], shape)
        return QuantizedRows(ordered(codes, order), scales, self._zeros(shape, tensors.get(_ZERO_POINT)))

    def _zeros(self, shape: tuple[int, int], stored: Array | None) -> npt.NDArray[np.uint8]:
        if stored is None:
            return _constant_zeros(shape, self.scales, self.bits)
        if stored.dtype == np.int8:
            return self.scales.spread(unsigned(_ZERO_POINT, stored, self.bits), shape)
        return unpack(stored.T, self.bits, shape[0]).T


@dataclass(frozen=True)
class PlainIntegers(_Integers):
    """`int-quantized` and `naive-quantized`: integers of `bits` in one byte each, zero points likewise."""

    def tensors(self, shape: tuple[int, int], stored: Callable[[str], StoredTensor | None]) -> dict[str, Expected]:
        shapes = self.scales.shapes(shape)
        tensors = {"weight": Expected((shape,), ("I8",)), self.scale_name: Expected(shapes, SCALE_DTYPES)}
        if stored(_ZERO_POINT) is not None or not self.is_symmetric:
            tensors[_ZERO_POINT] = Expected(shapes, ("I8",))
        if self.scales.is_ordered or stored(_GROUP_INDEX) is not None:
            tensors[_GROUP_INDEX] = Expected(((shape[1],),), ("I32", "I64"))
        return tensors

    def rows(self, shape: tuple[int, int], tensors: Mapping[str, Array], order: Array | None) -> QuantizedRows:
        weight = tensors["weight"]

        def codes(first: int, count: int) -> npt.NDArray[np.uint8]:
            return unsigned("weight", weight[first : first + count], self.bits)

        scales = self.scales.spread(tensors[self.scale_name], shape)
        zeros = tensors.get(_ZERO_POINT)
        if zeros is None:
            return QuantizedRows(ordered(codes, order), scales, _constant_zeros(shape, self.scales, self.bits))
        unsigned_zeros = unsigned(_ZERO_POINT, zeros, self.bits)
        return QuantizedRows(ordered(codes, order), scales, self.scales.spread(unsigned_zeros, shape))


@dataclass(frozen=True)
class Float8:
    """`float-quantized`, `naive-quantized` and Hugging Face's fine-grained FP8: float8_e4m3fn times scales."""

    scales: Scales
    scale_name: str = "weight_scale"
    group_index_name: str | None = None

    @property
    def code_name(self) -> CodeName:
        return "fp8"

    @property
    def group_size(self) -> int | None:
        return self.scales.group_size

    def tensors(self, shape: tuple[int, int], stored: Callable[[str], StoredTensor | None]) -> dict[str, Expected]:
        shapes = self.scales.shapes(shape)
        tensors = {"weight": Expected((shape,), ("F8_E4M3",)), self.scale_name: Expected(shapes, SCALE_DTYPES)}
        if stored(_ZERO_POINT) is not None:
            tensors[_ZERO_POINT] = Expected(shapes, ("F8_E4M3", "I8", *SCALE_DTYPES))
        return tensors

    def rows(self, shape: tuple[int, int], tensors: Mapping[str, Array], order: Array | None) -> QuantizedRows:
        assert order is None
        weight = tensors["weight"]
        if _ZERO_POINT in tensors and tensors[_ZERO_POINT].any():
            raise QuantizationError(f"{_ZERO_POINT} holds others than 0, and floats of 8 bits have no zero points")

        def codes(first: int, count: int) -> npt.NDArray[np.uint8]:
            rows: npt.NDArray[np.uint8] = weight[first : first + count]
            if ((rows & 0x7F) == 0x7F).any():
                raise QuantizationError(f"weight holds NaN in the outputs {first} to {first + count - 1}")
            return rows

        return QuantizedRows(codes, self.scales.spread(tensors[self.scale_name], shape), None)


def unsigned(name: str, values: npt.NDArray[np.int8], bits: int) -> npt.NDArray[np.uint8]:
    """values + 2 ** (bits - 1). Raises QuantizationError where one does not fit into `bits`."""
    half = 1 << (bits - 1)
    if bits < 8 and (values.min(initial=0) < -half or values.max(initial=0) >= half):
        raise QuantizationError(f"{name} holds {values.min()} to {values.max()}, which {bits} bits cannot")
    return values.view(np.uint8) + np.uint8(half)


def _constant_zeros(shape: tuple[int, int], scales: Scales, bits: int) -> npt.NDArray[np.uint8]:
    """The zeros of symmetric codes without their signs."""
    groups = groups_of(shape[1], scales.group_size)[1]
    return np.full((shape[0], groups), 1 << (bits - 1), np.uint8)
