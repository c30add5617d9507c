"""Batched multi-LoRA operators, y[slice] += (x A^T) B^T for tokens of many adapters of many ranks, base linears, and
attention over a paged cache.

Public, by purpose:
- adapters: `LoRATables` say where every adapter's weights lie. `lora_segments` makes the `LoRASegments` once a step:
  which tokens belong to which adapter. `lora_shrink` and `lora_expand` are called once for each fused linear;
  `lora_apply` is both in one call, `updated` is a product of the base with both, `lora_linear` the same of one linear,
  `activated` that of gate and up with their activation on a GPU, and `lora_embedding` is the first half
  for embeddings. `TokenRowTables` of `TokenRows` are an adapter's own rows of embeddings and head.
- base weights: `PackedWeight`, used by `packed_linear` and `packed_embedding`, with inputs of `activation_dtype`.
  `HugePages` is their memory; `MemoryAhead` takes that memory before it is used.
- quantised base weights: `QuantizedWeight` of a `CodeType`, used by `quantized_linear`, `quantized_lora_linear` and
  `quantized_embedding`.
- attention: `paged_attention` over `PagedSequences` with `AttentionOptions`.
  `rotary_attention` also rotates, by `rotary_angles`, and writes the cache; `store_rows` only writes it.
  `kv_row_size`, `kv_head_dim`, `load_rows` and `copy_blocks` are of caches, which `KVRows` are: floats, codes with
  their scales, or `KVCodes`.
- mixtures of experts: `route` chooses, and `expert_mlp` computes over `PackedExperts`, with adapters by `ExpertLoRA`.
- between linears: `add_rms_norm`, `add_layer_norm`, `silu_mul`, `gelu_tanh_mul`, `gelu_tanh`, `gelu`.
- all in one call: `decoder_layers` and `decoder_logits`, for a `PackedDecoder` of `PackedLayer`s (of
  `PackedLayerLinear`s) and a `PackedHead`, with a `LayerStep` for each kind of layer.
- choice: `penalise_tokens` and `forbid_tokens` change logits within `LARGEST_LOGIT`; then `sample_tokens` chooses by
  `SamplingRule`s, or `most_probable` takes the largest logit.
- the rest: `fill_step_inputs` fills the `StepInputs` of a captured graph. `load_cpu_kernels` builds the CPU operators
  before their first use. `forget_adapters` drops what is kept of the last call's adapters.

Every operator has its file here, with checks and shapes:
lora_linear, apply, shrink, expand         a linear with its LoRA update, and the update's two halves
  parts                                    the shape of the GPU's first half
embedding, token_rows                      LoRA on embeddings; an adapter's own rows of embeddings and head
  lora_segments, segments, tables          tokens sorted by adapter; where the weights of adapters lie
  adapter_codes, adapter_quantization      adapters stored as codes
    adapter_order                          their order on a GPU
linear, quantized                          linears of floats, and of codes
  panels, code_order                       the order of weights in memory, for CPUs and for GPUs
attention, rotary_angles, kv_rows          attention over the paged cache, positions, the rows of the cache
experts, packed_experts                    a router's choice, and the chosen experts' MLPs; their weights
elementwise                                the work between linears
decoder_layers                             all layers of a Llama-like model in one call
sampling, sampling_rule, penalties         the choice of tokens, and changes of logits before it
step_inputs, streams                       the inputs of captured graphs, and their second stream
huge_pages, memory_ahead                   memory for weights
control_groups                             Linux's limits of this process, and the processors that they leave
dispatch, interpreter                      who computes an operator; where the GPU's operators serve
  cpu, cuda                                C++ for CPUs; OpenAI Triton for GPUs
reference, penalties_reference             every operator in plain PyTorch
  sampling_reference, step_inputs_reference
self_test, comparisons                     the GPU operators compared with the reference, at start
"""

from multilora_kernels.adapter_order import has_own_order, order_codes
from multilora_kernels.apply import activated, lora_apply, updated
from multilora_kernels.attention import (
    AttentionOptions,
    PagedSequences,
    paged_attention,
    rotary_attention,
)
from multilora_kernels.cpu import forget_adapters, load_cpu_kernels
from multilora_kernels.decoder_layers import (
    LayerStep,
    PackedDecoder,
    PackedHead,
    PackedLayer,
    PackedLayerLinear,
    decoder_layers,
    decoder_logits,
)
from multilora_kernels.elementwise import add_layer_norm, add_rms_norm, gelu, gelu_tanh, gelu_tanh_mul, silu_mul
from multilora_kernels.embedding import lora_embedding
from multilora_kernels.expand import lora_expand
from multilora_kernels.experts import expert_mlp, route
from multilora_kernels.huge_pages import HugePages
from multilora_kernels.kv_rows import KVCodes, KVRows, copy_blocks, kv_head_dim, kv_row_size, load_rows, store_rows
from multilora_kernels.linear import (
    PackedWeight,
    activation_dtype,
    float32_linear,
    packed_embedding,
    packed_linear,
)
from multilora_kernels.lora_linear import lora_linear
from multilora_kernels.lora_segments import lora_segments, step_segments
from multilora_kernels.memory_ahead import MemoryAhead
from multilora_kernels.packed_experts import PackedExperts
from multilora_kernels.penalties import LARGEST_LOGIT, forbid_tokens, penalise_tokens
from multilora_kernels.quantized import (
    CodeType,
    QuantizedWeight,
    quantized_embedding,
    quantized_linear,
    quantized_lora_linear,
)
from multilora_kernels.rotary_angles import rotary_angles
from multilora_kernels.sampling import SamplingRule, most_probable, rule_parameters, sample_tokens
from multilora_kernels.segments import LoRASegments
from multilora_kernels.shrink import lora_shrink
from multilora_kernels.step_inputs import StepInputs, fill_step_inputs
from multilora_kernels.tables import ExpertLoRA, LoRATables
from multilora_kernels.token_rows import TokenRows, TokenRowTables

__all__ = [
    "LARGEST_LOGIT",
    "AttentionOptions",
    "CodeType",
    "ExpertLoRA",
    "HugePages",
    "KVCodes",
    "KVRows",
    "LayerStep",
    "LoRASegments",
    "LoRATables",
    "MemoryAhead",
    "PackedDecoder",
    "PackedExperts",
    "PackedHead",
    "PackedLayer",
    "PackedLayerLinear",
    "PackedWeight",
    "PagedSequences",
    "QuantizedWeight",
    "SamplingRule",
    "StepInputs",
    "TokenRowTables",
    "TokenRows",
    "activated",
    "activation_dtype",
    "add_layer_norm",
    "add_rms_norm",
    "copy_blocks",
    "decoder_layers",
    "decoder_logits",
    "expert_mlp",
    "fill_step_inputs",
    "float32_linear",
    "forbid_tokens",
    "forget_adapters",
    "gelu",
    "gelu_tanh",
    "gelu_tanh_mul",
    "has_own_order",
    "kv_head_dim",
    "kv_row_size",
    "load_cpu_kernels",
    "load_rows",
    "lora_apply",
    "lora_embedding",
    "lora_expand",
    "lora_linear",
    "lora_segments",
    "lora_shrink",
    "most_probable",
    "order_codes",
    "packed_embedding",
    "packed_linear",
    "paged_attention",
    "penalise_tokens",
    "quantized_embedding",
    "quantized_linear",
    "quantized_lora_linear",
    "rotary_angles",
    "rotary_attention",
    "route",
    "rule_parameters",
    "sample_tokens",
    "silu_mul",
    "step_segments",
    "store_rows",
    "updated",
]
