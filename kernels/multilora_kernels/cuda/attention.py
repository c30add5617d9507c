"""`paged_attention` and `rotary_attention` on a GPU, in OpenAI Triton.

A decode step is one launch (`decode_attention`). A step with prompts is three launches: the rotation of all tokens,
which writes the cache (`rotation`), the attention of prompts (`prompt_attention`), and the attention of decodes.
"""

from __future__ import annotations

from typing import Any

import torch

from multilora_kernels.cuda import decode_attention, prompt_attention
from multilora_kernels.cuda.kv_rows import parts_of
from multilora_kernels.cuda.rotation import rotate_and_store
from multilora_kernels.kv_rows import KVRows, kv_head_dim, num_kv_heads


def paged_attention(
    q: torch.Tensor,
    keys: KVRows,
    values: KVRows,
    *fields: Any,
) -> torch.Tensor:
    """See `multilora_kernels.attention.paged_attention`."""
    num_tokens, num_heads, head_dim = q.shape
    out = q.new_empty(num_tokens, num_heads * head_dim)
    prompt_attention.attend(q, keys, values, out, 0, *fields)
    return out


def rotary_attention(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: KVRows,
    values: KVRows,
    slots: torch.Tensor,
    block_tables: torch.Tensor,
    *fields: Any,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `multilora_kernels.attention.rotary_attention`."""
    rows, value_rows = parts_of(keys)[0], parts_of(values)[0]
    assert qkv.stride(1) == rows.stride(2) == block_tables.stride(1) == 1
    assert rows.stride() == value_rows.stride()
    assert cos.stride() == sin.stride()
    assert cos.stride(2) == 1 or cos.shape[2] == 0
    *sequences_and_options, is_interleaved = fields
    num_decodes = sequences_and_options[2]
    step = (qkv, cos, sin, keys, values, slots)
    width = qkv.shape[1] - 2 * num_kv_heads(keys) * kv_head_dim(keys)
    out = qkv.new_empty(len(qkv), width) if out is None else out
    assert out.shape == (len(qkv), width)
    assert out.is_contiguous()
    if num_decodes < len(block_tables):
        q = rotate_and_store(*step, is_interleaved)
        prompt_attention.attend(q, keys, values, out, num_decodes, block_tables, *sequences_and_options)
    if num_decodes:
        decode_attention.decode(*step, out, block_tables, *fields)
    return out
