"""Decoding with as many different adapters as sequences, stored as bfloat16, int8, fp8 and int4."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from benchmarks.adapter_bench import random_wire
from benchmarks.bench_rows import Row
from benchmarks.engine_bench import RANK, WARM_UP_STEPS, Bench
from multilora_engine.lora.format import pack_adapter

STORED = ("bfloat16", "int8", "fp8", "int4")
NUM_SEQUENCES = (16, 64)
LEAST_SHARES = {16: 0.9, 64: 0.8}
"""The goal: the share of the base model's tokens that is left with so many different int8 adapters."""

_KV_CACHE_BYTES = 768 << 20


def stored_rows(checkpoint: Path, threads: int, rounds: int, context: int, num_steps: int) -> list[Row]:
    """Tokens a second, and the bytes of an adapter. One engine for each type, in turn; base weights are bfloat16."""
    most = max(NUM_SEQUENCES)
    benches = {
        name: Bench(
            checkpoint,
            name,
            most,
            dtype="float32",
            weight_dtype="bfloat16",
            num_threads=threads,
            max_num_seqs=most,
            kv_cache_memory_bytes=_KV_CACHE_BYTES,
        )
        for name in STORED
    }
    num_bytes = {name: _load(bench, most) for name, bench in benches.items()}
    seconds: defaultdict[tuple[str, int], list[float]] = defaultdict(list)

    def decode(name: str, bench: Bench, n: int, tasks: Sequence[int | None]) -> None:
        with bench.batch(n, context, tasks):
            bench.step_seconds(WARM_UP_STEPS)
            seconds[name, n] += bench.step_seconds(num_steps)

    for _ in range(rounds):
        for n in NUM_SEQUENCES:
            for name, bench in benches.items():
                decode("none", bench, n, [None])
                decode(name, bench, n, range(n))
    for bench in benches.values():
        bench.close()
    rates = {key: key[1] / statistics.median(values) for key, values in seconds.items()}
    return [
        *(Row(f"stored: an adapter in {name}", size / 1e6, "MB") for name, size in num_bytes.items()),
        *(Row(f"stored: {n} sequences, {name}", rate, "tokens/s") for (name, n), rate in rates.items()),
        *(_share(n, name, rate / rates["none", n]) for (name, n), rate in rates.items() if name != "none"),
    ]


def _load(bench: Bench, count: int) -> int:
    """Give the engine so many adapters, which share their numbers but no memory; returns the bytes of one."""
    layout = bench.engine.info.adapter_layout
    adapter = pack_adapter(*random_wire(layout, RANK, seed=0), layout)
    for task in range(count):
        bench.engine.put_adapter(task, adapter)
    return adapter.pages.nbytes


def _share(n: int, name: str, share: float) -> Row:
    what = f"stored: {n} different in {name}, against none"
    if name != "int8":
        return Row(what, share, "x")
    return Row(what, share, "x", f">= {LEAST_SHARES[n]}", share >= LEAST_SHARES[n])
