"""A picture of a load. Imports matplotlib, which the extra `bench` brings, only when it draws."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from multilora_client.bench.report import Stage, summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot(stages: Sequence[Stage], knee: float | None, path: Path) -> None:
    """How the times of every stage are distributed; of several stages also p50 and p99 over the load."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    num_rows = 2 if len(stages) > 1 else 1
    figure, axes = pyplot.subplots(num_rows, 3, figsize=(13, 4 * num_rows), squeeze=False)
    _plot_distributions(stages, axes[0])
    if num_rows == 2:
        _plot_percentiles(stages, knee, axes[1])
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _plot_distributions(stages: Sequence[Stage], axes: Sequence[Axes]) -> None:
    for stage in stages:
        answered = [sample for sample in stage.samples if sample.is_answered]
        measured = (
            [sample.first_token_s for sample in answered],
            [gap for sample in answered for gap in sample.gaps_s],
            [sample.latency_s for sample in answered],
        )
        for axis, seconds in zip(axes, measured, strict=True):
            axis.step(np.sort(seconds) * 1e3, np.linspace(0, 100, len(seconds)), label=str(stage.load))
    for axis, title in zip(axes, ("to the first token", "between tokens", "whole request"), strict=True):
        axis.set(xlabel=f"{title}, ms", ylabel="% of them are faster", xlim=(0, None))
        axis.grid(alpha=0.3)
    axes[0].legend()


def _plot_percentiles(stages: Sequence[Stage], knee: float | None, axes: Sequence[Axes]) -> None:
    summaries = [summarise(stage.samples) for stage in stages]
    loads = [stage.load.level for stage in stages]
    for name in ("p50", "p99"):
        axes[0].plot(loads, [getattr(summary.first_token, name) * 1e3 for summary in summaries], "o-", label=name)
        axes[1].plot(loads, [getattr(summary.gap, name) * 1e3 for summary in summaries], "o-", label=name)
    axes[2].plot(loads, [summary.tokens_per_s for summary in summaries], "o-", label="all requests")
    for axis, title in zip(axes, ("to the first token, ms", "between tokens, ms", "answer tokens/s"), strict=True):
        if knee is not None:
            axis.axvline(knee, color="grey", linestyle="--", label="knee")
        axis.set(
            xlabel="requests a second" if stages[0].load.is_open else "requests at once", ylabel=title, ylim=(0, None)
        )
        axis.grid(alpha=0.3)
        axis.legend()
