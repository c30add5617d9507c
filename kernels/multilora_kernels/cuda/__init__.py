"""The GPU operators in OpenAI Triton, and their tile sizes (`block_sizes.json`).

attention                                  `paged_attention`, `rotary_attention`
  decode_attention, prompt_attention       for one query each, and for many
  rotation, key_tiles                      the steps before it; softmax sums that grow by tiles
kv_rows                                    rows of the cache, plain or in codes
shrink, expand, apply                      the two halves of a LoRA update, with an activation, and both
  shrink_rows, expand_rows                 of few rows without a prompt, each by itself
  segments, codes                          tokens sorted by adapter; adapters in codes and their order
quantized, code_values                     linears of codes, and the floats that codes mean
experts                                    a router's choice, and the chosen experts' MLPs
elementwise, tanh                          the work between linears
sampling, penalties, step_inputs           the choice of tokens, changes of logits, inputs of captured graphs
block_sizes, tiles, integers               tile sizes, products of tiles, arithmetic of grids
dependent_launch                           kernels that begin before the one before them has ended
ahead                                      kernels compiled in processes, before they are launched
"""

from __future__ import annotations

from multilora_kernels.cuda.apply import lora_apply
from multilora_kernels.cuda.attention import paged_attention, rotary_attention
from multilora_kernels.cuda.codes import order_codes
from multilora_kernels.cuda.elementwise import add_layer_norm, add_rms_norm, gelu, gelu_tanh, gelu_tanh_mul, silu_mul
from multilora_kernels.cuda.expand import lora_expand, lora_expand_activated
from multilora_kernels.cuda.experts import expert_mlp, route
from multilora_kernels.cuda.penalties import forbid_tokens, penalise_tokens
from multilora_kernels.cuda.quantized import quantized_linear
from multilora_kernels.cuda.sampling import sample_tokens
from multilora_kernels.cuda.segments import lora_segments
from multilora_kernels.cuda.shrink import lora_shrink
from multilora_kernels.cuda.step_inputs import fill_step_inputs

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "expert_mlp",
    "fill_step_inputs",
    "forbid_tokens",
    "gelu",
    "gelu_tanh",
    "gelu_tanh_mul",
    "lora_apply",
    "lora_expand",
    "lora_expand_activated",
    "lora_segments",
    "lora_shrink",
    "order_codes",
    "paged_attention",
    "penalise_tokens",
    "quantized_linear",
    "rotary_attention",
    "route",
    "sample_tokens",
    "silu_mul",
]
