"""Linears of a GGUF file, whose blocks become codes.

A type without minimums says the same as codes, scales and one zero for all. A minimum becomes a zero that is no
integer: scale * code - minimum = scale * (code - minimum / scale), which differs by a rounding of float32.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from multilora_wire.gguf.blocks import TYPES, row_codes, row_scales
from multilora_wire.quantized.names import ModuleClass
from multilora_wire.quantized.scheme import (
    Array,
    CodeName,
    Expected,
    QuantizationError,
    QuantizedRows,
    Scheme,
    StoredTensor,
)

_MIDDLES: Mapping[CodeName, int] = {"int4": 8, "int8": 128}


@dataclass(frozen=True)
class GGMLBlocks:
    """A weight `[outputs, bytes of a row]` in blocks of a type. The other fields are the type's, or wider ones."""

    type_name: str
    code_name: CodeName
    group_size: int
    scale_dtype: str
    has_float_zeros: bool
    scale_name: None = None
    group_index_name: None = None

    @classmethod
    def of(cls, type_name: str) -> GGMLBlocks:
        """With the smallest codes."""
        kind = TYPES[type_name]
        code_name: CodeName = "int4" if kind.bits == 4 else "int8"
        return cls(type_name, code_name, kind.group_size, kind.scale_dtype, kind.has_minimums)

    @property
    def tensor_name(self) -> str:
        """The name of the tensor after that of its linear."""
        return f"weight.{self.type_name}"

    def tensors(self, shape: tuple[int, int], stored: Callable[[str], StoredTensor | None]) -> dict[str, Expected]:
        out_features, in_features = shape
        kind = TYPES[self.type_name]
        if in_features % kind.num_values:
            raise QuantizationError(f"{self.type_name} needs a multiple of {kind.num_values} inputs, got {in_features}")
        row_bytes = in_features // kind.num_values * kind.num_bytes
        return {self.tensor_name: Expected(((out_features, row_bytes),), ("U8",))}

    def rows(self, shape: tuple[int, int], tensors: Mapping[str, Array], order: Array | None) -> QuantizedRows:
        assert order is None
        kind, blocks = TYPES[self.type_name], tensors[self.tensor_name]
        middle = _MIDDLES[self.code_name]
        stored, minimums = row_scales(kind, blocks)
        if not np.isfinite(stored).all() or (minimums is not None and not np.isfinite(minimums).all()):
            raise QuantizationError(f"{self.tensor_name} holds scales or minimums that are not finite")
        scales: Array = stored
        zeros: Array = np.full(scales.shape, middle, np.float64 if self.has_float_zeros else np.uint8)
        constant = None  # The groups that are their minimums alone.
        if minimums is not None:
            constant = (stored == 0) & (minimums != 0)
            scales = np.where(constant, -minimums, stored).astype(stored.dtype)  # float16 beside float16
            divisor = np.where(scales == 0, 1, scales).astype(np.float64)
            zeros = middle - kind.zero + np.where(constant, 0, minimums / divisor)
        split = kind.group_size // self.group_size  # Groups of a wider layout are smaller.

        def codes(first: int, count: int) -> npt.NDArray[np.uint8]:
            found = row_codes(kind, blocks[first : first + count]) + np.uint8(middle - kind.zero)
            if constant is not None and constant[first : first + count].any():
                ones = np.repeat(constant[first : first + count], kind.group_size, axis=1)
                found[ones] = middle - kind.zero + 1
            return found

        scale_type = np.float16 if self.scale_dtype == "F16" else np.float32
        return QuantizedRows(
            codes, np.repeat(scales.astype(scale_type), split, axis=1), np.repeat(zeros, split, axis=1)
        )


def with_one_layout(schemes: Sequence[Scheme]) -> list[GGMLBlocks] | None:
    """The schemes of linears that lie in one weight, each so wide that all have one layout; None for other schemes.

    Codes of 4 bits are codes of 8 bits, and a group is several with the same scale.
    """
    blocks = [scheme for scheme in schemes if isinstance(scheme, GGMLBlocks)]
    if len(blocks) < len(schemes):
        return None
    return [
        replace(
            one,
            code_name="int8" if any(other.code_name == "int8" for other in blocks) else "int4",
            group_size=min(other.group_size for other in blocks),
            scale_dtype="F32" if any(other.scale_dtype == "F32" for other in blocks) else "F16",
            has_float_zeros=any(other.has_float_zeros for other in blocks),
        )
        for one in blocks
    ]


@dataclass(frozen=True)
class GGUFCheckpoint:
    """`quant_method` gguf: the directory that is made for a GGUF file. The tensors' names tell their types."""

    notes: tuple[str, ...] = ()

    def scheme(self, name: str, module_class: ModuleClass, has: Callable[[str], bool]) -> Scheme | None:
        """How the module's weight is stored; None for floats."""
        return next((GGMLBlocks.of(kind) for kind in TYPES if TYPES[kind].is_quantized and has(f"weight.{kind}")), None)
