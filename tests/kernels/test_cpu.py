"""What only the compiled CPU operators promise."""

from __future__ import annotations

import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from support.lora_cases import TOLERANCES, make_case

from multilora_kernels import (
    LoRASegments,
    LoRATables,
    cpu,
    load_cpu_kernels,
    lora_apply,
    lora_expand,
    lora_shrink,
    reference,
)

_FOLDER = Path(__file__).parent


_NAMES = (
    "test_cpu.py",
    "test_shrink.py",
    "test_expand.py",
    "test_linear.py",
    "test_lora_linear.py",
    "test_quantized.py",
    "test_attention.py",
    "test_rotary_attention.py",
    "test_elementwise.py",
    "test_sampling.py",
)
_SHAPES = (
    "wanted_capability or every_dtype or every_rank or every_hidden_size or every_slice_width or magnitude or who "
    "or every_shape or all_shapes or integers or wherever or embeddings or every_window or elementwise or sampling"
)
_PAIRS = "wanted_capability or bfloat16 or all_shapes or no_number or whoever"
_PAIRS_NAMES = ("test_cpu.py", "test_linear.py", "test_quantized.py", "test_attention.py")


def _available_capabilities() -> list[str]:
    """Instruction sets of this machine that the library knows, widest first."""
    flags = set(Path("/proc/cpuinfo").read_text().split())
    avx512 = {"avx512f", "avx512bw", "avx512vl"}
    needed = {
        "amx": avx512 | {"avx512_bf16", "amx_tile", "amx_bf16"},
        "avx512_bf16": avx512 | {"avx512_bf16"},
        "avx512": avx512,
        "avx2": {"avx2", "fma", "f16c"},
        "default": set(),
    }
    return [name for name, wanted in needed.items() if wanted <= flags]


def _chosen_capability() -> str:
    """The widest, but avx512_bf16 only on AMD's processors: others multiply pairs of bfloat16 slower than floats."""
    has_quick_pairs = "AuthenticAMD" in Path("/proc/cpuinfo").read_text()
    return next(name for name in _available_capabilities() if name != "avx512_bf16" or has_quick_pairs)


def _other_capabilities() -> list[str]:
    """Those whose kernels are not all among those of the chosen one."""
    chosen = _chosen_capability()
    covered = {chosen, "avx512"} if chosen == "avx512_bf16" else {chosen}
    return [name for name in _available_capabilities() if name not in covered]


def test_the_compiled_operators_use_the_wanted_capability_or_else_the_quickest():
    assert load_cpu_kernels()
    wanted = os.environ.get("MULTILORA_CPU_CAPABILITY", _chosen_capability())
    assert cpu.capability() == wanted


@pytest.mark.parametrize("capability", _other_capabilities())
@pytest.mark.parametrize(
    "left_out",
    [
        pytest.param(
            "longest or past_the_dispatcher or number_of_threads and (identical or uniform or skewed)", id="short"
        ),
        pytest.param("no_test", id="all", marks=pytest.mark.long(reason="the same tests on more shapes")),
    ],
)
def test_the_other_instruction_sets_pass_the_same_tests(left_out, capability):
    environment = os.environ | {"MULTILORA_CPU_CAPABILITY": capability}
    # All else of avx512_bf16 is that of avx512.
    names, shapes = (_PAIRS_NAMES, _PAIRS) if capability == "avx512_bf16" else (_NAMES, _SHAPES)
    tests = [str(_FOLDER / name) for name in names]
    chosen = f"({shapes}) and not ({left_out})"
    subprocess.run([sys.executable, "-m", "pytest", "-q", "-k", chosen, *tests], env=environment, check=True)


@pytest.mark.parametrize("num_tokens", [1, 40])
def test_the_number_of_threads_does_not_change_a_bit(num_tokens):
    case = make_case("zipf", num_tokens, ranks=(16, 64, 7), base_share=0, lora_dtype=torch.bfloat16)
    results = []
    threads = torch.get_num_threads()
    for n in (1, 2, 3, 7):
        torch.set_num_threads(n)
        v, y = lora_shrink(case.x, case.tables, 0, case.shape.num_slices, case.segments), case.y.clone()
        lora_expand(v, y, case.tables, 0, case.shape.slice_sizes, case.segments)
        results.append(y)
    torch.set_num_threads(threads)
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_weights_outside_the_arena_are_refused_and_not_read():
    case = make_case("identical", 3, base_share=0, ranks=(4,))
    case.tables.a_offset.fill_(case.tables.arena.numel())
    with pytest.raises(RuntimeError, match="outside the arena"):
        lora_shrink(case.x, case.tables, 0, case.shape.num_slices, case.segments)


def test_other_tables_and_segments_are_read_even_where_the_last_ones_lay():
    case, other = (make_case("zipf", 9, ranks=ranks, base_share=0) for ranks in ((4, 16), (7, 2)))
    expected = {id(c): reference.lora_shrink(c.x, c.tables, 0, c.shape.num_slices, c.segments) for c in (case, other)}
    for c in (case, case, other, case, other, other):
        # New tuples, of which each may lie at the place of the one before.
        tables, segments = LoRATables(*c.tables), LoRASegments(*c.segments)
        y = torch.zeros(9, sum(c.shape.slice_sizes))
        lora_apply(c.x, y, tables, 0, c.shape.slice_sizes, segments)
        wanted = torch.zeros_like(y)
        reference.lora_expand(expected[id(c)], wanted, tables, 0, c.shape.slice_sizes, segments)
        rtol, atol = TOLERANCES[torch.float32]
        torch.testing.assert_close(y, wanted, rtol=rtol, atol=atol)


def test_a_forgotten_arena_is_freed():
    case = make_case("zipf", 3, ranks=(4,), base_share=0)
    arena = weakref.ref(case.tables.arena)
    lora_apply(case.x, case.y, case.tables, 0, case.shape.slice_sizes, case.segments)
    del case
    assert arena() is not None, "the last call's tables are kept for the next one"
    cpu.forget_adapters()
    assert arena() is None
