"""What adapters take in the server's memory, computed as the server packs them.

Each A `[rank, in]` and B `[out, rank]` of each adapted linear (and the magnitude `[out]` of DoRA) is a piece. It is
filled up to 64 bytes and lies within one page. Pieces are placed largest first, each into the first page with room. A
page holds the largest legal piece: `max_rank` times the widest side of a linear, where q, k, v and gate, up may be
fused; 256 KiB at least, in whole 4 KiB.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from multilora_client.errors import InvalidRequest

LinearName = Literal["q", "k", "v", "o", "gate", "up", "down"]
StoredDtype = Literal["float32", "bfloat16", "float16"]

LINEARS: tuple[LinearName, ...] = get_args(LinearName)

_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_ALIGNMENT_BYTES = 64
_PAGE_UNIT_BYTES = 4096
_MIN_PAGE_BYTES = 256 * 1024


@dataclass(frozen=True)
class AdapterLayout:
    """A model's sizes and how adapters of it are stored: `lora_dtype` in pages of `page_bytes`, up to `max_rank`."""

    num_layers: int
    hidden_size: int
    q_size: int
    kv_size: int
    intermediate_size: int
    max_rank: int
    lora_dtype: str
    page_bytes: int


def read_layout(checkpoint: Path, max_rank: int, lora_dtype: StoredDtype) -> AdapterLayout:
    """The layout of a Hugging Face checkpoint, from its `config.json`. Raises InvalidRequest."""
    path = checkpoint / "config.json"
    try:
        return _layout(json.loads(path.read_text(encoding="utf-8")), max_rank, lora_dtype)
    except (OSError, ValueError) as error:
        raise InvalidRequest(f"cannot read {path}: {error}") from error
    except (KeyError, TypeError) as error:
        raise InvalidRequest(f"{path} does not describe a Llama-family model: {error}") from error


def adapter_pages(layout: AdapterLayout, rank: int, linears: Sequence[LinearName] = LINEARS, dora: bool = False) -> int:
    """Pages of an adapter of one rank on the same linears of every layer."""
    pieces = [piece for name in linears for piece in _pieces(layout, name, rank, dora)] * layout.num_layers
    room: list[int] = []
    for piece in sorted(pieces, reverse=True):
        page = next((page for page, free in enumerate(room) if piece <= free), None)
        if page is None:
            room.append(layout.page_bytes - piece)
        else:
            room[page] -= piece
    return len(room)


def _layout(config: dict[str, Any], max_rank: int, lora_dtype: StoredDtype) -> AdapterLayout:
    hidden, num_heads = config["hidden_size"], config["num_attention_heads"]
    head_size = config.get("head_dim") or hidden // num_heads
    q_size, kv_size = num_heads * head_size, config.get("num_key_value_heads", num_heads) * head_size
    widest = max(hidden, q_size + 2 * kv_size, 2 * config["intermediate_size"])
    page_bytes = max(max_rank * widest * _ITEM_BYTES[lora_dtype], _MIN_PAGE_BYTES)
    return AdapterLayout(
        num_layers=config["num_hidden_layers"],
        hidden_size=hidden,
        q_size=q_size,
        kv_size=kv_size,
        intermediate_size=config["intermediate_size"],
        max_rank=max_rank,
        lora_dtype=lora_dtype,
        page_bytes=_round_up(page_bytes, _PAGE_UNIT_BYTES),
    )


def _pieces(layout: AdapterLayout, name: LinearName, rank: int, dora: bool) -> list[int]:
    """Bytes of A, B and, of DoRA, the magnitude."""
    hidden, q, kv, ffn = layout.hidden_size, layout.q_size, layout.kv_size, layout.intermediate_size
    in_size, out_size = {
        "q": (hidden, q),
        "k": (hidden, kv),
        "v": (hidden, kv),
        "o": (q, hidden),
        "gate": (hidden, ffn),
        "up": (hidden, ffn),
        "down": (ffn, hidden),
    }[name]
    values = [rank * in_size, rank * out_size, *([out_size] if dora else [])]
    return [_round_up(count * _ITEM_BYTES[layout.lora_dtype], _ALIGNMENT_BYTES) for count in values]


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
