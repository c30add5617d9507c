"""The GPU operators in OpenAI Triton, and their tile sizes (`block_sizes.json`)."""

from __future__ import annotations

from multilora_kernels.cuda.attention import paged_attention, rotary_attention
from multilora_kernels.cuda.elementwise import add_layer_norm, add_rms_norm, gelu_tanh, gelu_tanh_mul, silu_mul
from multilora_kernels.cuda.expand import lora_expand
from multilora_kernels.cuda.penalties import forbid_tokens, penalise_tokens
from multilora_kernels.cuda.quantized import quantized_linear
from multilora_kernels.cuda.sampling import sample_tokens
from multilora_kernels.cuda.segments import lora_segments
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
    "lora_segments",
    "lora_shrink",
    "paged_attention",
    "penalise_tokens",
    "quantized_linear",
    "rotary_attention",
    "sample_tokens",
    "silu_mul",
]
