"""Every decoder of transformers is served, or refused with a reason; docs/models.md tells which."""

from __future__ import annotations

import pytest

from checkpoints.list_architectures import GENERAL, NOT_TRIED, OWN, PAGE, TABLE, fate, rows_of
from checkpoints.tiny_decoders import architectures
from marked_tables import read_cells


def test_architectures_have_the_fates_of_the_page() -> None:
    rows = {name: row[REASON] for row in read_cells(PAGE, TABLE) for name in row["architectures"].split(", ")}
    assert fate("mistral") == OWN == rows["Mistral"]
    assert fate("gpt_neox") == GENERAL == rows["GPTNeoX"]
    assert fate("falcon") == rows["Falcon"]


@pytest.mark.long(reason="20 s: all architectures of transformers")
def test_the_page_has_every_architecture_of_transformers_with_its_fate() -> None:
    rows = rows_of({model_type: fate(model_type) for model_type in architectures()})
    assert [tuple(row.values()) for row in read_cells(PAGE, TABLE)] == rows, "write it anew: list_architectures --docs"
    assert sum(len(names.split(", ")) for text, names in rows if text == NOT_TRIED) < 5


REASON = "served by, or refused because"
