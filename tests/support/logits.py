"""Rows of logits that choosing a token finds hard."""

from __future__ import annotations

import torch


def logits_of(kind: str, rows: int, vocab: int, seed: int = 0) -> torch.Tensor:
    """float32 [rows, vocab]. kind: even, flat, usual, peaked, tied, low or few."""
    normal = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed))
    match kind:
        case "even":
            return torch.full((rows, vocab), -3.5)
        case "flat":
            return normal * 0.3
        case "usual":
            return normal * 3
        case "peaked":
            return normal * 30 - 500
        case "tied":
            return normal.round()
        case "low":
            # Some 2^-34 of the largest, where weights are rounded, tied and zero.
            return (normal - 24).index_fill(1, torch.tensor([vocab // 2]), 0.0)
        case _:
            assert kind == "few"
            return normal.masked_fill(torch.arange(vocab) % 37 != 36 % vocab, -torch.inf)
