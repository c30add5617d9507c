"""The wire format of adapters and the packed form that every tier stores. (signatures; being written)"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class AdapterLayout:
    """What an adapter must look like to fit one model: plain ints and strings, so that it travels between processes."""

    num_layers: int
    hidden_size: int
    q_size: int
    kv_size: int
    intermediate_size: int
    max_rank: int
    lora_dtype: str
    page_bytes: int


@dataclass(frozen=True)
class PackedAdapter:
    """An adapter in packed form. `rows`: bytes-like int table; `pages`: one contiguous uint8 tensor [num_pages, page_bytes]."""

    digest: str
    rows: list[list[int]]
    pages: torch.Tensor


def pack_adapter(weights: torch.Tensor, config: torch.Tensor, layout: AdapterLayout) -> PackedAdapter:
    """Validate wire tensors `lora_weights` [rows, width] and `lora_config` [rows, 3 or 4] and pack them.

    Copies what it keeps (the inputs may lie in shared memory). Raises InvalidRequest or Unsupported.
    """
    raise NotImplementedError
