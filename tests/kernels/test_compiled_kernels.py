"""The GPU kernels compile for the GPUs we name, fit their shared memory, and no register spills to memory."""

from __future__ import annotations

import itertools
import json
import re

import pytest
from support import compiled_kernels
from support.compiled_kernels import (
    Resources,
    add_layer_norm_resources,
    add_rms_norm_resources,
    add_up_resources,
    decode_resources,
    dequantize_resources,
    expand_resources,
    expert_codes_resources,
    expert_floats_resources,
    fill_resources,
    forbid_resources,
    gate_activation_resources,
    gelu_resources,
    gelu_tanh_mul_resources,
    multiply_codes_resources,
    order_resources,
    pair_rows_resources,
    penalise_resources,
    prompt_resources,
    rotation_resources,
    route_resources,
    sample_resources,
    segment_resources,
    shrink_resources,
    silu_mul_resources,
)

from benchmarks.lora_workloads import LinearShape
from multilora_kernels import adapter_codes
from multilora_kernels.cuda import block_sizes
from multilora_kernels.cuda.decode_attention import decode_kernel
from multilora_kernels.cuda.expand import expand_constants, expand_kernel, expand_programs
from multilora_kernels.cuda.expand_rows import expand_rows_blocks, expand_rows_constants, expand_rows_kernel
from multilora_kernels.cuda.experts import expert_codes_kernel, expert_floats_kernel, pair_rows_kernel
from multilora_kernels.cuda.penalties import forbid_kernel, penalise_kernel
from multilora_kernels.cuda.prompt_attention import prompt_kernel
from multilora_kernels.cuda.quantized import MAX_ROWS, ROW_BOUNDS, multiply_codes_kernel
from multilora_kernels.cuda.segments import segment_kernel
from multilora_kernels.cuda.shrink import shrink_kernel
from multilora_kernels.cuda.shrink_rows import shrink_rows_kernel
from multilora_kernels.parts import PART_SIZE, num_parts
from multilora_kernels.segments import PREFILL_CHUNK_SIZE, ROWS, capacity_of
from multilora_wire.pieces import CODE_BITS

_QKV = LinearShape(4096, (4096, 1024, 1024))
_O = LinearShape(4096, (4096,))
_GATE_UP = LinearShape(4096, (14336, 14336))
_DOWN = LinearShape(14336, (4096,))

_SHARED_KIB = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
"""What one program may have at most, by compute capability (CUDA C++ Programming Guide, table of technical data)."""

_IS_LONG = pytest.mark.long(reason="compiling a kernel takes seconds; 90 has every case, the others some")
_EVERY_GENERATION = [90, *(pytest.param(other, marks=_IS_LONG) for other in (80, 86, 89, 100, 120))]


@pytest.mark.parametrize("capability", _EVERY_GENERATION)
@pytest.mark.parametrize("resources", [shrink_resources, expand_resources])
@pytest.mark.parametrize("chunk_size", [ROWS, 16, 64])
@pytest.mark.parametrize(
    ("shape", "max_rank", "dtype"), [(_O, 16, "bf16"), (_DOWN, 64, "bf16"), (_QKV, 64, "fp16"), (_QKV, 256, "fp32")]
)
def test_it_compiles_without_spills(capability, resources, chunk_size, shape, max_rank, dtype):
    _check(resources(shape, chunk_size, max_rank, dtype, capability), capability)


@pytest.mark.parametrize("resources", [shrink_resources, expand_resources])
@pytest.mark.parametrize("codes", CODE_BITS)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("chunk_size", [ROWS, 16])
def test_codes_compile_without_spills(resources, codes, dtype, chunk_size):
    _check(resources(_QKV, chunk_size, 64, dtype, 90, codes), 90)


def test_codes_of_fp8_compile_for_a_chip_that_has_no_such_type():
    for used in (
        shrink_resources(_QKV, 16, 64, "fp16", 80, "fp8"),
        expand_resources(_QKV, 16, 64, "fp16", 80, "fp8"),
        shrink_resources(_QKV, ROWS, 64, "fp16", 80, "fp8"),
        expand_resources(_QKV, ROWS, 64, "fp16", 80, "fp8"),
    ):
        _check(used, 80)


@pytest.mark.parametrize("capability", _EVERY_GENERATION)
@pytest.mark.parametrize(
    ("max_rank", "dtype", "codes"),
    [
        *((16, "bf16", ""), (64, "fp16", "int8"), (64, "bf16", "int4")),
        *(pytest.param(*other, marks=_IS_LONG) for other in ((256, "fp32", ""), (16, "fp16", "fp8"))),
    ],
)
def test_updates_with_their_activation_compile_without_spills(capability, max_rank, dtype, codes):
    for activation in ("silu", "gelu_tanh"):
        # There the assembler stops at 64 registers, and keeps two addresses elsewhere.
        most_spilled = 8 if (capability, codes) == (90, "int8") else 0
        used = expand_resources(_GATE_UP, ROWS, max_rank, dtype, capability, codes, activation)
        _check(used, capability, most_spilled)
        assert used.registers <= (168 if codes == "int4" else 128)


@pytest.mark.parametrize("capability", _EVERY_GENERATION)
@pytest.mark.parametrize(
    ("chunk_size", "max_rank", "dtype", "codes"),
    [
        *((64, 16, "bf16", ""), (64, 16, "fp16", "int8"), (16, 64, "bf16", "")),
        *(
            pytest.param(*other, marks=_IS_LONG)
            for other in (
                *((64, 16, "fp16", ""), (64, 16, "bf16", "int4"), (64, 16, "fp16", "fp8"), (64, 32, "fp32", "")),
                *((16, 64, "fp16", "int8"), (16, 64, "bf16", "int4"), (16, 256, "fp32", "")),
            )
        ),
    ],
)
def test_updates_of_prompts_with_their_activation_compile_without_spills(
    capability, chunk_size, max_rank, dtype, codes
):
    _check(expand_resources(_GATE_UP, chunk_size, max_rank, dtype, capability, codes, "silu"), capability)


def _launches(rows: int, shape: LinearShape, codes: str = "") -> dict[str, tuple[int, int, Resources]]:
    """Programs, bytes of the adapters that all read, and resources of the launches of a step of adapters of rank 16.

    The update of gate and up activates them.
    """
    activation = "silu" if shape == _GATE_UP else None
    shrink = shrink_resources(shape, ROWS, 16, "bf16", 90, codes)
    expand = expand_resources(shape, ROWS, 16, "bf16", 90, codes, activation)
    splits = block_sizes.block_sizes("shrink", ROWS, 16, 90, shape.in_features, rows)["RANK_SPLITS"]
    sizes = block_sizes.block_sizes("expand", ROWS, 16, 90, shape.out_features, rows)
    bits = CODE_BITS.get(codes, 0)
    blocks = expand_rows_blocks(expand_rows_constants(1, shape.slice_sizes, False, sizes, bits, activation))
    a_bytes, b_bytes = 2 * 16 * shape.in_features, 2 * 16 * shape.out_features
    if bits:
        a_bytes = adapter_codes.a_bytes(16, shape.in_features, bits)
        b_bytes = sum(adapter_codes.b_bytes(size, 16, bits) for size in shape.slice_sizes)
    parts = -(-shape.in_features // PART_SIZE)
    return {
        "shrink": (rows * parts * splits * shape.num_slices, rows * shape.num_slices * a_bytes, shrink),
        "expand": (rows * blocks, rows * b_bytes, expand),
    }


def _times(name: str, shape: LinearShape) -> int:
    """How often a program of `_launches` reads of an adapter, one time after another: of gate, and then of up."""
    return 2 if (name, shape) == ("expand", _GATE_UP) else 1


@pytest.mark.parametrize("codes", ["", "int8"])
@pytest.mark.parametrize("rows", [1, 64, 128])
def test_steps_of_decodes_read_adapters_in_few_waves_of_many_bytes(rows, codes):
    """By H200s a wave of programs takes 1.9 us, however little they read, and a second brings 4.35 TB.

    Where programs read twice, one after the other, their wave should take 0.8 us more.
    """
    bytes_of_a_us, processors = 4.35e6, 132
    for shape in (_QKV, _O, _GATE_UP, _DOWN):
        for name, (programs, num_bytes, used) in _launches(rows, shape, codes).items():
            times = _times(name, shape)
            us_of_a_wave = 1.9 + 0.8 * (times - 1)
            at_once = processors * used.programs_at_once
            waves, least_us = -(-programs // at_once), num_bytes / bytes_of_a_us
            assert waves * us_of_a_wave <= 1.2 * least_us + us_of_a_wave, (name, shape, programs, at_once)
            # What a processor asks for at a time, where there is enough for all of them.
            share = min(num_bytes / processors, used.programs_at_once * num_bytes / programs / times)
            assert share >= min(num_bytes / processors, 32 << 10), (name, shape)


def test_expanding_prompts_reads_little_beside_its_outputs_and_ends_soon_where_chunks_are_missing():
    """A step of 2,048 tokens of one adapter, in tables of 64. Bytes that programs share come from the cache.

    The update of gate and up activates them.
    """
    num_tokens, max_loras, processors = 2048, 64, 132
    v_bytes = y_bytes = 0
    for shape in (_QKV, _O, _GATE_UP, _DOWN):
        activation = "silu" if shape == _GATE_UP else None
        used = expand_resources(shape, PREFILL_CHUNK_SIZE, 16, "bf16", 90, activation=activation)
        sizes = block_sizes.block_sizes("expand", PREFILL_CHUNK_SIZE, 16, 90, shape.out_features, num_tokens)
        parts = num_parts(shape.in_features, num_tokens)
        constants = expand_constants(parts, shape.slice_sizes, PREFILL_CHUNK_SIZE, 16, False, sizes, 0, activation)
        _, programs = expand_programs(constants, num_tokens)
        num_chunks = num_tokens // PREFILL_CHUNK_SIZE
        # Of gate and of up.
        v_bytes += num_chunks * programs * parts * PREFILL_CHUNK_SIZE * 16 * 4 * (2 if activation else 1)
        y_bytes += (1.5 if activation else 2) * num_tokens * shape.out_features * 2
        missing = capacity_of(num_tokens, max_loras, PREFILL_CHUNK_SIZE) - num_chunks
        assert missing * programs <= 8 * used.programs_at_once * processors, shape
        # What a processor has asked for of the next blocks.
        asked_for = used.programs_at_once * PREFILL_CHUNK_SIZE * constants["BLOCK_N"] * 2
        assert asked_for >= 24 << 10, shape
    assert v_bytes <= y_bytes / 3


@pytest.mark.parametrize("codes", ["", *CODE_BITS])
def test_rows_load_a_and_b_sixteen_bytes_at_a_time(codes):
    """Of a program, which has some thousand bytes of an adapter, most."""
    for shape in (_O, _GATE_UP):
        for name, (programs, num_bytes, used) in _launches(64, shape, codes).items():
            loads_of_a_thread = num_bytes / programs / (used.num_warps * 32) / 16
            assert used.wide_loads >= 0.75 * loads_of_a_thread / _times(name, shape), (name, used)


@pytest.mark.parametrize("codes", CODE_BITS)
def test_the_order_of_codes_compiles_without_spills(codes):
    for max_rank, capability in ((16, 80), (256, 90)):
        _check(order_resources(codes, max_rank, capability), capability)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("chunk_size", [ROWS, 16])
@pytest.mark.parametrize("resources", [shrink_resources, expand_resources])
def test_weights_that_may_lie_at_any_place_are_loaded_one_by_one(resources, chunk_size, dtype):
    # Else loads of 16 bytes would begin where none may: in expand for ranks that are no multiples of eight.
    elements_of_a_thread = 16
    used = resources(_QKV, chunk_size, 16, dtype, 90)
    assert used.single_loads >= elements_of_a_thread


_BLOCK = 64
"""Tokens of a block of a GPU's cache."""

_DECODE_REGISTERS = 128
"""Of a thread, at most: four programs of four warps run on a processor, and one loads while another ends."""


def _check_decode(used: Resources, capability: int, narrow: tuple[int, ...] = ()) -> None:
    """Keys and values come in pieces of 16 bytes a thread. narrow: bytes of pieces of what else is loaded ahead."""
    _check(used, capability)
    assert set(used.async_loads) == {16, *narrow}


@pytest.mark.parametrize("capability", _EVERY_GENERATION)
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=_IS_LONG), "fp32"])
@pytest.mark.parametrize(("group", "head_dim"), [(4, 128), pytest.param(3, 64, marks=_IS_LONG)])
def test_attention_compiles_without_spills(capability, dtype, group, head_dim):
    for has_options in (False, True):
        used = decode_resources(group, head_dim, _BLOCK, dtype, capability, has_options)
        _check_decode(used, capability)
        assert used.registers <= (255 if dtype == "fp32" else _DECODE_REGISTERS)
        _check(prompt_resources(group, head_dim, _BLOCK, dtype, capability, has_options), capability)


@pytest.mark.parametrize("capability", _EVERY_GENERATION)
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp16", marks=_IS_LONG), "fp32"])
@pytest.mark.parametrize(("group", "head_dim"), [(1, 64), pytest.param(4, 128, marks=_IS_LONG)])
def test_attention_with_a_bias_by_distance_compiles_without_spills(capability, dtype, group, head_dim):
    _check_decode(decode_resources(group, head_dim, _BLOCK, dtype, capability, has_bias=True), capability, (4,))
    _check(prompt_resources(group, head_dim, _BLOCK, dtype, capability, has_bias=True), capability)


@pytest.mark.parametrize("capability", _EVERY_GENERATION)
@pytest.mark.parametrize(("group", "head_dim"), [(1, 256), pytest.param(2, 80, marks=_IS_LONG)])
def test_attention_of_other_heads_compiles_without_spills(capability, group, head_dim):
    _check_decode(decode_resources(group, head_dim, _BLOCK, "bf16", capability), capability)
    _check(prompt_resources(group, head_dim, _BLOCK, "bf16", capability, has_window=True), capability)
    _check(rotation_resources(head_dim, "bf16", capability), capability)


def test_attention_over_small_blocks_and_with_a_window_compiles_without_spills():
    _check(decode_resources(4, 128, 16, "bf16", 90), 90)
    _check(prompt_resources(4, 128, 16, "bf16", 90, has_window=True), 90)


@pytest.mark.parametrize(
    ("capability", "dtype", "codes"),
    [
        (80, "bf16", "fp8"),
        (90, "bf16", "int8"),
        (90, "fp32", "int8"),
        (100, "fp16", "fp8"),
        *(pytest.param(other, "bf16", "int8", marks=_IS_LONG) for other in (80, 86, 89, 100, 120)),
        *(pytest.param(other, "bf16", "fp8", marks=_IS_LONG) for other in (86, 89, 90, 100, 120)),
    ],
)
def test_a_cache_in_codes_compiles_without_spills(capability, dtype, codes):
    for has_softcap in (False, True):
        used = decode_resources(4, 128, _BLOCK, dtype, capability, has_softcap, codes)
        # A scale a thread has 4 bytes.
        _check_decode(used, capability, (4,))
        assert used.registers <= (168 if capability == 120 else _DECODE_REGISTERS)
        used = prompt_resources(4, 128, _BLOCK, dtype, capability, has_softcap, codes, has_window=has_softcap)
        _check(used, capability)
    _check(rotation_resources(128, dtype, capability, codes), capability)


@pytest.mark.parametrize("capability", [pytest.param(each, marks=_IS_LONG) for each in (80, 86, 89, 90, 100, 120)])
@pytest.mark.parametrize("codes", ["int8", "fp8"])
def test_large_heads_in_codes_compile_without_spills(capability, codes):
    for has_options in (False, True):
        _check_decode(decode_resources(2, 256, _BLOCK, "fp16", capability, has_options, codes), capability, (4,))
        used = prompt_resources(2, 256, _BLOCK, "fp16", capability, has_options, codes, has_window=has_options)
        _check(used, capability)


@pytest.mark.parametrize("codes", ["", "int8"])
def test_rotation_loads_and_stores_16_bytes_a_thread(codes):
    used = rotation_resources(128, "bf16", 90, codes)
    assert used.wide_loads >= 3
    # A cosine and a sine.
    assert used.single_loads == 2


@pytest.mark.parametrize("num_tokens", [64, 8192])
@pytest.mark.parametrize("capability", _EVERY_GENERATION)
def test_segments_compile_without_spills(capability, num_tokens):
    _check(segment_resources(num_tokens, capability), capability)


@pytest.mark.parametrize("capability", _EVERY_GENERATION)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("size", [576, 4096, 16384])
def test_what_lies_between_matrix_products_compiles_without_spills(capability, dtype, size):
    _check(add_rms_norm_resources(size, dtype, capability), capability)
    _check(add_layer_norm_resources(size, dtype, capability), capability)
    _check(silu_mul_resources(dtype, capability), capability)
    _check(gelu_tanh_mul_resources(dtype, capability), capability)
    _check(gelu_resources(dtype, capability), capability)


@pytest.mark.parametrize("capability", [80, 86, 90, 100, 120])
def test_sampling_compiles_without_spills(capability):
    _check(sample_resources(128256, capability), capability)
    _check(penalise_resources(capability), capability)
    _check(forbid_resources(capability), capability)


@pytest.mark.parametrize("capability", _EVERY_GENERATION)
def test_dependent_kernels_wait_before_they_touch_memory_and_others_let_them_begin_first_of_all(capability):
    dependent = [
        decode_resources(4, 128, _BLOCK, "bf16", capability),
        add_rms_norm_resources(4096, "bf16", capability),
        add_layer_norm_resources(4096, "bf16", capability),
        silu_mul_resources("bf16", capability),
    ]
    before_them = [
        expand_resources(_O, ROWS, 16, "bf16", capability),
        multiply_codes_resources("int4", 16, True, "bf16", capability),
    ]
    for used, word in [*((each, "wait") for each in dependent), *((each, "launch_dependents") for each in before_them)]:
        body = used.ptx.partition(".entry")[2].partition("\n{")[2]
        before, *after = body.split(f"griddepcontrol.{word};")
        assert len(after) == (capability >= 90)
        # No branch leads around it.
        assert not after or not re.search(r"\.global|cp\.async|\bbra\b", before)
        assert ".global" in body


@pytest.mark.parametrize("capability", _EVERY_GENERATION)
@pytest.mark.parametrize("kind", ["int4", "int8", "fp8"])
@pytest.mark.parametrize("dtype", ["bf16", pytest.param("fp32", marks=_IS_LONG)])
def test_products_with_codes_compile_without_spills_and_load_many_at_once(capability, kind, dtype):
    # The assembler stops at 168 registers there. With a higher limit it takes 237 on other chips, too, instead of 137.
    most_spilled = 16 if (capability, kind, dtype) == (80, "int4", "fp32") else 0
    for num_rows in (*ROW_BOUNDS, MAX_ROWS):
        used = multiply_codes_resources(kind, num_rows, kind != "fp8", dtype, capability)
        _check(used, capability, most_spilled)
        assert used.widest_load == 16
    _check(dequantize_resources(kind, kind != "fp8", dtype, capability), capability)


@pytest.mark.parametrize("capability", _EVERY_GENERATION)
@pytest.mark.parametrize(
    ("dtype", "chunk_size"),
    [("bf16", 64), ("fp32", 16), *(pytest.param(*other, marks=_IS_LONG) for other in (("bf16", 16), ("fp16", 64)))],
)
def test_products_of_experts_compile_without_spills(capability, dtype, chunk_size):
    _check(expert_floats_resources(chunk_size, dtype, capability), capability)
    for kind in ("int4", "int8", "fp8"):
        _check(expert_codes_resources(kind, chunk_size, kind != "fp8", dtype, capability), capability)


@pytest.mark.parametrize("capability", _EVERY_GENERATION)
def test_what_lies_between_products_of_experts_compiles_without_spills(capability):
    for num_experts, top_k in ((8, 2), (128, 8), (512, 10)):
        _check(route_resources(num_experts, top_k, capability), capability)
    _check(pair_rows_resources(capability), capability)
    for dtype in ("bf16", "fp32"):
        _check(gate_activation_resources(dtype, capability), capability)
        _check(add_up_resources(dtype, capability), capability)


def test_penalties_are_rounded_as_a_cpu_rounds_them():
    ptx = penalise_resources(90).ptx
    assert "div.rn.f32" in ptx
    assert not re.search(r"div\.(full|approx)|\bfma\b", ptx)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_the_codes_of_a_cache_are_rounded_as_a_cpu_rounds_them(dtype):
    """The product with the scale's inverse, and its sum with 1.5 * 2^23: two instructions, and no fused one."""
    for used in (
        rotation_resources(128, dtype, 90, "int8"),
        decode_resources(4, 128, _BLOCK, dtype, 90, False, "int8"),
    ):
        assert re.search(r"add\S* .*0f4B400000", used.ptx)
        assert not re.search(r"fma\S* .*0f4B400000", used.ptx)
        # What the assembler takes for the two may be fused by it, where nothing lies between them.
        assert len(re.findall(r"min\.f32 .*0f42FE0000", used.ptx)) == len(re.findall(r"add\S* .*0f4B400000", used.ptx))
    assert not re.search(r"div\.(full|approx)", rotation_resources(128, dtype, 90, "int8").ptx)


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_the_filling_of_inputs_compiles_without_spills(capability):
    _check(fill_resources(capability), capability)


@pytest.mark.parametrize(
    ("kernel", "argument"),
    [
        (shrink_kernel, "first_slice"),
        (expand_kernel, "num_chunks num_tokens first_slice blocks"),
        (shrink_rows_kernel, "first_slice"),
        (expand_rows_kernel, "first_slice"),
        (decode_kernel, "num_distances num_splits split_tiles stride_bm"),
        (prompt_kernel, "num_distances num_sequences first_sequence num_blocks stride_bm"),
        (segment_kernel, "num_tokens max_loras capacity"),
        (penalise_kernel, "num_rows"),
        (forbid_kernel, "num_bans"),
        (multiply_codes_kernel, "num_rows tiles_per_split"),
        (expert_floats_kernel, "top_k"),
        (expert_codes_kernel, "top_k"),
        (pair_rows_kernel, "num_pairs first_column"),
    ],
)
def test_no_kernel_is_compiled_anew_for_a_number_that_changes_between_steps(kernel, argument):
    assert [param.name for param in kernel.params if param.do_not_specialize] == argument.split()


@pytest.mark.parametrize(
    "resources",
    [
        lambda: shrink_resources(_O, 16, 16, "bf16", 90),
        lambda: expand_resources(_O, 16, 16, "bf16", 90, "int4"),
        lambda: shrink_resources(_O, ROWS, 16, "bf16", 90),
        lambda: expand_resources(_O, ROWS, 16, "bf16", 90, "int4"),
        lambda: expand_resources(_GATE_UP, ROWS, 16, "bf16", 90, activation="silu"),
        lambda: decode_resources(4, 128, _BLOCK, "bf16", 90),
        lambda: prompt_resources(4, 128, _BLOCK, "bf16", 90),
        lambda: rotation_resources(128, "bf16", 90, "int8"),
        lambda: silu_mul_resources("bf16", 90),
        lambda: sample_resources(1, 90),
        lambda: penalise_resources(90),
        lambda: forbid_resources(90),
        lambda: multiply_codes_resources("int4", 16, True, "bf16", 90),
        lambda: dequantize_resources("int4", True, "bf16", 90),
        lambda: route_resources(64, 8, 90),
        lambda: expert_floats_resources(16, "bf16", 90),
        lambda: expert_codes_resources("int4", 16, True, "bf16", 90),
        lambda: gate_activation_resources("bf16", 90),
        lambda: add_up_resources("bf16", 90),
    ],
    ids=[
        "shrink",
        "expand",
        "shrink rows",
        "expand rows",
        "expand rows and activation",
        "decode",
        "prompt",
        "rotation",
        "silu_mul",
        "sample",
        "penalise",
        "forbid",
        "multiply",
        "dequantize",
        "route",
        "expert floats",
        "expert codes",
        "gate activation",
        "add up",
    ],
)
def test_a_kernel_compiles_where_every_number_is_one(monkeypatch, resources):
    # Triton takes a number that is 1 for a constant, unless it is told not to; the interpreter does not.
    source, seen = compiled_kernels._source, []

    def source_of_ones(kernel, constants, *others):
        is_number = {name: compiled_kernels._type(name, "fp32") == "i32" for name in kernel.arg_names}
        ones = [param.name for param in kernel.params if is_number[param.name] and not param.do_not_specialize]
        seen.extend(set(ones) - set(constants))
        return source(kernel, dict.fromkeys(ones, 1) | constants, *others)

    monkeypatch.setattr(compiled_kernels, "_source", source_of_ones)
    resources()
    assert seen


def test_tiles_are_of_the_architecture_where_the_table_has_some(tmp_path, monkeypatch):
    regimes = {regime: {"BLOCK_N": n, "BLOCK_R": 64} for n, regime in enumerate(("decode", "prefill"))}
    table = {"default": {"expand": regimes}, "sm_90": {"expand": {"prefill": {"BLOCK_N": 7, "BLOCK_R": 64}}}}
    monkeypatch.setattr(block_sizes, "TABLE_PATH", tmp_path / "table.json")
    block_sizes.TABLE_PATH.write_text(json.dumps(table))
    monkeypatch.setattr(block_sizes, "_table", block_sizes._table.__wrapped__)
    found = {
        (chunk_size, capability): block_sizes.block_sizes("expand", chunk_size, 20, capability, 4096, 64)
        for chunk_size, capability in itertools.product((16, 64), (80, 90))
    }
    assert {key: sizes["BLOCK_N"] for key, sizes in found.items()} == {
        (16, 80): 0,
        (16, 90): 0,
        (64, 80): 1,
        (64, 90): 7,
    }
    assert {sizes["BLOCK_R"] for sizes in found.values()} == {32}


def _table_of(tmp_path, monkeypatch, plans):
    table = {
        "default": {
            "update": {
                "rows": {"max_rows": 128, "plans": [{"max_rank": 16, "max_width": 0, "sizes": {"max_rows": 64}}]}
            },
            "shrink": {"decode": {"BLOCK_K": 256, "num_warps": 4, "BLOCK_R": 64, "plans": plans}},
        }
    }
    monkeypatch.setattr(block_sizes, "TABLE_PATH", tmp_path / "table.json")
    block_sizes.TABLE_PATH.write_text(json.dumps(table))
    monkeypatch.setattr(block_sizes, "_table", block_sizes._table.__wrapped__)


def test_a_plan_is_of_ranks_widths_and_rows_and_what_none_serves_has_the_default(tmp_path, monkeypatch):
    few_rows = [{"max_rows": 8, "sizes": {"num_warps": 1}}, {"max_rows": 64, "sizes": {"num_warps": 2}}]
    narrow = {"max_rank": 16, "max_width": 4096, "sizes": {"BLOCK_K": 512}, "by_rows": few_rows}
    wide = {"max_rank": 16, "max_width": 14336, "sizes": {"BLOCK_K": 128}}
    _table_of(tmp_path, monkeypatch, [narrow, wide])
    shapes = {
        (16, 4096, 8): (512, 1),
        (8, 2048, 9): (512, 2),
        (16, 4096, 65): (512, 4),
        (16, 4097, 8): (128, 4),
        (16, 14337, 8): (256, 4),
        (17, 4096, 8): (256, 4),
    }
    for (rank, width, num_rows), expected in shapes.items():
        sizes = block_sizes.block_sizes("shrink", 16, rank, 90, width, num_rows)
        assert (sizes["BLOCK_K"], sizes["num_warps"]) == expected, (rank, width, num_rows)
    assert block_sizes.row_bounds(90) == [8, 64]


def test_the_table_says_how_many_rows_without_a_prompt_are_taken_by_themselves(tmp_path, monkeypatch):
    _table_of(tmp_path, monkeypatch, [])
    steps = itertools.product((16, 17), (64, 65, 128, 129))
    taken = {(rank, num_rows) for rank, num_rows in steps if block_sizes.takes_rows(num_rows, rank, 90)}
    assert taken == {(16, 64), (17, 64), (17, 65), (17, 128)}


def test_a_plan_whose_sums_depend_on_the_rows_is_none(tmp_path, monkeypatch):
    few_rows = [{"max_rows": 8, "sizes": {"BLOCK_K": 128}}]
    _table_of(tmp_path, monkeypatch, [{"max_rank": 16, "max_width": 1, "sizes": {}, "by_rows": few_rows}])
    with pytest.raises(AssertionError, match="sums depend on the rows"):
        block_sizes.row_bounds(90)


def _check(used: Resources, capability: int, most_spilled: int = 0) -> None:
    assert used.spilled_bytes <= most_spilled
    assert used.registers <= 255
    # Code for one generation runs on the others of its major version, so the smallest of them counts.
    least = min(kib for other, kib in _SHARED_KIB.items() if other // 10 == capability // 10)
    assert used.shared_bytes <= least * 1024
