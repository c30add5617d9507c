"""MXFP4 as the released files of gpt-oss have it (transformers 5.23.0, `integrations/mxfp4.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from multilora_wire.quantized.scheme import Array, CodeName, Expected, QuantizationError, QuantizedRows, StoredTensor

_GROUP = 32
_NAN = 255
_ZERO = 128
"""The code of the number 0."""

_HALVES = np.array([0, 1, 2, 3, 4, 6, 8, 12], np.int16)
"""The numbers of E2M1 without a sign, in halves (OCP Microscaling Formats 1.0, section 5.3.3)."""
_CODES = np.concatenate((_ZERO + _HALVES, _ZERO - _HALVES)).astype(np.uint8)
_BYTES = np.arange(256, dtype=np.uint8)
_CODES_OF_BYTE = np.stack((_CODES[_BYTES & 15], _CODES[_BYTES >> 4]), axis=1).view(np.uint16)[:, 0]
"""The codes of the two inputs of a byte, side by side: the lower half is the first."""

_SCALES = (np.arange(256, dtype=np.uint16) - np.uint16(1)) << np.uint16(7)
_SCALES[:2] = 0x20, 0x40  # Below the normal numbers.
"""2 ** (exponent - 128), half of the number that E8M0 means, as the bits of a bfloat16."""


@dataclass(frozen=True)
class MXFP4:
    """Floats of 4 bits, two a byte along the inputs. 32 neighbouring inputs share a power of two.

    Every float is a whole number of halves, up to 12: a code of 8 bits holds it as it is.
    """

    scale_name: str = "scales"
    group_index_name: str | None = None

    @property
    def code_name(self) -> CodeName:
        return "int8"

    @property
    def group_size(self) -> int | None:
        return _GROUP

    def tensors(self, shape: tuple[int, int], stored: Callable[[str], StoredTensor | None]) -> dict[str, Expected]:
        out_features, in_features = shape
        if in_features % _GROUP:
            raise QuantizationError(f"MXFP4 needs a multiple of {_GROUP} inputs, got {in_features}")
        groups = in_features // _GROUP
        return {
            "blocks": Expected(((out_features, groups, _GROUP // 2),), ("U8",)),
            self.scale_name: Expected(((out_features, groups),), ("U8",)),
        }

    def rows(self, shape: tuple[int, int], tensors: Mapping[str, Array], order: Array | None) -> QuantizedRows:
        assert order is None
        blocks, exponents = tensors["blocks"], tensors[self.scale_name]
        if (exponents == _NAN).any():
            raise QuantizationError(f"{self.scale_name} holds {np.count_nonzero(exponents == _NAN)} NaN")

        def codes(first: int, count: int) -> npt.NDArray[np.uint8]:
            pairs: npt.NDArray[np.uint16] = _CODES_OF_BYTE[blocks[first : first + count].reshape(count, -1)]
            return pairs.view(np.uint8)

        return QuantizedRows(codes, _SCALES[exponents], np.full(exponents.shape, _ZERO, np.uint8))
