"""lora_segments: chunks of real tokens only, for any batch."""

from __future__ import annotations

import pytest
import torch
from support.synthetic_batches import POPULARITIES, choose_adapters

from multilora_kernels import load_cpu_kernels, lora_segments
from multilora_kernels.cpu import compiled_kernels
from multilora_kernels.segments import reference_segments


def _chunks(segments):
    rows = zip(
        segments.chunk_start.tolist(), segments.chunk_length.tolist(), segments.chunk_lora_index.tolist(), strict=True
    )
    return [
        (lora_index, segments.permutation[start : start + length].tolist())
        for start, length, lora_index in rows
        if length
    ]


def test_the_worked_example_of_the_docstring_holds():
    segments = lora_segments(torch.tensor([1, -1, 0, 1, 1, -1, 0]), max_loras=2, chunk_size=2)
    assert segments.permutation[:5].tolist() == [2, 6, 0, 3, 4]
    assert segments.chunk_start.tolist()[:3] == [0, 2, 4]
    assert segments.chunk_length.tolist()[:3] == [2, 2, 1]
    assert segments.chunk_lora_index.tolist()[:3] == [0, 1, 1]


@pytest.mark.parametrize("popularity", POPULARITIES)
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 7, 10, 133])
@pytest.mark.parametrize("chunk_size", [1, 2, 16])
def test_every_token_of_an_adapter_is_in_exactly_one_chunk_of_that_adapter(popularity, num_tokens, chunk_size):
    mapping = choose_adapters(popularity, num_tokens, torch.Generator().manual_seed(num_tokens))
    mapping[torch.rand(num_tokens, generator=torch.Generator().manual_seed(1)) < 0.2] = -1
    chunks = _chunks(lora_segments(mapping, max_loras=num_tokens, chunk_size=chunk_size))
    placed = [(token, lora_index) for lora_index, tokens in chunks for token in tokens]
    assert sorted(placed) == [(token, lora) for token, lora in enumerate(mapping.tolist()) if lora >= 0]
    assert all(1 <= len(tokens) <= chunk_size for _, tokens in chunks)
    counts = torch.bincount(mapping[mapping >= 0], minlength=1)
    assert len(chunks) == int(((counts + chunk_size - 1) // chunk_size).sum())


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("num_tokens", [0, 1, 16, 133, 600])
@pytest.mark.parametrize("chunk_size", [1, 3, 16])
def test_segments_are_those_of_the_reference(dtype, num_tokens, chunk_size):
    assert load_cpu_kernels()
    max_loras = num_tokens // 3 + 1
    mapping = torch.randint(-1, max_loras, (num_tokens,), generator=torch.Generator().manual_seed(chunk_size)).to(dtype)
    actual = lora_segments(mapping, max_loras, chunk_size)
    expected = reference_segments(mapping, max_loras, chunk_size, actual.chunk_start.numel())
    num_used = int((mapping >= 0).sum())
    assert torch.equal(actual.permutation[:num_used], expected.permutation[:num_used])
    for name in ("chunk_start", "chunk_length", "chunk_lora_index"):
        found = getattr(actual, name)
        assert found.dtype == torch.int32
        assert torch.equal(found, getattr(expected, name))
    assert (actual.permutation.shape, actual.num_tokens, actual.chunk_size) == ((num_tokens,), num_tokens, chunk_size)


def test_pytorch_gives_the_same_segments_where_nothing_is_compiled(monkeypatch):
    mapping = torch.tensor([1, -1, 0, 1, 1, -1, 0])
    compiled = lora_segments(mapping, max_loras=2, chunk_size=2)
    monkeypatch.setattr("multilora_kernels.cpu._library", lambda: None)
    assert _chunks(lora_segments(mapping, max_loras=2, chunk_size=2)) == _chunks(compiled)


def test_mappings_of_another_kind_are_refused():
    for mapping in (torch.zeros(3), torch.zeros(2, 3, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)[::2]):
        with pytest.raises(RuntimeError, match="token_lora_mapping must be contiguous int32 or int64"):
            compiled_kernels().lora_segments(mapping, 1, 16, 3)


def test_an_adapter_that_has_no_row_in_the_tables_is_refused():
    with pytest.raises(IndexError, match="adapter 3 of token 1 is none of 3"):
        lora_segments(torch.tensor([2, 3, -1]), max_loras=3)


def test_the_capacity_depends_only_on_the_number_of_tokens_so_that_a_graph_replays_for_any_mix():
    mixes = [torch.full((133,), -1), torch.zeros(133, dtype=torch.int64), torch.arange(133) % 8]
    assert len({lora_segments(mix, max_loras=8).chunk_start.numel() for mix in mixes}) == 1


def test_chunks_past_the_last_are_empty_and_of_no_adapter():
    segments = lora_segments(torch.tensor([-1, 3, -1]), max_loras=4)
    assert segments.chunk_length.tolist()[1:] == [0] * (segments.chunk_length.numel() - 1)
    assert segments.chunk_lora_index.tolist()[1:] == [-1] * (segments.chunk_length.numel() - 1)
