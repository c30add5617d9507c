"""Where the GPU operators serve: on a GPU, or where it is asked for in Triton's interpreter, without one."""

from __future__ import annotations

import os

import torch

ENVIRONMENT = {"TRITON_INTERPRET": "1", "MULTILORA_INTERPRETED_OPERATORS": "1"}
"""Variables of a process whose CPU tensors the GPU operators serve. Triton reads the first, for its kernels."""

IS_INTERPRETED = all(os.environ.get(name) == value for name, value in ENVIRONMENT.items())
"""Whether this is such a process."""


def has_gpu_operators(device: torch.device) -> bool:
    """Whether the GPU operators serve the tensors of a device."""
    return device.type == "cuda" or IS_INTERPRETED
