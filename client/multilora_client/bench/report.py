"""The results of a load: percentiles, the knee, answers that differ; as a table and as CSV."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from multilora_client.bench.load import Load, Sample

KNEE_FACTOR = 3.0
"""How many times as long as at the lowest rate 90 % of the first tokens may take where a server still keeps up."""

CSV_COLUMNS = (
    "load",
    "lora_task_id",
    "adapter",
    "due_s",
    "send_delay_s",
    "first_token_s",
    "latency_s",
    "longest_gap_s",
    "input_tokens",
    "output_tokens",
    "error",
)


@dataclass(frozen=True)
class StepCounts:
    """Sums over the server's steps that gave tokens, since it started: of their requests, and of the different adapters
    of these. None are known of a server that does not tell."""

    steps: int = 0
    requests: float = 0.0
    adapters: float = 0.0

    @classmethod
    def of(cls, stats: Mapping[str, Any]) -> StepCounts:
        """stats: as of `AsyncClient.adapter_stats`."""
        try:
            size, adapters = (stats["load"]["requests"][name] for name in ("batch_size", "batch_adapters"))
            return cls(sum(size["counts"]), float(size["total"]), float(adapters["total"]))
        except (KeyError, TypeError):
            return cls()

    def since(self, earlier: StepCounts) -> StepCounts:
        """The steps after `earlier`; none if the engine was started again meanwhile."""
        if self.steps < earlier.steps:
            return StepCounts()
        return StepCounts(
            self.steps - earlier.steps, self.requests - earlier.requests, self.adapters - earlier.adapters
        )


@dataclass(frozen=True)
class Stage:
    """One load, the results of its requests, at least one, and the server's steps meanwhile."""

    load: Load
    samples: Sequence[Sample]
    steps: StepCounts = StepCounts()


@dataclass(frozen=True)
class Percentiles:
    """Percentiles in seconds, NaN where nothing was measured."""

    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Percentiles:
        measured = np.fromiter(values, np.float64)
        if not measured.size:
            return cls(np.nan, np.nan, np.nan)
        return cls(*(float(value) for value in np.percentile(measured, (50, 90, 99))))


@dataclass(frozen=True)
class Summary:
    """A stage in numbers. Times count only requests that were answered to the end.

    seconds: from the first request that was due to the last end. gap: between the pieces of an answer, a token each
    unless the server or this client lags. send_delay: how late this client was itself; all other times include it.
    """

    num_requests: int
    num_adapters: int
    errors: Counter[str]
    seconds: float
    num_input_tokens: int
    num_output_tokens: int
    first_token: Percentiles
    gap: Percentiles
    latency: Percentiles
    send_delay: Percentiles

    @property
    def requests_per_s(self) -> float:
        return (self.num_requests - self.errors.total()) / self.seconds

    @property
    def tokens_per_s(self) -> float:
        return self.num_output_tokens / self.seconds


def summarise(samples: Sequence[Sample]) -> Summary:
    """The numbers of a stage. samples: at least one."""
    answered = [sample for sample in samples if sample.is_answered]
    return Summary(
        num_requests=len(samples),
        num_adapters=len({sample.job.target.lora_task_id for sample in samples} - {None}),
        errors=Counter(sample.error for sample in samples if not sample.is_answered),
        seconds=max(sample.done_s for sample in samples) - min(sample.due_s for sample in samples),
        num_input_tokens=sum(sample.num_input_tokens for sample in answered),
        num_output_tokens=sum(sample.num_output_tokens for sample in answered),
        first_token=Percentiles.of(sample.first_token_s for sample in answered),
        gap=Percentiles.of(gap for sample in answered for gap in sample.gaps_s),
        latency=Percentiles.of(sample.latency_s for sample in answered),
        send_delay=Percentiles.of(sample.send_delay_s for sample in samples),
    )


def find_knee(stages: Sequence[Stage]) -> float | None:
    """The highest rate up to which the server keeps up, 0 if it never does; None if the knee lies beyond all rates.

    The server keeps up while every request is answered and 90 % of the first tokens come within KNEE_FACTOR times
    their time at the lowest rate, which has to be a light load. Behind the knee requests wait for each other, and the
    longer the load lasts, the longer they wait.
    """
    stages = sorted(stages, key=lambda stage: stage.load.level)
    limit = KNEE_FACTOR * summarise(stages[0].samples).first_token.p90
    knee = 0.0
    for stage in stages:
        summary = summarise(stage.samples)
        if summary.errors or not summary.first_token.p90 <= limit:
            return knee
        knee = stage.load.level
    return None


def describe_knee(stages: Sequence[Stage], knee: float | None) -> str:
    """The knee in one sentence. stages: the stages of an open loop."""
    highest = max(stage.load.level for stage in stages)
    if knee is None:
        return f"no knee: the server keeps up at {highest:g} requests/s"
    if not knee:
        return "no knee: requests fail at the lowest rate"
    return f"knee: the server keeps up at {knee:g} requests/s, and no longer at the next higher rate"


def different_answers(samples: Iterable[Sample]) -> list[tuple[Sample, Sample]]:
    """Whole answers that differ from the first one of the same weights to the same prompt: (first, other)."""
    first: dict[tuple[str, str], Sample] = {}
    different = []
    for sample in samples:
        if sample.is_answered:
            expected = first.setdefault((sample.job.prompt, sample.job.target.content), sample)
            if expected.text != sample.text:
                different.append((expected, sample))
    return different


def render(stages: Sequence[Stage]) -> Table:
    """A table with a column for each stage."""
    table = Table("", *(str(stage.load) for stage in stages))
    for column in table.columns[1:]:
        column.justify = "right"
    summaries = [summarise(stage.samples) for stage in stages]
    for label, describe in _LINES:
        table.add_row(label, *map(describe, summaries))
    table.add_row("requests / adapters of a step", *(_of_a_step(stage.steps) for stage in stages))
    return table


def _of_a_step(steps: StepCounts) -> str:
    if not steps.steps:
        return "-"
    return f"{steps.requests / steps.steps:.1f} / {steps.adapters / steps.steps:.1f}"


def write_csv(stages: Sequence[Stage], path: Path) -> None:
    """Write a line for each request; values that it never reached are empty."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(CSV_COLUMNS)
        for stage in stages:
            start_s = min(sample.due_s for sample in stage.samples)
            writer.writerows(_csv_row(stage, sample, start_s) for sample in stage.samples)


def _csv_row(stage: Stage, sample: Sample, start_s: float) -> list[object]:
    target = sample.job.target
    return [
        str(stage.load),
        "" if target.lora_task_id is None else target.lora_task_id,
        target.content,
        f"{sample.due_s - start_s:.6f}",
        f"{sample.send_delay_s:.6f}",
        f"{sample.first_token_s:.6f}" if sample.piece_times_s else "",
        f"{sample.latency_s:.6f}",
        f"{max(sample.gaps_s):.6f}" if sample.gaps_s else "",
        sample.num_input_tokens,
        sample.num_output_tokens,
        sample.error,
    ]


def _milliseconds(times: Percentiles) -> str:
    if np.isnan(times.p50):
        return "-"
    return " / ".join(f"{seconds * 1e3:,.0f}" for seconds in (times.p50, times.p90, times.p99))


def _errors(summary: Summary) -> str:
    return ", ".join(f"{count} {code}" for code, count in summary.errors.most_common()) or "0"


_LINES: tuple[tuple[str, Callable[[Summary], str]], ...] = (
    ("requests", lambda summary: str(summary.num_requests)),
    ("adapters asked", lambda summary: str(summary.num_adapters)),
    ("errors", _errors),
    ("prompt tokens", lambda summary: str(summary.num_input_tokens)),
    ("answer tokens", lambda summary: str(summary.num_output_tokens)),
    ("requests/s", lambda summary: f"{summary.requests_per_s:.2f}"),
    ("answer tokens/s", lambda summary: f"{summary.tokens_per_s:.1f}"),
    ("first token, ms, p50 / p90 / p99", lambda summary: _milliseconds(summary.first_token)),
    ("between tokens, ms", lambda summary: _milliseconds(summary.gap)),
    ("whole request, ms", lambda summary: _milliseconds(summary.latency)),
    ("sent late by, ms", lambda summary: _milliseconds(summary.send_delay)),
)
