"""The slower path of each operator of a GPU: the same by plain PyTorch on the device, for `gpu_operators.serve_slower`.

Most are the references of the tests. Some of them read the host, so a CUDA graph holds none. Attention has one of its
own: the reference computes token by token, which a prompt of some thousand would wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from multilora_kernels import penalties_reference, reference, sampling_reference, step_inputs_reference
from multilora_kernels.gpu_operators import gpu_operator
from multilora_kernels.kv_rows import load_rows
from multilora_kernels.quantized import QuantizedWeight
from multilora_kernels.segments import LoRASegments, reference_segments
from multilora_kernels.tables import LoRATables

_OUTPUTS_AT_ONCE = 8192
"""Of a quantised weight, which are written as float32."""

_SCORES_AT_ONCE = 1 << 25
"""Of all heads: the memory of a long prompt's scores has a bound."""


def _lora_apply(
    x: torch.Tensor,
    y: torch.Tensor,
    tables: LoRATables,
    first_slice: int,
    slice_sizes: Sequence[int],
    segments: LoRASegments,
) -> None:
    """In two steps, by what serves each: kernels, where these are right."""
    v = gpu_operator("lora_shrink")(x, tables, first_slice, len(slice_sizes), segments)
    gpu_operator("lora_expand")(v, y, tables, first_slice, slice_sizes, segments)


def _lora_segments(mapping: torch.Tensor, max_loras: int, chunk_size: int, capacity: int) -> tuple[torch.Tensor, ...]:
    segments = reference_segments(mapping, max_loras, chunk_size, capacity)
    return segments.permutation, segments.chunk_start, segments.chunk_length, segments.chunk_lora_index


def _quantized_linear(x: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None) -> torch.Tensor:
    num_outputs = weight.shape[0]
    pieces = [
        F.linear(x, weight.rows(first, min(_OUTPUTS_AT_ONCE, num_outputs - first)).to(x.dtype))
        for first in range(0, num_outputs, _OUTPUTS_AT_ONCE)
    ]
    y = torch.cat(pieces, dim=1)
    return y if bias is None else y.add_(bias)


def _paged_attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    context_lens: torch.Tensor,
    num_decodes: int,
    block_size: int,
    window: int,
    scale: float,
    softcap: float,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """One sequence after the other, in float32; as `reference.paged_attention`."""
    num_heads, num_kv_heads = q.shape[1], keys.shape[1]
    out = q.new_empty(q.shape)
    starts = query_starts.tolist()
    for table, context, start, end in zip(block_tables, context_lens.tolist(), starts, starts[1:], strict=False):
        first_key = max(0, context - (end - start) - window + 1) if window else 0
        positions = torch.arange(first_key, context, device=q.device)
        slots = table[positions // block_size] * block_size + positions % block_size
        # [num_kv_heads, keys, head_dim]
        k, v = (load_rows(cache, slots, torch.float32).transpose(0, 1) for cache in (keys, values))
        rows_at_once = max(1, _SCORES_AT_ONCE // (num_heads * len(positions)))
        for first in range(start, end, rows_at_once):
            rows = q[first : min(first + rows_at_once, end)]
            # [num_kv_heads, heads of each, rows, head_dim]
            queries = rows.float().unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
            scores = (queries @ k[:, None].mT) * scale
            if softcap:
                scores = softcap * (scores / softcap).tanh()
            own = torch.arange(context - end + first, context - end + first + len(rows), device=q.device)[:, None]
            is_seen = positions <= own
            if window:
                is_seen &= positions > own - window
            weights = _softmax(scores.masked_fill_(~is_seen, -torch.inf), sinks)
            out[first : first + len(rows)] = (weights @ v[:, None]).permute(2, 0, 1, 3).flatten(1, 2).to(q.dtype)
    return out.flatten(1)


def _softmax(scores: torch.Tensor, sinks: torch.Tensor | None) -> torch.Tensor:
    """scores: [num_kv_heads, heads of each, rows, keys]; a sink is one more key, whose value is zero."""
    if sinks is None:
        return scores.softmax(dim=-1)
    of_heads = sinks.float().view(*scores.shape[:2], 1, 1).expand(*scores.shape[:3], 1)
    return torch.cat((scores, of_heads), dim=-1).softmax(dim=-1)[..., :-1]


def _rotary_attention(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    slots: torch.Tensor,
    *fields: Any,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    *sequences_and_options, is_interleaved = fields
    q = reference.rotate_and_store(qkv, cos, sin, keys, values, slots, is_interleaved)
    result = _paged_attention(q, keys, values, *sequences_and_options)
    return result if out is None else out.copy_(result)


SLOWER_OPERATORS: Mapping[str, Callable[..., Any]] = {
    "lora_shrink": reference.lora_shrink,
    "lora_expand": reference.lora_expand,
    "lora_apply": _lora_apply,
    "lora_segments": _lora_segments,
    "rotary_attention": _rotary_attention,
    "paged_attention": _paged_attention,
    "quantized_linear": _quantized_linear,
    "add_rms_norm": reference.add_rms_norm,
    "add_layer_norm": reference.add_layer_norm,
    "silu_mul": reference.silu_mul,
    "gelu_tanh_mul": reference.gelu_tanh_mul,
    "gelu_tanh": reference.gelu_tanh,
    "penalise_tokens": penalties_reference.penalise_tokens,
    "forbid_tokens": penalties_reference.forbid_tokens,
    "sample_tokens": sampling_reference.sample_tokens,
    "fill_step_inputs": step_inputs_reference.fill_step_inputs,
}
"""By name, with the arguments and results of `cuda`'s."""
