"""The loops that the limits are taken from do the work that they are counted for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.machine_limits import PAUSES, Limits, PlainLoops, Yardsticks, matrix_rate

_FLAGS = {
    torch.float32: ("avx2", "avx512f"),
    torch.bfloat16: ("avx512_bf16",),
}
"""The processor's flags, as Linux names them, any of which a dot product of a type takes."""


def _cpu_flags() -> set[str]:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return set(next(line for line in lines if line.startswith("flags")).split())


@pytest.mark.parametrize(("dtype", "per_operation"), [(torch.float32, 0), (torch.bfloat16, 1 / 8)])
def test_every_round_adds_to_every_accumulator(dtype: torch.dtype, per_operation: float) -> None:
    loops, rounds = PlainLoops(), 1000
    operations = loops.operations(dtype)
    assert bool(operations) == any(flag in _cpu_flags() for flag in _FLAGS[dtype])
    if not operations:
        return
    for few, many in zip(loops.multiply(dtype, rounds), loops.multiply(dtype, 3 * rounds), strict=True):
        assert many - few == 2 * rounds * operations * per_operation
        assert few > rounds * operations * per_operation  # accumulator i starts at i


@pytest.mark.parametrize("pause", PAUSES)
def test_all_values_are_loaded_whatever_the_number_of_threads(pause: int) -> None:
    values = torch.arange(1 << 12, dtype=torch.float32)
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2):
            torch.set_num_threads(num_threads)
            assert PlainLoops().load(values, pause) == float(values.sum(dtype=torch.float64))
    finally:
        torch.set_num_threads(before)


def test_the_fastest_step_of_a_kind_is_the_limit() -> None:
    yardsticks = Yardsticks("cpu", torch.float32)
    seconds = dict.fromkeys(yardsticks.steps, 1.0)
    slow = yardsticks.limits(seconds)
    loads = [f"load, pauses of {pause}" for pause in PAUSES]
    for load in loads:
        assert yardsticks.limits(seconds | {load: 1e-3, "multiply": 1e-3}).bandwidth > slow.bandwidth
        assert yardsticks.limits(seconds | {load: 1e3}).bandwidth == slow.bandwidth
    assert {"copy", "read", *loads} <= set(seconds)


def test_a_limit_is_of_bytes_or_of_flops_whichever_takes_longer() -> None:
    limits = Limits(bandwidth=100.0, peak=10.0)
    assert limits.seconds(200, 10) == 2
    assert limits.seconds(200, 30) == 3


def test_threads_multiply_each_by_itself_and_torch_has_as_many_as_before() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert matrix_rate(seconds=0.001) > 0
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
