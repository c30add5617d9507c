"""`multilora_wire.layout`: pages of real models, and placement by itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multilora_wire.layout import (
    MAX_PAGE_BYTES,
    AdapterLayout,
    PageShape,
    adapter_layout,
    adapter_pages,
    num_values,
    place_pieces,
    uniform_shape,
)
from multilora_wire.sites import AdapterSite, ModelSites, SitePart, WireModule, decoder_sites

SMOLLM2_135M = decoder_sites(30, 576, 576, 192, 1536)
LLAMA_8B = decoder_sites(32, 4096, 4096, 1024, 14336)
LLAMA_70B = decoder_sites(80, 8192, 8192, 1024, 28672)
SITES = {"SmolLM2": SMOLLM2_135M, "8B": LLAMA_8B, "70B": LLAMA_70B}

FIRST_LAYOUT_BYTES = {
    ("SmolLM2", "float32"): {8: 10223616, 16: 19660800, 64: 78643200},
    ("SmolLM2", "bfloat16"): {8: 5111808, 16: 9830400, 64: 39321600},
    ("8B", "float32"): {8: 88080384, 16: 168820736, 64: 675282944},
    ("8B", "bfloat16"): {8: 44040192, 16: 84410368, 64: 337641472},
    ("70B", "bfloat16"): {8: 212860928, 16: 418381824, 64: 1658847232},
}
"""Bytes of an adapter by its rank when a page was as large as the largest legal piece."""


def with_head(sites: ModelSites, hidden_size: int, vocab_size: int) -> ModelSites:
    """The same model with a site more: its output head."""
    column = sites.num_columns
    head = WireModule(99, "head", sites.num_layers - 1, hidden_size, vocab_size, (SitePart(column, 0),))
    site = AdapterSite("lm_head", sites.num_layers - 1, hidden_size, vocab_size, column)
    return ModelSites((*sites.sites, site), (*sites.modules, head))


@pytest.mark.parametrize(("name", "dtype"), FIRST_LAYOUT_BYTES)
def test_an_adapter_takes_what_it_took_when_no_piece_could_span_pages(name: str, dtype: str) -> None:
    layout = adapter_layout(SITES[name], 64, dtype)
    for rank, before in FIRST_LAYOUT_BYTES[name, dtype].items():
        assert adapter_pages(layout, rank) * layout.page_bytes == before


@pytest.mark.parametrize(("sites", "hidden_size", "vocab_size"), [(SMOLLM2_135M, 576, 49152), (LLAMA_8B, 4096, 128256)])
def test_a_head_among_the_sites_leaves_the_pages_as_they_are(
    sites: ModelSites, hidden_size: int, vocab_size: int
) -> None:
    before = adapter_layout(sites, 64, "bfloat16")
    layout = adapter_layout(with_head(sites, hidden_size, vocab_size), 64, "bfloat16")
    assert layout.page_bytes == before.page_bytes <= MAX_PAGE_BYTES
    shape = uniform_shape(layout, 64)
    assert shape.runs == (-(-vocab_size * 64 * 2 // layout.page_bytes),)
    values = sum(num_values(module, 64) for module in layout.sites.plain_modules)
    assert shape.num_pages * layout.page_bytes <= 1.02 * values * 2


@pytest.mark.parametrize("max_rank", [1, 8, 64, 256])
def test_pages_have_bounds_whatever_the_rank(max_rank: int) -> None:
    for sites in (SMOLLM2_135M, LLAMA_8B, LLAMA_70B):
        page_bytes = adapter_layout(sites, max_rank, "float32").page_bytes
        assert 256 * 1024 <= page_bytes <= 8 * 1024 * 1024
        assert page_bytes % 4096 == 0


@given(st.lists(st.integers(1, 900), min_size=1, max_size=40))
def test_pieces_never_overlap_and_runs_come_first(sizes: list[int]) -> None:
    placement = place_pieces(sizes, page_bytes=256)
    taken: set[int] = set()
    for size, offset in zip(sizes, placement.offsets, strict=True):
        assert offset % 64 == 0
        assert size > 256 or offset % 256 + size <= 256
        assert size <= 256 or offset % 256 == 0
        units = set(range(offset // 64, -(-(offset + size) // 64)))
        assert not taken & units
        taken |= units
    assert max(taken) < len(placement.fill) * 4
    runs = sorted((-(-size // 256) for size in sizes if size > 256), reverse=True)
    assert placement.shape == PageShape(len(placement.fill) - sum(runs), tuple(runs))
    for page, used in enumerate(placement.fill):
        assert used == 64 * sum(unit // 4 == page for unit in taken)


def test_smaller_pieces_fill_the_rest_of_a_runs_last_page() -> None:
    assert place_pieces([300, 128, 64], page_bytes=256).shape == PageShape(0, (2,))


def test_models_with_different_sites_have_different_fingerprints() -> None:
    layout = AdapterLayout(LLAMA_8B, 64, "float32", 4096)
    assert layout.fingerprint == AdapterLayout(LLAMA_8B, 8, "float32", 4096).fingerprint
    assert layout.fingerprint != AdapterLayout(LLAMA_70B, 64, "float32", 4096).fingerprint


@pytest.mark.parametrize(("dtype", "share"), [("int8", 0.56), ("fp8", 0.56), ("int4", 0.34)])
@pytest.mark.parametrize("name", SITES)
def test_codes_take_a_half_and_a_third_of_bfloat16s_bytes(name: str, dtype: str, share: float) -> None:
    layouts = [adapter_layout(SITES[name], 64, stored) for stored in (dtype, "bfloat16")]
    assert [layout.version for layout in layouts] == [5, 4]
    codes, floats = (adapter_pages(layout, 16) * layout.page_bytes for layout in layouts)
    assert codes <= share * floats
