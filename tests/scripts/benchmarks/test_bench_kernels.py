"""The kernel benchmark computes what it names, and counts what really moves."""

from __future__ import annotations

import torch

from benchmarks import bench_kernels
from benchmarks.bench_kernels import measured, measured_experts, median_difference
from benchmarks.lora_workloads import Batch, ExpertBatch, Mixture, Workload, llama
from benchmarks.machine_limits import Limits

_TINY = llama("tiny", hidden=64, kv=32, ffn=96, num_layers=2)


def test_an_update_is_that_of_every_adapter_on_its_rows() -> None:
    torch.manual_seed(0)
    batch = Batch(Workload(_TINY, 7, 2, (4, 16)), torch.float32, torch.float32, "cpu")
    for y in batch.y:
        y.zero_()
    batch.update()
    expected = [torch.zeros_like(y) for y in batch.y]
    mapping = torch.arange(7) % 2
    for column, i, shape in batch.linears:
        start = 0
        for offset, size in enumerate(shape.slice_sizes):
            for token, adapter in enumerate(mapping.tolist()):
                rank = int(batch.tables.rank[adapter, column + offset])
                a, b = (
                    int(table[adapter, column + offset]) for table in (batch.tables.a_offset, batch.tables.b_offset)
                )
                matrix_a = batch.tables.arena[a : a + rank * shape.in_features].view(rank, shape.in_features)
                matrix_b = batch.tables.arena[b : b + size * rank].view(size, rank)
                expected[i][token, start : start + size] += matrix_b @ (matrix_a @ batch.x[i][token])
            start += size
    assert all(bool(y.abs().max() > 0) for y in expected)
    torch.testing.assert_close(batch.y, expected, rtol=1e-4, atol=1e-5)


def test_bytes_and_flops_are_those_of_the_formula() -> None:
    workload = Workload(_TINY, num_tokens=3, num_adapters=2, ranks=(4, 8))
    slices = [(64, 64), (64, 32), (64, 32), (64, 64), (64, 96), (64, 96), (96, 64)]
    per_rank = sum(i + o for i, o in slices)
    assert workload.adapter_bytes(torch.bfloat16) == 2 * 2 * (4 + 8) * per_rank
    assert workload.num_flops() == 2 * 2 * (4 + 8 + 4) * per_rank
    num_weights = 2 * sum(i * o for i, o in slices)
    assert workload.weight_bytes(torch.float32) == 4 * num_weights
    assert workload.weight_flops() == 2 * 3 * num_weights


def test_what_an_update_adds_is_told_round_by_round() -> None:
    assert median_difference([9.0, 3.0, 4.0], [1.0, 2.0, 3.0]) == 1.0


def test_every_contestant_has_a_time_and_its_share_of_the_limit() -> None:
    rows = {row.what: row for row in measured(Workload(_TINY, 3, 3, (8,)), "cpu", rounds=2)}
    for name in ("update", "linears", "with LoRA"):
        assert rows[f"tiny 3 rows distinct rank 8: {name}"].unit == "ms"
        assert rows[f"tiny 3 rows distinct rank 8: {name}, of the limit"].value > 0


_MIXTURE = Mixture("tiny", num_experts=5, top_k=2, hidden=64, inner=32)


def test_bytes_and_flops_of_experts_are_those_that_rows_use() -> None:
    batch = ExpertBatch(_MIXTURE, 1, has_codes=False, device="cpu", num_adapters=16)
    assert batch.base_bytes == 2 * 2 * 3 * 64 * 32 * 2  # layers, experts of a row, matrices
    assert batch.adapter_bytes == 2 * 2 * 3 * 16 * (64 + 32) * 2
    assert (batch.base_flops, batch.adapter_flops) == (batch.base_bytes, batch.adapter_bytes)
    many = ExpertBatch(_MIXTURE, 200, has_codes=True, device="cpu", num_adapters=1)
    assert many.base_bytes == 2 * 5 * 3 * 64 * 32 * (4 + 16 / 128) / 8  # all experts, once each
    assert many.adapter_bytes == 2 * 5 * 3 * 16 * (64 + 32) * 2


def test_experts_have_a_time_and_its_share_of_the_limit(monkeypatch) -> None:
    class Yardsticks:
        def __init__(self, *_) -> None:
            self.steps = {"read": lambda: None, "multiply": lambda: None}

        def limits(self, _) -> Limits:
            return Limits(1e9, 1e9)

    monkeypatch.setattr(bench_kernels, "Yardsticks", Yardsticks)
    rows = {row.what: row for row in measured_experts(_MIXTURE, 3, has_codes=True, device="cpu", rounds=2)}
    for name in ("experts", "with adapters"):
        assert rows[f"tiny w4a16 3 rows: {name}"].unit == "ms a layer"
        assert rows[f"tiny w4a16 3 rows: {name}, of the limit"].value > 0
