"""The formats of codes that `multilora quantize` writes, and a weight that is hard to round."""

from __future__ import annotations

import pytest
import torch
from compressed_tensors.quantization import QuantizationArgs

from multilora_engine.quantize.scales import Codes, Float8Codes, IntegerCodes

FORMATS = [
    pytest.param(4, "int", True, id="int4"),
    pytest.param(4, "int", False, id="int4-asymmetric"),
    pytest.param(8, "int", True, id="int8"),
    pytest.param(8, "int", False, id="int8-asymmetric"),
    pytest.param(8, "float", True, id="fp8"),
]


def make_codes(bits: int, kind: str) -> Codes:
    return IntegerCodes(bits) if kind == "int" else Float8Codes()


def make_args(bits: int, kind: str, symmetric: bool, group_size: int) -> QuantizationArgs:
    return QuantizationArgs(num_bits=bits, type=kind, symmetric=symmetric, group_size=group_size)


def ugly_weight() -> torch.Tensor:
    """[23, 96]: heavy tails, with rows that are zero, tiny, of one sign, constant, and but for one value zero."""
    torch.manual_seed(3)
    weight = torch.distributions.StudentT(3.0).sample((23, 96)) * 0.02
    weight[1] = 0
    weight[2] *= 1e-30
    weight[3].abs_()
    weight[4] = -0.3
    weight[5, 1:] = 0
    weight[6] *= 1e4
    return weight
