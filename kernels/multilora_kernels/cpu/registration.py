"""The CPU's operators as torch's dispatcher calls them: with the fields of structs one by one."""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch

from multilora_kernels import operators


def register(library: ModuleType) -> None:
    """Register the functions of the compiled module (`python.cpp`) for tensors of the CPU."""
    operators.implement(
        "CPU",
        library.dispatched_lora_shrink,
        library.dispatched_lora_expand,
        library.dispatched_lora_apply,
    )
    operators.implement_plain(
        "CPU",
        packed_linear=library.dispatched_packed_linear,
        packed_embedding=library.dispatched_packed_embedding,
        add_rms_norm=library.dispatched_add_rms_norm,
        add_layer_norm=library.dispatched_add_layer_norm,
        silu_mul=library.dispatched_silu_mul,
        gelu_tanh_mul=library.dispatched_gelu_tanh_mul,
        gelu_tanh=library.dispatched_gelu_tanh,
        sample_tokens=library.dispatched_sample_tokens,
        **_of_structs(library),
    )


def _of_structs(library: ModuleType) -> dict[str, Any]:
    """The operators whose arguments make tables, segments, quantised panels, or sequences and options."""

    def lora_linear(x: torch.Tensor, panels: torch.Tensor, *others: Any) -> Any:
        return _with_adapters(x, panels, *others)

    def quantized_lora_linear(x: torch.Tensor, *others: Any) -> Any:
        return _with_adapters(x, others[:6], *others[6:])

    def _with_adapters(x: torch.Tensor, panels: Any, first_slice: int, slice_sizes: Sequence[int], *others: Any) -> Any:
        *fields, bias = others
        tables, segments = operators.structs_of(x.shape[0], tuple(fields))
        return library.dispatched_lora_linear(x, panels, tables, first_slice, slice_sizes, segments, bias)

    def quantized_linear(x: torch.Tensor, *others: Any) -> Any:
        return library.dispatched_packed_linear(x, others[:6], others[6])

    def quantized_embedding(token_ids: torch.Tensor, *others: Any) -> Any:
        return library.dispatched_packed_embedding(token_ids, others[:6], others[6])

    def paged_attention(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, *fields: Any) -> Any:
        return library.dispatched_paged_attention(q, keys, values, fields[:6], _options(*fields[6:]))

    def rotary_attention(
        qkv: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
        *fields: Any,
    ) -> Any:
        is_interleaved, *may_round = fields[9:]
        sequences, options = fields[:6], _options(*fields[6:9], *may_round)
        step = (qkv, cos, sin, keys, values, slots, sequences)
        return library.dispatched_rotary_attention(*step, options, is_interleaved)

    return {
        "lora_linear": lora_linear,
        "quantized_lora_linear": quantized_lora_linear,
        "quantized_linear": quantized_linear,
        "quantized_embedding": quantized_embedding,
        "paged_attention": paged_attention,
        "rotary_attention": rotary_attention,
    }


def _options(
    scale: float, softcap: float, sinks: torch.Tensor | None, may_round: bool = False
) -> tuple[float, float, torch.Tensor | None, bool]:
    """`AttentionOptions`; torch leaves an argument away that has its default."""
    return scale, softcap, sinks, may_round
