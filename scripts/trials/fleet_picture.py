"""Draws which worker answered for which adapter over time, and the events of the fleet meanwhile."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from trials.fleet_judge import Asked, Tally

_BIN_S = 1.0
_MARKS = {"earlier": "^", "wrong": "X", "base": "X", "absent": "v", "unavailable": "s", "unstated": "X"}


def draw(tallies: Sequence[Tally], begun: Mapping[str, float], workers: Mapping[int, str], path: Path) -> None:
    """begun: the time at which each phase began. workers: their names by their numbers in the fleet."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    start = min(begun.values())
    asked = [one for tally in tallies for one in tally.asked]
    figure, (above, below) = pyplot.subplots(2, 1, figsize=(14, 9), sharex=True, height_ratios=(2, 1))
    colors = pyplot.get_cmap("tab10")
    for index, (number, name) in enumerate(workers.items()):
        mine = [one for one in asked if one.worker == number and one.outcome == "right"]
        above.scatter(*_points(mine, start), s=5, color=colors(index), label=name)
    others = [one for one in asked if one.worker is None and one.outcome == "right"]
    above.scatter(*_points(others, start), s=3, color="lightgrey", label="through Triton's front", zorder=0)
    for outcome, marker in _MARKS.items():
        if seen := [one for one in asked if one.outcome == outcome]:
            above.scatter(*_points(seen, start), s=30, color="black", marker=marker, label=f"{outcome}: {len(seen)}")
    seconds = [one.second - start for one in asked]
    bins = np.arange(0, max(seconds) + _BIN_S, _BIN_S)
    series = [[one.second - start for one in asked if one.worker == number] for number in workers]
    series.append([one.second - start for one in asked if one.worker is None])
    shades = [*(colors(index) for index in range(len(workers))), "lightgrey"]
    below.hist(series, bins, stacked=True, color=shades)
    for index, (name, second) in enumerate(begun.items()):
        for axis in (above, below):
            axis.axvline(second - start, color="black", linewidth=0.6, linestyle="--")
        above.text(second - start, 1.01 + 0.035 * (index % 4), name, fontsize=8, transform=above.get_xaxis_transform())
    above.set(ylabel="adapter, the most asked first", ylim=(-1, None))
    below.set(xlabel="seconds", ylabel=f"answers in {_BIN_S:g} s")
    above.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), fontsize=8, markerscale=2)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _points(asked: Sequence[Asked], start: float) -> tuple[list[float], list[int]]:
    return [one.second - start for one in asked], [one.number for one in asked]
