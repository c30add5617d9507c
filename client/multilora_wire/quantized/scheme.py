"""`Scheme`: how one linear of a checkpoint is stored as codes, by any tool."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

CodeName = Literal["int4", "int8", "fp8"]
Array = npt.NDArray[Any]
Shape = tuple[int, ...]

SCALE_DTYPES = ("F16", "BF16", "F32")


class QuantizationError(ValueError):
    """A checkpoint, or its own description, is not served. Its message names the tensor or the key."""


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a checkpoint, as the header of its file has it. dtype: safetensors' name, such as `BF16`."""

    dtype: str
    shape: Shape


@dataclass(frozen=True)
class Expected:
    """The shapes and types that a tensor may have."""

    shapes: tuple[Shape, ...]
    dtypes: tuple[str, ...]


@dataclass(frozen=True)
class QuantizedRows:
    """W[o, i] = scales[o, i // group_size] * (codes[o, i] - zeros[o, i // group_size]), codes and zeros without a sign.

    codes: (first, count) -> the rows first .. first + count, [count, in_features] uint8; of "fp8" the bytes of
    float8_e4m3fn. scales: [out_features, groups]; bfloat16 as uint16. zeros: [out_features, groups] uint8, or float64
    of a scheme with `has_float_zeros`; None for "fp8". With an input order i counts the inputs in this order.
    """

    codes: Callable[[int, int], npt.NDArray[np.uint8]]
    scales: Array
    zeros: npt.NDArray[np.uint8] | npt.NDArray[np.float64] | None


class Scheme(Protocol):
    """How one linear is stored: the tensors under its name, and their meaning.

    group_size: inputs that share a scale; None for all inputs of a row.
    """

    @property
    def code_name(self) -> CodeName: ...

    @property
    def group_size(self) -> int | None: ...

    @property
    def scale_name(self) -> str | None:
        """The tensor whose type is that of the scales; None where they lie among the codes (`GGMLBlocks`)."""
        ...

    @property
    def group_index_name(self) -> str | None:
        """The tensor that holds the group of each input, [in_features] int32, where there is one; see `input_order`."""
        ...

    def tensors(self, shape: tuple[int, int], stored: Callable[[str], StoredTensor | None]) -> dict[str, Expected]:
        """The tensors of a weight [out_features, in_features], by their suffixes to the linear's name.

        stored: the tensor that a checkpoint has under such a name.
        """
        ...

    def rows(self, shape: tuple[int, int], tensors: Mapping[str, Array], order: Array | None) -> QuantizedRows:
        """The weight out of `tensors`, which have the shapes and types that were expected.

        order: `input_order` of the group index. Raises QuantizationError, which names the tensor, where they do not
        agree with each other.
        """
        ...


def check_stored(name: str, found: StoredTensor | None, expected: Expected) -> StoredTensor:
    """`found`, the tensor `name` of a checkpoint. Raises QuantizationError where it is missing, or another one."""
    if found is None:
        raise QuantizationError(f"tensor {name} is missing, and quantization_config asks for it")
    if found.shape not in expected.shapes or found.dtype not in expected.dtypes:
        shapes = " or ".join(str(list(shape)) for shape in expected.shapes)
        raise QuantizationError(
            f"tensor {name} is {found.dtype} {list(found.shape)}, quantization_config asks for "
            f"{' or '.join(expected.dtypes)} {shapes}"
        )
    return found


def groups_of(in_features: int, group_size: int | None) -> tuple[int, int]:
    """The inputs of a group, at most all, and the number of groups."""
    size = min(group_size or in_features, in_features)
    return size, -(-in_features // size)


def input_order(name: str, group_index: Array, group_size: int | None) -> npt.NDArray[np.int64] | None:
    """The inputs group by group, [in_features]; None where they lie so already, or where the index is -1 throughout,
    which compressed-tensors writes for that.

    name: of the tensor. Raises QuantizationError where a group has another size than `group_size` (the last one: the
    rest).
    """
    size, num_groups = groups_of(len(group_index), group_size)
    in_order = np.arange(len(group_index)) // size
    if np.array_equal(group_index, in_order) or np.all(group_index == -1):
        return None
    order = np.argsort(group_index, kind="stable")
    if not np.array_equal(group_index[order], in_order):
        raise QuantizationError(
            f"tensor {name} does not divide {len(group_index)} inputs into {num_groups} groups of {size}"
        )
    return order


def ordered(
    codes: Callable[[int, int], npt.NDArray[np.uint8]], order: Array | None
) -> Callable[[int, int], npt.NDArray[np.uint8]]:
    """`codes` with their inputs in `order`."""
    return codes if order is None else lambda first, count: codes(first, count)[:, order]


def check_scales(name: str, scales: Array) -> None:
    """Raises QuantizationError where a scale is infinite or no number. bfloat16 comes as uint16."""
    finite = (scales & 0x7F80) != 0x7F80 if scales.dtype == np.uint16 else np.isfinite(scales)
    if not finite.all():
        count = np.size(finite) - np.count_nonzero(finite)
        raise QuantizationError(f"tensor {name} holds {count} scales that are not finite")
