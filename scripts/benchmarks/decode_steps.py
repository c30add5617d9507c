"""Decode steps of engines beside the limits of the machine, in one arithmetic at a time."""

from __future__ import annotations

import itertools
import statistics
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.bench_rows import Row
from benchmarks.engine_bench import WARM_UP_STEPS, Bench, RepeatedLimits, Work, linear_bytes
from benchmarks.step_parts import PARTS, timed_parts
from benchmarks.step_results import StepResult
from checkpoints.quantized_default_model import SchemeName
from multilora_engine.lora.format import TORCH_DTYPES

BATCHES = (32, 16, 8, 1)
"""Sequences that decode together."""

MAX_LIMITS = {1: 1.25, 16: 1.5}
"""The goal: a decode step of so many sequences takes at most so many times its limit."""

QUANTIZED: tuple[SchemeName, ...] = ("w8a16", "w4a16")
"""Schemes of the quantised default model that are measured beside the float one."""

IN_BFLOAT16 = " in bfloat16"
"""Behind the names of weights whose engines compute in bfloat16."""

MAX_QUANTIZED_LIMITS = {1: 1.3, 16: 1.6}
"""The same goal with quantised weights."""

LEAST_SPEEDUPS = {("w4a16", 1): 3.0}
"""The goal: how many times as fast as with float32 weights a step of so many sequences is; for all others 1."""

Result = Row | StepResult


def decode_results(
    benches: Mapping[str, Bench], dtype: torch.dtype, rounds: int, context: int, num_steps: int
) -> list[Result]:
    """Step times, their limits, and the parts of a step, by the type that an engine stores its weights in."""
    repeated = RepeatedLimits(dtype)
    seconds: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    parts: defaultdict[tuple[str, int, str], list[float]] = defaultdict(list)
    for _, (weights, bench) in itertools.product(range(rounds), benches.items()):
        for n in BATCHES:
            repeated.measure()
            with bench.batch(n, context):
                bench.step_seconds(WARM_UP_STEPS)
                seconds[weights, n] += bench.step_seconds(num_steps)
                with timed_parts() as stopwatch:
                    bench.step_seconds(num_steps)
            for part in PARTS:
                parts[weights, n, part].append(stopwatch.seconds[part] / num_steps)
    limits = repeated.limits
    results: list[Result] = [
        Row("machine: read bandwidth", limits.bandwidth / 1e9, "GB/s"),
        Row(f"machine: {str(repeated.dtype).removeprefix('torch.')} products", limits.peak / 1e9, "GFLOP/s"),
    ]
    for weights, bench in benches.items():
        stored = weights.removesuffix(IN_BFLOAT16)
        work, max_limits = work_of(bench, stored, dtype), MAX_QUANTIZED_LIMITS if stored in QUANTIZED else MAX_LIMITS
        for n in reversed(BATCHES):
            contexts = [context + WARM_UP_STEPS + num_steps // 2] * n
            limit = work.decode_seconds(contexts, limits)
            results.append(
                StepResult(
                    f"decode {n}, {weights}",
                    statistics.median(seconds[weights, n]),
                    limit,
                    max_seconds=max_limits[n] * limit if n in max_limits else None,
                    parts={part: statistics.median(parts[weights, n, part]) for part in PARTS},
                )
            )
    return results + speedup_rows({key: statistics.median(values) for key, values in seconds.items()})


def bfloat16_results(
    checkpoints: Mapping[str, Path], rounds: int, context: int, num_steps: int, **options: Any
) -> list[Result]:
    """`decode_results` of engines that compute in bfloat16. checkpoints: by the type or scheme of their weights."""
    options |= {"dtype": "bfloat16"}
    benches = {f"{weights}{IN_BFLOAT16}": Bench(path, **options) for weights, path in checkpoints.items()}
    results = decode_results(benches, torch.bfloat16, rounds, context, num_steps)
    for bench in benches.values():
        bench.close()
    return results


def work_of(bench: Bench, weights: str, dtype: torch.dtype) -> Work:
    """The work of an engine that stores its weights as a type of floats, or in a scheme of QUANTIZED."""
    if weights in QUANTIZED:
        return Work(bench.model, dtype, num_weight_bytes=linear_bytes(Path(bench.engine.info.model_path)))
    return Work(bench.model, dtype, TORCH_DTYPES[weights])


def speedup_rows(seconds: Mapping[tuple[str, int], float]) -> list[Row]:
    """Quantised weights against float32 ones. seconds: by weights and number of sequences."""
    return [
        at_least(
            f"decode {n}, {weights} against float32",
            seconds["float32", n] / seconds[weights, n],
            "x",
            LEAST_SPEEDUPS.get((weights, n), 1.0),
        )
        for weights, n in sorted(seconds)
        if weights in QUANTIZED
    ]


def at_least(what: str, value: float, unit: str, goal: float | None) -> Row:
    return Row(what, value, unit) if goal is None else Row(what, value, unit, f">= {goal:g}", value >= goal)
