"""The GPU operators in OpenAI Triton, and their tile sizes (`block_sizes.json`)."""

from __future__ import annotations

import functools

from multilora_kernels import operators
from multilora_kernels.cuda.attention import paged_attention, rotary_attention
from multilora_kernels.cuda.elementwise import add_layer_norm, add_rms_norm, gelu_tanh, gelu_tanh_mul, silu_mul
from multilora_kernels.cuda.expand import lora_expand
from multilora_kernels.cuda.penalties import forbid_tokens, penalise_tokens
from multilora_kernels.cuda.sampling import sample_tokens
from multilora_kernels.cuda.shrink import lora_shrink
from multilora_kernels.cuda.step_inputs import fill_step_inputs
from multilora_kernels.cuda.update import lora_apply

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "fill_step_inputs",
    "forbid_tokens",
    "gelu_tanh",
    "gelu_tanh_mul",
    "lora_apply",
    "lora_expand",
    "lora_shrink",
    "paged_attention",
    "penalise_tokens",
    "register_operators",
    "rotary_attention",
    "sample_tokens",
    "silu_mul",
]


@functools.cache
def register_operators(dispatch_key: str) -> bool:
    """Make these the operators of a dispatch key, "CUDA", or in the interpreter "CPU"; always True."""
    operators.implement(dispatch_key, lora_shrink, lora_expand, lora_apply)
    operators.implement_plain(
        dispatch_key,
        paged_attention=paged_attention,
        rotary_attention=rotary_attention,
        sample_tokens=sample_tokens,
    )
    return True
