"""Checkpoints of AutoGPTQ and GPTQModel (AutoGPTQ `nn_modules/qlinear/qlinear_cuda.py`, `pack`)."""

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
    QuantizedRows,
    StoredTensor,
    groups_of,
    ordered,
)


@dataclass(frozen=True)
class GPTQ:
    """Integers in dense streams along the inputs, one stream an output; zeros in streams along the outputs.

    zero_offset: added to a stored zero, modulo 2 ** bits: 1 in files of version 1, 0 in those of version 2.
    is_ordered: whether inputs were grouped by activations (`desc_act`); then a checkpoint must have their groups.
    """

    bits: int
    group_size: int | None
    zero_offset: int
    is_ordered: bool
    scale_name: str = "scales"
    group_index_name: str | None = "g_idx"

    @property
    def code_name(self) -> CodeName:
        return "int4" if self.bits <= 4 else "int8"

    def tensors(self, shape: tuple[int, int], stored: Callable[[str], StoredTensor | None]) -> dict[str, Expected]:
        out_features, in_features = shape
        num_groups = groups_of(in_features, self.group_size)[1]
        tensors = {
            "qweight": Expected(((num_words(self.bits, in_features), out_features),), ("I32",)),
            "qzeros": Expected(((num_groups, num_words(self.bits, out_features)),), ("I32",)),
            "scales": Expected(((num_groups, out_features),), SCALE_DTYPES),
        }
        if self.is_ordered or stored("g_idx") is not None:
            tensors["g_idx"] = Expected(((in_features,),), ("I32", "I64"))
        return tensors

    def rows(self, shape: tuple[int, int], tensors: Mapping[str, Array], order: Array | None) -> QuantizedRows:
        qweight = tensors["qweight"]

        def codes(first: int, count: int) -> npt.NDArray[np.uint8]:
            return unpack(qweight[:, first : first + count].T, self.bits, shape[1])

        stored = unpack(tensors["qzeros"], self.bits, shape[0])
        zeros = (stored + np.uint8(self.zero_offset)) & np.uint8((1 << self.bits) - 1)
        return QuantizedRows(ordered(codes, order), tensors["scales"].T, zeros.T)
