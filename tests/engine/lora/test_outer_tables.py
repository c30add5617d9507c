"""Token rows, embeddings and heads of PEFT's files: what is kept in every tier, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save, save_file
from support.adapters import TINY, wire_adapter

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
from multilora_engine.lora.format import ARENA_DTYPES, TORCH_DTYPES, pack_adapter, pack_peft, ranks_of
from multilora_engine.lora.free_pages import PagePool
from multilora_engine.lora.layout import PackedAdapter, TableEntries, page_shape
from multilora_engine.process.messages import adapter_header, adapter_payload, read_adapter
from multilora_kernels import lora_embedding, reference
from multilora_kernels.adapter_codes import dequantize_a, dequantize_b
from multilora_kernels.adapter_quantization import quantize_a, quantize_b
from multilora_wire.adapter_origin import WrongBaseModel
from multilora_wire.layout import AdapterLayout, PageShape, adapter_layout, layout_version
from multilora_wire.peft_config import PeftError
from multilora_wire.peft_files import read_peft
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
from multilora_wire.tensor_file import MemoryBytes

VOCAB, HIDDEN = 101, 24
SITES = decoder_sites(3, HIDDEN, q_size=40, kv_size=8, intermediate_size=56, vocab_size=VOCAB, is_tied=True)
LAYOUT = replace(TINY, sites=SITES)
UNTIED = replace(TINY, sites=decoder_sites(3, HIDDEN, q_size=40, kv_size=8, intermediate_size=56, vocab_size=VOCAB))
SPANNING = replace(LAYOUT, page_bytes=2048)
LINEARS = [(1, 0, 3), (6, 2, 16)]
IDS = [7, 100, 0, 55]
DTYPES = [*TORCH_DTYPES, *CODE_BITS]
EMBED = "model.embed_tokens"


def layout_of(lora_dtype: str, base: AdapterLayout = LAYOUT) -> AdapterLayout:
    return replace(base, lora_dtype=lora_dtype, version=layout_version(lora_dtype))


def rand(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


BASE = {f"{EMBED}.weight": rand(VOCAB, HIDDEN, seed=11), "lm_head.weight": rand(VOCAB, HIDDEN, seed=12)}
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with embeddings and a head."""
    folder = tmp_path_factory.mktemp("base")
    save_file(BASE, folder / "model.safetensors")
    return folder


Q_PROJ: Tensors = {
    "model.layers.1.self_attn.q_proj.lora_A.weight": rand(5, HIDDEN, seed=21),
    "model.layers.1.self_attn.q_proj.lora_B.weight": rand(40, 5, seed=22),
}
HEAD: Tensors = {"lm_head.lora_A.weight": rand(5, HIDDEN, seed=1), "lm_head.lora_B.weight": rand(VOCAB, 5, seed=2)}
EMBEDDINGS: Tensors = {
    f"{EMBED}.lora_embedding_A": rand(16, VOCAB, seed=4),
    f"{EMBED}.lora_embedding_B": rand(HIDDEN, 16, seed=5),
}
SETTINGS: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 5,
    "lora_alpha": 10,
    "rank_pattern": {"embed_tokens": 16},
    "alpha_pattern": {"embed_tokens": 48},
}


def read(layout: AdapterLayout, base: Path, tensors: Tensors, **settings: Any) -> PackedAdapter:
    """The adapter of PEFT's files with these tensors and fields beside `SETTINGS`."""
    weights = save({f"base_model.model.{key}": tensor.contiguous() for key, tensor in tensors.items()})
    config = json.dumps(SETTINGS | settings).encode()
    return pack_peft(read_peft(config, MemoryBytes(weights), layout.sites), layout, base)


def token_rows(key: str, count: int, seed: int) -> Tensors:
    return {f"{key}.token_adapter.trainable_tokens_delta": rand(count, HIDDEN, seed=seed)}


ALL: Tensors = {
    **HEAD,
    **EMBEDDINGS,
    **Q_PROJ,
    # Copies, by modules_to_save, in which a few rows differ: each copy counts alone.
    f"{EMBED}.weight": BASE[f"{EMBED}.weight"].index_copy(0, torch.tensor(IDS), rand(len(IDS), HIDDEN, seed=6)),
    "lm_head.base_layer.weight": torch.cat((rand(90, HIDDEN, seed=7), BASE["lm_head.weight"][90:])),
}


def read_all(layout: AdapterLayout, base: Path) -> PackedAdapter:
    tensors = {key: ALL[key] for key in ALL if not key.startswith(EMBED)} | {
        f"{EMBED}.base_layer.weight": ALL[f"{EMBED}.weight"],
        **EMBEDDINGS,
    }
    return read(layout, base, tensors)


def rows_of(adapter: PackedAdapter, layout: AdapterLayout) -> TableRows:
    """Tables of two rows. The second is the adapter's, amid pages whose bytes are NaN in every float."""
    shape = page_shape(adapter.rows, len(adapter.pages), layout)
    pool = PagePool(len(adapter.pages) + 3, layout.page_bytes, torch.device("cpu"))
    pool.storage.fill_(0xFF)
    pool.allocate(PageShape(1))
    pages = pool.allocate(shape)
    for page, source in zip(pages, adapter.pages, strict=True):
        pool.storage[page] = source
    rows = TableRows(layout, pool.storage, count=2)
    rows.write(1, TableEntries.of(adapter.rows, layout), pages)
    return rows


@pytest.mark.parametrize("form", [UNTIED, replace(UNTIED, page_bytes=2048)], ids=["one page", "spanning"])
@pytest.mark.parametrize("lora_dtype", DTYPES)
def test_a_step_finds_every_part_as_the_files_have_it(lora_dtype: str, form: AdapterLayout, base: Path) -> None:
    layout = layout_of(lora_dtype, form)
    rows, outer = rows_of(read_all(layout, base), layout), layout.sites.outer
    assert outer is not None
    tables, floats, arena = rows.tables, TORCH_DTYPES.get(lora_dtype, torch.float32), ARENA_DTYPES[lora_dtype]
    sent_a, sent_b = HEAD["lm_head.lora_A.weight"], HEAD["lm_head.lora_B.weight"] * 2.0
    sent_rows, sent_out = EMBEDDINGS[f"{EMBED}.lora_embedding_A"].T, EMBEDDINGS[f"{EMBED}.lora_embedding_B"] * 3.0
    if layout.code_bits:
        a = dequantize_a(quantize_a(sent_a, arena), 5, HIDDEN, arena)
        b = dequantize_b(quantize_b(sent_b, arena), VOCAB, 5, arena)
        a_rows = dequantize_b(quantize_b(sent_rows.contiguous(), arena), VOCAB, 16, arena)
        b_rows = dequantize_b(quantize_b(sent_out, arena), HIDDEN, 16, arena)
    else:
        a, b, a_rows, b_rows = (x.to(floats) for x in (sent_a, sent_b, sent_rows, sent_out))
    assert reference.matrix_a(tables, 1, outer.head.column, HIDDEN).equal(a)
    assert reference.matrix_b(tables, 1, outer.head.column, VOCAB).equal(b)
    assert reference.magnitude_of(tables, 1, outer.head.column, VOCAB) is None
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
    expected = torch.zeros(VOCAB, HIDDEN).index_copy(0, torch.tensor(IDS), rand(len(IDS), HIDDEN, seed=6))
    assert found.equal(expected.to(floats).float())
    logits = torch.zeros(HIDDEN, VOCAB)
    parts.head_rows.replace_logits(logits, torch.eye(HIDDEN), mapping[:HIDDEN])
    expected = rand(90, HIDDEN, seed=7).to(floats).float().T
    torch.testing.assert_close(logits[:, :90], expected, rtol=1e-6, atol=1e-6)
    assert not logits[:, 90:].any()


@pytest.mark.parametrize("layout", [LAYOUT, UNTIED], ids=["tied", "untied"])
@pytest.mark.parametrize("lora_dtype", ["float32", "int8"])
def test_magnitudes_are_divided_by_the_lengths_that_peft_has(
    lora_dtype: str, layout: AdapterLayout, base: Path
) -> None:
    layout = layout_of(lora_dtype, layout)
    magnitudes = {
        "lm_head.lora_magnitude_vector": rand(VOCAB, seed=31).abs(),
        f"{EMBED}.lora_magnitude_vector": rand(HIDDEN, seed=32).abs(),
    }
    tables = rows_of(read(layout, base, {**HEAD, **EMBEDDINGS, **magnitudes}, use_dora=True), layout).tables
    outer = layout.sites.outer
    assert outer is not None
    weight, head = BASE[f"{EMBED}.weight"], BASE[f"{EMBED}.weight" if outer.is_tied else "lm_head.weight"]
    updated = head + 2.0 * HEAD["lm_head.lora_B.weight"] @ HEAD["lm_head.lora_A.weight"]
    expected = magnitudes["lm_head.lora_magnitude_vector"] / updated.norm(dim=1)
    stored = reference.magnitude_of(tables, 1, outer.head.column, VOCAB)
    torch.testing.assert_close(stored, expected, rtol=1e-5, atol=1e-6)
    update = EMBEDDINGS[f"{EMBED}.lora_embedding_B"] @ EMBEDDINGS[f"{EMBED}.lora_embedding_A"]
    expected = magnitudes[f"{EMBED}.lora_magnitude_vector"] / (weight.T + 3.0 * update).norm(dim=1)
    stored = reference.magnitude_of(tables, 1, outer.embeddings.column, HIDDEN)
    torch.testing.assert_close(stored, expected, rtol=1e-5, atol=1e-6)


def test_steps_without_such_parts_find_none(base: Path) -> None:
    rows = rows_of(read_all(UNTIED, base), UNTIED)
    assert rows.outer_parts([-1, 0]) is None
    parts = rows.outer_parts([1])
    assert rows.outer_parts([0, 1, -1]) is parts
    plain = wire_adapter(UNTIED, LINEARS)
    rows.write(1, TableEntries.of(pack_adapter(plain.weights, plain.config, UNTIED).rows, UNTIED), [1, 2])
    assert rows.outer_parts([1]) is None


def test_shared_rows_of_a_tied_model_are_stored_once(base: Path) -> None:
    adapter = read(LAYOUT, base, token_rows(EMBED, 4, seed=6) | Q_PROJ, trainable_token_indices=IDS)
    assert [row.module_id for row in adapter.rows] == [TIED_ROWS, 1]
    parts = rows_of(adapter, LAYOUT).outer_parts([1])
    assert parts is not None
    assert parts.embedding_rows is not None
    assert parts.head_rows is not None
    assert not parts.has_embedding_lora
    assert not parts.has_head_lora


def copies(changed: int, kind: torch.dtype = torch.float32, **names: str) -> Tensors:
    """Whole copies of modules, by their endings, whose row 3 was multiplied `changed` times."""
    tensors = {}
    for module, ending in names.items():
        name = EMBED if module == "embed" else "lm_head"
        weight = BASE[f"{name if module == 'head' and changed < 100 else EMBED}.weight"].to(kind).clone()
        weight[3] *= changed % 100
        tensors[f"{name}.{ending}"] = weight
    return tensors


@pytest.mark.parametrize(
    ("layout", "tensors", "settings", "expected"),
    [
        (UNTIED, copies(2, embed="weight"), {"modules_to_save": ["embed_tokens"]}, [EMBEDDING_ROWS]),
        (UNTIED, copies(2, head="weight"), {"modules_to_save": ["lm_head"]}, [HEAD_ROWS]),
        (UNTIED, copies(2, embed="base_layer.weight", head="base_layer.weight"), {}, [HEAD_ROWS, EMBEDDING_ROWS]),
        # PEFT loads a copy of a tied weight into both modules, unless it is in modules_to_save.
        (LAYOUT, copies(102, embed="base_layer.weight"), {}, [TIED_ROWS]),
        (LAYOUT, copies(102, embed="weight", head="weight"), {}, [TIED_ROWS]),
        (LAYOUT, copies(102, embed="weight"), {"modules_to_save": ["embed_tokens"]}, [EMBEDDING_ROWS]),
        (LAYOUT, copies(102, head="weight"), {"modules_to_save": ["lm_head"]}, [HEAD_ROWS]),
        # Copies of the base's own weights cost nothing.
        (UNTIED, copies(1, embed="base_layer.weight", head="weight"), {}, []),
        (UNTIED, copies(1, torch.bfloat16, embed="weight"), {}, []),
        (UNTIED, copies(1, torch.float16, head="weight"), {}, []),
        (LAYOUT, copies(101, embed="base_layer.weight"), {}, []),
    ],
)
def test_the_rows_of_a_copy_count_where_they_differ_from_the_bases(
    layout: AdapterLayout, tensors: Tensors, settings: dict[str, Any], expected: list[int], base: Path
) -> None:
    adapter = read(layout, base, tensors | Q_PROJ, **settings)
    rows = {row.module_id: row.rank for row in adapter.rows if row.layer == OUTER_LAYER}
    assert rows == dict.fromkeys(expected, 1)


def test_an_adapter_of_nothing_but_the_bases_own_weights_is_refused(base: Path) -> None:
    with pytest.raises(InvalidRequest, match="the adapter changes nothing"):
        read(UNTIED, base, copies(1, embed="weight"))


def test_too_many_changed_rows_are_refused_with_both_numbers(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multilora_engine.lora.format.MAX_SAVED_BYTES", 100 * HIDDEN * 4)
    copy = copies(1, embed="weight")
    copy[f"{EMBED}.weight"] += 1
    text = "embed_tokens.weight: 101 of its 101 rows differ from the base model's and take 9696 bytes, 9600 at most"
    with pytest.raises(InvalidRequest, match=text):
        read(UNTIED, base, copy)
    copy[f"{EMBED}.weight"][0] -= 1
    copy[f"{EMBED}.weight"][0] = BASE[f"{EMBED}.weight"][0]
    assert read(UNTIED, base, copy).rows[0].rank == 100


@pytest.mark.parametrize("lora_dtype", ["float32", "int8"])
def test_digests_tell_ids_and_rows_apart_but_not_their_order(lora_dtype: str, base: Path) -> None:
    layout, rows = layout_of(lora_dtype, UNTIED), rand(len(IDS), HIDDEN, seed=6)

    def digest(key: str, ids: list[int], values: torch.Tensor) -> str:
        tensors = {f"{key}.token_adapter.trainable_tokens_delta": values} | Q_PROJ
        lists = {key.rpartition(".")[2]: ids}
        return read(layout, base, tensors, trainable_token_indices=lists).digest

    first = digest(EMBED, IDS, rows)
    assert digest(EMBED, IDS[::-1], rows.flip(0)) == first
    as_list = read(layout, base, token_rows(EMBED, 4, seed=6) | Q_PROJ, trainable_token_indices=IDS)
    assert as_list.digest == first
    others = [
        digest(EMBED, IDS[::-1], rows),
        digest(EMBED, [8, *IDS[1:]], rows),
        digest(EMBED, IDS, rows * 1.01),
        digest("lm_head", IDS, rows),
        read(layout_of(lora_dtype), base, token_rows(EMBED, 4, seed=6) | Q_PROJ, trainable_token_indices=IDS).digest,
        read(layout, base, Q_PROJ).digest,
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
@pytest.mark.parametrize("form", [UNTIED, replace(UNTIED, page_bytes=2048)], ids=["one page", "spanning"])
def test_a_file_and_a_message_keep_every_part(lora_dtype: str, form: AdapterLayout, base: Path, tmp_path: Path) -> None:
    layout = layout_of(lora_dtype, form)
    adapter, path = read_all(layout, base), tmp_path / "5.safetensors"
    header = encode_header(5, adapter.digest, "name", adapter.rows, len(adapter.pages), layout)
    write_file_atomically(
        path, with_pages_digest(header, adapter.rows, list(adapter.pages), layout), list(adapter.pages)
    )
    file = describe_file(path, layout)
    assert file.ranks == ranks_of(adapter.rows) == (5, 16)
    assert file.shape == page_shape(adapter.rows, len(adapter.pages), layout)
    pages = torch.empty_like(adapter.pages)
    assert read_file(open_regular(path), file, list(pages), layout) == adapter.rows
    assert pages.equal(adapter.pages)
    sent = read_adapter(adapter_header(5, adapter), adapter_payload(adapter))
    assert (sent.digest, sent.rows) == (adapter.digest, adapter.rows)


def test_a_file_of_an_earlier_layout_is_refused_by_its_version(base: Path, tmp_path: Path) -> None:
    adapter, path = read(LAYOUT, base, Q_PROJ), tmp_path / "5.safetensors"
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


def indices(ids: Any, **more: Any) -> dict[str, Any]:
    return {"trainable_token_indices": ids, **more}


def changed(tensors: Tensors, key: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Tensors:
    return tensors | {key: change(tensors[key])}


@pytest.mark.parametrize(
    ("layout", "tensors", "settings", "text"),
    [
        (UNTIED, token_rows(EMBED, 2, 1), indices([3, 101]), "101 is not in the vocabulary of 101 tokens"),
        (UNTIED, token_rows(EMBED, 2, 1), indices([3, -1]), "-1 is not in the vocabulary of 101 tokens"),
        (UNTIED, token_rows(EMBED, 3, 1), indices([3, 9, 3]), "trainable_tokens_delta: 3 is there twice"),
        (UNTIED, token_rows(EMBED, 3, 1), indices([3, 9]), r"has shape \[3, 24\], and the tokens .* need \[2, 24\]"),
        (
            UNTIED,
            {f"{EMBED}.token_adapter.trainable_tokens_delta": torch.ones(2, 25)},
            indices([3, 9]),
            r"has shape \[2, 25\], and the tokens .* need \[2, 24\]",
        ),
        (UNTIED, token_rows(EMBED, 2, 1), indices([3, 9.0]), "a list of token ids is expected"),
        (UNTIED, token_rows(EMBED, 2, 1), indices("3, 9"), "a list of token ids is expected"),
        (UNTIED, token_rows(EMBED, 2, 1), indices([True, 9]), "a list of token ids is expected"),
        (UNTIED, token_rows(EMBED, 2, 1), {}, "adapter_config.json names none of model.embed_tokens"),
        (UNTIED, token_rows("lm_head", 2, 1), indices([3, 9]), "names none of lm_head"),
        (UNTIED, Q_PROJ, indices([3, 9]), "names tokens of model.embed_tokens, and .* has no rows of it"),
        (UNTIED, Q_PROJ, indices({"wte": [3]}), "names 'wte'; only rows of embed_tokens and lm_head"),
        (UNTIED, token_rows(EMBED, 1, 1), indices({"embed_tokens": [3], EMBED: [4]}), "each once"),
        (UNTIED, token_rows(EMBED, 2, 1) | EMBEDDINGS, indices([3, 9]), "PEFT computes no such module"),
        (LAYOUT, token_rows(EMBED, 2, 1) | HEAD, indices([3, 9]), "PEFT computes no such module"),
        (UNTIED, token_rows(EMBED, 2, 1), {"token_indices": [3, 9]}, "LORA does not have"),
        (
            UNTIED,
            token_rows(EMBED, 2, 1) | Q_PROJ,
            {"token_indices": [3, 9], "peft_type": "TRAINABLE_TOKENS"},
            "peft_type TRAINABLE_TOKENS, which has no LoRA",
        ),
        (
            LAYOUT,
            {f"{name}.trainable_tokens_delta": rand(2, HIDDEN, seed=i) for i, name in enumerate((EMBED, "lm_head"))},
            {"token_indices": [3, 9], "peft_type": "TRAINABLE_TOKENS"},
            "differ, and this model has one matrix for both",
        ),
        (UNTIED, {"lm_head.weight": torch.ones(102, 24)}, {}, r"has shape \[102, 24\], and this .* are \[101, 24\]"),
        (UNTIED, {f"{EMBED}.weight": torch.ones(101, 23)}, {}, r"has shape \[101, 23\]"),
        (UNTIED, Q_PROJ, {"modules_to_save": ["lm_head"]}, "names 'lm_head', and adapter_model.safetensors has none"),
        (UNTIED, Q_PROJ, {"modules_to_save": ["score"]}, "of whole modules only embed_tokens and lm_head are served"),
        (UNTIED, Q_PROJ, {"modules_to_save": "lm_head"}, "a list of names is expected"),
        (UNTIED, copies(2, head="weight") | HEAD, {"modules_to_save": ["lm_head"]}, "which modules_to_save replaces"),
        (LAYOUT, HEAD, {"ensure_weight_tying": True}, "ensure_weight_tying is true"),
        (
            LAYOUT,
            HEAD,
            {"ensure_weight_tying": True, "target_modules": ["embed_tokens"]},
            "ensure_weight_tying is true",
        ),
        (LAYOUT, copies(102, embed="weight"), {"ensure_weight_tying": True}, "ensure_weight_tying is true"),
        (
            LAYOUT,
            copies(102, embed="weight") | {"lm_head.weight": BASE[f"{EMBED}.weight"]},
            {},
            "differ, and this model has one matrix for both",
        ),
        (
            LAYOUT,
            copies(102, head="weight") | token_rows(EMBED, 1, 1),
            indices([3], modules_to_save=["lm_head"]),
            "changes both modules of a tied model at once and one of them alone",
        ),
        (UNTIED, HEAD | {"lm_head.base_layer.weight": torch.full((VOCAB, HIDDEN), torch.nan)}, {}, "holds NaN"),
        (UNTIED, changed(HEAD, "lm_head.lora_B.weight", lambda b: b / 0), {}, "lora_B.weight holds NaN or infinite"),
        (UNTIED, changed(HEAD, "lm_head.lora_B.weight", lambda b: b[:, :4]), {}, "have different ranks"),
        (UNTIED, HEAD, {"r": 6}, "has rank 5, but adapter_config.json says 6"),
        (UNTIED, {"lm_head.lora_A.weight": HEAD["lm_head.lora_A.weight"]}, {}, "has no lora_B beside it"),
        (UNTIED, HEAD, {"use_dora": True}, "has no lora_magnitude_vector of lm_head"),
        (UNTIED, HEAD, {"target_modules": ["q_proj"]}, "target_modules .* leaves out lm_head"),
        (UNTIED, HEAD, {"target_modules": ["q_proj", "lm_head"], "exclude_modules": ["lm_head"]}, "exclude_modules"),
        (TINY, HEAD, {}, "lm_head.lora_[AB].weight belongs to the embeddings or the head"),
        (replace(UNTIED, ruled_out=("lm_head",)), HEAD, {}, "lm_head: the adapter adapts lm_head, ruled out"),
        (replace(UNTIED, max_rank=4), HEAD, {}, r"Invalid low_rank \(5\). low_rank must be <= max_lora_rank \(4\)"),
        (
            layout_of("float16", UNTIED),
            changed(HEAD, "lm_head.lora_B.weight", lambda b: b * 1e6),
            {},
            "beyond the range",
        ),
    ],
)
def test_what_peft_would_not_compute_so_is_refused_with_names_and_numbers(
    layout: AdapterLayout, tensors: Tensors, settings: dict[str, Any], text: str, base: Path
) -> None:
    with pytest.raises((PeftError, InvalidRequest), match=text):
        read(layout, base, tensors, **settings)


def test_matrices_of_another_vocabulary_or_width_are_another_models(base: Path) -> None:
    for key, change in (("lora_B", lambda b: b[:100]), ("lora_A", lambda a: a[:, :23])):
        with pytest.raises(WrongBaseModel, match=r"lm_head has 2[34] inputs and 10[01] outputs there, 24 inputs"):
            read(UNTIED, base, changed(HEAD, f"lm_head.{key}.weight", change))


def test_a_list_of_no_tokens_trains_none(base: Path) -> None:
    tensors = {f"{EMBED}.token_adapter.trainable_tokens_delta": torch.zeros(0, HIDDEN)} | Q_PROJ
    for lists in ([], {"embed_tokens": []}, None):
        adapter = read(UNTIED, base, tensors if lists is not None else Q_PROJ, trainable_token_indices=lists)
        assert [row.layer for row in adapter.rows] == [1]


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
