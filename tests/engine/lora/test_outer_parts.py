"""Token rows, embeddings and heads: what is kept, in every tier, and what is refused, in which words."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import TINY, wire_adapter
from support.outer_parts import OuterPart, add_parts

from multilora_engine.errors import InvalidRequest
from multilora_engine.lora.adapter_file import (
    DamagedFile,
    describe_file,
    encode_header,
    open_regular,
    read_file,
    with_pages_digest,
    write_file_atomically,
)
from multilora_engine.lora.device_tier import TableRows
from multilora_engine.lora.format import ARENA_DTYPES, TORCH_DTYPES, kinds_of, pack_adapter, ranks_of
from multilora_engine.lora.free_pages import PagePool
from multilora_engine.lora.layout import PackedAdapter, page_shape
from multilora_engine.process.messages import adapter_header, adapter_payload, read_adapter
from multilora_kernels import lora_embedding, reference
from multilora_kernels.adapter_codes import dequantize_a, dequantize_b
from multilora_kernels.adapter_quantization import quantize_a, quantize_b
from multilora_wire.layout import AdapterLayout, PageShape, adapter_layout, layout_version
from multilora_wire.pieces import CODE_BITS
from multilora_wire.sites import (
    EMBEDDING_LORA,
    EMBEDDING_ROWS,
    HEAD_LORA,
    HEAD_ROWS,
    OUTER_LAYER,
    TIED_ROWS,
    decoder_sites,
)

VOCAB, HIDDEN = 101, 24
SITES = decoder_sites(3, HIDDEN, q_size=40, kv_size=8, intermediate_size=56, vocab_size=VOCAB, is_tied=True)
LAYOUT = replace(TINY, sites=SITES)
SPANNING = replace(LAYOUT, page_bytes=2048)
LINEARS = [(1, 0, 3), (6, 2, 16)]
IDS = [7, 100, 0, 55]
DTYPES = [*TORCH_DTYPES, *CODE_BITS]


def layout_of(lora_dtype: str, base: AdapterLayout = LAYOUT) -> AdapterLayout:
    return replace(base, lora_dtype=lora_dtype, version=layout_version(lora_dtype))


def rand(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def all_parts() -> list[OuterPart]:
    return [
        OuterPart(HEAD_LORA, rand(5, HIDDEN, seed=1), rand(VOCAB, 5, seed=2), rand(VOCAB, seed=3).abs()),
        OuterPart(EMBEDDING_LORA, rand(16, VOCAB, seed=4), rand(HIDDEN, 16, seed=5)),
        OuterPart(EMBEDDING_ROWS, torch.tensor(IDS), rand(len(IDS), HIDDEN, seed=6)),
        OuterPart(HEAD_ROWS, torch.arange(90), rand(90, HIDDEN, seed=7)),
    ]


def pack(layout: AdapterLayout, parts: list[OuterPart] | None = None) -> PackedAdapter:
    wire = wire_adapter(layout, LINEARS)
    return add_parts(pack_adapter(wire.weights, wire.config, layout), all_parts() if parts is None else parts, layout)


def rows_of(adapter: PackedAdapter, layout: AdapterLayout) -> TableRows:
    """Tables of two rows, of which the second is the adapter's, amid pages whose bytes are NaN in every float."""
    shape = page_shape(adapter.rows, len(adapter.pages), layout)
    pool = PagePool(len(adapter.pages) + 3, layout.page_bytes, torch.device("cpu"))
    pool.storage.fill_(0xFF)
    pool.allocate(PageShape(1))
    pages = pool.allocate(shape)
    for page, source in zip(pages, adapter.pages, strict=True):
        pool.storage[page] = source
    rows = TableRows(layout, pool.storage, count=2)
    rows.write(1, adapter.rows, pages)
    return rows


@pytest.mark.parametrize("base", [LAYOUT, SPANNING], ids=["one page", "spanning"])
@pytest.mark.parametrize("lora_dtype", DTYPES)
def test_a_step_finds_every_part_as_it_was_sent(lora_dtype: str, base: AdapterLayout) -> None:
    layout = layout_of(lora_dtype, base)
    rows, outer = rows_of(pack(layout), layout), layout.sites.outer
    assert outer is not None
    tables, (head, embeddings, embedding_rows, head_rows) = rows.tables, all_parts()
    floats, arena = TORCH_DTYPES.get(lora_dtype, torch.float32), ARENA_DTYPES[lora_dtype]
    if layout.code_bits:
        a = dequantize_a(quantize_a(head.a, arena), 5, HIDDEN, arena)
        b = dequantize_b(quantize_b(head.b, arena), VOCAB, 5, arena)
        a_rows = dequantize_b(quantize_b(embeddings.a.T.contiguous(), arena), VOCAB, 16, arena)
        b_rows = dequantize_b(quantize_b(embeddings.b, arena), HIDDEN, 16, arena)
    else:
        a, b, a_rows, b_rows = (x.to(floats) for x in (head.a, head.b, embeddings.a.T, embeddings.b))
    assert reference.matrix_a(tables, 1, outer.head.column, HIDDEN).equal(a)
    assert reference.matrix_b(tables, 1, outer.head.column, VOCAB).equal(b)
    magnitude = reference.magnitude_of(tables, 1, outer.head.column, VOCAB)
    assert magnitude is not None
    assert magnitude.equal(head.magnitude.to(floats))  # type: ignore[union-attr]
    assert reference.matrix_b(tables, 1, outer.embeddings.column, HIDDEN).equal(b_rows)
    mapping = torch.ones(VOCAB, dtype=torch.int64)
    v = lora_embedding(torch.arange(VOCAB), mapping, tables, outer.embeddings.column)
    assert v[0, 0, :, :16].equal(a_rows.float())

    parts = rows.outer_parts([-1, 1])
    assert parts is not None
    assert parts.has_embedding_lora
    assert parts.has_head_lora
    assert parts.embedding_rows is not None
    assert parts.head_rows is not None
    found = parts.embedding_rows.replace_embeddings(torch.zeros(VOCAB, HIDDEN), torch.arange(VOCAB), mapping)
    expected = torch.zeros(VOCAB, HIDDEN).index_copy_(0, embedding_rows.a, embedding_rows.b.to(floats).float())
    assert found.equal(expected)
    logits = torch.zeros(HIDDEN, VOCAB)
    parts.head_rows.replace_logits(logits, torch.eye(HIDDEN), mapping[:HIDDEN])
    torch.testing.assert_close(logits[:, :90], head_rows.b.to(floats).float().T, rtol=1e-6, atol=1e-6)
    assert not logits[:, 90:].any()


def test_steps_without_such_parts_find_none() -> None:
    rows = rows_of(pack(LAYOUT), LAYOUT)
    assert rows.outer_parts([-1, 0]) is None
    parts = rows.outer_parts([1])
    assert rows.outer_parts([0, 1, -1]) is parts
    plain = wire_adapter(LAYOUT, LINEARS)
    rows.write(1, pack_adapter(plain.weights, plain.config, LAYOUT).rows, [1, 2])
    assert rows.outer_parts([1]) is None


def test_shared_rows_of_a_tied_model_are_stored_once() -> None:
    part = OuterPart(TIED_ROWS, torch.tensor(IDS), rand(len(IDS), HIDDEN, seed=6))
    rows = rows_of(pack(LAYOUT, [part]), LAYOUT)
    parts = rows.outer_parts([1])
    assert parts is not None
    assert parts.embedding_rows is not None
    assert parts.head_rows is not None
    assert not parts.has_embedding_lora
    assert not parts.has_head_lora
    assert len(pack(LAYOUT, [part]).rows) == len(LINEARS) + 1


@pytest.mark.parametrize("lora_dtype", ["float32", "int8"])
def test_digests_tell_ids_and_rows_apart_but_not_their_order(lora_dtype: str) -> None:
    layout, rows = layout_of(lora_dtype), rand(len(IDS), HIDDEN, seed=6)

    def digest(module_id: int, ids: list[int], values: torch.Tensor) -> str:
        return pack(layout, [OuterPart(module_id, torch.tensor(ids), values)]).digest

    first = digest(EMBEDDING_ROWS, IDS, rows)
    assert digest(EMBEDDING_ROWS, IDS[::-1], rows.flip(0)) == first
    others = [
        digest(EMBEDDING_ROWS, IDS[::-1], rows),
        digest(EMBEDDING_ROWS, [8, *IDS[1:]], rows),
        digest(EMBEDDING_ROWS, IDS, rows * 1.01),
        digest(HEAD_ROWS, IDS, rows),
        digest(TIED_ROWS, IDS, rows),
        pack(layout, [OuterPart(EMBEDDING_LORA, rows[:, :1].expand(4, VOCAB), rows.T)]).digest,
    ]
    assert len({first, *others}) == 7


@pytest.mark.parametrize("lora_dtype", ["float32", "int4"])
def test_plain_adapters_are_stored_as_for_a_model_whose_vocabulary_nobody_told(lora_dtype: str) -> None:
    wire = wire_adapter(TINY, LINEARS)
    plain = pack_adapter(wire.weights, wire.config, layout_of(lora_dtype, TINY))
    told = pack_adapter(wire.weights, wire.config, layout_of(lora_dtype))
    assert (told.digest, told.rows) == (plain.digest, plain.rows)
    assert told.pages.equal(plain.pages)


@pytest.mark.parametrize("lora_dtype", ["bfloat16", "fp8"])
@pytest.mark.parametrize("base", [LAYOUT, SPANNING], ids=["one page", "spanning"])
def test_a_file_and_a_message_keep_every_part(lora_dtype: str, base: AdapterLayout, tmp_path: Path) -> None:
    layout = layout_of(lora_dtype, base)
    adapter, path = pack(layout), tmp_path / "5.safetensors"
    header = encode_header(5, adapter.digest, "name", adapter.rows, len(adapter.pages), layout)
    write_file_atomically(
        path, with_pages_digest(header, adapter.rows, list(adapter.pages), layout), list(adapter.pages)
    )
    file = describe_file(path, layout)
    assert file.ranks == ranks_of(adapter.rows) == (3, 5, 16)
    assert file.kinds == kinds_of(adapter.rows, adapter.traits) == ("LoRA", "DoRA", "embeddings", "head", "tokens")
    assert file.shape == page_shape(adapter.rows, len(adapter.pages), layout)
    pages = torch.empty_like(adapter.pages)
    assert read_file(open_regular(path), file, list(pages), layout) == adapter.rows
    assert pages.equal(adapter.pages)
    sent = read_adapter(adapter_header(5, adapter), adapter_payload(adapter))
    assert (sent.digest, sent.rows) == (adapter.digest, adapter.rows)


def test_a_file_of_an_earlier_layout_is_refused_by_its_version(tmp_path: Path) -> None:
    adapter, path = pack(LAYOUT), tmp_path / "5.safetensors"
    header = encode_header(5, adapter.digest, "", adapter.rows, len(adapter.pages), replace(LAYOUT, version=2))
    write_file_atomically(path, header, list(adapter.pages))
    with pytest.raises(DamagedFile, match="its layout has version 2, this server's has 4"):
        describe_file(path, LAYOUT)


@pytest.mark.parametrize("module_id", [HEAD_LORA, EMBEDDING_LORA, EMBEDDING_ROWS, HEAD_ROWS, TIED_ROWS])
@pytest.mark.parametrize("layer", [OUTER_LAYER, 0])
def test_no_row_of_the_wire_names_such_a_part(module_id: int, layer: int) -> None:
    config = torch.tensor([[module_id, layer, 1, 0]], dtype=torch.int32)
    with pytest.raises(
        InvalidRequest, match=f"row 0: lora module {module_id} not enabled for this model; it has 0 attn"
    ):
        pack_adapter(torch.zeros(1, 5000), config, LAYOUT)


def _rows(ids: list[int], width: int = HIDDEN, count: int | None = None) -> OuterPart:
    return OuterPart(EMBEDDING_ROWS, torch.tensor(ids), torch.ones(len(ids) if count is None else count, width))


def _head(rank: int, hidden: int = HIDDEN, vocab: int = VOCAB, **more: Any) -> OuterPart:
    return OuterPart(HEAD_LORA, torch.ones(rank, hidden), torch.ones(vocab, rank), **more)


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([_rows([3, 101])], "embed_tokens rows: token 101 is not in the vocabulary of 101 tokens"),
        ([_rows([3, -1])], "token -1 is not in the vocabulary"),
        ([_rows([3, 9, 3])], "embed_tokens rows: token 3 has several rows"),
        ([_rows([3, 9], width=25)], r"2 token ids and rows of shape \[2, 25\], and this model needs \[2, 24\]"),
        ([_rows([3, 9], count=3)], r"2 token ids and rows of shape \[3, 24\], and this model needs \[2, 24\]"),
        ([_rows([])], r"0 token ids and rows of shape \[0, 24\]"),
        ([_rows([1]), _rows([2])], "the adapter has embed_tokens rows twice"),
        (
            [_head(3, vocab=102)],
            r"lm_head: A is \[3, 24\] and B \[102, 3\], and this model needs \[3, 24\] and \[101, 3\]",
        ),
        ([_head(3, hidden=23)], r"lm_head: A is \[3, 23\]"),
        ([_head(17)], r"lm_head: Invalid low_rank \(17\). low_rank must be <= max_lora_rank \(16\)"),
        ([_head(3, magnitude=torch.ones(100))], r"lm_head: the magnitude is \[100\], and this model needs \[101\]"),
        ([_head(3, magnitude=torch.full((101,), torch.nan))], "lm_head holds NaN or infinite values"),
        ([OuterPart(EMBEDDING_ROWS, torch.tensor([1]), torch.full((1, 24), torch.inf))], "NaN or infinite"),
    ],
)
def test_wrong_parts_are_refused_with_names_and_numbers(parts: list[OuterPart], text: str) -> None:
    with pytest.raises(InvalidRequest, match=text):
        pack(LAYOUT, parts)


def test_values_beyond_the_stored_type_are_refused() -> None:
    part = OuterPart(EMBEDDING_ROWS, torch.tensor([1]), torch.full((1, 24), 1e5))
    with pytest.raises(InvalidRequest, match="embed_tokens rows holds values beyond the range of float16"):
        pack(layout_of("float16"), [part])


def test_a_model_with_two_matrices_has_no_shared_rows_and_one_whose_vocabulary_nobody_told_has_none() -> None:
    part = OuterPart(TIED_ROWS, torch.tensor([1]), torch.ones(1, 24))
    untied = replace(TINY, sites=decoder_sites(3, 24, 40, 8, 56, vocab_size=VOCAB))
    for layout in (TINY, untied):
        with pytest.raises(InvalidRequest, match="may not change the embeddings or the head"):
            pack(layout, [part])


def test_a_site_that_the_checkpoint_rules_out_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="lm_head: ruled out by lora_compatible"):
        pack(replace(LAYOUT, ruled_out=("lm_head",)), [_head(3)])


@pytest.mark.parametrize("lora_dtype", ["bfloat16", "int8"])
def test_parts_take_at_most_a_twentieth_more_than_their_values(lora_dtype: str) -> None:
    vocab, hidden, rank, count = 49152, 576, 16, 8000
    sites = decoder_sites(30, hidden, 576, 192, 1536, vocab_size=vocab)
    layout = adapter_layout(sites, 64, lora_dtype)
    assert layout.page_bytes == adapter_layout(decoder_sites(30, hidden, 576, 192, 1536), 64, lora_dtype).page_bytes
    module_of = {module.module_id: module for module in sites.outer_modules}
    matrices = sum(
        piece.num_bytes for m in (HEAD_LORA, EMBEDDING_LORA) for piece in layout.pieces(module_of[m], rank, False)
    )
    overhead = 1.17 if lora_dtype == "int8" else 1.05  # a scale for 16 codes of rank 16
    assert matrices <= overhead * 2 * rank * (vocab + hidden) * layout.itemsize
    rows = sum(piece.num_bytes for piece in layout.pieces(module_of[EMBEDDING_ROWS], count, False))
    assert rows <= 1.05 * count * hidden * (4 if lora_dtype == "int8" else 2)
