"""`paged_attention`: attention of many sequences over one paged cache, in one call. `rotary_attention` first rotates
queries and keys and writes the cache.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from multilora_kernels.dispatch import compiled_for, operator
from multilora_kernels.interpreter import has_gpu_operators
from multilora_kernels.kv_rows import KVRows, kv_head_dim


class PagedSequences(NamedTuple):
    """The sequences of a step: which tokens of the batch belong to each, and where its keys and values lie.

    block_tables: [num_sequences, max blocks] int64; position p of a sequence has the slot
        block_table[p // block_size] * block_size + p % block_size. Slots after its context are not read.
    query_starts: [num_sequences + 1] int64, the first token of each sequence in the batch, then the end of the last.
    context_lens: [num_sequences] int64, the number of keys of each sequence, including its tokens in the batch.
    num_decodes: the number of sequences with one token that the decode kernel computes; they come first. The result of
        any other token has the same bits, whatever other tokens of its sequence are in the batch.
    window: the number of newest keys that a token attends to, including its own; None means all.
    """

    block_tables: torch.Tensor
    query_starts: torch.Tensor
    context_lens: torch.Tensor
    num_decodes: int
    block_size: int
    window: int | None = None


class AttentionOptions(NamedTuple):
    """How a layer's scores become weights.

    scale: positive factor of q K^T; None means 1 / sqrt(head_dim).
    softcap: scores become softcap * tanh(scores / softcap) before any key is masked; 0 leaves them. Gemma 2
        (arXiv:2408.00118) has a softcap.
    sinks: [num_heads], for each query head a score without a value, which counts in the softmax's denominator; None for
        no sinks. gpt-oss (arXiv:2508.10925) has sinks.
    distance_bias: contiguous float32 [num_heads, num_distances], added to scaled scores: that of query head h for a key
        d positions before the query grows by distance_bias[h, min(d, num_distances - 1)]. None for no bias. The decoder
        of T5 (arXiv:1910.10683) has such a bias, and ALiBi (arXiv:2108.12409) is one. Beside it softcap must be 0.
    may_round: whether queries and weights may be rounded to bfloat16, beside keys and values of bfloat16. A CPU that
        multiplies pairs of bfloat16 faster than floats rounds them, as bfloat16 arithmetic does. Sums stay float32.
    """

    scale: float | None = None
    softcap: float = 0.0
    sinks: torch.Tensor | None = None
    distance_bias: torch.Tensor | None = None
    may_round: bool = False


_PLAIN = AttentionOptions()


def paged_attention(
    q: torch.Tensor,
    keys: KVRows,
    values: KVRows,
    sequences: PagedSequences,
    options: AttentionOptions = _PLAIN,
) -> torch.Tensor:
    """softmax(scale q K^T) V over the keys up to each token's own position, with float32 arithmetic.

    q: [num_tokens, num_heads, head_dim], float32, bfloat16 or float16.
    keys, values: [num_slots, num_kv_heads, head_dim], of one of these types, with equal strides. Or codes, int8 or
        float8_e4m3fn: [num_slots, num_kv_heads, head_dim + SCALE_BYTES] on a CPU, `KVCodes` on a GPU (`kv_rows`).
        Query head h reads the key-value head h // (num_heads / num_kv_heads).
    options: the scale and the other changes of scores.
    Returns [num_tokens, num_heads * head_dim] in the dtype of q. A token's result has the same bits whatever other
    sequences are in the batch.
    """
    library = compiled_for(q)
    if library is not None:
        return library.paged_attention(q, keys, values, sequences, options)  # type: ignore[no-any-return]
    fields = (*_sequence_fields(sequences), *_option_fields(options, q.shape[2]))
    return operator("paged_attention", q)(q, keys, values, *fields)  # type: ignore[no-any-return]


def rotary_attention(
    qkv: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    keys: KVRows,
    values: KVRows,
    slots: torch.Tensor,
    sequences: PagedSequences,
    options: AttentionOptions = _PLAIN,
    is_interleaved: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate queries and keys, store keys and values, then do `paged_attention`, all in float32 arithmetic.

    qkv: [num_tokens, (num_heads + 2 num_kv_heads) * head_dim], the heads of queries, keys and values side by side;
        float32, bfloat16 or float16, as are cos and sin.
    cos, sin: [num_tokens, 1, rotary_dim]; element i < rotary_dim of a head becomes x[i] * cos[i] + x[j] * sin[i], where
        j is (i + rotary_dim / 2) % rotary_dim, or i ^ 1 if `is_interleaved`. The other elements of a head stay as they
        are. If rotary_dim is 0, all elements stay.
    keys, values: as for `paged_attention`, written in place. slots: [num_tokens] int64, the slot of each token.
    options: as for `paged_attention`. out: contiguous; if it is given, the result is written to it and it is returned.
    Returns [num_tokens, num_heads * head_dim] in the dtype of qkv.
    """
    step = (qkv, cos, sin, keys, values, slots)
    if out is not None and not has_gpu_operators(qkv.device):
        return out.copy_(rotary_attention(*step, sequences, options, is_interleaved))
    library = compiled_for(qkv)
    if library is not None:
        return library.rotary_attention(*step, sequences, options, is_interleaved)  # type: ignore[no-any-return]
    fields = (*_sequence_fields(sequences), *_option_fields(options, kv_head_dim(keys)), is_interleaved)
    into = {} if out is None else {"out": out}
    return operator("rotary_attention", qkv)(*step, *fields, **into)  # type: ignore[no-any-return]


def _sequence_fields(sequences: PagedSequences) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, int, int, int]:
    return *sequences[:5], sequences.window or 0


def _option_fields(
    options: AttentionOptions, head_dim: int
) -> tuple[float, float, torch.Tensor | None, torch.Tensor | None]:
    assert options.distance_bias is None or not options.softcap
    scale = head_dim**-0.5 if options.scale is None else options.scale
    return scale, options.softcap, options.sinks, options.distance_bias
