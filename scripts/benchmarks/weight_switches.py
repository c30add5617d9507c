"""Decode steps of the quantised default model: codes alone, and with floats beside them that `auto` may take."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bench_rows import Row
from benchmarks.engine_bench import Bench

FLOATS_BYTES = 1 << 30
"""The budget of the floats: more than those of the default model's weights."""

LEAST_SPEEDUP = 1.0
"""The goal: with `auto` a step is at least so many times as fast as with float32 weights."""


def switch_rows(
    benches: Mapping[str, Bench],
    schemes: Sequence[str],
    batches: Sequence[int],
    rounds: int,
    context: int,
    num_steps: int,
    **options: Any,
) -> list[Row]:
    """The time of a step by number of sequences; with `auto` against float32 weights, and against codes alone.

    benches: engines of float32 weights and of each scheme. batches: from the largest on. options: of engines.
    """
    floats: dict[str, Any] = {"unpacked_weights_memory_bytes": FLOATS_BYTES, "unpacked_weights": "*"}
    engines = {("float32", ""): benches["float32"]}
    for scheme in schemes:
        checkpoint = Path(benches[scheme].engine.info.model_path)
        engines |= {(scheme, ""): benches[scheme], (scheme, ", auto"): Bench(checkpoint, **options, **floats)}
    seconds: defaultdict[tuple[str, str, int], list[float]] = defaultdict(list)
    for _, (key, bench) in itertools.product(range(rounds), engines.items()):
        with bench.batch(max(batches), context) as request_ids:
            for n in batches:
                for request_id in request_ids[n:]:
                    bench.engine.abort(request_id)
                seconds[*key, n] += bench.step_seconds(num_steps)
    for (_, choice), bench in engines.items():
        if choice:
            bench.close()
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    rows = []
    for n in reversed(batches):
        for scheme, choice in engines:
            name, step = f"decode {n}, {scheme}{choice}", medians[scheme, choice, n]
            rows.append(Row(f"{name}: a step", step * 1e3, "ms"))
            if choice:
                speedup = medians["float32", "", n] / step
                rows += [
                    Row(f"{name} against codes alone", medians[scheme, "", n] / step, "x"),
                    Row(f"{name} against float32", speedup, "x", f">= {LEAST_SPEEDUP:g}", speedup >= LEAST_SPEEDUP),
                ]
    return rows
