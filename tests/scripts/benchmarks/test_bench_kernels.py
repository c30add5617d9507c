"""The kernel benchmark compares like with like, and counts what really moves."""

from __future__ import annotations

import csv

import pytest
import torch

from benchmarks.bench_kernels import Result, bench, median_difference, write_results
from benchmarks.lora_workloads import Batch, Workload, llama
from benchmarks.machine_limits import Limits

_TINY = llama("tiny", hidden=64, kv=32, ffn=96, num_layers=2)


def _update_of(batch: Batch, step) -> list[torch.Tensor]:
    for y in batch.y:
        y.zero_()
    step()
    return [y.clone() for y in batch.y]


@pytest.mark.parametrize(("num_tokens", "num_adapters"), [(6, 6), (7, 2), (5, 1)])
def test_every_contestant_computes_the_same_update(num_tokens, num_adapters):
    torch.manual_seed(0)
    batch = Batch(Workload(_TINY, num_tokens, num_adapters, (4, 16)), torch.float32, torch.float32, "cpu")
    ours = _update_of(batch, batch.update)
    assert all(bool(y.abs().max() > 0) for y in ours)
    for other in (batch.gather_bmm(), batch.gemm_per_adapter()):
        torch.testing.assert_close(_update_of(batch, other), ours, rtol=1e-4, atol=1e-5)


def test_bytes_and_flops_are_those_of_the_formula():
    workload = Workload(_TINY, num_tokens=3, num_adapters=2, ranks=(4, 8))
    slices = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 96), (64, 96), (96, 64)]
    per_rank = sum(i + o for i, o in slices)
    assert workload.adapter_bytes(torch.bfloat16) == 2 * 2 * (4 + 8) * per_rank
    assert workload.num_flops() == 2 * 2 * (4 + 8 + 4) * per_rank
    num_weights = 2 * sum(i * o for i, o in slices)
    assert workload.weight_bytes(torch.float32) == 4 * num_weights
    assert workload.weight_flops() == 2 * 3 * num_weights


def test_a_limit_is_of_bytes_or_of_flops_whichever_takes_longer():
    limits = Limits(bandwidth=100.0, peak=10.0)
    assert limits.seconds(200, 10) == 2
    assert limits.seconds(200, 30) == 3


def test_what_an_update_adds_is_told_round_by_round():
    assert median_difference([9.0, 3.0, 4.0], [1.0, 2.0, 3.0]) == 1.0


def _result(**other: float) -> Result:
    """Times and limits of plain numbers; `other` takes the place of some."""
    times = {"update": 1.0, "linears": 5.0, "lora_linears": 8.0, "added": 4.0}
    limits = {"limit": 0.5, "limit_of_adapters": 2.0, "lora_linears_limit": 6.0}
    machine = {"bandwidth": 28e9, "peak": 340e9}
    return Result("135M", 1, 1, **{"gather_bmm": 10.0, "gemm_per_adapter": 2.5, **times, **limits, **machine, **other})


def test_fractions_are_of_the_limit_that_belongs_to_them():
    result = _result()
    assert (result.fraction, result.lora_linears_fraction, result.added_fraction) == (0.5, 0.75, 0.5)


def test_a_run_leaves_a_table_and_a_plot(tmp_path):
    results = [bench(Workload(_TINY, rows, rows, (8,)), "cpu", rounds=2) for rows in (1, 3)]
    write_results(results, "test", tmp_path)
    with (tmp_path / "kernels.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["workload"] for row in rows] == ["tiny 1 rows distinct rank 8", "tiny 3 rows distinct rank 8"]
    for name in ("update", "fraction_of_limit", "linears", "lora_linears", "lora_linears_fraction_of_limit"):
        assert all(float(row[name]) > 0 for row in rows)
    assert (tmp_path / "kernels.png").stat().st_size > 1000
