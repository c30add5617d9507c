"""Tensors as the NumPy arrays that readers of checkpoints take, and back, without a copy."""

from __future__ import annotations

import numpy as np
import torch

from multilora_wire.quantized.scheme import Array

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
