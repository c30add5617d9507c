"""Tile sizes of the GPU kernels: one table, `block_sizes.json`, written by `scripts/run tune_block_sizes`.

The table is keyed by architecture, operator and regime; "default" has an entry for each, an architecture for those that
differ there. A regime depends only on the number of tokens, never on which adapters they use, so that a captured CUDA
graph replays for any mix.

Programs of prompts expand 64 outputs: with 128 they spill on three of six architectures, or have so many registers that
half as many warps run. Eight warps share them on sm_80, where four spill beside ranks up to 16.
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


def block_sizes(operator: Operator, chunk_size: int, max_rank: int, capability: int) -> BlockSizes:
    """Tile sizes of an operator for batches cut into chunks of `chunk_size` tokens; capability: 90 for sm_90."""
    sizes = dict(_table(capability)[operator, regime_of(chunk_size)])
    sizes["BLOCK_R"] = max(MIN_BLOCK_R, min(sizes["BLOCK_R"], triton.next_power_of_2(max_rank)))
    return sizes | {"enable_fp_fusion": True}


@functools.cache
def _table(capability: int) -> dict[tuple[str, str], BlockSizes]:
    tables: dict[str, dict[str, dict[str, BlockSizes]]] = json.loads(TABLE_PATH.read_text())
    return {
        (operator, regime): sizes
        for name in ("default", architecture(capability))
        for operator, regimes in tables.get(name, {}).items()
        for regime, sizes in regimes.items()
    }


def architecture(capability: int) -> str:
    """The key of the table."""
    return f"sm_{capability}"


@functools.cache
def capability(device: torch.device) -> int:
    """The compute capability of a device, 90 for sm_90; in the interpreter the oldest that we name."""
    if device.type != "cuda":
        return 80
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor
