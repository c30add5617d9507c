"""A real server under mixed load for as long as you like: does memory stay flat, and is every answer right?

Clients ask the base model and adapters that do not all fit into memory, upload, cancel and send requests that are wrong
(serving_load.py). Meanwhile the proportional set size of every process of the server, and what is in /dev/shm, are
measured; each gets a straight line fitted by least squares, after a warm-up. Memory that grows shows as a slope that
its error bars cannot explain.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer
from inject_faults import Scene, stage
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table
from serving_load import Tally

from multilora_client import Client, MultiloraClientError

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED_MEMORY = "/dev/shm"

_NUM_STANDARD_ERRORS = 3
_WARM_UP_SHARE = 0.25
_BAD_REQUESTS: Sequence[Mapping[str, object]] = (
    {"input_ids": [10**6], "max_tokens": 1},
    {"input_ids": [1], "max_tokens": 0},
    {"input_ids": [1], "max_tokens": 1, "adapter": 10**6},
)
"""An id outside the vocabulary, no tokens wanted, an adapter that nobody sent."""


@dataclass(frozen=True)
class Line:
    """A straight line through bytes over seconds. slope, error: MiB an hour, and its standard error."""

    first: float
    last: float
    slope: float
    error: float

    @property
    def grows(self) -> bool:
        return self.slope > _NUM_STANDARD_ERRORS * self.error


@dataclass(frozen=True)
class Samples:
    """Bytes of each process, and of /dev/shm, at each of `seconds` since the start."""

    seconds: list[float]
    num_bytes: dict[str, list[int]]

    def line(self, name: str) -> Line:
        """Fitted to what comes after the warm-up."""
        start = int(len(self.seconds) * _WARM_UP_SHARE)
        return fit(self.seconds[start:], self.num_bytes[name][start:])


def fit(seconds: Sequence[float], num_bytes: Sequence[int]) -> Line:
    """Least squares; the error supposes that deviations are independent, and is zero for a constant."""
    x, y = np.asarray(seconds, float) / 3600, np.asarray(num_bytes, float) / (1 << 20)
    deviations = x - x.mean()
    spread = float(deviations @ deviations)
    slope = float(deviations @ y) / spread
    residuals = y - y.mean() - slope * deviations
    error = float(np.sqrt(residuals @ residuals / max(1, len(x) - 2) / spread))
    return Line(float(y[0]), float(y[-1]), slope, error)


def measure(scene: Scene) -> dict[str, int]:
    """Proportional set sizes by role; shared pages count in parts, so that the sum is what the server takes."""
    sizes = {name: process.memory_full_info().pss for name, process in scene.server.processes().items()}
    files = scene.server.shared_memory.iterdir()
    return sizes | {SHARED_MEMORY: sum(file.stat().st_blocks * 512 for file in files)}


def send_bad_requests(scene: Scene) -> None:
    with Client(f"http://{scene.server.http_url}") as client:
        for request in _BAD_REQUESTS:
            with suppress(MultiloraClientError):
                client.generate(**request)  # type: ignore[arg-type]
                raise AssertionError(f"{request} was answered")


def soak(scene: Scene, seconds: float, interval_s: float, progress: Progress) -> tuple[Samples, Tally]:
    """Load and measure. Raises what a client raised that is no answer of the server, and psutil.Error for a death."""
    task = progress.add_task("soaking", total=seconds)
    samples = Samples([], {})
    with scene.load.running():
        started = time.monotonic()
        while (now := time.monotonic() - started) < seconds:
            samples.seconds.append(now)
            for name, size in measure(scene).items():
                samples.num_bytes.setdefault(name, []).append(size)
            send_bad_requests(scene)
            progress.update(task, completed=now)
            time.sleep(interval_s)
    scene.load.ask_all()
    return samples, scene.load.new_tally()


def render(samples: Samples, tally: Tally) -> list[Table]:
    memory = Table(
        "process",
        *(Column(name, justify="right") for name in ("first, MiB", "last, MiB", "slope, MiB/h", "± standard error")),
        title=f"Memory after warm-up, {samples.seconds[-1] / 60:.1f} minutes in all",
    )
    for name in samples.num_bytes:
        line = samples.line(name)
        memory.add_row(name, f"{line.first:.1f}", f"{line.last:.1f}", f"{line.slope:+.1f}", f"{line.error:.1f}")
    answers = Table("answers", Column("count", justify="right"))
    for name, count in sorted(tally.seen.items()):
        answers.add_row(name, f"{count:,}")
    for name, count in {"WRONG": len(tally.wrong), "lost": len(tally.lost), "stuck": tally.stuck}.items():
        answers.add_row(name, f"{count}")
    return [memory, answers]


def plot(samples: Samples, path: Path) -> None:
    """Every process over time, each from its own first value after the warm-up."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5))
    for name, sizes in samples.num_bytes.items():
        axes.plot(np.asarray(samples.seconds) / 60, np.asarray(sizes) / (1 << 20), label=name)
    axes.set(xlabel="minutes", ylabel="MiB (proportional set size)", title="multilora under mixed load", ylim=(0, None))
    axes.legend(fontsize="small", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main(
    minutes: Annotated[float, typer.Option(help="How long.", min=0.1)] = 60.0,
    clients: Annotated[int, typer.Option(help="Clients at once.", min=1)] = 8,
    interval: Annotated[float, typer.Option(help="Seconds between measurements.", min=0.1)] = 2.0,
    output: Annotated[Path, typer.Option(help="The plot.")] = REPOSITORY / "bench_results" / "soak_serving.png",
) -> None:
    """Soak a server. Ends with status 1 for an answer that is wrong, lost or stuck; judge the slopes yourself."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    console = Console()
    with (
        tempfile.TemporaryDirectory(prefix="multilora-soak-") as directory,
        Progress(console=console, transient=True) as progress,
        stage(clients, Path(directory)) as scene,
    ):
        samples, tally = soak(scene, minutes * 60, interval, progress)
    plot(samples, output)
    for table in render(samples, tally):
        console.print(table)
    growing = [name for name in samples.num_bytes if samples.line(name).grows]
    console.print(
        f"slopes beyond {_NUM_STANDARD_ERRORS} standard errors: {', '.join(growing) or 'none'}; plot: {output}"
    )
    raise typer.Exit(1 if tally.wrong or tally.lost or tally.stuck else 0)


if __name__ == "__main__":
    typer.run(main)
