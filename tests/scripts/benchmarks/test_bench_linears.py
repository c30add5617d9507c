"""The benchmark of the linears compares like with like, and counts what really moves."""

from __future__ import annotations

import csv

import pytest
import torch

from benchmarks.bench_linears import Workload, bench, formats, pack, step_workloads, write_results
from benchmarks.machine_limits import onednn_linear
from benchmarks.model_shapes import DEFAULT_MODEL
from multilora_kernels import HugePages, packed_linear


@pytest.mark.parametrize("rows", [1, 5])
def test_every_contestant_computes_the_same_product(rows):
    x, weight = torch.randn(rows, 40), torch.randn(70, 40)
    with torch.inference_mode():
        onednn = onednn_linear(x, torch.ops.mkldnn._reorder_linear_weight(weight, rows))
    torch.testing.assert_close(
        packed_linear(x, pack(weight, torch.float32, HugePages())), x @ weight.T, rtol=1e-4, atol=1e-4
    )
    torch.testing.assert_close(onednn, x @ weight.T, rtol=1e-4, atol=1e-4)


def test_a_step_multiplies_the_whole_model_once():
    [workload] = step_workloads(DEFAULT_MODEL, [16])
    assert workload.num_weights == 30 * (576 * (576 + 2 * 192 + 576) + 3 * 576 * 1536) + 49152 * 576
    assert workload.num_flops == 32 * workload.num_weights


def test_a_run_leaves_a_table_and_a_plot(tmp_path):
    results = bench(Workload("tiny", ((70, 40), (40, 70)), rows=3), rounds=2)
    write_results(results, "test", tmp_path)
    with (tmp_path / "linears.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["workload"], row["weights"], int(row["num_bytes"])) for row in rows] == [
        *(("tiny", name, dtype.itemsize * 5600) for name, (dtype, _) in formats().items()),
        *(
            ("tiny", f"{codes}{suffix}", num_bytes + 2 * 110)
            for suffix in ("", " in bfloat16")
            for codes, num_bytes in (("int4", 5600 // 2), ("int8", 5600), ("fp8", 5600))
        ),
    ]
    assert {row["weights"] for row in rows} >= {"float32", "bfloat16"}
    assert all(float(row["ours"]) > 0 and float(row["over_limit"]) > 0 for row in rows)
    assert (tmp_path / "linears.png").stat().st_size > 1000
