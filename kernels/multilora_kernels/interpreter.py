"""Where the GPU operators compute: on a GPU, or without one in Triton's interpreter, if a variable asks for it."""

from __future__ import annotations

import os

import torch

ENVIRONMENT = {"TRITON_INTERPRET": "1", "MULTILORA_INTERPRETED_OPERATORS": "1"}
"""Variables that make the GPU operators compute on CPU tensors. Triton itself reads the first, for its kernels."""

IS_INTERPRETED = all(os.environ.get(name) == value for name, value in ENVIRONMENT.items())
"""Whether this process has these variables."""


def has_gpu_operators(device: torch.device) -> bool:
    """Whether the GPU operators compute on tensors of this device."""
    return device.type == "cuda" or IS_INTERPRETED
