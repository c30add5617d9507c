"""Decode steps of the quantised default model: codes alone, and with floats beside them that `auto` may take."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.bench_rows import Row
from benchmarks.engine_bench import Bench
from multilora_engine.models.weights import MEASURED_ROWS

FLOATS_BYTES = 1 << 30
"""The budget of the floats: more than those of the default model's weights."""

LEAST_SPEEDUP = 1.0
"""The goal: with `auto` a step is at least so many times as fast as in the slower engine of float32 weights."""

CHOICE = "choice of "
"""The start of the results that tell what `auto` goes by."""

_NUM_STEPS = 4
"""Steps that an engine takes in a row."""


def switch_rows(
    benches: Mapping[str, Bench],
    schemes: Sequence[str],
    batches: Sequence[int],
    rounds: int,
    context: int,
    num_steps: int,
    **options: Any,
) -> list[Row]:
    """The time of a step by number of sequences; with `auto` against the slower float32 engine, and codes alone.

    A second engine of float32 weights tells by how much engines differ that compute the same. Engines take turns of a
    few steps each with sequences of equal lengths, all at once in memory; the first step of a turn does not count.

    benches: engines of float32 weights and of each scheme. batches: from the largest on. options: of engines.
    """
    floats: dict[str, Any] = {"unpacked_weights_memory_bytes": FLOATS_BYTES, "unpacked_weights": "*"}
    again = Bench(Path(benches["float32"].engine.info.model_path), weight_dtype="float32", **options)
    engines = {("float32", ""): benches["float32"], ("float32", ", another engine"): again}
    for scheme in schemes:
        checkpoint = Path(benches[scheme].engine.info.model_path)
        engines |= {(scheme, ""): benches[scheme], (scheme, ", auto"): Bench(checkpoint, **options, **floats)}
    seconds: defaultdict[tuple[str, str, int], list[float]] = defaultdict(list)
    with ExitStack() as stack:
        running = {key: stack.enter_context(bench.batch(max(batches), context)) for key, bench in engines.items()}
        for n in batches:
            for key, request_ids in running.items():
                for request_id in request_ids[n:]:
                    engines[key].engine.abort(request_id)
            turns = list(engines.items())
            for turn in range(rounds * -(-num_steps // _NUM_STEPS)):
                first = turn % len(turns)
                for key, bench in turns[first:] + turns[:first]:
                    seconds[*key, n] += bench.step_seconds(1 + _NUM_STEPS)[1:]
    choices = [row for key, bench in engines.items() if key[1] == ", auto" for row in choice_rows(key[0], bench)]
    for (_, name), bench in engines.items():
        if name:
            bench.close()
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    rows = []
    for n in reversed(batches):
        for scheme, choice in engines:
            name, step = f"decode {n}, {scheme}{choice}", medians[scheme, choice, n]
            rows.append(Row(f"{name}: a step", step * 1e3, "ms"))
            if choice == ", auto":
                speedup = max(medians["float32", which, n] for which in ("", ", another engine")) / step
                rows += [
                    Row(f"{name} against codes alone", medians[scheme, "", n] / step, "x"),
                    Row(f"{name} against float32", speedup, "x", f">= {LEAST_SPEEDUP:g}", speedup >= LEAST_SPEEDUP),
                ]
            elif (scheme, choice) != ("float32", ""):
                rows.append(Row(f"{name} against float32", medians["float32", "", n] / step, "x"))
    return rows + choices


def choice_rows(scheme: str, bench: Bench) -> list[Row]:
    """How many times as fast floats were as codes when the engine started, by weight and number of rows."""
    return [
        Row(f"{CHOICE}{scheme}, {compared.shape[0]} x {compared.shape[1]}: floats at {n} rows", codes / floats, "x")
        for compared in bench.engine.weights.comparisons
        for n, codes, floats in zip(MEASURED_ROWS, compared.codes, compared.floats, strict=True)
    ]
