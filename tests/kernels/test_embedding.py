"""LoRA on embeddings against plain products, for floats and every kind of codes."""

from __future__ import annotations

import pytest
import torch

from multilora_kernels import LoRATables, lora_embedding
from multilora_kernels.adapter_codes import b_bytes, dequantize_b
from multilora_kernels.adapter_quantization import quantize_b

VOCAB, MAX_RANK = 101, 33
RANKS = (1, 16, 33, 8, 17)
COLUMN = 1


def make_tables(dtype: torch.dtype) -> tuple[LoRATables, list[torch.Tensor]]:
    """Tables of three columns, whose other two say nothing, and the A of each adapter, [vocabulary, rank]."""
    generator = torch.Generator().manual_seed(1)
    matrices = [torch.randn(VOCAB, rank, generator=generator) for rank in RANKS]
    if dtype.itemsize == 1:
        bits = 4 if dtype == torch.uint8 else 8
        stored = [quantize_b(a, dtype) for a in matrices]
        assert [len(s) for s in stored] == [b_bytes(VOCAB, rank, bits) for rank in RANKS]
        matrices = [dequantize_b(s, VOCAB, rank, dtype) for s, rank in zip(stored, RANKS, strict=True)]
    else:
        stored = [a.to(dtype).flatten().view(torch.uint8) for a in matrices]
        matrices = [a.to(dtype).float() for a in matrices]
    offsets, arena = [], torch.full((64,), 0xFF, dtype=torch.uint8)
    for part in stored:
        offsets.append(len(arena) // dtype.itemsize)
        arena = torch.cat((arena, part, torch.full((-len(part) % 64,), 0xFF, dtype=torch.uint8)))
    # The last adapter ends with the arena.
    arena = arena[: offsets[-1] * dtype.itemsize + len(stored[-1])]
    shape = (len(RANKS) + 1, 3)
    rank, a_offset = torch.zeros(shape, dtype=torch.int32), torch.full(shape, 1 << 40)
    rank[:-1, COLUMN], a_offset[:-1, COLUMN] = torch.tensor(RANKS, dtype=torch.int32), torch.tensor(offsets)
    return LoRATables(arena.view(dtype), rank, a_offset, a_offset, torch.full(shape, -1), MAX_RANK), matrices


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn, torch.uint8]
)
def test_each_token_finds_its_row_of_its_adapter(dtype: torch.dtype) -> None:
    tables, matrices = make_tables(dtype)
    generator = torch.Generator().manual_seed(2)
    token_ids = torch.randint(VOCAB, (300,), generator=generator)
    token_ids[:2] = torch.tensor([VOCAB - 1, 0])
    mapping = torch.randint(-1, len(RANKS) + 1, (300,), generator=generator)
    mapping[:2] = len(RANKS) - 1
    v = lora_embedding(token_ids, mapping, tables, COLUMN)
    assert v.shape == (1, 1, 300, MAX_RANK)
    assert v.dtype == torch.float32
    for t, (token, index) in enumerate(zip(token_ids.tolist(), mapping.tolist(), strict=True)):
        if 0 <= index < len(RANKS):
            torch.testing.assert_close(v[0, 0, t, : RANKS[index]], matrices[index][token], rtol=0, atol=0)
