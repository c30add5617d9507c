"""Tile sizes of the GPU kernels: one table, `block_sizes.json`, written by `scripts/run tune_block_sizes`.

The table is keyed by GPU ("default" serves those not listed), operator and regime. A regime depends only on the number
of tokens, never on which adapters they use, so that a captured CUDA graph replays for any mix.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Literal

import torch
import triton

from multilora_kernels.segments import CHUNK_SIZE

Operator = Literal["shrink", "expand", "update"]
Regime = Literal["decode", "prefill"]
BlockSizes = dict[str, int]
"""Keyword arguments of a kernel launch: BLOCK_* sizes, num_warps, num_stages and other options of the compiler."""

TABLE_PATH = Path(__file__).with_name("block_sizes.json")
MIN_BLOCK_R = 16
"""Tensor cores take at least sixteen ranks; those an adapter does not have are masked and not loaded."""


def regime_of(chunk_size: int) -> Regime:
    """Decode batches are cut into chunks of one tensor-core tile, prefill batches into larger ones."""
    return "decode" if chunk_size <= CHUNK_SIZE else "prefill"


def block_sizes(operator: Operator, chunk_size: int, max_rank: int, gpu: str) -> BlockSizes:
    """Tile sizes of an operator for batches cut into chunks of `chunk_size` tokens."""
    sizes = dict(_table(gpu)[operator][regime_of(chunk_size)])
    sizes["BLOCK_R"] = max(MIN_BLOCK_R, min(sizes["BLOCK_R"], triton.next_power_of_2(max_rank)))
    return sizes | {"enable_fp_fusion": True}


@functools.cache
def _table(gpu: str) -> dict[str, dict[str, BlockSizes]]:
    tables: dict[str, dict[str, dict[str, BlockSizes]]] = json.loads(TABLE_PATH.read_text())
    return tables.get(gpu, tables["default"])


@functools.cache
def gpu_name(device: torch.device) -> str:
    """The key of a device in the table."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "default"
