"""Wire tensors in, packed pages out: the values that are kept, and the tensors that are refused, in which words."""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.lora.variants import calculate_alora_offsets
from safetensors.numpy import save
from safetensors.torch import save_file
from support.adapters import ENCODER_DECODER, SPANNING, TINY, wire_adapter
from support.expert_adapters import FORMS, GPT_OSS, PLAIN, forms_for, numbered, random_factors, shared_outer, wrapped
from support.sources import NO_BASE
from transformers import LlamaConfig

from multilora_client import AdapterError, AdapterTensors, convert_peft
from multilora_engine.errors import InvalidRequest
from multilora_engine.lora.checkpoint_layout import checkpoint_layout
from multilora_engine.lora.format import TORCH_DTYPES, check_rows, pack_adapter, pack_peft, random_adapter
from multilora_engine.lora.layout import MAX_INVOCATION_TOKENS, AdapterTraits, PackedAdapter, page_shape
from multilora_engine.lora.sources.packing import pack_directory
from multilora_engine.lora.sources.source import LocalAdapter, Unusable
from multilora_wire import peft_files
from multilora_wire.layout import AdapterLayout, PageShape, adapter_layout, adapter_pages, num_values
from multilora_wire.peft_files import read_peft
from multilora_wire.sites import PLAIN_EXPERTS, ModelSites, decoder_sites
from multilora_wire.tensor_file import MemoryBytes

ALL_MODULES = [(m, layer, 1 + (m * 5 + layer) % 16) for layer in range(3) for m in (1, 2, 3, 4, 5, 6, 7)]
SMOLLM2_135M = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
}
FUSED = [(0, 0, 3), (18, 0, 5), (6, 0, 16), (0, 2, 1)]


def read_back(packed: PackedAdapter, layout: AdapterLayout) -> dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]:
    values = packed.pages.view(-1).view(TORCH_DTYPES[layout.lora_dtype])
    matrices = {}
    for row in packed.rows:
        module = layout.sites.module_at[row.layer, row.module_id]
        a_start, b_start = row.a_offset // layout.itemsize, row.b_offset // layout.itemsize
        a = values[a_start : a_start + row.rank * module.in_size].view(row.rank, module.in_size)
        b = values[b_start : b_start + row.rank * module.out_size].view(module.out_size, row.rank)
        matrices[row.module_id, row.layer] = (a, b)
    return matrices


@pytest.mark.parametrize("rows", [ALL_MODULES, FUSED, [(6, 1, 1)]], ids=["all", "fused", "one"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_row_survives_packing_unchanged(rows: list[tuple[int, int, int]], dtype: torch.dtype) -> None:
    wire = wire_adapter(TINY, rows, dtype=dtype)
    packed = pack_adapter(wire.weights, wire.config, TINY)
    matrices = read_back(packed, TINY)
    assert matrices.keys() == wire.matrices.keys()
    for key, (a, b) in wire.matrices.items():
        torch.testing.assert_close(matrices[key], (a.float(), b.float()), rtol=0, atol=0)


def byte_ranges(packed: PackedAdapter, layout: AdapterLayout) -> list[tuple[int, int]]:
    """(start, size) of every piece, ascending."""
    return sorted(
        (offset, piece.num_bytes)
        for row in packed.rows
        for offset, piece in zip(
            row.offsets,
            layout.pieces(layout.sites.module_at[row.layer, row.module_id], row.rank, row.is_dora),
            strict=True,
        )
    )


@pytest.mark.parametrize("layout", [TINY, SPANNING], ids=["one page", "spanning"])
def test_pieces_are_aligned_never_overlap_and_straddle_a_page_only_from_its_start(layout: AdapterLayout) -> None:
    wire = wire_adapter(layout, ALL_MODULES)
    packed = pack_adapter(wire.weights, wire.config, layout)
    assert len(packed.pages) > 1
    pieces = byte_ranges(packed, layout)
    for (start, size), (next_start, _) in pairwise([*pieces, (packed.pages.numel(), 0)]):
        assert start % 64 == 0
        assert start + size <= next_start
        is_within_a_page = start // layout.page_bytes == (start + size - 1) // layout.page_bytes
        assert is_within_a_page or (size > layout.page_bytes and start % layout.page_bytes == 0)
    assert (layout is SPANNING) == any(size > layout.page_bytes for _, size in pieces)


def test_the_shape_of_the_pages_names_every_piece_that_spans_some() -> None:
    wire = wire_adapter(SPANNING, ALL_MODULES)
    packed = pack_adapter(wire.weights, wire.config, SPANNING)
    shape = page_shape(packed.rows, len(packed.pages), SPANNING)
    spanning = {start // 2048: -(-size // 2048) for start, size in byte_ranges(packed, SPANNING) if size > 2048}
    starts = [sum(shape.runs[:i]) for i in range(len(shape.runs))]
    assert dict(zip(starts, shape.runs, strict=True)) == spanning
    assert list(shape.runs) == sorted(shape.runs, reverse=True)
    assert shape.num_pages == len(packed.pages)


def test_what_no_piece_covers_is_zero() -> None:
    wire = wire_adapter(TINY, ALL_MODULES)
    torch.empty(1 << 20).fill_(torch.nan)  # so that fresh memory is not zero by itself
    packed = pack_adapter(wire.weights, wire.config, TINY)
    values = packed.pages.view(-1).view(torch.float32).clone()
    for start, size in byte_ranges(packed, TINY):
        values[start // 4 : (start + size) // 4] = 0
    assert not values.any()


@pytest.mark.parametrize("lora_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("rank", [8, 16, 64])
def test_an_adapter_takes_hardly_more_than_its_parameters(rank: int, lora_dtype: str, tmp_path: Path) -> None:
    LlamaConfig(**SMOLLM2_135M, architectures=["LlamaForCausalLM"]).save_pretrained(tmp_path)
    layout = checkpoint_layout(tmp_path, 64, lora_dtype)
    parameters = sum(num_values(module, rank) for module in layout.sites.plain_modules)
    num_bytes = adapter_pages(layout, rank) * layout.page_bytes
    assert 1 <= num_bytes / (parameters * layout.itemsize) <= 1.05


@pytest.mark.parametrize("lora_dtype", ["bfloat16", "int8", "int4"])
def test_a_random_adapter_has_every_linear_and_half_the_rank_until_it_fits(lora_dtype: str) -> None:
    layout = adapter_layout(TINY.sites, 8, lora_dtype)
    asked: list[int] = []

    def fits(shape: PageShape) -> bool:
        asked.append(shape.num_pages)
        return len(asked) > 1

    packed = random_adapter(layout, 8, fits, is_dora=True)
    assert packed is not None
    assert packed.num_pages == asked[1]
    assert {(row.layer, row.module_id) for row in packed.rows} == {
        (module.layer, module.module_id) for module in layout.sites.plain_modules
    }
    assert {(row.rank, row.is_dora) for row in packed.rows} == {(4, True)}
    check_rows(packed.rows, packed.num_pages, layout)
    assert all(packed.pages.view(-1)[offset : offset + 64].any() for row in packed.rows for offset in row.offsets)
    assert random_adapter(layout, 8, lambda shape: False) is None


def test_the_digest_does_not_depend_on_row_order_row_width_or_wire_dtype() -> None:
    wire = wire_adapter(TINY, ALL_MODULES, dtype=torch.float16)
    reordered = torch.randperm(len(ALL_MODULES), generator=torch.Generator().manual_seed(1))
    wider = torch.nn.functional.pad(wire.weights.float(), (0, 77))
    digest = pack_adapter(wire.weights, wire.config, TINY).digest
    assert pack_adapter(wider[reordered], wire.config[reordered], TINY).digest == digest
    assert pack_adapter(wire.weights, wire.config[:, :3], TINY).digest == digest


@pytest.mark.parametrize(
    ("lora_dtype", "rows", "is_dora", "digest"),
    [
        ("float32", ALL_MODULES, False, "34e81cbdbbac84d87dd33dbfdef50fa7"),
        ("float32", FUSED, False, "379df8a07e1416aea6ae8d2de2b83711"),
        ("float32", ALL_MODULES, True, "7df735cc16faf92f31d3b744554ee4cb"),
        ("bfloat16", ALL_MODULES, False, "e6ca0f873bf2090ba8a6b646098f6ace"),
        ("bfloat16", FUSED, False, "c2e3706b7d42ae11e7bc2d5948d9fe0a"),
        ("bfloat16", ALL_MODULES, True, "e9c378c6263b9b5ab658de8989750338"),
        ("float16", FUSED, False, "786f0818da9fda9e6b8b888c92dc8d58"),
        ("int8", ALL_MODULES, False, "08ba5fd9ce6e5b509fb0e2dd4d621b6f"),
        ("fp8", FUSED, False, "27abeae58dd92dab63801809e18bba26"),
        ("int4", ALL_MODULES, True, "1772548b51d6f694f3a5e6bed3ad66e2"),
    ],
)
def test_digests_are_those_of_the_first_layout(
    lora_dtype: str, rows: list[tuple[int, int, int]], is_dora: bool, digest: str
) -> None:
    """They name adapters in logs and in prefix caches, and clients keep them."""
    layout = replace(TINY, lora_dtype=lora_dtype)
    wire = wire_adapter(layout, rows, seed=3, extra_width=64 if is_dora else 3)
    wire.config[:, 3] = int(is_dora)
    assert pack_adapter(wire.weights, wire.config, layout).digest == digest


def test_the_digest_changes_with_the_traits_and_plain_traits_leave_it() -> None:
    wire = wire_adapter(TINY, [(1, 0, 4), (6, 2, 1)])
    plain = pack_adapter(wire.weights, wire.config, TINY)
    assert pack_adapter(wire.weights, wire.config, TINY, AdapterTraits()).digest == plain.digest
    digests = {plain.digest}
    for tokens in [(5,), (6,), (5, 6), (6, 5), (56,), (0,)]:
        packed = pack_adapter(wire.weights, wire.config, TINY, AdapterTraits(tokens))
        assert (packed.traits.invocation_tokens, len(packed.digest)) == (tokens, 32)
        assert torch.equal(packed.pages, plain.pages)
        digests.add(packed.digest)
    assert len(digests) == 7


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ((3, -1), "have -1"),
        ((sys.maxunicode + 1,), "have 1114112"),
        ((1,) * (MAX_INVOCATION_TOKENS + 1), "there are 257"),
    ],
)
def test_traits_that_no_adapter_can_have_are_refused(tokens: tuple[int, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        AdapterTraits(invocation_tokens=tokens)


@given(
    prompt=st.lists(st.sampled_from([0, 1, 7, 0xD800, 49151]), max_size=40),
    tokens=st.lists(st.sampled_from([0, 1, 7, 0xD800]), min_size=1, max_size=5),
)
def test_an_adapter_starts_where_its_invocation_tokens_begin_for_the_last_time(
    prompt: list[int], tokens: list[int]
) -> None:
    (start,) = calculate_alora_offsets(
        {"x": LoraConfig(alora_invocation_tokens=tokens, task_type="CAUSAL_LM")}, "x", torch.tensor([prompt])
    )
    expected = None if start is None else len(prompt) - start
    assert AdapterTraits(tuple(tokens)).start(prompt) == expected
    assert AdapterTraits().start(prompt) == 0


def test_the_digest_changes_with_any_value() -> None:
    wire = wire_adapter(TINY, ALL_MODULES)
    digest = pack_adapter(wire.weights, wire.config, TINY).digest
    wire.weights[7, 0] += 1e-3
    assert pack_adapter(wire.weights, wire.config, TINY).digest != digest


def test_packing_copies_out_of_its_inputs() -> None:
    wire = wire_adapter(TINY, FUSED)
    packed = pack_adapter(wire.weights, wire.config, TINY)
    before = packed.pages.clone()
    wire.weights.fill_(torch.nan)
    assert torch.equal(packed.pages, before)


def _config(*rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32)


@pytest.mark.parametrize(
    ("weights", "config", "message"),
    [
        (torch.zeros(1, 2, 3), _config([1, 0, 1]), r"Invalid shape for lora_weights tensor: \[1, 2, 3\]"),
        (torch.zeros(0, 900), torch.zeros(0, 3, dtype=torch.int32), "Invalid shape for lora_weights"),
        (torch.zeros(1, 900), _config([1, 0]), "Invalid shape for lora_config tensor"),
        (torch.zeros(1, 900), _config([1, 0, 1, 0, 0]), "Invalid shape for lora_config tensor"),
        (torch.zeros(2, 900), _config([1, 0, 1]), "lora_weights has 2 rows and lora_config 1"),
        *(
            (
                torch.zeros(1, 900),
                _config([i, 0, 1]),
                rf"lora module {i} not enabled for this model; {name} needs an enc",
            )
            for i, name in enumerate([f"cross_attn_{n}" for n in ("qkv", "q", "k", "v", "dense")], 8)
        ),
        (torch.zeros(1, 900), _config([-1, 0, 1]), "lora module -1 not enabled"),
        (torch.zeros(1, 900), _config([1, 3, 1]), r"Expected layerId to be in the range \[0, numModelLayers\): 3"),
        (torch.zeros(1, 900), _config([1, -1, 1]), "Expected layerId"),
        (torch.zeros(1, 900), _config([1, 0, 0]), "Expected adapterSize to be > 0, it is 0"),
        (torch.zeros(1, 900), _config([1, 0, -4]), "Expected adapterSize to be > 0"),
        (
            torch.zeros(1, 9000),
            _config([1, 0, 17]),
            r"Invalid low_rank \(17\). low_rank must be <= max_lora_rank \(16\); .* --set max_lora_rank=17$",
        ),
        (
            torch.zeros(1, 40000),
            _config([1, 0, 512]),
            r"low_rank \(512\).*max_lora_rank \(16\); 256 is the most that a server",
        ),
        (torch.zeros(1, 900), _config([1, 0, 1, 2]), "is_dora must be 0 or 1, it is 2"),
        (torch.zeros(1, 63), _config([1, 0, 1]), r"has to few values for attn_q.* 64 values needed, the rows hold 63"),
        (torch.zeros(2, 900), _config([1, 0, 1], [1, 0, 2]), r"both adapt layers\.0\.self_attn\.q_proj; send"),
        (torch.zeros(2, 900), _config([0, 1, 1], [3, 1, 2]), r"both adapt layers\.1\.self_attn\.v_proj"),
        (torch.zeros(2, 9000), _config([18, 1, 1], [7, 1, 2]), r"both adapt layers\.1\.mlp\.up_proj"),
    ],
)
def test_what_does_not_fit_the_model_is_refused_by_name(
    weights: torch.Tensor, config: torch.Tensor, message: str
) -> None:
    with pytest.raises(InvalidRequest, match=message):
        pack_adapter(weights, config, TINY)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            [9, 3, 1],
            r"lora module 9 \(cross_attn_q\) not enabled for layer 3; layers 0 to 2 are decoder\.block, 3 to 4 enc",
        ),
        ([8, 4, 1], r"lora module 8 \(cross_attn_qkv\) not enabled for layer 4"),
        ([1, 5, 1], r"range \[0, numModelLayers\): 5, numModelLayers is 5; layers 0 to 2 are decoder\.block"),
        ([13, 0, 1], r"lora module 13 not enabled for this model; it has 0 attn_qkv"),
    ],
)
def test_rows_that_an_encoder_decoder_has_not_are_refused_with_its_layers(row: list[int], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        pack_adapter(torch.zeros(1, 900), _config(row), ENCODER_DECODER)


@pytest.mark.parametrize("lora_dtype", ["float16", "bfloat16", "float32"])
def test_the_largest_numbers_of_either_sign_are_taken(lora_dtype: str) -> None:
    layout = replace(TINY, lora_dtype=lora_dtype)
    wire = wire_adapter(layout, ALL_MODULES, dtype=TORCH_DTYPES[layout.lora_dtype])
    limits = torch.finfo(TORCH_DTYPES[layout.lora_dtype])
    wire.weights[4, :4] = torch.tensor([limits.max, limits.min, limits.tiny, -0.0])
    wire.weights[4, -1] = -0.0
    packed = pack_adapter(wire.weights, wire.config, layout)
    module_id, layer, _, _ = wire.config[4].tolist()
    assert torch.equal(read_back(packed, layout)[module_id, layer][0].flatten()[:4], wire.weights[4, :4])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_are_refused_with_their_place(value: float, dtype: torch.dtype) -> None:
    wire = wire_adapter(TINY, ALL_MODULES, dtype=dtype)
    wire.weights[4, 11] = value
    layout = replace(TINY, lora_dtype=str(dtype).removeprefix("torch."))
    for stored in (TINY, layout):
        with pytest.raises(InvalidRequest, match=r"row 4 \(mlp_h_to_4h, layer 0, rank \d+\).* at position 11"):
            pack_adapter(wire.weights, wire.config, stored)


def test_values_after_the_declared_rank_are_refused() -> None:
    wire = wire_adapter(TINY, [(1, 0, 8)])
    wire.config[0, 2] = 4
    with pytest.raises(InvalidRequest, match=r"other than zero beyond the 256 .*rank or module is wrong"):
        pack_adapter(wire.weights, wire.config, TINY)


def test_values_beyond_the_storage_type_are_refused() -> None:
    layout = replace(TINY, lora_dtype="float16")
    wire = wire_adapter(TINY, [(1, 0, 8)])
    wire.weights[0, 0] = 1e5
    with pytest.raises(InvalidRequest, match="beyond the range of lora_dtype float16"):
        pack_adapter(wire.weights, wire.config, layout)


def test_an_adapter_takes_the_pages_told_at_start() -> None:
    assert adapter_pages(TINY, 16, is_dora=True) == len(pack_adapter(*_largest(TINY), TINY).pages), (
        "the size told at start is the size it takes"
    )


def _largest(layout: AdapterLayout) -> tuple[torch.Tensor, torch.Tensor]:
    rows = [(module.module_id, module.layer, layout.max_rank) for module in layout.sites.plain_modules]
    wire = wire_adapter(layout, rows, extra_width=64)
    wire.config[:, 3] = 1
    return wire.weights, wire.config


def write_peft(directory: Path, tensors: dict[str, torch.Tensor], **config: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 5, "lora_alpha": 11} | config))
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def peft_tensors(dtype: torch.dtype, is_dora: bool) -> dict[str, torch.Tensor]:
    """Matrices of all kinds of modules of TINY, the fused ones, too."""
    tensors = {}
    for layer, path in enumerate(["self_attn.qkv_proj", "mlp.gate_up_proj", "mlp.down_proj"]):
        module = TINY.sites.module_named[f"layers.{layer}.{path}"]
        prefix = f"base_model.model.model.layers.{layer}.{path}"
        tensors[f"{prefix}.lora_A.weight"] = (torch.randn(5, module.in_size) * 0.1).to(dtype)
        tensors[f"{prefix}.lora_B.weight"] = (torch.randn(module.out_size, 5) * 0.1).to(dtype)
        if is_dora:
            tensors[f"{prefix}.lora_magnitude_vector"] = (torch.rand(module.out_size) + 0.5).to(dtype)
    return tensors


@pytest.fixture(scope="module")
def base_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with the linears that `peft_tensors` adapts."""
    directory = tmp_path_factory.mktemp("base")
    modules = {
        name: TINY.sites.module_named[name]
        for name in ("layers.0.self_attn.qkv_proj", "layers.1.mlp.gate_up_proj", "layers.2.mlp.down_proj")
    }
    weights = {f"model.{name}.weight": torch.randn(m.out_size, m.in_size) for name, m in modules.items()}
    save_file(weights, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("lora_dtype", ["float32", "bfloat16", "float16", "int8", "fp8", "int4"])
@pytest.mark.parametrize(
    ("dtype", "is_dora"), [(torch.float32, True), (torch.bfloat16, False), (torch.float16, True)], ids=str
)
def test_an_adapter_has_one_digest_as_tensors_as_files_and_from_a_source(
    tmp_path: Path, base_model: Path, lora_dtype: str, dtype: torch.dtype, is_dora: bool
) -> None:
    layout = adapter_layout(TINY.sites, 16, lora_dtype)
    folder = write_peft(tmp_path / "x", peft_tensors(dtype, is_dora), use_dora=is_dora, use_rslora=True)
    wire = convert_peft(folder, base_model=base_model, sites=TINY.sites)
    as_tensors = pack_adapter(wire_weights(wire), torch.from_numpy(wire.config), layout)

    files = [(folder / name).read_bytes() for name in ("adapter_config.json", "adapter_model.safetensors")]
    as_files = pack_peft(read_peft(files[0], MemoryBytes(files[1]), layout.sites), layout, base_model)
    from_source = pack_directory(LocalAdapter(folder, folder, revision="1", name="x"), layout, base_model)

    assert as_files.rows == from_source.rows == as_tensors.rows
    assert torch.equal(as_files.pages, as_tensors.pages)
    assert torch.equal(from_source.pages, as_tensors.pages)
    assert as_files.digest == from_source.digest == as_tensors.digest


@pytest.mark.parametrize("lora_dtype", ["float32", "bfloat16", "float16", "int8", "fp8", "int4"])
@pytest.mark.parametrize("is_dora", [False, True])
def test_an_adapter_of_both_stacks_has_one_digest_as_tensors_as_files_and_from_a_source(
    tmp_path: Path, lora_dtype: str, is_dora: bool
) -> None:
    layout = adapter_layout(ENCODER_DECODER.sites, 16, lora_dtype)
    tensors, weights = {}, {}
    for site in layout.sites.sites:
        name = layout.sites.full_name(site.name)
        key = f"base_model.model.{name}"
        weights[f"{name}.weight"] = torch.randn(site.out_size, site.in_size)
        tensors[f"{key}.lora_A.weight"] = torch.randn(5, site.in_size) * 0.1
        tensors[f"{key}.lora_B.weight"] = torch.randn(site.out_size, 5) * 0.1
        if is_dora:
            tensors[f"{key}.lora_magnitude_vector"] = torch.rand(site.out_size) + 0.5
    save_file(weights, tmp_path / "model.safetensors")
    folder = write_peft(tmp_path / "x", tensors, use_dora=is_dora)
    wire = convert_peft(folder, base_model=tmp_path, sites=layout.sites)
    as_tensors = pack_adapter(wire_weights(wire), torch.from_numpy(wire.config), layout)
    from_source = pack_directory(LocalAdapter(folder, folder, revision="1", name="x"), layout, tmp_path)

    assert {(row.layer, row.module_id) for row in as_tensors.rows} == {
        (module.layer, module.module_id) for module in layout.sites.plain_modules
    }
    assert from_source.rows == as_tensors.rows
    assert torch.equal(from_source.pages, as_tensors.pages)
    assert from_source.digest == as_tensors.digest
    check_rows(as_tensors.rows, as_tensors.num_pages, layout)


def pack_experts(tensors: Mapping[str, np.ndarray], layout: AdapterLayout) -> PackedAdapter:
    config = {"peft_type": "LORA", "r": 3, "lora_alpha": 6, "peft_version": "0.21.2"}
    data = save({key: np.ascontiguousarray(value) for key, value in tensors.items()})
    return pack_peft(read_peft(json.dumps(config).encode(), MemoryBytes(data), layout.sites), layout, NO_BASE)


@pytest.mark.parametrize("lora_dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("sites", [PLAIN, GPT_OSS], ids=["halves", "alternating"])
def test_an_adapter_on_experts_has_one_digest_in_every_form(sites: ModelSites, lora_dtype: str, tmp_path: Path) -> None:
    layout = adapter_layout(sites, 4, lora_dtype)
    factors = random_factors(sites, has_shared_sides=True)
    forms = {name: FORMS[name](factors, sites.experts_form) for name in forms_for(sites)}
    forms |= {
        f"{name}, shared": shared_outer(tensors) for name, tensors in forms.items() if name.startswith("all experts")
    }
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 3, "lora_alpha": 6}')
    (tmp_path / "adapter_model.safetensors").write_bytes(save(forms["one expert a tensor"]))
    wire = convert_peft(tmp_path, sites=sites)

    packed = {name: pack_experts(tensors, layout) for name, tensors in forms.items()}
    packed["converted"] = pack_adapter(torch.from_numpy(wire.weights), torch.from_numpy(wire.config), layout)

    assert len(packed) >= 7
    first = packed["one expert a tensor"]
    for name, other in packed.items():
        assert other.rows == first.rows, name
        assert torch.equal(other.pages, first.pages), name
        assert other.digest == first.digest, name


@pytest.mark.parametrize("form", FORMS)
def test_experts_that_adapters_may_not_change_are_refused_in_every_form(form: str) -> None:
    sites = PLAIN.restricted_to(["attn_q", "moe_4h_to_h"])
    message = r"mlp\.experts\.gate_proj: lora module moe_h_to_4h not enabled for this model \(id 13, layer 1\)"

    with pytest.raises(InvalidRequest, match=message):
        pack_experts(FORMS[form](random_factors(PLAIN), PLAIN_EXPERTS), adapter_layout(sites, 4, "float32"))


def test_an_expert_that_a_file_lacks_has_the_digest_of_one_without_an_update() -> None:
    layout = adapter_layout(PLAIN, 4, "float32")
    factors = random_factors(PLAIN)
    without = {place: pair for place, pair in factors.items() if place[2] != 1}
    zero = factors | {place: (a, 0 * b) for place, (a, b) in factors.items() if place[2] == 1}

    assert pack_experts(numbered(without), layout).digest == pack_experts(wrapped(zero, PLAIN_EXPERTS), layout).digest


def pack_folder(folder: Path, layout: AdapterLayout = TINY) -> PackedAdapter:
    return pack_directory(LocalAdapter(folder, folder, revision="1", name="x"), layout, NO_BASE)


@pytest.mark.parametrize("lora_dtype", ["float32", "int8"])
def test_the_tokens_that_activate_an_adapter_come_with_its_files(tmp_path: Path, lora_dtype: str) -> None:
    layout, matrices = adapter_layout(TINY.sites, 16, lora_dtype), peft_tensors(torch.float32, is_dora=False)
    plain = pack_folder(write_peft(tmp_path / "plain", matrices), layout)
    activated = pack_folder(write_peft(tmp_path / "activated", matrices, alora_invocation_tokens=[3, 7]), layout)
    traits = AdapterTraits(invocation_tokens=(3, 7))
    assert (activated.traits, plain.traits) == (traits, AdapterTraits())
    assert torch.equal(activated.pages, plain.pages)
    assert activated.digest == traits.digest(plain.digest) != plain.digest
    with pytest.raises(AdapterError, match=r"alora_invocation_tokens is \(3, 7\), which the two tensors cannot tell"):
        convert_peft(tmp_path / "activated")


@pytest.mark.parametrize(
    ("tokens", "says"),
    [
        ([1] * (MAX_INVOCATION_TOKENS + 1), "there are 257 invocation tokens, at most 256"),
        ([5, -1], "the invocation tokens have -1"),
        ([5, 311], r"has 311, expected 0 \.\. 310"),
    ],
)
def test_tokens_that_can_activate_nothing_are_refused(tmp_path: Path, tokens: list[int], says: str) -> None:
    sites = decoder_sites(num_layers=3, hidden_size=24, q_size=40, kv_size=8, intermediate_size=56, vocab_size=311)
    matrices = peft_tensors(torch.float32, is_dora=False)
    folder = write_peft(tmp_path / "x", matrices, alora_invocation_tokens=tokens)
    with pytest.raises(Unusable, match=f"alora_invocation_tokens:? {says}"):
        pack_folder(folder, adapter_layout(sites, 16, "float32"))


def wire_weights(tensors: AdapterTensors) -> torch.Tensor:
    if tensors.dtype == "BF16":
        return torch.from_numpy(tensors.weights.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(tensors.weights)


@pytest.mark.parametrize("lora_dtype", ["float32", "bfloat16", "int8", "int4"])
def test_pieces_of_a_matrix_are_stored_as_the_whole_is(
    tmp_path: Path, base_model: Path, lora_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = adapter_layout(TINY.sites, 16, lora_dtype)
    folder = write_peft(tmp_path / "x", peft_tensors(torch.float32, is_dora=True), use_dora=True)
    adapter = LocalAdapter(folder, folder, revision="1", name="x")
    whole = pack_directory(adapter, layout, base_model)
    monkeypatch.setattr(peft_files, "MAX_PIECE_VALUES", 30)
    assert torch.equal(pack_directory(adapter, layout, base_model).pages, whole.pages)
    assert pack_directory(adapter, layout, base_model).digest == whole.digest


@pytest.mark.parametrize(
    "blocks", [{"target_modules_bd_a": ["qkv_proj"]}, {"target_modules_bd_b": ["gate_up", "down"]}]
)
def test_blocks_are_expanded_to_the_matrix_that_they_are(tmp_path: Path, blocks: dict[str, list[str]]) -> None:
    whole, parts = {}, {}
    for key, value in peft_tensors(torch.float32, is_dora=False).items():
        side, rows, columns = "target_modules_bd_b", len(value), 4
        if "lora_A" in key:
            side, rows, columns = "target_modules_bd_a", 4, value.shape[1]
        is_block = any(name in key for name in blocks.get(side, ()))
        parts[key] = torch.randn(rows, columns // 2 if is_block else columns)
        whole[key] = torch.block_diag(*parts[key].chunk(2)) if is_block else parts[key]
    bdlora = {"nblocks": 2, "match_strict": False} | blocks
    first = write_peft(tmp_path / "parts", parts, r=4, use_bdlora=bdlora)
    second = write_peft(tmp_path / "whole", whole, r=4)
    digests = {
        pack_directory(LocalAdapter(folder, folder, revision="1", name="x"), TINY, NO_BASE).digest
        for folder in (first, second)
    }
    assert len(digests) == 1


def test_files_take_little_memory_beside_their_pages(tmp_path: Path) -> None:
    """A and B of 24 Mi values each: 48 MiB of the file, and 96 MiB as float32."""
    sites = decoder_sites(num_layers=1, hidden_size=3 << 15, q_size=3 << 15, kv_size=8, intermediate_size=8)
    layout = adapter_layout(sites, 256, "bfloat16")
    key = "base_model.model.model.layers.0.self_attn.q_proj"
    shapes = {f"{key}.lora_A.weight": [256, 3 << 15], f"{key}.lora_B.weight": [3 << 15, 256]}
    size = 2 * 256 * (3 << 15)
    header = {
        key: {"dtype": "F16", "shape": shape, "data_offsets": [index * size, index * size + size]}
        for index, (key, shape) in enumerate(shapes.items())
    }
    folder = write_peft(tmp_path, {}, r=256)
    text = json.dumps(header).encode()
    with (folder / "adapter_model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + 2 * size)
    tracemalloc.start()
    try:
        packed = pack_directory(LocalAdapter(folder, folder, revision="1", name="x"), layout, NO_BASE)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert packed.pages.nbytes >= 2 * size
    assert peak - packed.pages.nbytes < 64 << 20
