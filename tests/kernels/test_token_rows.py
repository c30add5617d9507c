"""An adapter's own rows of embeddings and head against plain loops, beside neighbours that must not change."""

from __future__ import annotations

import pytest
import torch

from multilora_kernels import TokenRows, TokenRowTables, token_rows

VOCAB, HIDDEN, MAX_LORAS = 97, 12, 5


def make_rows(sizes: dict[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, dict[int, TokenRows]]:
    """An arena of NaN with the rows of some adapters at odd places, and the rows. sizes: tokens by `lora_index`."""
    generator = torch.Generator().manual_seed(4)
    arena = torch.full((20000,), torch.nan, dtype=dtype)
    rows, first = {}, 7
    for index, count in sizes.items():
        ids = torch.randperm(VOCAB, generator=generator)[:count].sort().values
        arena[first : first + count * HIDDEN] = torch.randn(count * HIDDEN, generator=generator).to(dtype)
        rows[index] = TokenRows(ids, first)
        first += count * HIDDEN + 3
    return arena, rows


def row_of(arena: torch.Tensor, rows: dict[int, TokenRows], index: int, token: int) -> torch.Tensor | None:
    part = rows.get(index)
    if part is None or token not in part.token_ids.tolist():
        return None
    start = part.first + part.token_ids.tolist().index(token) * HIDDEN
    return arena[start : start + HIDDEN]


SIZES = [{0: 1}, {4: 3, 1: 16, 2: 97}, {3: 64, 0: 65}]


@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_with_rows_of_their_own_get_them_and_no_other(sizes: dict[int, int], dtype: torch.dtype) -> None:
    arena, rows = make_rows(sizes, dtype)
    generator = torch.Generator().manual_seed(5)
    token_ids = torch.randint(VOCAB, (400,), generator=generator)
    mapping = torch.randint(-1, MAX_LORAS, (400,), generator=generator)
    x = torch.randn(400, HIDDEN, generator=generator)
    before = x.clone()
    tables = TokenRowTables(arena, rows, HIDDEN, VOCAB, MAX_LORAS)
    actual = tables.replace_embeddings(x, token_ids, mapping)
    found = 0
    for i, (index, token) in enumerate(zip(mapping.tolist(), token_ids.tolist(), strict=True)):
        row = row_of(arena, rows, index, token)
        found += row is not None
        assert actual[i].equal(before[i] if row is None else row.float())
    assert 0 < found < 400


@pytest.mark.parametrize("gathered_values", [0, 1 << 22])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_logits_of_tokens_with_rows_of_their_own_are_products_with_them(
    sizes: dict[int, int], dtype: torch.dtype, gathered_values: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_rows, "_GATHERED_VALUES", gathered_values)
    arena, rows = make_rows(sizes, dtype)
    generator = torch.Generator().manual_seed(6)
    mapping = torch.randint(-1, MAX_LORAS, (31,), generator=generator)
    mapping[:2] = torch.tensor([-1, max(sizes)])
    x = torch.randn(31, HIDDEN, generator=generator)
    logits = torch.randn(31, VOCAB, generator=generator)
    expected = logits.clone()
    for i, index in enumerate(mapping.tolist()):
        for token in range(VOCAB):
            row = row_of(arena, rows, index, token)
            if row is not None:
                expected[i, token] = x[i] @ row.float()
    TokenRowTables(arena, rows, HIDDEN, VOCAB, MAX_LORAS).replace_logits(logits, x, mapping)
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)
    assert logits[0].equal(expected[0])
    assert not logits.isnan().any()


def test_a_step_that_wants_no_logits_changes_none() -> None:
    arena, rows = make_rows({1: 3, 2: 70}, torch.float32)
    tables = TokenRowTables(arena, rows, HIDDEN, VOCAB, MAX_LORAS)
    tables.replace_logits(torch.empty(0, VOCAB), torch.empty(0, HIDDEN), torch.empty(0, dtype=torch.int64))
