"""The benchmark of whole steps runs from end to end where there is no GPU, and counts what really moves."""

from __future__ import annotations

import csv

import torch
from rich.console import Console

from benchmarks.bench_rows import write_results
from benchmarks.bench_steps import bench_all
from benchmarks.model_steps import EIGHT_BILLION, TINY, Sizes, Storage, Workbench, linears
from multilora_kernels import CodeType

FLOATS = Storage(torch.float32, torch.float32)
SIZES = Sizes(batches=(1, 3), context=20, prompt=33)


def test_the_model_has_the_eight_billion_weights_it_is_named_for():
    layers = EIGHT_BILLION.num_layers * sum(inputs * outputs for inputs, outputs in linears(EIGHT_BILLION))
    assert layers + 2 * EIGHT_BILLION.vocab_size * EIGHT_BILLION.hidden_size == 8_029_995_008


def test_a_step_moves_weights_contexts_and_distinct_adapters_once():
    bench = Workbench(TINY, SIZES, FLOATS, torch.device("cpu"))
    base, _ = bench.decode_work(3, 0)
    shapes = {name: place.shape for name, place in bench.model.checkpoint_tensors().items()}
    read = [shape.numel() for name, shape in shapes.items() if len(shape) == 2 and "embed_tokens" not in name]
    assert base == 4 * (sum(read) + 3 * 20 * 2 * 2 * 32)
    assert bench.decode_work(3, 3)[0] - base == bench.tables.arena.nbytes


def test_a_step_of_codes_moves_their_bytes():
    bench = Workbench(TINY, SIZES, Storage(torch.float32, torch.int8, CodeType.INT4, 32), torch.device("cpu"))
    layers = TINY.num_layers * sum(inputs * outputs for inputs, outputs in linears(TINY))
    floats = 4 * (TINY.vocab_size * TINY.hidden_size + 3 * 20 * 2 * 2 * 32)
    base, _ = bench.decode_work(3, 0)
    # Half a byte a code and a scale of four bytes for 32; panels of some dozen outputs are filled up to whole ones.
    assert 0 <= base - floats - layers * (1 / 2 + 4 / 32) < 0.25 * layers
    assert bench.decode_work(3, 3)[0] - base == bench.tables.arena.nbytes
    bench.decode(3, 3)()


def test_a_run_leaves_a_table_and_a_plot(tmp_path):
    bench = Workbench(TINY, SIZES, FLOATS, torch.device("cpu"))
    rows = bench_all(bench, 1, Console(quiet=True))
    write_results(rows, tmp_path, "steps")
    with (tmp_path / "steps.csv").open() as file:
        names = {row["what"] for row in csv.DictReader(file)}
    decodes = {f"decode {batch} sequences, {n} adapters" for batch in (1, 3) for n in (0, 1, 3) if n <= batch}
    assert names == decodes | {"prefill 33 tokens"}
    assert all(row.value > 0 for row in rows)
    assert (tmp_path / "steps.png").stat().st_size > 1000
