"""Plans by rank, width and rows, from costs that stand in for a GPU's times."""

from __future__ import annotations

from benchmarks.synthetic_batches import LinearShape
from benchmarks.tune_block_sizes import CHOICES, cold_layers, tune_plans

ENTRY = {name: values[0] for name, values in CHOICES["update"].items()}


def test_a_plan_has_what_is_quickest_for_its_rank_width_and_rows_and_sums_as_with_more_rows():
    def cost(linear, rank, num_rows, sizes):
        block_n = 64 if num_rows <= 8 else 256
        block_k = 512 if linear.in_features > 4096 else 128
        # With few rows other tiles of the sum would be quicker, too.
        block_k = 256 if num_rows <= 8 else block_k
        warps = 8 if rank > 16 else 4
        wanted = {"BLOCK_K": block_k, "BLOCK_N": block_n, "num_warps": warps, "num_stages": 2}
        return sum(sizes[name] != value for name, value in wanted.items())

    def cost_of_two(linear, rank, num_rows):
        return -1 if linear.in_features > 4096 else 9

    plans = {(plan["max_rank"], plan["max_width"]): plan for plan in tune_plans(ENTRY, cost, cost_of_two)}
    assert list(plans) == [(16, 4096), (16, 14336), (64, 4096), (64, 14336)]
    assert plans[16, 4096]["sizes"] == {"BLOCK_N": 256}
    assert plans[64, 14336]["sizes"] == {"BLOCK_K": 512, "BLOCK_N": 256, "num_warps": 8}
    assert [key for key, plan in plans.items() if plan.get("num_launches") == 2] == [(16, 14336), (64, 14336)]
    assert all(plan["by_rows"] == [{"max_rows": 8, "sizes": {"BLOCK_N": 64}}] for plan in plans.values())


def test_few_rows_may_make_two_launches_the_quicker_plan():
    def cost(linear, rank, num_rows, sizes):
        return 5 if num_rows <= 8 else 1

    plans = tune_plans(ENTRY, cost, lambda *_: 2)
    assert [plan["num_launches"] for plan in plans] == [2] * 4
    assert tune_plans(ENTRY, cost, lambda *_: 3) == []


def test_where_the_entry_is_the_quickest_there_is_no_plan():
    assert tune_plans(ENTRY, lambda linear, rank, num_rows, sizes: sizes != ENTRY, lambda *_: 0) == []


def test_adapters_that_are_timed_are_more_than_a_cache_holds():
    linear, rank = LinearShape(4096, (4096, 1024, 1024)), 16
    bytes_of_layer = 8 * rank * (3 * 4096 + 6144) * 2
    assert cold_layers(linear, rank, 8) == 57
    assert 56 * bytes_of_layer < 256 << 20 <= 57 * bytes_of_layer
