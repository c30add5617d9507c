"""The GPU operators in OpenAI Triton, and their tile sizes (`block_sizes.json`)."""

from __future__ import annotations

import functools

from multilora_kernels import operators
from multilora_kernels.cuda.attention import paged_attention
from multilora_kernels.cuda.elementwise import add_layer_norm, add_rms_norm, gelu_tanh, gelu_tanh_mul, silu_mul
from multilora_kernels.cuda.expand import lora_expand
from multilora_kernels.cuda.shrink import lora_shrink

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "gelu_tanh",
    "gelu_tanh_mul",
    "load_cuda_kernels",
    "lora_expand",
    "lora_shrink",
    "paged_attention",
    "silu_mul",
]


@functools.cache
def load_cuda_kernels() -> bool:
    """Register the CUDA operators; always True."""
    operators.implement("CUDA", lora_shrink, lora_expand)
    operators.implement_plain("CUDA", paged_attention=paged_attention)
    return True
