"""Everything of this package that torch knows as an operator: `multilora::lora_shrink`, `lora_expand`, `lora_apply`,
`lora_linear`, `packed_linear`, `packed_embedding`, `quantized_lora_linear`, `quantized_linear`, `quantized_embedding`,
`paged_attention`, `rotary_attention`, `add_rms_norm`, `add_layer_norm`, `silu_mul`, `gelu_tanh_mul`,
`gelu_tanh`, `sample_tokens`.

torch.compile and CUDA graphs see one opaque node each, with a fake implementation for shapes. An operator takes only
tensors and integers, so the tables and segments are passed field by field here and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import library

from multilora_kernels.gpu_operators import slower_operators
from multilora_kernels.interpreter import has_gpu_operators
from multilora_kernels.kv_rows import kv_head_dim
from multilora_kernels.panels import QuantizedPanels
from multilora_kernels.parts import empty_v
from multilora_kernels.segments import LoRASegments
from multilora_kernels.tables import LoRATables

Shrink = Callable[[torch.Tensor, LoRATables, int, int, LoRASegments], torch.Tensor]
Expand = Callable[[torch.Tensor, torch.Tensor, LoRATables, int, Sequence[int], LoRASegments], None]
Apply = Callable[[torch.Tensor, torch.Tensor, LoRATables, int, Sequence[int], LoRASegments], None]

_TABLES = "Tensor arena, Tensor rank, Tensor a_offset, Tensor b_offset, Tensor magnitude_offset, int max_rank"
_SEGMENTS = "Tensor permutation, Tensor chunk_start, Tensor chunk_length, Tensor chunk_lora_index, int chunk_size"

library.define(
    "multilora::lora_shrink", f"(Tensor x, int first_slice, int num_slices, {_TABLES}, {_SEGMENTS}) -> Tensor"
)
library.define(
    "multilora::lora_expand",
    f"(Tensor v, Tensor(a!) y, int first_slice, int[] slice_sizes, {_TABLES}, {_SEGMENTS}) -> ()",
)

library.define(
    "multilora::lora_apply",
    f"(Tensor x, Tensor(a!) y, int first_slice, int[] slice_sizes, {_TABLES}, {_SEGMENTS}) -> ()",
)

library.define(
    "multilora::lora_linear",
    f"(Tensor x, Tensor panels, int first_slice, int[] slice_sizes, {_TABLES}, {_SEGMENTS}, Tensor? bias) -> Tensor",
)

library.define("multilora::packed_linear", "(Tensor x, Tensor panels, int out_features) -> Tensor")
library.define("multilora::packed_embedding", "(Tensor token_ids, Tensor panels, int num_embeddings) -> Tensor")

_QUANTIZED = "Tensor codes, Tensor scales, Tensor? zeros, int group_size, int in_features, int digits"

library.define(
    "multilora::quantized_lora_linear",
    f"(Tensor x, {_QUANTIZED}, int first_slice, int[] slice_sizes, {_TABLES}, {_SEGMENTS}, Tensor? bias) -> Tensor",
)

library.define("multilora::quantized_linear", f"(Tensor x, {_QUANTIZED}, int out_features) -> Tensor")
library.define("multilora::quantized_embedding", f"(Tensor token_ids, {_QUANTIZED}, int num_embeddings) -> Tensor")

_SEQUENCES = (
    "Tensor block_tables, Tensor query_starts, Tensor context_lens, int num_decodes, int block_size, int window"
)

_OPTIONS = "float scale, float softcap, Tensor? sinks"
_MAY_ROUND = "bool may_round=False"

library.define(
    "multilora::paged_attention",
    f"(Tensor q, Tensor keys, Tensor values, {_SEQUENCES}, {_OPTIONS}, {_MAY_ROUND}) -> Tensor",
)
library.define(
    "multilora::rotary_attention",
    "(Tensor qkv, Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values, Tensor slots,"
    f" {_SEQUENCES}, {_OPTIONS}, bool is_interleaved, {_MAY_ROUND}) -> Tensor",
)

library.define(
    "multilora::add_rms_norm", "(Tensor x, Tensor update, Tensor weight, float eps) -> (Tensor normed, Tensor total)"
)
library.define(
    "multilora::add_layer_norm",
    "(Tensor x, Tensor update, Tensor weight, Tensor? bias, float eps) -> (Tensor normed, Tensor total)",
)
library.define("multilora::silu_mul", "(Tensor gate_up) -> Tensor")
library.define("multilora::gelu_tanh_mul", "(Tensor gate_up) -> Tensor")
library.define("multilora::gelu_tanh", "(Tensor x) -> Tensor")

library.define("multilora::sample_tokens", "(Tensor logits, Tensor parameters) -> Tensor")

_shrink = torch.ops.multilora.lora_shrink.default
_expand = torch.ops.multilora.lora_expand.default
_apply = torch.ops.multilora.lora_apply.default
_linear = torch.ops.multilora.lora_linear.default
_packed_linear = torch.ops.multilora.packed_linear.default
_packed_embedding = torch.ops.multilora.packed_embedding.default

_quantized_linear = torch.ops.multilora.quantized_lora_linear.default
quantized_linear = torch.ops.multilora.quantized_linear.default
quantized_embedding = torch.ops.multilora.quantized_embedding.default

paged_attention = torch.ops.multilora.paged_attention.default
rotary_attention = torch.ops.multilora.rotary_attention.default
add_rms_norm = torch.ops.multilora.add_rms_norm.default
add_layer_norm = torch.ops.multilora.add_layer_norm.default
silu_mul = torch.ops.multilora.silu_mul.default
gelu_tanh_mul = torch.ops.multilora.gelu_tanh_mul.default
gelu_tanh = torch.ops.multilora.gelu_tanh.default
sample_tokens = torch.ops.multilora.sample_tokens.default


def call_shrink(
    x: torch.Tensor, tables: LoRATables, first_slice: int, num_slices: int, segments: LoRASegments
) -> torch.Tensor:
    """`lora_shrink` through the dispatcher."""
    return _shrink(x, first_slice, num_slices, *table_fields(tables), *segment_fields(segments))  # type: ignore[no-any-return]


def call_expand(
    v: torch.Tensor,
    y: torch.Tensor,
    tables: LoRATables,
    first_slice: int,
    slice_sizes: Sequence[int],
    segments: LoRASegments,
) -> None:
    """`lora_expand` through the dispatcher."""
    _expand(v, y, first_slice, slice_sizes, *table_fields(tables), *segment_fields(segments))


def call_apply(
    x: torch.Tensor,
    y: torch.Tensor,
    tables: LoRATables,
    first_slice: int,
    slice_sizes: Sequence[int],
    segments: LoRASegments,
) -> None:
    """`lora_apply` through the dispatcher."""
    _apply(x, y, first_slice, slice_sizes, *table_fields(tables), *segment_fields(segments))


def call_linear(
    x: torch.Tensor,
    panels: torch.Tensor,
    tables: LoRATables,
    first_slice: int,
    slice_sizes: Sequence[int],
    segments: LoRASegments,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """`lora_linear` through the dispatcher."""
    return _linear(x, panels, first_slice, slice_sizes, *table_fields(tables), *segment_fields(segments), bias)  # type: ignore[no-any-return]


def call_quantized_lora_linear(
    x: torch.Tensor,
    panels: QuantizedPanels,
    tables: LoRATables,
    first_slice: int,
    slice_sizes: Sequence[int],
    segments: LoRASegments,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """`quantized_lora_linear` through the dispatcher."""
    fields = (*table_fields(tables), *segment_fields(segments))
    return _quantized_linear(x, *panels, first_slice, slice_sizes, *fields, bias)  # type: ignore[no-any-return]


def call_packed_linear(x: torch.Tensor, panels: torch.Tensor, out_features: int) -> torch.Tensor:
    """`packed_linear` through the dispatcher."""
    return _packed_linear(x, panels, out_features)  # type: ignore[no-any-return]


def call_packed_embedding(token_ids: torch.Tensor, panels: torch.Tensor, num_embeddings: int) -> torch.Tensor:
    """`packed_embedding` through the dispatcher."""
    return _packed_embedding(token_ids, panels, num_embeddings)  # type: ignore[no-any-return]


def implement(dispatch_key: str, shrink: Shrink, expand: Expand, apply: Apply | None = None) -> None:
    """Register functions over tables and segments as the operators of a dispatch key ("CPU", "CUDA").

    apply: None: `shrink`, then `expand`.
    """

    def lora_shrink(x: torch.Tensor, first_slice: int, num_slices: int, *fields: Any) -> torch.Tensor:
        tables, segments = structs_of(x.shape[0], fields)
        return shrink(x, tables, first_slice, num_slices, segments)

    def lora_expand(
        v: torch.Tensor, y: torch.Tensor, first_slice: int, slice_sizes: Sequence[int], *fields: Any
    ) -> None:
        tables, segments = structs_of(y.shape[0], fields)
        expand(v, y, tables, first_slice, slice_sizes, segments)

    def lora_apply(
        x: torch.Tensor, y: torch.Tensor, first_slice: int, slice_sizes: Sequence[int], *fields: Any
    ) -> None:
        tables, segments = structs_of(x.shape[0], fields)
        if apply is not None:
            apply(x, y, tables, first_slice, slice_sizes, segments)
        else:
            v = shrink(x, tables, first_slice, len(slice_sizes), segments)
            expand(v, y, tables, first_slice, slice_sizes, segments)

    library.impl("multilora::lora_shrink", dispatch_key, lora_shrink)
    library.impl("multilora::lora_expand", dispatch_key, lora_expand)
    library.impl("multilora::lora_apply", dispatch_key, lora_apply)


def implement_plain(dispatch_key: str, **functions: Callable[..., Any]) -> None:
    """Register functions with the arguments of the operators that they are named after."""
    for name, function in functions.items():
        library.impl(f"multilora::{name}", dispatch_key, function)


_TableFields = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]
_SegmentFields = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, int]


def table_fields(tables: LoRATables) -> _TableFields:
    return (
        tables.arena,
        tables.rank,
        tables.a_offset,
        tables.b_offset,
        tables.magnitude_offset,
        tables.max_rank,
    )


def segment_fields(segments: LoRASegments) -> _SegmentFields:
    return (
        segments.permutation,
        segments.chunk_start,
        segments.chunk_length,
        segments.chunk_lora_index,
        segments.chunk_size,
    )


def structs_of(num_tokens: int, fields: tuple[Any, ...]) -> tuple[LoRATables, LoRASegments]:
    """fields: those of tables, then those of segments, as in the operators' arguments."""
    permutation, chunk_start, chunk_length, chunk_lora_index, chunk_size = fields[6:]
    segments = LoRASegments(permutation, chunk_start, chunk_length, chunk_lora_index, num_tokens, chunk_size)
    return LoRATables(*fields[:6]), segments


def _fake_shrink(x: torch.Tensor, first_slice: int, num_slices: int, *fields: Any) -> torch.Tensor:
    tables, _ = structs_of(x.shape[0], fields)
    if has_gpu_operators(x.device) and "lora_shrink" not in slower_operators():
        return empty_v(x, num_slices, tables.max_rank)
    return x.new_empty(1, num_slices, x.shape[0], tables.max_rank, dtype=torch.float32)


def _fake_in_place(*_: Any) -> None:
    return None


def _fake_linear(
    x: torch.Tensor, panels: torch.Tensor, first_slice: int, slice_sizes: Sequence[int], *_: Any
) -> torch.Tensor:
    return x.new_empty(x.shape[0], sum(slice_sizes))


def _fake_packed_linear(x: torch.Tensor, panels: torch.Tensor, out_features: int) -> torch.Tensor:
    return x.new_empty(x.shape[0], out_features)


def _fake_packed_embedding(token_ids: torch.Tensor, panels: torch.Tensor, num_embeddings: int) -> torch.Tensor:
    in_features = panels.shape[2] * panels.shape[4:].numel()
    return panels.new_empty(token_ids.shape[0], in_features, dtype=torch.float32)


def _fake_quantized_linear(x: torch.Tensor, *fields: Any) -> torch.Tensor:
    out_features = fields[6]
    return x.new_empty(x.shape[0], out_features)


def _fake_quantized_lora_linear(x: torch.Tensor, *fields: Any) -> torch.Tensor:
    slice_sizes = fields[7]
    return x.new_empty(x.shape[0], sum(slice_sizes))


def _fake_quantized_embedding(token_ids: torch.Tensor, codes: torch.Tensor, *fields: Any) -> torch.Tensor:
    in_features = fields[3]
    return codes.new_empty(token_ids.shape[0], in_features, dtype=torch.float32)


def _fake_paged_attention(q: torch.Tensor, *_: Any) -> torch.Tensor:
    return q.new_empty(q.shape[0], q.shape[1] * q.shape[2])


def _fake_rotary_attention(
    qkv: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, keys: torch.Tensor, *_: Any
) -> torch.Tensor:
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] - 2 * keys.shape[1] * kv_head_dim(keys))


def _fake_add_norm(x: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _fake_gated(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)


def _fake_sample_tokens(logits: torch.Tensor, parameters: torch.Tensor) -> torch.Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


library.register_fake("multilora::lora_shrink", _fake_shrink)
library.register_fake("multilora::lora_expand", _fake_in_place)
library.register_fake("multilora::lora_apply", _fake_in_place)
library.register_fake("multilora::lora_linear", _fake_linear)
library.register_fake("multilora::packed_linear", _fake_packed_linear)
library.register_fake("multilora::packed_embedding", _fake_packed_embedding)
library.register_fake("multilora::quantized_lora_linear", _fake_quantized_lora_linear)
library.register_fake("multilora::quantized_linear", _fake_quantized_linear)
library.register_fake("multilora::quantized_embedding", _fake_quantized_embedding)
library.register_fake("multilora::paged_attention", _fake_paged_attention)
library.register_fake("multilora::rotary_attention", _fake_rotary_attention)
library.register_fake("multilora::add_rms_norm", _fake_add_norm)
library.register_fake("multilora::add_layer_norm", _fake_add_norm)
library.register_fake("multilora::silu_mul", _fake_gated)
library.register_fake("multilora::gelu_tanh_mul", _fake_gated)
library.register_fake("multilora::gelu_tanh", torch.empty_like)
library.register_fake("multilora::sample_tokens", _fake_sample_tokens)
