"""A real server under mixed load for as long as you like: does memory stay flat, and is every answer right?

Clients ask the base model and adapters that do not all fit into memory, upload, cancel and send requests that are wrong
(serving_load.py); each call has a deadline, and one that passes it counts as stuck. Meanwhile the anonymous memory of
every process of the server, and what is in /dev/shm, are measured; each gets a straight line fitted by least squares,
after a warm-up. Memory that grows shows as a slope that its error bars cannot explain.

It outlives the terminal it was started from: scripts/soak_serving --minutes 60 > soak.log 2>&1 &
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import numpy as np
import numpy.typing as npt
import psutil
import typer
from inject_faults import Scene, stage
from rich import box
from rich.console import Console
from rich.table import Column, Table
from serving_load import ANSWER_TIMEOUT_S, Tally

from multilora_client import Client, MultiloraClientError

REPOSITORY = Path(__file__).resolve().parents[1]
SHARED_MEMORY = "/dev/shm"

_NUM_STANDARD_ERRORS = 3
_NEGLIGIBLE_SLOPE = 1.0
_NEGLIGIBLE_SHARE = 0.01
"""MiB an hour, and share of its size: what grows by less than the larger of them is flat, however small its error."""

_WARM_UP_SHARE = 0.25
_REPORT_INTERVAL_S = 300.0
_WIDTH = 110
_BAD_REQUESTS: Sequence[Mapping[str, object]] = (
    {"input_ids": [10**6], "max_tokens": 1},
    {"input_ids": [1], "max_tokens": 0},
    {"input_ids": [1], "max_tokens": 1, "adapter": 10**6},
)
"""An id outside the vocabulary, no tokens wanted, an adapter that nobody sent."""


@dataclass(frozen=True)
class Line:
    """A straight line through bytes over seconds. first, last: MiB; slope, error: MiB an hour, its standard error."""

    first: float
    last: float
    slope: float
    error: float

    @property
    def grows(self) -> bool:
        negligible = max(_NEGLIGIBLE_SLOPE, _NEGLIGIBLE_SHARE * self.first)
        return self.slope > max(_NUM_STANDARD_ERRORS * self.error, negligible)


@dataclass(frozen=True)
class Samples:
    """Bytes of each process, and of /dev/shm, at each of `seconds` since the start. dead: who did not see the end."""

    seconds: list[float] = field(default_factory=list)
    num_bytes: dict[str, list[int]] = field(default_factory=dict)
    dead: list[str] = field(default_factory=list)

    def line(self, name: str) -> Line:
        """Fitted to what comes after the warm-up."""
        start = int(len(self.seconds) * _WARM_UP_SHARE)
        return fit(self.seconds[start:], self.num_bytes[name][start:])

    @property
    def growing(self) -> list[str]:
        return [name for name in self.num_bytes if self.line(name).grows]


def fit(seconds: Sequence[float], num_bytes: Sequence[int]) -> Line:
    """Least squares. The error supposes deviations that each resemble the one before, as memory's do."""
    x, y = np.asarray(seconds, float) / 3600, np.asarray(num_bytes, float) / (1 << 20)
    deviations = x - x.mean()
    spread = float(deviations @ deviations) or 1.0  # of one sample there is none
    slope = float(deviations @ y) / spread
    residuals = y - y.mean() - slope * deviations
    error = float(np.sqrt(residuals @ residuals / max(1, len(x) - 2) / spread)) * _dependence(residuals)
    return Line(float(y[0]), float(y[-1]), slope, error)


def _dependence(residuals: npt.NDArray[np.float64]) -> float:
    """What the error of a slope is multiplied by when each deviation is `r` times the one before, plus chance.

    sqrt((1 + r) / (1 - r)): n such deviations tell as much as n (1 - r) / (1 + r) independent ones. At least 1.
    """
    power = float(residuals @ residuals)
    r = float(residuals[1:] @ residuals[:-1]) / power if power else 0.0
    return float(np.sqrt((1 + r) / (1 - r))) if 0 < r < 1 else 1.0


def measure(processes: Mapping[str, psutil.Process], shared_memory: Path) -> dict[str, int]:
    """By role the anonymous memory, which is what leaks; files mapped are shared with whoever else runs here.

    Raises psutil.NoSuchProcess for one that has died.
    """
    sizes = {name: anonymous_bytes(process) for name, process in processes.items()}
    return sizes | {SHARED_MEMORY: sum(file.stat().st_blocks * 512 for file in shared_memory.iterdir())}


def anonymous_bytes(process: psutil.Process) -> int:
    """What is in memory and in no file. Raises psutil.NoSuchProcess."""
    with suppress(OSError):
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) << 10
    raise psutil.NoSuchProcess(process.pid, process.name())


def send_bad_requests(scene: Scene) -> None:
    with Client(f"http://{scene.server.http_url}") as client:
        for request in _BAD_REQUESTS:
            with suppress(MultiloraClientError):
                client.generate(**request, timeout_s=ANSWER_TIMEOUT_S)  # type: ignore[arg-type]
                raise AssertionError(f"{request} was answered")


def soak(scene: Scene, samples: Samples, seconds: float, interval_s: float, say: Callable[[str], None]) -> None:
    """Load and measure into `samples`, until a process dies or the time is up; tell every few minutes.

    Raises what a client raised that is no answer of the server.
    """
    processes = scene.server.processes()
    next_report_s = _REPORT_INTERVAL_S
    with scene.load.running():
        started = time.monotonic()
        while (now := time.monotonic() - started) < seconds:
            try:
                sizes = measure(processes, scene.server.shared_memory)
            except psutil.NoSuchProcess:
                samples.dead.extend(name for name, process in processes.items() if not process.is_running())
                return
            samples.seconds.append(now)
            for name, size in sizes.items():
                samples.num_bytes.setdefault(name, []).append(size)
            send_bad_requests(scene)
            if now > next_report_s:
                say(_progress(now, samples, scene.load.tally))
                next_report_s += _REPORT_INTERVAL_S
            time.sleep(interval_s)
    scene.load.ask_all()


def _progress(now: float, samples: Samples, tally: Tally) -> str:
    total = sum(sizes[-1] for sizes in samples.num_bytes.values()) / (1 << 20)
    counts = f"{tally.seen['right']:,} right, {len(tally.wrong)} wrong, {len(tally.lost)} lost, {tally.stuck} stuck"
    return f"{now / 60:.0f} minutes: {counts}; {total:.0f} MiB"


def render(samples: Samples, tally: Tally) -> list[Table]:
    """The summary, as Markdown."""
    columns = ("after warm-up, MiB", "at the end, MiB", "slope, MiB/h", "standard error", "")
    memory = Table("process", *(Column(name, justify="right") for name in columns), box=box.MARKDOWN)
    for name in samples.num_bytes:
        line = samples.line(name)
        verdict = "GROWS" if line.grows else "flat"
        memory.add_row(
            name, f"{line.first:.1f}", f"{line.last:.1f}", f"{line.slope:+.2f}", f"{line.error:.2f}", verdict
        )
    answers = Table("answers", Column("count", justify="right"), box=box.MARKDOWN)
    for name, count in sorted(tally.seen.items()):
        answers.add_row(name, f"{count:,}")
    for name, count in {"wrong": len(tally.wrong), "lost": len(tally.lost), "stuck": tally.stuck}.items():
        answers.add_row(name, f"{count}")
    return [memory, answers]


def conclude(samples: Samples, tally: Tally, console: Console) -> bool:
    """Print what was seen; whether it is as it must be."""
    for table in render(samples, tally):
        console.print(table)
    complaints = [
        *(f"{name} died" for name in samples.dead),
        *(f"{name} grows" for name in samples.growing),
        *tally.wrong[:5],
        *([f"{len(tally.lost)} adapters are lost"] if tally.lost else []),
        *([f"{tally.stuck} requests were stuck"] if tally.stuck else []),
    ]
    console.print(f"FAILED: {'; '.join(complaints)}" if complaints else "PASSED", markup=False)
    return not complaints


def plot(samples: Samples, path: Path) -> None:
    """Every process over time."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 5))
    for name, sizes in samples.num_bytes.items():
        axes.plot(np.asarray(samples.seconds) / 60, np.asarray(sizes) / (1 << 20), label=name)
    axes.set(xlabel="minutes", ylabel="MiB of anonymous memory", title="multilora under mixed load", ylim=(0, None))
    axes.legend(fontsize="small", ncols=2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main(
    minutes: Annotated[float, typer.Option(help="How long.", min=0.1)] = 60.0,
    clients: Annotated[int, typer.Option(help="Clients at once.", min=1)] = 8,
    interval: Annotated[float, typer.Option(help="Seconds between measurements.", min=0.1)] = 5.0,
    output: Annotated[Path, typer.Option(help="The plot.")] = REPOSITORY / "bench_results" / "soak_serving.png",
    log: Annotated[Path | None, typer.Option(help="Append what the server writes to this file.")] = None,
) -> None:
    """Soak a server. Ends with status 1 for memory that grows, and for an answer that is wrong, lost or stuck."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    console = Console(width=_WIDTH, highlight=False)
    console.print(f"{clients} clients for {minutes:g} minutes; a line every {_REPORT_INTERVAL_S / 60:g}")
    with tempfile.TemporaryDirectory(prefix="multilora-soak-") as name, stage(clients, Path(name), log) as scene:
        samples = Samples()
        try:
            soak(scene, samples, minutes * 60, interval, console.print)
        finally:
            is_right = conclude(samples, scene.load.tally, console)
            plot(samples, output)
    console.print(f"plot: {output}")
    raise typer.Exit(0 if is_right else 1)


if __name__ == "__main__":
    typer.run(main)
