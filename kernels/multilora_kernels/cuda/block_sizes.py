"""Tile sizes of the GPU kernels: one table, `block_sizes.json`, tuned by `scripts/gpu_report`.

The table is keyed by architecture, operator and regime. "default" has an entry for each operator and regime; an
architecture has an entry only if it differs. A regime depends only on the number of tokens, never on their adapters, so
that a captured CUDA graph replays for any mix.

Steps without a prompt, of at most so many rows as the entry of the update has as `max_rows`, are computed row by row
("rows"). Others are cut into chunks of tokens of one adapter ("decode", and for many tokens "prefill").

An entry may have plans that a tuner found for the architecture. The first plan whose `max_rank` and `max_width` are not
exceeded changes sizes of the entry. The first of its `by_rows` whose `max_rows` is not exceeded changes sizes again.
Without plans, the entry serves all shapes. Sums must not depend on how many rows share a step, so `by_rows` does not
change the tiles of a sum.

    "expand": {"rows": {"BLOCK_N": 512, "BLOCK_R": 16, ..., "plans": [
        {"max_rank": 16, "max_width": 4096, "sizes": {"num_warps": 8},
         "by_rows": [{"max_rows": 8, "sizes": {"BLOCK_N": 256}}]}]}}

Attention has a regime by the type of keys. A plan of its entries has `max_head_dim` and may have `max_group`, the query
heads of a key-value head.

Programs of prompts expand 64 outputs at a time: with 128 half as many run at once. They keep 64 ranks of v for all
outputs; an architecture's limit of registers is where the assembler stops too early by itself, and spills.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch

from multilora_kernels.cuda.integers import next_power_of_2
from multilora_kernels.segments import CHUNK_SIZE, ROWS

Operator = Literal["shrink", "expand", "update"]
AttentionOperator = Literal["decode_attention", "prompt_attention"]
KeyKind = Literal["8 bits", "16 bits", "32 bits"]
"""Of keys and values: "32 bits" where they or the queries are float32, else the size of an element."""

Regime = Literal["rows", "decode", "prefill"]
BlockSizes = dict[str, int]
"""Keyword arguments of a kernel launch: BLOCK_* sizes, num_warps, num_stages and other options of the compiler."""

TABLE_PATH = Path(__file__).with_name("block_sizes.json")
_OF_SUMS = {"BLOCK_K", "BLOCK_R"}
_MORE_ROWS = 1 << 62
"""Larger than any bound."""

MIN_BLOCK_R = 16
"""Tensor cores take at least sixteen ranks. Ranks that an adapter lacks are masked and not loaded."""


def regime_of(chunk_size: int) -> Regime:
    """Decode batches are cut into chunks of one tensor-core tile, prefill batches into larger ones, rows not at all."""
    if chunk_size == ROWS:
        return "rows"
    return "decode" if chunk_size <= CHUNK_SIZE else "prefill"


def block_sizes(
    operator: Operator, chunk_size: int, max_rank: int, capability: int, width: int, num_rows: int
) -> BlockSizes:
    """Tile sizes of an operator for batches of `num_rows` tokens, cut into chunks of `chunk_size`, or `ROWS`.

    capability: 90 for sm_90. width: inputs of the linear, for expand outputs of all its slices.
    """
    regime = regime_of(chunk_size)
    entry = _table(capability)[operator, regime]
    # Every launch looks sizes up. They are remembered for each shape, not for each number of rows.
    key = (max_rank, width, next((bound for bound in entry.row_bounds if num_rows <= bound), _MORE_ROWS))
    return entry.served.get(key) or entry.served.setdefault(key, _sizes(entry, regime, *key))


def _sizes(entry: _Entry, regime: Regime, max_rank: int, width: int, num_rows: int) -> BlockSizes:
    plan = entry.plan(max_rank, width)
    sizes: BlockSizes = entry.sizes | plan.get("sizes", {})
    sizes |= next((rows["sizes"] for rows in plan.get("by_rows", ()) if num_rows <= rows["max_rows"]), {})
    least = 1 if regime == "rows" else MIN_BLOCK_R
    sizes["BLOCK_R"] = max(least, min(sizes["BLOCK_R"], next_power_of_2(max_rank)))
    return sizes | {"enable_fp_fusion": True}


def takes_rows(num_rows: int, max_rank: int, capability: int) -> bool:
    """Whether a step of so many rows without a prompt is computed row by row."""
    entry = _table(capability)["update", "rows"]
    limits = entry.sizes | entry.plan(max_rank, 0).get("sizes", {})
    return num_rows <= int(limits["max_rows"])


def attention_sizes(
    operator: AttentionOperator, kind: KeyKind, group: int, head_dim: int, capability: int
) -> BlockSizes:
    """Tile sizes of attention. group: query heads of a key-value head. capability: 90 for sm_90."""
    entry = _table(capability)[operator, kind]
    serving = (p for p in entry.plans if group <= p.get("max_group", group) and head_dim <= p["max_head_dim"])
    return entry.sizes | next((plan["sizes"] for plan in serving), {})


def key_kind(*dtypes: torch.dtype) -> KeyKind:
    """dtypes: of queries, and of keys and values."""
    if torch.float32 in dtypes:
        return "32 bits"
    return "8 bits" if any(dtype.itemsize == 1 for dtype in dtypes) else "16 bits"


def entry_with_plans(
    operator: Operator | AttentionOperator, regime: Regime | KeyKind, capability: int, plans: list[dict[str, Any]]
) -> dict[str, Any]:
    """The table's entry as an architecture's own, with plans before those that it has: {"sm_90": {operator: ...}}."""
    entry = _table(capability)[operator, regime]
    return {architecture(capability): {operator: {regime: entry.sizes | {"plans": [*plans, *entry.plans]}}}}


def row_bounds(capability: int) -> list[int]:
    """The numbers of rows up to which some plan has sizes of its own, ascending."""
    return sorted({bound for entry in _table(capability).values() for bound in entry.row_bounds})


class _Entry(NamedTuple):
    """sizes: where no plan changes them. plans: as the table has them. row_bounds: numbers of rows up to which some
    plan has sizes of its own, ascending. served: sizes by rank, width and bound.
    """

    sizes: BlockSizes
    plans: list[dict[str, Any]]
    row_bounds: list[int]
    served: dict[tuple[int, int, int], BlockSizes]

    def plan(self, max_rank: int, width: int) -> dict[str, Any]:
        """The first one that serves the shape; empty for none."""
        serving = (plan for plan in self.plans if max_rank <= plan["max_rank"] and width <= plan["max_width"])
        return next(serving, {})


@functools.cache
def _table(capability: int) -> dict[tuple[str, str], _Entry]:
    tables: dict[str, dict[str, dict[str, dict[str, Any]]]] = json.loads(TABLE_PATH.read_text())
    return {
        (operator, regime): _entry(sizes)
        for name in ("default", architecture(capability))
        for operator, regimes in tables.get(name, {}).items()
        for regime, sizes in regimes.items()
    }


def _entry(content: dict[str, Any]) -> _Entry:
    plans = content.get("plans", [])
    for plan in plans:
        assert all(not _OF_SUMS & rows["sizes"].keys() for rows in plan.get("by_rows", ())), "sums depend on the rows"
    row_bounds = sorted({rows["max_rows"] for plan in plans for rows in plan.get("by_rows", ())})
    return _Entry({name: size for name, size in content.items() if name != "plans"}, plans, row_bounds, {})


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
