"""Random adapters in the wire format, and what they mean: a plain dictionary of A and B."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch

from multilora_wire.config_sites import config_sites
from multilora_wire.layout import AdapterLayout, num_values
from multilora_wire.sites import decoder_sites

TINY = AdapterLayout(
    decoder_sites(num_layers=3, hidden_size=24, q_size=40, kv_size=8, intermediate_size=56),
    max_rank=16,
    lora_dtype="float32",
    page_bytes=16384,
)
"""Odd on purpose: q_size differs from hidden_size, nothing is a power of two."""

SPANNING = replace(TINY, page_bytes=2048)
"""Many pieces take two pages and more: the largest has 7168 bytes."""

_T5 = {"model_type": "t5", "d_model": 24, "d_kv": 10, "num_heads": 3, "d_ff": 56, "feed_forward_proj": "gated-gelu"}
ENCODER_DECODER = replace(TINY, sites=config_sites({**_T5, "num_layers": 2, "num_decoder_layers": 3}))
"""Of a T5: layers 0 to 2 are the decoder's, 3 and 4 the encoder's."""


@dataclass(frozen=True)
class WireAdapter:
    """weights [rows, width], config [rows, 4], and per (module, layer) the A and B that were written into them."""

    weights: torch.Tensor
    config: torch.Tensor
    matrices: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]


def wire_adapter(
    layout: AdapterLayout,
    rows: Iterable[tuple[int, int, int]],
    seed: int = 0,
    scale: float = 0.05,
    extra_width: int = 3,
    dtype: torch.dtype = torch.float32,
) -> WireAdapter:
    """An adapter with the given (module id, layer, rank) rows, in that order, a bit wider than the widest.

    The A and B of a module with experts have one more dimension, which comes first.
    """
    generator = torch.Generator().manual_seed(seed)
    modules = layout.sites.module_at
    rows = list(rows)
    width = max(num_values(modules[layer, m], r) for m, layer, r in rows) + extra_width
    weights = torch.zeros(len(rows), width, dtype=dtype)
    matrices = {}
    for i, (module_id, layer, rank) in enumerate(rows):
        module = modules[layer, module_id]
        experts = (module.experts,) if module.experts > 1 else ()
        a = (torch.randn(*experts, rank, module.in_size, generator=generator) * scale).to(dtype)
        b = (torch.randn(*experts, module.out_size, rank, generator=generator) * scale).to(dtype)
        weights[i, : a.numel() + b.numel()] = torch.cat([a.flatten(), b.flatten()])
        matrices[module_id, layer] = (a, b)
    config = torch.tensor([[m, layer, r, 0] for m, layer, r in rows], dtype=torch.int32)
    return WireAdapter(weights, config, matrices)
