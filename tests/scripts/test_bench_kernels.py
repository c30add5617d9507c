"""The kernel benchmark compares like with like, and counts what really moves."""

from __future__ import annotations

import csv

import pytest
import torch
from bench_kernels import bench, write_results
from lora_workloads import Batch, Workload, llama

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
    ours = _update_of(batch, batch.ours)
    assert all(bool(y.abs().max() > 0) for y in ours)
    for other in (batch.gather_bmm(), batch.gemm_per_adapter()):
        torch.testing.assert_close(_update_of(batch, other), ours, rtol=1e-4, atol=1e-5)


def test_bytes_and_flops_are_those_of_the_formula():
    workload = Workload(_TINY, num_tokens=3, num_adapters=2, ranks=(4, 8))
    slices = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 96), (64, 96), (96, 64)]
    per_rank = sum(i + o for i, o in slices)
    assert workload.adapter_bytes(torch.bfloat16) == 2 * 2 * (4 + 8) * per_rank
    assert workload.num_flops() == 2 * 2 * (4 + 8 + 4) * per_rank


def test_a_run_leaves_a_table_and_a_plot(tmp_path):
    results = [bench(Workload(_TINY, rows, rows, (8,)), "cpu", rounds=2) for rows in (1, 3)]
    write_results(results, "test", tmp_path)
    with (tmp_path / "kernels.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["workload"] for row in rows] == ["tiny 1 rows distinct rank 8", "tiny 3 rows distinct rank 8"]
    assert all(float(row["ours"]) > 0 and float(row["fraction_of_limit"]) > 0 for row in rows)
    assert (tmp_path / "kernels.png").stat().st_size > 1000
