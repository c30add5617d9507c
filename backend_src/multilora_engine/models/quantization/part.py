"""`QuantizedPart`: one linear of a checkpoint that is stored as codes, and its way into the model's memory."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from multilora_engine.errors import ConfigError
from multilora_engine.models.weights import StoredPart
from multilora_kernels.quantized import CodeType, QuantizedWeight
from multilora_wire.quantized.ggml import GGMLBlocks
from multilora_wire.quantized.scheme import Array, QuantizationError, Scheme, StoredTensor, check_scales, groups_of

STORED_DTYPES = {
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I32": torch.int32,
    "I64": torch.int64,
}
"""torch's dtypes by safetensors' names."""

SCALE_DTYPES = STORED_DTYPES | {"U8": torch.bfloat16}
"""The dtypes that scales are kept in. Bytes are powers of two, which bfloat16 holds."""


def as_array(tensor: torch.Tensor) -> Array:
    """bfloat16 as uint16 and float8 as uint8, since NumPy has no such types."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return (tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor).numpy()


def as_tensor(array: Array) -> torch.Tensor:
    """uint16 as bfloat16."""
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


_VALUES_PER_TILE = 1 << 20
_ROW_MULTIPLE = 64
"""Tiles end where no layout of codes has its outputs side by side."""


@dataclass(frozen=True)
class Layout:
    """The layout that linears must have in common to lie in one `QuantizedWeight`."""

    code_type: CodeType
    group_size: int
    scale_dtype: torch.dtype
    zero_dtype: torch.dtype = torch.int8

    @property
    def words(self) -> str:
        minimums = "" if self.zero_dtype == torch.int8 else ", with minimums"
        return f"{self.code_type.value} in groups of {self.group_size}{minimums}"


@dataclass(frozen=True)
class QuantizedPart:
    """A linear of a checkpoint.

    tensors: by their suffixes to its name. order: of its inputs, [in_features] int64; None where they stay as they are.
    """

    stored: StoredPart
    in_features: int
    scheme: Scheme
    tensors: dict[str, StoredTensor]
    scale_dtype: torch.dtype
    order: Array | None

    @property
    def layout(self) -> Layout:
        size, _ = groups_of(self.in_features, self.scheme.group_size)
        has_float_zeros = isinstance(self.scheme, GGMLBlocks) and self.scheme.has_float_zeros
        zero_dtype = torch.float32 if has_float_zeros else torch.int8
        return Layout(CodeType(self.scheme.code_name), size, self.scale_dtype, zero_dtype)


@dataclass
class PartFilling:
    """Keeps the tensors of a part until all of them are there, and then writes its rows of `weight`.

    They come in any order and from any file. first: the part's first output in `weight`.
    """

    part: QuantizedPart
    weight: QuantizedWeight
    first: int
    _tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def places(self) -> dict[str, PartTensor]:
        """The places of all tensors, by the checkpoint's names."""
        return {f"{self.part.stored.name}.{suffix}": self.place(suffix) for suffix in self.part.tensors}

    def place(self, suffix: str) -> PartTensor:
        """The place of one tensor."""
        tensor = self.part.tensors[suffix]
        return PartTensor(self, suffix, torch.Size(tensor.shape), frozenset({STORED_DTYPES[tensor.dtype]}))

    def add(self, suffix: str, tensor: torch.Tensor) -> None:
        """Raises ConfigError where the tensors, once they are all there, do not agree."""
        self._tensors[suffix] = tensor
        if len(self._tensors) < len(self.part.tensors):
            return
        arrays = {name: as_array(found) for name, found in self._tensors.items()}
        self._tensors = {}
        try:
            self._write(arrays)
        except (QuantizationError, ValueError) as error:
            raise ConfigError(f"{self.part.stored.name}: {error}") from error

    def _write(self, arrays: dict[str, Array]) -> None:
        part, scheme = self.part, self.part.scheme
        if scheme.scale_name is not None:
            check_scales(scheme.scale_name, arrays[scheme.scale_name])
        rows = scheme.rows((part.stored.count, part.in_features), arrays, part.order)
        step = max(_ROW_MULTIPLE, _VALUES_PER_TILE // part.in_features // _ROW_MULTIPLE * _ROW_MULTIPLE)
        for begin in range(0, part.stored.count, step):
            end = min(begin + step, part.stored.count)
            self.weight.copy_rows(
                self.first + begin,
                torch.from_numpy(np.ascontiguousarray(rows.codes(begin, end - begin))),
                as_tensor(rows.scales[begin:end]),
                None if rows.zeros is None else torch.from_numpy(rows.zeros[begin:end]),
            )


@dataclass(frozen=True)
class PartTensor:
    """The place of one tensor of a part."""

    filling: PartFilling
    suffix: str
    shape: torch.Size
    dtypes: frozenset[torch.dtype]

    def copy_(self, values: torch.Tensor, /) -> None:
        self.filling.add(self.suffix, values)
