"""Decoding with as many different adapters as sequences, stored as bfloat16, int8, fp8 and int4.

A step reads the base model once and every sequence's adapter: beside the base model's speed stands the share of it that
would be left if the adapters' bytes took their time at the machine's bandwidth, and nothing else did.
"""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.adapter_bench import random_wire
from benchmarks.bench_rows import Row
from benchmarks.engine_bench import RANK, WARM_UP_STEPS, Bench, RepeatedLimits
from multilora_engine.lora.format import pack_adapter
from multilora_engine.lora.layout import PackedAdapter
from multilora_wire.layout import AdapterLayout

WEIGHTS = ("float32", "bfloat16")
"""The types that the base model's weights are stored in; products are of float32."""

STORED = ("bfloat16", "int8", "fp8", "int4")
NUM_SEQUENCES = (16, 64)
LEAST_SHARES = {16: 0.9, 64: 0.8}
"""The goal: the share of the base model's tokens that is left with so many different int8 adapters."""

_KV_CACHE_BYTES = 768 << 20


def stored_rows(checkpoint: Path, threads: int, rounds: int, context: int, num_steps: int) -> list[Row]:
    """Tokens a second by types of weights and adapters and by sequences, and the share that the adapters leave."""
    limits, rows = RepeatedLimits(), list[Row]()
    for weights in WEIGHTS:
        benches = {name: _bench(checkpoint, threads, weights, name) for name in STORED}
        adapters = {name: _load(bench) for name, bench in benches.items()}
        seconds = _measure(benches, limits, rounds, context, num_steps)
        num_bytes = {
            name: _read_bytes(adapters[name], bench.engine.info.adapter_layout) for name, bench in benches.items()
        }
        for bench in benches.values():
            bench.close()
        for n in NUM_SEQUENCES:
            base, beside = seconds["none", n], f"weights in {weights}, {n} sequences"
            rows.append(Row(f"{beside}, no adapter: tokens", n / base, "tokens/s"))
            for name in STORED:
                subject = f"{beside}, adapters in {name}"
                left = base / (base + n * num_bytes[name] / limits.limits.bandwidth)
                rows += [
                    Row(f"{subject}: an adapter", adapters[name].pages.nbytes / 1e6, "MB"),
                    Row(f"{subject}: tokens", n / seconds[name, n], "tokens/s"),
                    _share(subject, n, name, base / seconds[name, n]),
                    Row(f"{subject}: its bytes alone leave", left, "x"),
                ]
    return rows


def _bench(checkpoint: Path, threads: int, weights: str, lora_dtype: str) -> Bench:
    most = max(NUM_SEQUENCES)
    return Bench(
        checkpoint,
        lora_dtype,
        most,
        dtype="float32",
        weight_dtype=weights,
        num_threads=threads,
        max_num_seqs=most,
        kv_cache_memory_bytes=_KV_CACHE_BYTES,
    )


def _measure(
    benches: Mapping[str, Bench], limits: RepeatedLimits, rounds: int, context: int, num_steps: int
) -> dict[tuple[str, int], float]:
    """Median seconds of a step by type of the adapters, or "none", and sequences. One engine for each type, in turn."""
    seconds: defaultdict[tuple[str, int], list[float]] = defaultdict(list)

    def decode(name: str, bench: Bench, n: int, tasks: Sequence[int | None]) -> None:
        with bench.batch(n, context, tasks):
            bench.step_seconds(WARM_UP_STEPS)
            seconds[name, n] += bench.step_seconds(num_steps)

    for _, n in itertools.product(range(rounds), NUM_SEQUENCES):
        for name, bench in benches.items():
            limits.measure()
            decode("none", bench, n, [None])
            decode(name, bench, n, range(n))
    return {key: statistics.median(values) for key, values in seconds.items()}


def _share(subject: str, n: int, name: str, share: float) -> Row:
    what = f"{subject} against none"
    if name != "int8":
        return Row(what, share, "x")
    goal = ">= " + ", ".join(f"{least:g} of {count}" for count, least in LEAST_SHARES.items())
    return Row(what, share, "x", goal, share >= LEAST_SHARES[n])


def _load(bench: Bench) -> PackedAdapter:
    """Give the engine an adapter for each sequence, which share their numbers but no memory; returns one."""
    layout = bench.engine.info.adapter_layout
    adapter = pack_adapter(*random_wire(layout, RANK, seed=0), layout)
    for task in range(max(NUM_SEQUENCES)):
        bench.engine.put_adapter(task, adapter)
    return adapter


def _read_bytes(adapter: PackedAdapter, layout: AdapterLayout) -> int:
    """The bytes of an adapter that a step reads: those of its pages that are used."""
    return sum(
        piece.num_bytes
        for row in adapter.rows
        for piece in layout.pieces(layout.sites.module_at[row.layer, row.module_id], row.rank, row.is_dora)
    )
