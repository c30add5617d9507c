"""Which implementation serves a tensor: OpenAI-Triton kernels on CUDA, C++ on the CPU."""

from __future__ import annotations

import torch

from multilora_kernels.constant_result import constant_result
from multilora_kernels.cpu import load_cpu_kernels
from multilora_kernels.gpu_registration import register_gpu_operators


def load_operators(x: torch.Tensor) -> None:
    """Make sure that the operators of the device of `x` are registered; cheap after the first call."""
    if x.is_cuda:
        _load_cuda_kernels()
    else:
        load_cpu_kernels()


@constant_result
def _load_cuda_kernels() -> bool:
    return register_gpu_operators("CUDA")
