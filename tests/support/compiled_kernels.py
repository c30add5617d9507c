"""Compiles the GPU kernels ahead of time, for GPUs that are not there, and reads registers, spills and shared bytes."""

from __future__ import annotations

import itertools
import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from benchmarks.lora_workloads import LinearShape
from multilora_kernels.cuda.block_sizes import KeyKind, attention_sizes, block_sizes
from multilora_kernels.cuda.codes import order_codes_kernel, order_constants
from multilora_kernels.cuda.decode_attention import decode_constants, decode_kernel
from multilora_kernels.cuda.dependent_launch import LEAST_CAPABILITY, dependent_constants
from multilora_kernels.cuda.elementwise import (
    activation_constants,
    activation_kernel,
    add_layer_norm_kernel,
    add_rms_norm_kernel,
    norm_constants,
)
from multilora_kernels.cuda.expand import expand_constants, expand_kernel, is_wide_tile
from multilora_kernels.cuda.expand_rows import expand_rows_constants, expand_rows_kernel
from multilora_kernels.cuda.experts import (
    activation_constants as gate_constants,
)
from multilora_kernels.cuda.experts import (
    add_up_constants,
    add_up_kernel,
    codes_constants,
    expert_codes_kernel,
    expert_floats_kernel,
    floats_constants,
    gate_activation_kernel,
    pair_rows_kernel,
    route_constants,
    route_kernel,
    rows_constants,
)
from multilora_kernels.cuda.penalties import forbid_constants, forbid_kernel, penalise_constants, penalise_kernel
from multilora_kernels.cuda.prompt_attention import prompt_constants, prompt_kernel
from multilora_kernels.cuda.quantized import (
    dequantize_constants,
    dequantize_kernel,
    multiply_codes_kernel,
    multiply_constants,
)
from multilora_kernels.cuda.rotation import rotate_and_store_kernel, rotation_constants
from multilora_kernels.cuda.sampling import sample_constants, sample_kernel
from multilora_kernels.cuda.segments import segment_constants, segment_kernel
from multilora_kernels.cuda.shrink import shrink_constants, shrink_kernel
from multilora_kernels.cuda.shrink_rows import shrink_rows_constants, shrink_rows_kernel
from multilora_kernels.cuda.step_inputs import fill_constants, fill_kernel
from multilora_kernels.parts import num_parts
from multilora_kernels.segments import CHUNK_SIZE, ROWS
from multilora_wire.pieces import CODE_BITS

_POINTERS = {
    "v_ptr": "*fp32",
    "a_offset_ptr": "*i64",
    "b_offset_ptr": "*i64",
    "magnitude_offset_ptr": "*i64",
    "block_table_ptr": "*i64",
    "context_len_ptr": "*i64",
    "query_start_ptr": "*i64",
    "mapping_ptr": "*i64",
    "slot_ptr": "*i64",
    "sums_ptr": "*fp32",
    "stats_ptr": "*fp32",
    "sinks_ptr": "*fp32",
    "distance_bias_ptr": "*fp32",
    "logits_ptr": "*fp32",
    "parameters_ptr": "*fp64",
    "weights_ptr": "*fp32",
    "token_ptr": "*i64",
    "place_ptr": "*i64",
    "ban_ptr": "*i64",
    "last_token_ptr": "*i64",
    "row_ptr": "*i64",
    "ranks_ptr": "*i64",
    "out_features_ptr": "*i64",
    **dict.fromkeys(
        [
            *("rank_ptr", "permutation_ptr", "chunk_start_ptr", "chunk_length_ptr", "chunk_lora_index_ptr"),
            *("work_ptr", "arrival_ptr", "counts_ptr", "expert_ptr"),
        ],
        "*i32",
    ),
}
_SCALARS = dict.fromkeys(["scale", "softcap", "eps", "limit"], "fp32")
_ALIGNED_INTEGERS = {
    *("in_features", "size", "group_size", "stride_cn"),
    *("stride_xm", "stride_vp", "stride_vs", "stride_vm", "stride_ym"),
    *("stride_qm", "stride_qh", "stride_ks", "stride_kh", "stride_sh", "stride_cm"),
}
_NO_POINTERS: Mapping[str, str] = {}
_CODE_ARENA = {"int8": {"arena_ptr": "*i8"}, "fp8": {"arena_ptr": "*u8"}, "int4": {"arena_ptr": "*u8"}}
_TORCH_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "int4": torch.uint8,
}
_SCALES = dict.fromkeys(("key_scales_ptr", "value_scales_ptr"), "*fp32")
_CODE_CACHE = {
    "int8": dict.fromkeys(("keys_ptr", "values_ptr"), "*i8") | _SCALES,
    "fp8": dict.fromkeys(("keys_ptr", "values_ptr"), "*u8") | _SCALES,
}
_NUM_ROWS = 64
"""Of a step: the table may have tiles of their own for fewer."""

_OPTIONS = ("num_warps", "num_stages", "maxnreg", "enable_fp_fusion", "launch_pdl")


_REGISTERS, _SHARED_BYTES, _SHARED_OF_SYSTEM, _WARPS, _PROGRAMS = 65536, 228 << 10, 1 << 10, 64, 32
"""Of a multiprocessor of sm_90, and shared bytes of each program that the system takes (CUDA C++ Programming Guide)."""


@dataclass(frozen=True)
class Resources:
    """The resources of one thread, or for shared memory of one program, as the compiled code of a kernel says.

    single_loads: instructions that load one number of 16 bits from global memory. wide_loads: those that load 16 bytes
    to registers. widest_load: bytes of the widest one, to registers or to shared memory. async_loads: bytes of each
    one to shared memory. ptx: the code that the assembler takes.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int
    num_warps: int
    single_loads: int
    wide_loads: int
    widest_load: int
    async_loads: list[int]
    ptx: str = field(repr=False)

    @property
    def programs_at_once(self) -> int:
        """Programs that run at the same time on a multiprocessor of sm_90."""
        of_a_thread = -(-self.registers // 8) * 8
        return min(
            _REGISTERS // (of_a_thread * 32 * self.num_warps),
            _SHARED_BYTES // (self.shared_bytes + _SHARED_OF_SYSTEM),
            _WARPS // self.num_warps,
            _PROGRAMS,
        )


def shrink_resources(
    shape: LinearShape, chunk_size: int, max_rank: int, dtype: str, capability: int, codes: str = ""
) -> Resources:
    """`lora_shrink` of a linear.

    chunk_size: `ROWS` for rows by themselves. dtype: "bf16", "fp16" or "fp32". capability: 80, 90, 100 for sm_80,
    sm_90, sm_100. codes: of adapters, "int8", "fp8" or "int4"; "" where they have the dtype.
    """
    sizes = block_sizes("shrink", chunk_size, max_rank, capability, shape.in_features, _NUM_ROWS)
    parts = num_parts(shape.in_features, 1)
    if chunk_size == ROWS:
        of_rows = shrink_rows_constants(
            shape.in_features, dtype == "fp32" and not codes, sizes, CODE_BITS.get(codes, 0)
        )
        return _resources(shrink_rows_kernel, of_rows, dtype, capability, _CODE_ARENA.get(codes, _NO_POINTERS))
    constants = shrink_constants(
        shape.in_features, parts, chunk_size, dtype == "fp32", sizes, capability, CODE_BITS.get(codes, 0)
    )
    return _resources(shrink_kernel, constants, dtype, capability, _CODE_ARENA.get(codes, _NO_POINTERS))


def expand_resources(
    shape: LinearShape,
    chunk_size: int,
    max_rank: int,
    dtype: str,
    capability: int,
    codes: str = "",
    activation: str | None = None,
) -> Resources:
    """`lora_expand` of a linear, or with an activation `lora_expand_activated`; the rest as of `shrink_resources`."""
    parts = num_parts(shape.in_features, 1)
    sizes = block_sizes("expand", chunk_size, max_rank, capability, shape.out_features, _NUM_ROWS)
    if chunk_size == ROWS:
        of_rows = expand_rows_constants(
            parts, shape.slice_sizes, dtype == "fp32" and not codes, sizes, CODE_BITS.get(codes, 0), activation
        )
        of_rows |= {} if activation else {"out_ptr": None}
        return _resources(expand_rows_kernel, of_rows, dtype, capability, _CODE_ARENA.get(codes, _NO_POINTERS))
    is_wide = is_wide_tile(_TORCH_DTYPES[dtype], _TORCH_DTYPES[codes or dtype])
    constants = expand_constants(
        parts, shape.slice_sizes, chunk_size, max_rank, is_wide, sizes, CODE_BITS.get(codes, 0), activation
    )
    constants |= {} if activation else {"out_ptr": None}
    return _resources(expand_kernel, constants, dtype, capability, _CODE_ARENA.get(codes, _NO_POINTERS))


def order_resources(codes: str, max_rank: int, capability: int) -> Resources:
    """`order_codes`; arguments as of `shrink_resources`."""
    constants = order_constants(max_rank, CODE_BITS[codes])
    return _resources(order_codes_kernel, constants, "fp32", capability, _CODE_ARENA[codes])


def segment_resources(num_tokens: int, capability: int) -> Resources:
    """`lora_segments` of so many tokens; the rest as of the others."""
    return _resources(segment_kernel, segment_constants(num_tokens, CHUNK_SIZE), "fp32", capability)


def decode_resources(
    group: int,
    head_dim: int,
    block_size: int,
    dtype: str,
    capability: int,
    has_softcap: bool = False,
    codes: str = "",
    has_bias: bool = False,
) -> Resources:
    """`rotary_attention` of a decode step, with sinks where it has a soft cap.

    group: query heads of a key-value head. codes: of the cache, "int8" or "fp8"; "" where it has the dtype. has_bias:
    there is a bias by distance. The rest as of the others.
    """
    sizes = attention_sizes("decode_attention", _key_kind(dtype, codes), group, head_dim, capability)
    constants = decode_constants(sizes, group, head_dim, head_dim, block_size, has_softcap)
    constants |= _without(has_softcap, codes, has_bias)
    return _resources(decode_kernel, constants, dtype, capability, _CODE_CACHE.get(codes, _NO_POINTERS))


def prompt_resources(
    group: int,
    head_dim: int,
    block_size: int,
    dtype: str,
    capability: int,
    has_softcap: bool = False,
    codes: str = "",
    has_bias: bool = False,
    has_window: bool = False,
) -> Resources:
    """`paged_attention`; arguments as of `decode_resources`."""
    sizes = attention_sizes("prompt_attention", _key_kind(dtype, codes), group, head_dim, capability)
    constants = prompt_constants(sizes, group, head_dim, block_size, has_softcap, has_window)
    constants |= _without(has_softcap, codes, has_bias)
    return _resources(prompt_kernel, constants, dtype, capability, _CODE_CACHE.get(codes, _NO_POINTERS))


def _key_kind(dtype: str, codes: str) -> KeyKind:
    if dtype == "fp32":
        return "32 bits"
    return "8 bits" if codes else "16 bits"


def _without(has_sinks: bool, codes: str, has_bias: bool) -> dict[str, None]:
    """Arguments of attention that are not there."""
    missing = [
        () if has_sinks else ("sinks_ptr",),
        () if has_bias else ("distance_bias_ptr",),
        () if codes else _SCALES,
    ]
    return dict.fromkeys(itertools.chain(*missing))


def rotation_resources(head_dim: int, dtype: str, capability: int, codes: str = "") -> Resources:
    """The rotation and the writing of the cache; arguments as of the others."""
    constants = rotation_constants(head_dim, head_dim, is_interleaved=False) | _without(True, codes, True)
    return _resources(rotate_and_store_kernel, constants, dtype, capability, _CODE_CACHE.get(codes, _NO_POINTERS))


def add_rms_norm_resources(size: int, dtype: str, capability: int) -> Resources:
    """`add_rms_norm`; the rest as of the others."""
    return _resources(add_rms_norm_kernel, norm_constants(size), dtype, capability)


def add_layer_norm_resources(size: int, dtype: str, capability: int) -> Resources:
    """`add_layer_norm` with a bias; the rest as of the others."""
    return _resources(add_layer_norm_kernel, norm_constants(size), dtype, capability)


def silu_mul_resources(dtype: str, capability: int) -> Resources:
    """`silu_mul`; arguments as of the others."""
    return _resources(activation_kernel, activation_constants("silu", is_gated=True), dtype, capability)


def gelu_tanh_mul_resources(dtype: str, capability: int) -> Resources:
    """`gelu_tanh_mul`; arguments as of the others."""
    return _resources(activation_kernel, activation_constants("gelu_tanh", is_gated=True), dtype, capability)


def gelu_resources(dtype: str, capability: int) -> Resources:
    """`gelu`; arguments as of the others."""
    return _resources(activation_kernel, activation_constants("gelu", is_gated=False), dtype, capability)


def sample_resources(vocab: int, capability: int) -> Resources:
    """`sample_tokens`; the rest as of the others."""
    return _resources(sample_kernel, sample_constants(vocab), "fp32", capability)


def penalise_resources(capability: int) -> Resources:
    """`penalise_tokens`; the rest as of the others."""
    return _resources(penalise_kernel, penalise_constants(), "fp32", capability)


def forbid_resources(capability: int) -> Resources:
    """`forbid_tokens`; the rest as of the others."""
    return _resources(forbid_kernel, forbid_constants(), "fp32", capability)


def fill_resources(capability: int) -> Resources:
    """`fill_step_inputs`; the rest as of the others."""
    pointers = {name: "*i64" for name in fill_kernel.arg_names if name.endswith("_ptr")}
    return _resources(fill_kernel, fill_constants(), "fp32", capability, pointers)


def multiply_codes_resources(kind: str, num_rows: int, has_zeros: bool, dtype: str, capability: int) -> Resources:
    """`quantized_linear` of few rows. kind: int4, int8 or fp8. The rest as of the others."""
    constants = multiply_constants(kind, 4096, 128, num_rows, dtype == "fp32") | {"bias_ptr": None}
    return _resources(multiply_codes_kernel, *_with_zeros(constants, kind, has_zeros, dtype, capability))


def dequantize_resources(kind: str, has_zeros: bool, dtype: str, capability: int) -> Resources:
    """The weight of `quantized_linear` of many rows as floats; arguments as of `multiply_codes_resources`."""
    return _resources(
        dequantize_kernel, *_with_zeros(dequantize_constants(kind, 128), kind, has_zeros, dtype, capability)
    )


def route_resources(num_experts: int, top_k: int, capability: int) -> Resources:
    """`route`; the rest as of the others."""
    return _resources(route_kernel, route_constants(num_experts, top_k, True), "fp32", capability)


def expert_floats_resources(chunk_size: int, dtype: str, capability: int) -> Resources:
    """The products of `expert_mlp` with floats; arguments as of the others."""
    return _resources(expert_floats_kernel, floats_constants(chunk_size, dtype == "fp32"), dtype, capability)


def expert_codes_resources(kind: str, chunk_size: int, has_zeros: bool, dtype: str, capability: int) -> Resources:
    """The products of `expert_mlp` with codes; arguments as of the others."""
    constants = codes_constants(kind, 2048, 128, 128, chunk_size, dtype == "fp32")
    return _resources(expert_codes_kernel, *_with_zeros(constants, kind, has_zeros, dtype, capability))


def gate_activation_resources(dtype: str, capability: int) -> Resources:
    """The activations of `expert_mlp`, clamped and with biases; arguments as of the others."""
    return _resources(gate_activation_kernel, gate_constants(True), dtype, capability)


def add_up_resources(dtype: str, capability: int) -> Resources:
    """The sums of `expert_mlp`, with biases; arguments as of the others."""
    return _resources(add_up_kernel, add_up_constants(8), dtype, capability)


def pair_rows_resources(capability: int) -> Resources:
    """The rows of the tables of `expert_mlp`; the rest as of the others."""
    return _resources(pair_rows_kernel, rows_constants(8), "fp32", capability)


def _with_zeros(
    constants: dict[str, Any], kind: str, has_zeros: bool, dtype: str, capability: int
) -> tuple[dict[str, Any], str, int, Mapping[str, str]]:
    pointers = {
        "sums_ptr": "*fp32",
        "arrival_ptr": "*i32",
        "codes_ptr": "*i8" if kind == "int8" else "*u8",
        "zeros_ptr": "*i8",
        "weight_ptr": f"*{dtype}",
    }
    return constants | ({} if has_zeros else {"zeros_ptr": None}), dtype, capability, pointers


def _resources(
    kernel: Any, constants: Mapping[str, Any], dtype: str, capability: int, pointers: Mapping[str, str] = _NO_POINTERS
) -> Resources:
    constants = {**constants, **_of_dependent_launches(kernel, capability >= LEAST_CAPABILITY)}
    options = {name: constants[name] for name in _OPTIONS if name in constants}
    arguments = {name: value for name, value in constants.items() if name not in _OPTIONS}
    source = _source(kernel, arguments, dtype, pointers)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    registers, stack, local = _usage(compiled.asm["cubin"])
    ptx = compiled.asm["ptx"]
    single_loads, wide_loads = ptx.count("ld.global.b16"), len(re.findall(r"ld\.global\S*\.v4\.b32", ptx))
    # Loads from global memory.
    to_registers = re.findall(r"ld\.global\S*?(?:\.v(\d))?\.b(\d+)", ptx)
    to_shared = re.findall(r"cp\.async\.c[ag]\.shared\.global .*?\], (0x\w+|\d+)", ptx)
    widths, sizes = [int(count or 1) * int(bits) // 8 for count, bits in to_registers], [int(x, 0) for x in to_shared]
    widest = max([*widths, *sizes], default=0)
    used = (registers, stack + local, compiled.metadata.shared, compiled.metadata.num_warps)
    return Resources(*used, single_loads, wide_loads, widest, sizes, ptx)


def _of_dependent_launches(kernel: Any, is_on: bool) -> dict[str, Any]:
    """What the kernels that have a part in them are launched with."""
    constants = dependent_constants(is_on) if "IS_DEPENDENT" in kernel.arg_names else {}
    return constants | ({"LAUNCHES_DEPENDENTS": is_on} if "LAUNCHES_DEPENDENTS" in kernel.arg_names else {})


def _source(kernel: Any, constants: Mapping[str, Any], dtype: str, pointers: Mapping[str, str]) -> Any:
    """pointers: the types of some arguments that differ from the usual ones."""
    names = kernel.arg_names
    types = {name: pointers.get(name, _type(name, dtype)) for name in names}
    aligned = [name for name in names if name not in constants and (name.endswith("_ptr") or name in _ALIGNED_INTEGERS)]
    return triton.compiler.ASTSource(
        kernel,
        types | dict.fromkeys(constants, "constexpr"),
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )


def _type(argument: str, dtype: str) -> str:
    if argument.endswith("_ptr"):
        return _POINTERS.get(argument, f"*{dtype}")
    return _SCALARS.get(argument, "i32")


def _usage(cubin: bytes) -> tuple[int, int, int]:
    """Registers, stack bytes and local bytes of a thread. The kernels have no arrays, so these are spills."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        report = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", report)
    assert found, report
    return int(found[1]), int(found[2]), int(found[3])
