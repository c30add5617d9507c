"""Adapters on experts, routers and shared experts: from the wire and from files into pages and tables."""

from __future__ import annotations

import json
import sys
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from support.sources import NO_BASE

from multilora_engine.dynamo.fleet_messages import Upload
from multilora_engine.dynamo.fleet_uploads import check_pages, digest_of
from multilora_engine.errors import InvalidRequest
from multilora_engine.lora.adapter_file import (
    describe_file,
    encode_header,
    open_regular,
    read_file,
    with_pages_digest,
    write_file_atomically,
)
from multilora_engine.lora.adapter_sets import Part, plan_set
from multilora_engine.lora.device_tier import TableRows
from multilora_engine.lora.format import ARENA_DTYPES, TORCH_DTYPES, check_rows, pack_adapter, pack_peft
from multilora_engine.lora.free_pages import PagePool
from multilora_engine.lora.layout import PackedAdapter, TableEntries, own_pieces, page_shape
from multilora_engine.lora.sources.packing import pack_directory
from multilora_engine.lora.sources.source import LocalAdapter
from multilora_engine.process.messages import (
    PutAdapter,
    adapter_header,
    adapter_payload,
    decode_to_engine,
    encode,
    read_adapter,
)
from multilora_kernels import LoRATables, reference
from multilora_kernels.adapter_codes import dequantize_a, dequantize_b
from multilora_kernels.adapter_quantization import quantize_a, quantize_b
from multilora_wire.adapter_info import AdapterMember
from multilora_wire.layout import AdapterLayout, adapter_layout, num_values, uniform_shape
from multilora_wire.module_names import (
    ATTN_Q,
    MLP_GATE_UP,
    MLP_H_TO_4H,
    MOE_4H_TO_H,
    MOE_GATE,
    MOE_H_TO_4H,
    MOE_ROUTER,
    SHARED_EXPERT_GATE,
    SHARED_UP,
)
from multilora_wire.peft_config import PeftConfig
from multilora_wire.peft_files import PeftAdapter, PeftLinear, StoredMatrix
from multilora_wire.sites import (
    WireModule,
    attention_shapes,
    expert_shapes,
    mlp_shapes,
    model_sites,
    shared_expert_shapes,
)
from multilora_wire.tensor_file import MemoryBytes, TensorPlace

NUM_EXPERTS = 5
_ATTENTION = attention_shapes(24, q_size=40, kv_size=8)
_SPARSE = [*_ATTENTION, *expert_shapes(24, 20, NUM_EXPERTS), *shared_expert_shapes(24, 36)]
SITES = model_sites([[*_ATTENTION, *mlp_shapes(24, 56)], _SPARSE, _SPARSE], hidden_size=24)
"""A dense layer before two sparse ones. All sizes differ."""

LAYOUT = AdapterLayout(SITES, max_rank=16, lora_dtype="float32", page_bytes=16384)
FLOATS = [LAYOUT, replace(LAYOUT, page_bytes=1024), adapter_layout(SITES, 16, "bfloat16")]
CODES = [adapter_layout(SITES, 16, dtype) for dtype in ("int8", "fp8", "int4")]

Key = tuple[int, int, int]
"""Module id, layer, expert."""

Wire = tuple[torch.Tensor, torch.Tensor]
"""weights and config."""


@dataclass(frozen=True)
class Drawn:
    """An adapter by the experts that change something, with A and B of each; and the same in both forms.

    weights, config: of the wire, with the values of all experts. linears, data: of files.
    """

    matrices: dict[Key, tuple[torch.Tensor, torch.Tensor]]
    weights: torch.Tensor
    config: torch.Tensor
    linears: list[PeftLinear]
    data: bytes

    def pack_wire(self, layout: AdapterLayout) -> PackedAdapter:
        return pack_adapter(self.weights, self.config, layout)

    def pack_files(self, layout: AdapterLayout) -> PackedAdapter:
        adapter = PeftAdapter(PeftConfig({}, (), ()), MemoryBytes(self.data), tuple(self.linears), "FP32")
        return pack_peft(adapter, layout, NO_BASE)


class _File:
    def __init__(self) -> None:
        self.data = bytearray()

    def add(self, values: torch.Tensor) -> StoredMatrix:
        start = len(self.data)
        self.data += values.contiguous().numpy().tobytes()
        shape = (values.shape[0], values.shape[1])
        return StoredMatrix(TensorPlace(f"t{start}", "F32", shape, start, len(self.data)), shape)


EXPERT_IDS = (MOE_H_TO_4H, MOE_4H_TO_H, MOE_GATE)
PLACES = [(module.module_id, module.layer) for module in SITES.plain_modules]


@st.composite
def adapters(draw: st.DrawFn) -> Drawn:
    """Some modules of some layers; experts absent, with a B of zeros, or with an A that others have, too."""
    places = draw(st.lists(st.sampled_from(PLACES), min_size=1, max_size=9, unique=True))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    matrices: dict[Key, tuple[torch.Tensor, torch.Tensor]] = {}
    file, linears, wire = _File(), list[PeftLinear](), list[tuple[list[int], torch.Tensor]]()
    pool: dict[tuple[int, int, int], list[torch.Tensor]] = {}
    stored: dict[int, StoredMatrix] = {}
    for module_id, layer in places:
        module, rank = SITES.module_at[layer, module_id], draw(st.integers(1, 4))
        all_a, all_b = [], []
        for expert in range(module.experts):
            known = pool.setdefault((layer, rank, module.in_size), [])
            is_shared = bool(known) and module.experts > 1 and draw(st.booleans())
            a = draw(st.sampled_from(known)) if is_shared else torch.randn(rank, module.in_size, generator=generator)
            if module.experts > 1 and not is_shared:
                known.append(a)
            kind = draw(st.sampled_from(["present", "present", "zero", "absent"])) if module.experts > 1 else "present"
            b = torch.randn(module.out_size, rank, generator=generator)
            b = b if kind == "present" else b * torch.tensor(-0.0 if draw(st.booleans()) else 0.0)
            if kind == "present":
                matrices[module_id, layer, expert] = (a, b)
            if kind != "absent":
                has_one_place = draw(st.booleans())
                stored_a = stored.setdefault(id(a), file.add(a)) if has_one_place else file.add(a)
                name = f"layers.{layer}.{module.name}.{expert}"
                linears.append(PeftLinear(name, module_id, layer, stored_a, file.add(b), 1.0, expert=expert))
            all_a.append(a if kind == "present" or draw(st.booleans()) else torch.zeros_like(a))
            all_b.append(b)
        row = torch.cat([*(a.flatten() for a in all_a), *(b.flatten() for b in all_b)])
        wire.append(([module_id, layer, rank, 0], row))
    if not matrices:  # Adapters that change nothing have a test of their own.
        return draw(adapters())
    width = max(len(row) for _, row in wire) + 3
    order = draw(st.permutations(range(len(wire))))
    weights = torch.stack([torch.nn.functional.pad(wire[i][1], (0, width - len(wire[i][1]))) for i in order])
    config = torch.tensor([wire[i][0] for i in order], dtype=torch.int32)
    return Drawn(matrices, weights, config, draw(st.permutations(linears)), bytes(file.data))


def tables_of(adapter: PackedAdapter, layout: AdapterLayout) -> LoRATables:
    """Tables of one row, which had another adapter's entries, over pages whose other bytes are NaN in every float."""
    shape = page_shape(adapter.rows, len(adapter.pages), layout)
    pool = PagePool(len(adapter.pages) + 3, layout.page_bytes, torch.device("cpu"))
    pool.storage.fill_(0xFF)
    pool.allocate(uniform_shape(layout, 1, modules=[layout.sites.plain_modules[0]]))
    pages = pool.allocate(shape)
    for page, source in zip(pages, adapter.pages, strict=True):
        pool.storage[page] = source
    rows = TableRows(layout, pool.storage, count=1)
    rows.tables.rank.fill_(3)
    rows.write(0, TableEntries.of(adapter.rows, layout), pages)
    return rows.tables


def columns_of(layout: AdapterLayout) -> dict[Key, tuple[int, WireModule]]:
    """The column of each linear and expert, and its module."""
    return {
        (module.module_id, module.layer, expert): (module.parts[0].column + expert, module)
        for module in layout.sites.plain_modules
        for expert in range(module.experts)
    }


@settings(deadline=None, max_examples=80)
@given(adapters(), st.sampled_from(FLOATS))
def test_tables_have_the_matrices_of_every_expert_and_nothing_for_others(drawn: Drawn, layout: AdapterLayout) -> None:
    packed, dtype = drawn.pack_wire(layout), TORCH_DTYPES[layout.lora_dtype]
    check_rows(packed.rows, len(packed.pages), layout)
    tables = tables_of(packed, layout)
    for key, (column, module) in columns_of(layout).items():
        rank = int(tables.rank[0, column])
        assert rank == (drawn.matrices[key][0].shape[0] if key in drawn.matrices else 0)
        if rank:
            a, b = drawn.matrices[key]
            assert reference.matrix_a(tables, 0, column, module.in_size).equal(a.to(dtype))
            assert reference.matrix_b(tables, 0, column, module.out_size).equal(b.to(dtype))


@settings(deadline=None, max_examples=60)
@given(adapters(), st.sampled_from(CODES))
def test_codes_have_scales_of_each_expert(drawn: Drawn, layout: AdapterLayout) -> None:
    arena = ARENA_DTYPES[layout.lora_dtype]
    tables = tables_of(drawn.pack_wire(layout), layout)
    for key, (column, module) in columns_of(layout).items():
        assert bool(tables.rank[0, column]) == (key in drawn.matrices)
        if key in drawn.matrices:
            a, b = drawn.matrices[key]
            expected_a = dequantize_a(quantize_a(a, arena), *a.shape, arena)
            expected_b = dequantize_b(quantize_b(b, arena), *b.shape, arena)
            assert reference.matrix_a(tables, 0, column, module.in_size).equal(expected_a)
            assert reference.matrix_b(tables, 0, column, module.out_size).equal(expected_b)


@settings(deadline=None, max_examples=80)
@given(adapters(), st.sampled_from([*FLOATS, *CODES]))
def test_files_and_wire_are_one_adapter_whatever_lies_in_them_twice(drawn: Drawn, layout: AdapterLayout) -> None:
    wire, files = drawn.pack_wire(layout), drawn.pack_files(layout)
    assert (files.digest, files.rows, files.pages.equal(wire.pages)) == (wire.digest, wire.rows, True)


@settings(deadline=None, max_examples=60)
@given(adapters(), st.sampled_from(FLOATS))
def test_an_a_that_experts_of_a_layer_have_in_common_is_stored_once(drawn: Drawn, layout: AdapterLayout) -> None:
    packed, dtype = drawn.pack_wire(layout), TORCH_DTYPES[layout.lora_dtype]
    different: dict[int, set[bytes]] = {}
    alone = 0
    for (module_id, layer, _), (a, _) in drawn.matrices.items():
        if SITES.module_at[layer, module_id].experts > 1:
            different.setdefault(layer, set()).add(a.to(dtype).view(torch.uint8).numpy().tobytes())
        else:
            alone += 1
    assert len({row.a_offset for row in packed.rows}) == alone + sum(map(len, different.values()))
    num_bytes = sum(piece.num_bytes for _, piece in own_pieces(packed.rows, layout))
    assert packed.pages.view(-1).numpy().nonzero()[0].size <= num_bytes


def all_experts(
    layout: AdapterLayout, rank: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """weights and config of an adapter on every expert, router and shared expert."""
    modules = [module for module in layout.sites.plain_modules if module.module_id >= MOE_H_TO_4H]
    width = max(num_values(module, rank) for module in modules)
    weights = torch.zeros(len(modules), width)
    for index, module in enumerate(modules):
        weights[index, : num_values(module, rank)] = torch.randn(num_values(module, rank))
    config = torch.tensor([[module.module_id, module.layer, rank, 0] for module in modules], dtype=torch.int32)
    return weights.to(dtype), config


def test_an_adapter_takes_the_pages_that_its_size_tells() -> None:
    modules = [module for module in SITES.plain_modules if module.module_id >= MOE_H_TO_4H]
    for layout in (*FLOATS, *CODES):
        packed = pack_adapter(*all_experts(layout, 3), layout)
        assert uniform_shape(layout, 3, modules=modules) == page_shape(packed.rows, len(packed.pages), layout)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_the_digest_does_not_depend_on_the_wires_dtype(dtype: torch.dtype) -> None:
    weights, config = all_experts(LAYOUT, 2, dtype)
    for layout in (LAYOUT, CODES[0]):
        assert pack_adapter(weights, config, layout).digest == pack_adapter(weights.float(), config, layout).digest


def test_adapters_on_different_experts_are_different() -> None:
    digests = set()
    for expert in range(NUM_EXPERTS):
        a, b = torch.zeros(NUM_EXPERTS, 2, 24), torch.zeros(NUM_EXPERTS, 20, 2)
        a[expert], b[expert] = 1.0, 1.0
        weights, config = (
            torch.cat([a.flatten(), b.flatten()])[None],
            torch.tensor([[MOE_GATE, 1, 2]], dtype=torch.int32),
        )
        for layout in (LAYOUT, CODES[0]):
            digests.add(pack_adapter(weights, config, layout).digest)
    assert len(digests) == 2 * NUM_EXPERTS


def test_an_adapter_that_changes_nothing_is_one_row() -> None:
    weights, config = all_experts(LAYOUT, 2)
    weights.zero_()
    packed = pack_adapter(weights[:1], config[:1], LAYOUT)
    assert [(row.module_id, row.layer, row.expert) for row in packed.rows] == [(*config[0, :2].tolist(), 0)]
    check_rows(packed.rows, len(packed.pages), LAYOUT)


@settings(deadline=None, max_examples=25)
@given(adapters(), st.sampled_from([LAYOUT, CODES[2]]))
def test_files_of_the_disk_tier_and_messages_give_the_adapter_back(drawn: Drawn, layout: AdapterLayout) -> None:
    packed = drawn.pack_wire(layout)
    header = adapter_header(7, packed)
    message = decode_to_engine(memoryview(encode(PutAdapter("r", header))))
    assert isinstance(message, PutAdapter)
    sent = read_adapter(message.adapter, adapter_payload(packed))
    assert (sent.digest, sent.rows) == (packed.digest, packed.rows)
    check_rows(sent.rows, len(sent.pages), layout)


def test_a_file_of_the_disk_tier_gives_the_adapter_back(tmp_path: Path) -> None:
    for layout in (LAYOUT, CODES[2]):
        weights, config = all_experts(layout, 3)
        weights[:, 5] = 0
        packed, path = pack_adapter(weights, config, layout), tmp_path / "5.safetensors"
        header = encode_header(5, packed.digest, "name", packed.rows, len(packed.pages), layout)
        pages = list(packed.pages)
        write_file_atomically(path, with_pages_digest(header, packed.rows, pages, layout), pages)
        file = describe_file(path, layout)
        assert (file.digest, file.ranks) == (packed.digest, (3,))
        read = torch.empty_like(packed.pages)
        assert read_file(open_regular(path), file, list(read), layout) == packed.rows
        assert read.equal(packed.pages)


@settings(deadline=None, max_examples=40)
@given(st.lists(adapters(), min_size=1, max_size=3), st.sampled_from(FLOATS[:2]))
def test_a_set_is_the_sum_of_its_members_on_every_expert(members: list[Drawn], layout: AdapterLayout) -> None:
    weights = [0.5, -1.0, 0.25][: len(members)]
    parts = [
        Part(AdapterMember(7, weight, f"{index}"), (packed := member.pack_wire(layout)).rows, list(packed.pages))
        for index, (member, weight) in enumerate(zip(members, weights, strict=True))
    ]
    plan = plan_set(parts, layout)
    pages = torch.full((len(plan.placement.fill), layout.page_bytes), 0xA5, dtype=torch.uint8)
    plan.fill(list(pages))
    check_rows(plan.rows, len(pages), layout)
    tables = tables_of(PackedAdapter("", plan.rows, pages), layout)
    for key, (column, module) in columns_of(layout).items():
        having = [
            (member.matrices[key], weight)
            for member, weight in zip(members, weights, strict=True)
            if key in member.matrices
        ]
        assert int(tables.rank[0, column]) == sum(a.shape[0] for (a, _), _ in having)
        if having:
            update = reference.matrix_b(tables, 0, column, module.out_size) @ reference.matrix_a(
                tables, 0, column, module.in_size
            )
            torch.testing.assert_close(update, sum(weight * (b @ a) for (a, b), weight in having))


def wire(*rows: tuple[int, int, int], width: int = 2000) -> Wire:
    """Rows (module id, layer, rank) of ones."""
    weights = torch.zeros(len(rows), width)
    for index, (module_id, layer, rank) in enumerate(rows):
        module = SITES.module_at.get((layer, module_id))
        weights[index, : num_values(module, rank) if module else 1] = 1
    return weights, torch.tensor(rows, dtype=torch.int32)


def dora(weights: torch.Tensor, config: torch.Tensor) -> Wire:
    return weights, torch.nn.functional.pad(config, (0, 1), value=1)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (wire((MOE_GATE, 0, 2)), r"row 0: lora module 15 \(moe_gate\) not enabled for layer 0"),
        (wire((MOE_ROUTER, 0, 2)), r"row 0: lora module 16 \(moe_router\) not enabled for layer 0"),
        (wire((SHARED_UP, 0, 2)), r"row 0: lora module 21 \(shared_expert_gate\) not enabled for layer 0"),
        (wire((MLP_H_TO_4H, 1, 2)), r"row 0: lora module 5 \(mlp_h_to_4h\) not enabled for layer 1"),
        (wire((MOE_GATE, 1, 2), (MLP_GATE_UP, 1, 2)), r"row 1: lora module 18 \(mlp_gate_up\) not enabled for layer 1"),
        (
            wire((ATTN_Q, 1, 2), (22, 1, 2)),
            r"row 1: lora module 22 not enabled for this model; it has .*13 moe.* layer 1 was meant",
        ),
        (
            wire((MOE_GATE, 1, 2), (MOE_GATE, 1, 2)),
            r"row 1 \(.* and .*row 0 \(.* both adapt layers.1.mlp.experts.up_proj of expert 0; send each once",
        ),
        (wire((MOE_GATE, 1, 17), width=9000), r"Invalid low_rank \(17\). low_rank must be <= max_lora_rank \(16\)"),
        (
            wire((MOE_GATE, 1, 2), width=439),
            r"to few values for moe_gate: its A is \[2, 24\] and its B \[20, 2\] here for each of 5 experts, 440 "
            "values needed, the rows hold 439",
        ),
        (dora(*wire((MOE_4H_TO_H, 2, 2))), r"layer 2, rank 2\): DoRA on experts \(moe_4h_to_h\) is not supported"),
    ],
)
def test_wrong_rows_are_refused_with_their_numbers(tensors: Wire, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        pack_adapter(*tensors, LAYOUT)


def test_values_beyond_the_last_expert_are_refused() -> None:
    weights, config = wire((MOE_GATE, 1, 2))
    weights[0, 440] = 1
    with pytest.raises(InvalidRequest, match="values other than zero beyond the 440 that its module and rank account"):
        pack_adapter(weights, config, LAYOUT)


@pytest.mark.parametrize("layout", [LAYOUT, CODES[0]], ids=["floats", "codes"])
@pytest.mark.parametrize("place", [3, 48 * 4 + 1, 439])
def test_a_value_of_any_expert_that_is_not_finite_is_refused(place: int, layout: AdapterLayout) -> None:
    weights, config = wire((MOE_GATE, 1, 2))
    weights[0, 240:] = 0  # Even where no B changes anything.
    weights[0, place] = torch.nan
    with pytest.raises(InvalidRequest, match=f"moe_gate, layer 1, rank 2.* at position {place}"):
        pack_adapter(weights, config, layout)


def linear(file: _File, expert: int, module_id: int = MOE_GATE, layer: int = 1, rank: int = 2) -> PeftLinear:
    module = SITES.module_at[layer, module_id]
    a, b = file.add(torch.ones(rank, module.in_size)), file.add(torch.ones(module.out_size, rank))
    return PeftLinear(f"layers.{layer}.experts.{expert}", module_id, layer, a, b, 1.0, expert=expert)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda file: [linear(file, 5)], r"layers.1.experts.5: expert 5, and the model has 5 in this layer"),
        (lambda file: [linear(file, -1)], r"layers.1.experts.-1: expert -1, and the model has 5"),
        (lambda file: [linear(file, 1, ATTN_Q)], r"layers.1.experts.1: expert 1, and the model has 1"),
        (lambda file: [linear(file, 3), linear(file, 3)], r"both adapt layers.1.mlp.experts.up_proj of expert 3"),
        (lambda file: [replace(linear(file, 0), magnitude=file.add(torch.ones(20, 1)).place)], r"\.0: DoRA on experts"),
        (lambda file: [linear(file, 0, rank=17)], r"Invalid low_rank \(17\)"),
    ],
)
def test_wrong_linears_of_files_are_refused(make: Callable[[_File], list[PeftLinear]], message: str) -> None:
    file = _File()
    linears = tuple(make(file))
    adapter = PeftAdapter(PeftConfig({}, (), ()), MemoryBytes(bytes(file.data)), linears, "FP32")
    with pytest.raises(InvalidRequest, match=message):
        pack_peft(adapter, LAYOUT, NO_BASE)


def test_stored_rows_that_lie_elsewhere_or_are_of_no_expert_are_refused() -> None:
    weights, config = wire((MOE_GATE, 1, 2), (MOE_H_TO_4H, 1, 2), (SHARED_EXPERT_GATE, 2, 1))
    packed = pack_adapter(weights, config, LAYOUT)
    rows, num_pages = packed.rows, len(packed.pages)
    check_rows(rows, num_pages, LAYOUT)
    for index, wrong in (
        (0, {"expert": 5}),
        (0, {"expert": -1}),
        (10, {"expert": 1}),
        (0, {"a_offset": rows[1].b_offset}),
        (1, {"a_offset": rows[0].a_offset + 64}),
        (1, {"rank": 3}),
        (1, {"magnitude_offset": 64}),
        (3, {"b_offset": rows[4].b_offset}),
    ):
        changed = [*rows]
        fields = {name: getattr(rows[index], name) for name in type(rows[index]).__struct_fields__}
        changed[index] = type(rows[index])(**fields | wrong)
        with pytest.raises(ValueError, match=r"does not (fit the model|lie where packing puts it)"):
            check_rows(changed, num_pages, LAYOUT)


@pytest.mark.parametrize("layout", [LAYOUT, CODES[0]], ids=["floats", "codes"])
def test_modules_that_the_server_leaves_out_are_refused_by_upstreams_text(layout: AdapterLayout) -> None:
    sites = SITES.restricted_to(["attn_q", "attn_v", "moe_gate"])
    restricted = adapter_layout(sites, 16, layout.lora_dtype)
    packed = pack_adapter(*wire((ATTN_Q, 0, 2), (MOE_GATE, 2, 2)), restricted)
    check_rows(packed.rows, len(packed.pages), restricted)
    for row in ((MOE_ROUTER, 1, 2), (MOE_4H_TO_H, 1, 2), (MLP_H_TO_4H, 0, 2), (0, 1, 2)):
        name = SITES.module_at[row[1], row[0]].name
        expected = f"lora module {name} not enabled for this model .*layer {row[1]}.*: lora_target_modules "
        with pytest.raises(InvalidRequest, match=expected + "of the server has attn_q, attn_v, moe_gate$"):
            pack_adapter(*wire((ATTN_Q, 0, 2), row), restricted)
        stored = pack_adapter(*wire(row), layout)
        with pytest.raises(ValueError, match="does not fit the model"):
            check_rows(stored.rows, len(stored.pages), restricted)
    linears = (linear(file := _File(), 1, MOE_4H_TO_H),)
    adapter = PeftAdapter(PeftConfig({}, (), ()), MemoryBytes(bytes(file.data)), linears, "FP32")
    with pytest.raises(InvalidRequest, match="lora module moe_4h_to_h not enabled for this model"):
        pack_peft(adapter, restricted, NO_BASE)
    with pytest.raises(
        InvalidRequest, match="lora module 22 not enabled for this model; it has 1 attn_q, 3 attn_v, 15 moe"
    ):
        pack_adapter(*wire((22, 1, 2)), restricted)


def test_an_adapter_larger_than_the_servers_tiers_is_refused_with_both_numbers() -> None:
    packed = pack_adapter(*all_experts(LAYOUT, 3), LAYOUT)
    enough, too_few = (replace(LAYOUT, max_pages=len(packed.pages) - lacking) for lacking in (0, 1))
    assert pack_adapter(*all_experts(LAYOUT, 3), enough).num_pages == len(packed.pages)
    numbers = (
        f"takes {len(packed.pages) << 14} bytes, and this server has room for adapters of {len(packed.pages) - 1 << 14}"
    )
    with pytest.raises(InvalidRequest, match=numbers):
        pack_adapter(*all_experts(LAYOUT, 3), too_few)


def test_the_fleet_checks_the_experts_of_an_adapter_that_it_passes_on() -> None:
    packed = pack_adapter(*all_experts(LAYOUT, 3), LAYOUT)
    pages = bytearray(adapter_payload(packed))
    upload = Upload(adapter_header(7, packed), "", digest_of(packed, LAYOUT), len(pages), 1)
    check_pages(upload, pages, LAYOUT)
    other = [*packed.rows]
    place = next(index for index, row in enumerate(other) if row.expert == 1)
    other[place] = msgspec.structs.replace(other[place], expert=0)
    wrong = msgspec.structs.replace(upload, header=msgspec.structs.replace(upload.header, rows=other))
    with pytest.raises(InvalidRequest, match="the adapter has the digest"):
        check_pages(wrong, pages, LAYOUT)


def test_writing_the_tables_takes_no_python_for_each_row() -> None:
    """An adapter on all experts of a model of 30B has 18,672 rows, and the engine's thread writes the tables."""
    calls = []
    for weights, config in (wire((ATTN_Q, 0, 2)), all_experts(LAYOUT, 3)):
        packed = pack_adapter(weights, config, LAYOUT)
        assert packed.entries is not None
        storage = torch.zeros(8, LAYOUT.page_bytes, dtype=torch.uint8)
        rows, entries = TableRows(LAYOUT, storage, count=1), packed.entries
        pages = list(range(packed.num_pages))
        events: list[str] = []
        sys.setprofile(lambda frame, event, _, events=events: events.append(event))
        try:
            rows.write(0, entries, pages)
        finally:
            sys.setprofile(None)
        calls.append(len(events))
        assert int((rows.tables.rank > 0).sum()) == len(packed.rows)
    assert calls[0] == calls[1]


def test_a_large_file_of_all_experts_takes_little_memory_beside_its_pages(tmp_path: Path) -> None:
    layout = adapter_layout(model_sites([expert_shapes(2048, 768, 64)] * 4, 2048), 64, "bfloat16")
    prefix = "base_model.model.model.layers"
    shapes = {}
    for layer in range(4):
        for level, in_size, out_size in ((".base_layer", 2048, 1536), ("", 768, 2048)):
            name = f"{prefix}.{layer}.mlp.experts{level}"
            shapes |= {f"{name}.lora_A.weight": (16 * 64, in_size), f"{name}.lora_B.weight": (out_size, 16 * 64)}
    tensors = {key: torch.zeros(shape, dtype=torch.bfloat16) for key, shape in shapes.items()}
    for key, tensor in tensors.items():
        tensor.fill_(1) if "lora_B" in key else tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) % 4093)
    save_file(tensors, tmp_path / "adapter_model.safetensors")
    targets = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    config = {"peft_type": "LORA", "r": 16, "lora_alpha": 16, "target_parameters": targets, "peft_version": "0.21.2"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"target_modules": None}))
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    del tensors
    tracemalloc.start()
    try:
        packed = pack_directory(LocalAdapter(tmp_path, tmp_path, revision="1", name="x"), layout, NO_BASE)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(packed.rows) == 4 * 3 * 64
    assert 0.95 * num_bytes < packed.pages.nbytes < 1.05 * num_bytes
    assert peak - packed.pages.nbytes < 64 << 20
