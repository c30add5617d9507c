"""The GPU operators in OpenAI Triton, and their tile sizes (`block_sizes.json`)."""

from __future__ import annotations

import functools

from multilora_kernels import operators
from multilora_kernels.cuda.attention import paged_attention
from multilora_kernels.cuda.elementwise import add_layer_norm, add_rms_norm, gelu_tanh, gelu_tanh_mul, silu_mul
from multilora_kernels.cuda.expand import lora_expand
from multilora_kernels.cuda.kv_rows import store_codes
from multilora_kernels.cuda.sampling import sample_tokens
from multilora_kernels.cuda.shrink import lora_shrink

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "gelu_tanh",
    "gelu_tanh_mul",
    "lora_expand",
    "lora_shrink",
    "paged_attention",
    "register_operators",
    "sample_tokens",
    "silu_mul",
    "store_codes",
]


@functools.cache
def register_operators(dispatch_key: str) -> bool:
    """Make these the operators of a dispatch key, "CUDA", or in the interpreter "CPU"; always True."""
    operators.implement(dispatch_key, lora_shrink, lora_expand)
    operators.implement_plain(
        dispatch_key, paged_attention=paged_attention, store_codes=store_codes, sample_tokens=sample_tokens
    )
    return True
