"""Decoding with as many different adapters as sequences, stored as bfloat16, int8, fp8 and int4."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.adapter_bench import random_wire
from benchmarks.bench_rows import Row
from benchmarks.engine_bench import RANK, WARM_UP_STEPS, Bench
from multilora_engine.lora.format import pack_adapter

WEIGHTS = ("float32", "bfloat16")
"""The types that the base model's weights are stored in; products are of float32."""

STORED = ("bfloat16", "int8", "fp8", "int4")
NUM_SEQUENCES = (16, 64)
LEAST_SHARES = {16: 0.9, 64: 0.8}
"""The goal: the share of the base model's tokens that is left with so many different int8 adapters."""

_KV_CACHE_BYTES = 768 << 20


def stored_rows(checkpoint: Path, threads: int, rounds: int, context: int, num_steps: int) -> list[Row]:
    """Tokens a second by types of weights and adapters and by sequences, and the share that the adapters leave."""
    rows = list[Row]()
    for weights in WEIGHTS:
        benches = {name: _bench(checkpoint, threads, weights, name) for name in STORED}
        num_bytes = {name: _load(bench) for name, bench in benches.items()}
        seconds = _measure(benches, rounds, context, num_steps)
        for bench in benches.values():
            bench.close()
        for n in NUM_SEQUENCES:
            base, beside = seconds["none", n], f"weights in {weights}, {n} sequences"
            rows.append(Row(f"{beside}, no adapter: tokens", n / base, "tokens/s"))
            for name in STORED:
                subject = f"{beside}, adapters in {name}"
                rows += [
                    Row(f"{subject}: an adapter", num_bytes[name] / 1e6, "MB"),
                    Row(f"{subject}: tokens", n / seconds[name, n], "tokens/s"),
                    _share(subject, n, name, base / seconds[name, n]),
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


def _measure(benches: Mapping[str, Bench], rounds: int, context: int, num_steps: int) -> dict[tuple[str, int], float]:
    """Median seconds of a step by type of the adapters, or "none", and sequences. One engine for each type, in turn."""
    seconds: defaultdict[tuple[str, int], list[float]] = defaultdict(list)

    def decode(name: str, bench: Bench, n: int, tasks: Sequence[int | None]) -> None:
        with bench.batch(n, context, tasks):
            bench.step_seconds(WARM_UP_STEPS)
            seconds[name, n] += bench.step_seconds(num_steps)

    for _, n in itertools.product(range(rounds), NUM_SEQUENCES):
        for name, bench in benches.items():
            decode("none", bench, n, [None])
            decode(name, bench, n, range(n))
    return {key: statistics.median(values) for key, values in seconds.items()}


def _share(subject: str, n: int, name: str, share: float) -> Row:
    what = f"{subject} against none"
    if name != "int8":
        return Row(what, share, "x")
    goal = ">= " + ", ".join(f"{least:g} of {count}" for count, least in LEAST_SHARES.items())
    return Row(what, share, "x", goal, share >= LEAST_SHARES[n])


def _load(bench: Bench) -> int:
    """Give the engine an adapter for each sequence, which share numbers but no memory; returns the bytes of one."""
    layout = bench.engine.info.adapter_layout
    adapter = pack_adapter(*random_wire(layout, RANK, seed=0), layout)
    for task in range(max(NUM_SEQUENCES)):
        bench.engine.put_adapter(task, adapter)
    return adapter.pages.nbytes
