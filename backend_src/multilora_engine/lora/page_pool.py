"""`PagePool`: a fixed amount of memory cut into pages of one size."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from multilora_engine.lora.free_pages import FreePages
from multilora_kernels import HugePages


class PagePool(FreePages):
    """`storage` is uint8 [count, page_bytes]: page p is row p, so consecutive pages are consecutive memory."""

    def __init__(self, num_pages: int, page_bytes: int, device: torch.device, pin_memory: bool = False) -> None:
        super().__init__(num_pages)
        self.page_bytes = page_bytes
        shape = (num_pages, page_bytes)
        self.storage = (
            HugePages().zeros(shape, torch.uint8)
            if device.type == "cpu" and not pin_memory
            else torch.empty(shape, dtype=torch.uint8, device=device, pin_memory=pin_memory)
        )

    def views(self, pages: Iterable[int]) -> list[torch.Tensor]:
        """Pages themselves, uint8 [page_bytes] each."""
        return [self.storage[page] for page in pages]
