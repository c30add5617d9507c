"""The kernel benchmark compares like with like, and counts what really moves."""

from __future__ import annotations

import csv

import pytest
import torch

from benchmarks import bench_kernels, kernel_resources
from benchmarks.bench_kernels import Result, bench, median_difference, write_docs, write_results
from benchmarks.engine_tables import PAGE
from benchmarks.kernel_resources import GPUS, Used
from benchmarks.lora_workloads import Batch, Workload, llama
from benchmarks.machine_limits import Limits
from benchmarks.model_shapes import EIGHT_BILLION
from marked_tables import read_cells, read_table
from plots import DOCS

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


def test_the_page_gets_a_row_for_each_workload_and_the_limits_of_the_machine(tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(PAGE.read_text())
    monkeypatch.setattr(bench_kernels, "PAGE", page)

    write_docs([_result(), _result(added=0.1, bandwidth=32e9)], "By a test.")

    assert read_table(page, "operators").splitlines()[2:] == [
        "| 135M | 1,000 ms | 50 % | 4,000 ms | 50 % | 8,000 ms | 75 % | 10 x | 2.5 x |",
        "| 135M | 1,000 ms | 50 % | noise |  | 8,000 ms | 75 % | 10 x | 2.5 x |",
        "",
        "By a test. The machine meanwhile: read bandwidth 30 GB/s, float32 products 340 GFLOP/s.",
    ]
    shown, written = (read_table(path, "operators").splitlines()[0] for path in (PAGE, page))
    assert shown == written


def test_a_run_leaves_a_table_and_a_plot(tmp_path):
    results = [bench(Workload(_TINY, rows, rows, (8,)), "cpu", rounds=2) for rows in (1, 3)]
    write_results(results, "test", tmp_path)
    with (tmp_path / "kernels.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["workload"] for row in rows] == ["tiny 1 rows distinct rank 8", "tiny 3 rows distinct rank 8"]
    for name in ("update", "fraction_of_limit", "linears", "lora_linears", "lora_linears_fraction_of_limit"):
        assert all(float(row[name]) > 0 for row in rows)
    assert (tmp_path / "kernels.png").stat().st_size > 1000


def test_kernels_are_compiled_for_every_gpu_and_shape_and_shown(tmp_path):
    compilations = kernel_resources.compilations(EIGHT_BILLION)
    assert len(compilations) == len(GPUS) * (2 * 4 * 2 * 2 + 4 * 2 + 2 * 4 + 13)
    used = [
        compilations[0](),
        Used("silu_mul", "", "", "sm_80", registers=18, spilled_bytes=0, shared_bytes=2048, widest_load=16),
    ]
    assert (used[0].name, used[0].gpu) == ("shrink q|k|v rank 16, chunks of 16", "sm_80")
    assert used[0].registers > 0
    kernel_resources.write_results(used, tmp_path)
    with (tmp_path / "kernel_resources.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["registers"]) for row in rows] == [used[0].registers, 18]
    assert (tmp_path / "kernel_resources.png").stat().st_size > 1000
    assert kernel_resources.render(used).row_count == 2


def test_linears_share_a_row_of_the_page_which_shows_the_worst_of_them():
    q, down = (Used("update", linear, "rank 16", "sm_80", *sizes) for linear, sizes in _UPDATES)
    other = Used("silu_mul", "", "", "sm_80", 18, 0, 2048, 16)
    assert kernel_resources.docs_table([q, down, other]).splitlines()[2:] == [
        "| update, rank 16 | 96 / 8 / 3 / 4 |",
        "| silu_mul | 18 / 0 / 2 / 16 |",
    ]


_UPDATES = [("q|k|v", (96, 0, 2048, 16)), ("down", (80, 8, 3072, 4))]


def test_the_page_has_a_row_for_each_kernel_and_none_spills():
    rows = read_cells(DOCS / "gpu.md", "kernel resources")
    assert [{*row} - {"kernel"} for row in rows] == [{f"sm_{gpu}" for gpu in GPUS}] * (2 * 2 * 2 + 2 + 2 * 4 + 13)
    assert all(cell.split(" / ")[1] == "0" for row in rows for gpu, cell in row.items() if gpu != "kernel")
