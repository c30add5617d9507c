"""Which implementation serves a tensor: OpenAI-Triton kernels on CUDA, C++ on the CPU."""

from __future__ import annotations

import torch

from multilora_kernels.cpu import load_cpu_kernels


def load_operators(x: torch.Tensor) -> None:
    """Make sure that the operators of the device of `x` are registered; cheap after the first call."""
    if not x.is_cuda:
        load_cpu_kernels()
