"""Checkpoints of AutoAWQ, version GEMM (compressed-tensors 0.20.0, `entrypoints/convert/converters/autoawq.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from multilora_wire.quantized.bits import unpack
from multilora_wire.quantized.scheme import (
    SCALE_DTYPES,
    Array,
    CodeName,
    Expected,
    QuantizedRows,
    StoredTensor,
    groups_of,
)

_BITS = 4
_PER_WORD = 32 // _BITS
_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""Output 8 c + k of word c lies at the bits 4 * _PLACES[k] of it."""


@dataclass(frozen=True)
class AWQ:
    """Integers of 4 bits in words along the outputs, zeros likewise. has_zeros: without them every zero is 8."""

    group_size: int | None
    has_zeros: bool
    scale_name: str = "scales"
    group_index_name: str | None = None

    @property
    def code_name(self) -> CodeName:
        return "int4"

    def tensors(self, shape: tuple[int, int], stored: Callable[[str], StoredTensor | None]) -> dict[str, Expected]:
        out_features, in_features = shape
        num_groups = groups_of(in_features, self.group_size)[1]
        words = -(-out_features // _PER_WORD)
        tensors = {
            "qweight": Expected(((in_features, words),), ("I32",)),
            "scales": Expected(((num_groups, out_features),), SCALE_DTYPES),
        }
        if self.has_zeros or stored("qzeros") is not None:
            tensors["qzeros"] = Expected(((num_groups, words),), ("I32",))
        return tensors

    def rows(self, shape: tuple[int, int], tensors: Mapping[str, Array], order: Array | None) -> QuantizedRows:
        assert order is None
        qweight, scales = tensors["qweight"], tensors["scales"].T

        def codes(first: int, count: int) -> npt.NDArray[np.uint8]:
            begin, end = first // _PER_WORD, -(-(first + count) // _PER_WORD)
            outputs = _outputs(qweight[:, begin:end])[:, first - begin * _PER_WORD :][:, :count]
            return np.ascontiguousarray(outputs.T)

        if "qzeros" not in tensors:
            return QuantizedRows(codes, scales, np.full(scales.shape, 1 << (_BITS - 1), np.uint8))
        return QuantizedRows(codes, scales, _outputs(tensors["qzeros"])[:, : shape[0]].T)


def _outputs(words: npt.NDArray[np.int32]) -> npt.NDArray[np.uint8]:
    """[n, words] -> [n, 8 words], the outputs in order."""
    count = words.shape[1] * _PER_WORD
    values = unpack(words, _BITS, count).reshape(len(words), -1, _PER_WORD)
    return values[:, :, _PLACES].reshape(len(words), count)
