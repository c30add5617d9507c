"""Adapters that become codes on arrival: their bytes in every tier, and the engine's answers."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.adapters import SPANNING, TINY, WireAdapter, wire_adapter
from support.engines import LogitsRecorder, run_all
from support.oracle import ATTENTION, MLP, Oracle, packed
from transformers import LlamaConfig, LlamaForCausalLM

from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.errors import InvalidRequest
from multilora_engine.lora.adapter_file import DamagedFile
from multilora_engine.lora.device_tier import TableRows
from multilora_engine.lora.disk_tier import DiskTier
from multilora_engine.lora.format import ARENA_DTYPES, pack_adapter
from multilora_engine.lora.free_pages import PagePool
from multilora_engine.lora.layout import AdapterTraits, PackedAdapter, TableEntries
from multilora_engine.lora_config import LoRAConfig
from multilora_engine.request import GenerationRequest, SamplingParams
from multilora_kernels import LoRATables, reference
from multilora_kernels.adapter_codes import dequantize_a, dequantize_b
from multilora_kernels.adapter_quantization import quantize_a, quantize_b
from multilora_wire.layout import AdapterLayout, PageShape, layout_version
from multilora_wire.pieces import CODE_BITS, part_bounds

ROWS = [(0, 0, 3), (18, 0, 5), (6, 0, 16), (0, 2, 1), (1, 1, 16), (3, 1, 7), (4, 2, 9)]
"""Some of several sites: 0 is q, k and v, of 40, 8 and 8 outputs."""

WORDS = LlamaConfig(
    vocab_size=311,
    hidden_size=48,
    intermediate_size=88,
    num_hidden_layers=2,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=12,
    initializer_range=0.3,
)
LOGITS_TOLERANCE = 3e-3
"""As in test_parity.py."""


def layout_of(lora_dtype: str, base: AdapterLayout = TINY) -> AdapterLayout:
    return replace(base, lora_dtype=lora_dtype, version=layout_version(lora_dtype))


def with_magnitudes(wire: WireAdapter) -> tuple[torch.Tensor, torch.Tensor]:
    """The wire tensors of the same rows as DoRA; each magnitude is as long as the row allows."""
    config = wire.config.clone()
    config[:, 3] = 1
    generator = torch.Generator().manual_seed(9)
    weights = torch.nn.functional.pad(wire.weights, (0, 128))
    for i, (a, b) in enumerate(wire.matrices.values()):
        start = a.numel() + b.numel()
        weights[i, start : start + len(b)] = torch.rand(len(b), generator=generator) + 0.5
    return weights, config


def tables_of(adapter: PackedAdapter, layout: AdapterLayout) -> LoRATables:
    """Tables of one row, in the middle of pages whose bytes are NaN in every float."""
    pool = PagePool(len(adapter.pages) + 2, layout.page_bytes, torch.device("cpu"))
    pool.storage.fill_(0xFF)
    pages = pool.allocate(PageShape(0, (len(adapter.pages) + 2,)))[1:-1]
    for page, source in zip(pages, adapter.pages, strict=True):
        pool.storage[page] = source
    rows = TableRows(layout, pool.storage, count=1)
    rows.write(0, TableEntries.of(adapter.rows, layout), pages)
    return rows.tables


@pytest.mark.parametrize("base", [TINY, SPANNING], ids=["one page", "spanning"])
@pytest.mark.parametrize("lora_dtype", CODE_BITS)
def test_the_tables_address_the_codes_of_every_site(lora_dtype: str, base: AdapterLayout) -> None:
    layout, arena = layout_of(lora_dtype, base), ARENA_DTYPES[lora_dtype]
    wire = wire_adapter(layout, ROWS, dtype=torch.float16)
    weights, config = with_magnitudes(wire)
    tables = tables_of(pack_adapter(weights, config, layout), layout)
    for i, ((module_id, layer), (a, b)) in enumerate(wire.matrices.items()):
        module = layout.sites.module_at[layer, module_id]
        magnitude = weights[i, a.numel() + b.numel() :]
        expected_a = dequantize_a(quantize_a(a.float(), arena), *a.shape, arena)
        for part, (start, end) in zip(module.parts, pairwise(part_bounds(module)), strict=True):
            expected_b = dequantize_b(quantize_b(b[start:end].float(), arena), end - start, b.shape[1], arena)
            assert reference.matrix_a(tables, 0, part.column, module.in_size).equal(expected_a)
            assert reference.matrix_b(tables, 0, part.column, end - start).equal(expected_b)
            stored = reference.magnitude_of(tables, 0, part.column, end - start)
            assert stored is not None
            assert stored.equal(magnitude[start:end].float())


def test_the_digest_is_over_what_was_sent() -> None:
    wire = wire_adapter(TINY, ROWS, dtype=torch.bfloat16)
    first = pack_adapter(wire.weights, wire.config, layout_of("int8"))
    reordered = torch.arange(len(ROWS)).flip(0)
    wider = torch.nn.functional.pad(wire.weights.float(), (0, 50))[reordered]
    again = pack_adapter(wider, wire.config[reordered], layout_of("int8"))
    assert (again.digest, again.pages.equal(first.pages)) == (first.digest, True)
    for other in ("fp8", "int4"):
        assert pack_adapter(wire.weights, wire.config, layout_of(other)).digest == first.digest
    tiny = []
    for value in (1e-5, 2e-5):
        wire.weights[3, 0] = value
        tiny.append(pack_adapter(wire.weights, wire.config, layout_of("int8")))
    assert tiny[0].pages.equal(tiny[1].pages)
    assert tiny[0].digest != tiny[1].digest


@pytest.mark.parametrize("lora_dtype", CODE_BITS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_are_refused_with_their_place(value: float, lora_dtype: str) -> None:
    wire = wire_adapter(TINY, ROWS, dtype=torch.bfloat16)
    wire.weights[4, 11] = value
    with pytest.raises(InvalidRequest, match=r"row 4 \(attn_q, layer 1, rank 16\).* at position 11"):
        pack_adapter(wire.weights, wire.config, layout_of(lora_dtype))


@pytest.mark.parametrize("lora_dtype", CODE_BITS)
def test_what_no_code_covers_is_zero(lora_dtype: str) -> None:
    wire = wire_adapter(TINY, ROWS)
    torch.empty(1 << 20).fill_(torch.nan)  # so that fresh memory is not zero by itself
    adapter = pack_adapter(wire.weights, wire.config, layout_of(lora_dtype))
    again = pack_adapter(wire.weights, wire.config, layout_of(lora_dtype))
    assert adapter.pages.equal(again.pages)
    layout, pages = layout_of(lora_dtype), adapter.pages.view(-1).clone()
    for row in adapter.rows:
        pieces = layout.pieces(layout.sites.module_at[row.layer, row.module_id], row.rank, row.is_dora)
        for piece, offset in zip(pieces, row.offsets, strict=True):
            pages[offset : offset + piece.num_bytes] = 0
    assert not pages.any()


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, PackedAdapter]:
    """The file of an adapter of int8 codes, with the number 7, that is activated by the token 5."""
    layout = layout_of("int8")
    wire = wire_adapter(layout, ROWS)
    adapter = pack_adapter(wire.weights, wire.config, layout, AdapterTraits(invocation_tokens=(5,)))
    tier, pages = DiskTier(tmp_path, 1 << 20, layout), list(adapter.pages)
    write = tier.store(7, adapter.digest, "seven", adapter.rows, pages, lambda file: None, traits=adapter.traits)
    write.result(timeout=60)
    tier.close()
    return tmp_path / "7.safetensors", adapter


def read(path: Path, count: int) -> torch.Tensor:
    tier = DiskTier(path.parent, 1 << 20, layout_of("int8"))
    pages = torch.zeros(count, TINY.page_bytes, dtype=torch.uint8)
    try:
        tier.open(7).read(list(pages)).result(timeout=60)
    finally:
        tier.close()
    return pages


def test_a_file_of_codes_comes_back_bit_for_bit(stored: tuple[Path, PackedAdapter]) -> None:
    path, adapter = stored
    assert read(path, len(adapter.pages)).equal(adapter.pages)


def test_a_file_whose_codes_were_changed_is_refused(stored: tuple[Path, PackedAdapter]) -> None:
    path, adapter = stored
    content = bytearray(path.read_bytes())
    content[-TINY.page_bytes + 5] ^= 1
    path.write_bytes(content)
    with pytest.raises(DamagedFile, match="does not have the digest"):
        read(path, len(adapter.pages))


def test_a_file_of_codes_whose_traits_were_changed_is_refused(stored: tuple[Path, PackedAdapter]) -> None:
    path, adapter = stored
    path.write_bytes(path.read_bytes().replace(b"[5]", b"[6]", 1))
    with pytest.raises(DamagedFile, match="does not have the digest"):
        read(path, len(adapter.pages))


def test_a_file_of_another_storage_type_is_no_adapter_here(stored: tuple[Path, PackedAdapter]) -> None:
    path, _ = stored
    for lora_dtype in ("float32", "fp8", "int4"):
        tier = DiskTier(path.parent, 1 << 20, layout_of(lora_dtype))
        assert tier.adapters == []
        tier.close()
    layout = json.loads(
        json.loads(path.read_bytes()[8:].split(b'"pages":', 1)[0].rstrip(b",") + b"}")["__metadata__"]["layout"]
    )
    assert (layout["version"], layout["lora_dtype"]) == (5, "int8")


def dequantize(oracle: Oracle, arena: torch.dtype) -> None:
    """Give the oracle's adapters, whose scaling is 1, the values that codes of them mean."""
    assert oracle._model is not None
    for name, parameter in oracle._model.named_parameters():
        rows = parameter.data
        if ".lora_A." in name:
            parameter.data = dequantize_a(quantize_a(rows, arena), *rows.shape, arena)
        elif ".lora_B." in name:
            parameter.data = dequantize_b(quantize_b(rows, arena), *rows.shape, arena)


@pytest.mark.parametrize("lora_dtype", CODE_BITS)
def test_tokens_are_those_of_the_adapters_that_codes_mean_before_and_after_eviction(
    lora_dtype: str, tmp_path: Path, default_model_dir: Path
) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(WORDS)
    model.save_pretrained(tmp_path / "model")
    oracle = Oracle(model, tmp_path)
    ranks = {"one": 1, "odd": 7, "usual": 16, "large": 64}
    for seed, (name, rank) in enumerate(ranks.items()):
        oracle.add_random(name, rank, ATTENTION + MLP, seed)
    engine = Engine(
        EngineConfig(
            model_path=tmp_path / "model",
            tokenizer_path=default_model_dir,
            num_threads=2,
            kv_cache_memory_bytes=8 << 20,  # type: ignore[arg-type]
            enable_prefix_caching=False,
            lora=LoRAConfig(
                lora_dtype=lora_dtype,  # type: ignore[arg-type]
                lora_cache_host_memory_bytes=768 << 10,  # type: ignore[arg-type]
                lora_cache_dir=tmp_path / "files",
            ),
        )
    )
    layout = engine.info.adapter_layout
    for task, name in enumerate(ranks):
        engine.put_adapter(task, packed(oracle.adapters[name], layout))
    dequantize(oracle, ARENA_DTYPES[lora_dtype])
    recorder = LogitsRecorder(engine)
    prompts = [[(7 * i + j * j) % 311 for j in range(5 + i)] for i in range(6)]
    for time in ("first", "again"):
        requests = [
            GenerationRequest(f"{time} {task} {i}", prompt, SamplingParams(max_tokens=6, end_id=-1), lora_task_id=task)
            for i, prompt in enumerate(prompts)
            for task in range(len(ranks))
        ]
        answers = run_all(engine, requests)
        for task, name in enumerate(ranks):
            for i, prompt in enumerate(prompts):
                key = f"{time} {task} {i}"
                logits = oracle.logits(name, prompt, answers[key].token_ids)
                torch.testing.assert_close(torch.stack(recorder.rows[key]), logits, rtol=0, atol=LOGITS_TOLERANCE)
                assert answers[key].token_ids == logits.argmax(dim=-1).tolist()
    assert engine.loras.stats.host.evictions > 0
    engine.close()
