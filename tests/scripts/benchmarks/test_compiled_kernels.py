"""The GPU kernels compile for the GPUs we name, and no register spills to memory."""

from __future__ import annotations

import pytest

from benchmarks.compiled_kernels import (
    Resources,
    add_layer_norm_resources,
    add_rms_norm_resources,
    combine_resources,
    decode_resources,
    expand_resources,
    gelu_tanh_mul_resources,
    shrink_resources,
    silu_mul_resources,
)
from benchmarks.synthetic_batches import LinearShape

_QKV = LinearShape(4096, (4096, 1024, 1024))
_DOWN = LinearShape(14336, (4096,))


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("resources", [shrink_resources, expand_resources])
@pytest.mark.parametrize("chunk_size", [16, 64])
@pytest.mark.parametrize(
    ("shape", "max_rank", "dtype"), [(_QKV, 16, "bf16"), (_DOWN, 64, "bf16"), (_QKV, 64, "fp16"), (_QKV, 256, "fp32")]
)
def test_it_compiles_without_spills(capability, resources, chunk_size, shape, max_rank, dtype):
    _check(resources(shape, chunk_size, max_rank, dtype, capability))


@pytest.mark.parametrize("resources", [shrink_resources, expand_resources])
@pytest.mark.parametrize("code_bits", [8, 4])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_codes_compile_without_spills(resources, code_bits, dtype):
    _check(resources(_QKV, 16, 64, dtype, 90, code_bits))


@pytest.mark.parametrize("resources", [shrink_resources, expand_resources])
def test_weights_that_may_lie_at_any_place_are_loaded_one_by_one(resources):
    # Else loads of 16 bytes would begin where none may: in expand for ranks that are no multiples of eight.
    elements_of_a_thread = 16
    assert resources(_QKV, 16, 16, "bf16", 90).single_loads >= elements_of_a_thread


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(("group", "head_dim"), [(4, 128), (3, 64), (8, 128)])
def test_decode_attention_compiles_without_spills(capability, dtype, group, head_dim):
    for has_options in (False, True):
        _check(decode_resources(group, head_dim, 16, dtype, capability, has_options))
        _check(combine_resources(head_dim, dtype, capability, has_options))


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("size", [576, 4096, 16384])
def test_what_lies_between_matrix_products_compiles_without_spills(capability, dtype, size):
    _check(add_rms_norm_resources(size, dtype, capability))
    _check(add_layer_norm_resources(size, dtype, capability))
    _check(silu_mul_resources(dtype, capability))
    _check(gelu_tanh_mul_resources(dtype, capability))


def _check(used: Resources) -> None:
    assert used.spilled_bytes == 0
    assert used.registers <= 255
    assert used.shared_bytes <= 163 * 1024, "what an A100 gives one program"
