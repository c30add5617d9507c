"""Draws the Grafana dashboard's panels from real data: a server, clients with the sample adapters, and Prometheus.

Grafana itself is not needed: every panel's expressions go to Prometheus as Grafana would send them, and matplotlib
draws the results.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Annotated, Any

import matplotlib
import typer
from matplotlib import pyplot
from rich.console import Console
from rich.progress import Progress

from checkpoints.prepare_default_model import ensure_default_checkpoint
from deployment.monitoring import Prometheus, Query, dashboard_queries, legend_of, panels
from multilora_client import Adapter, AdapterNotFound, Client, load_adapter
from repository import REPOSITORY
from servers.started_server import started_server
from training.sample_adapters import SAMPLE_ADAPTERS

_RATE_INTERVAL = "10s"
_NUM_COLUMNS = 4
_PROMPTS = ("The capital of France is", "Once upon a time", "Bees make", "What is the largest ocean on Earth?")

console = Console(highlight=False)


def main(
    seconds: Annotated[float, typer.Option(min=15, help="How long clients ask.")] = 90.0,
    clients: Annotated[int, typer.Option(min=1, help="Clients at once.")] = 6,
    output: Annotated[Path, typer.Option(help="The picture.")] = REPOSITORY / "bench_results" / "dashboard.png",
) -> None:
    """Serve, ask, scrape, and draw the panels."""
    with started_server(ensure_default_checkpoint(), console) as server:
        console.print("the server is ready")
        with Prometheus(server.metrics_url.removeprefix("http://").split("/")[0]) as prometheus:
            start = time.time()
            with _load(server.grpc_url, clients):
                _wait(seconds)
            _draw(prometheus, start, time.time(), output)
    console.print(f"drawn: {output}")


@contextmanager
def _load(url: str, num_clients: int) -> Iterator[None]:
    adapters = [load_adapter(sample.directory) for sample in SAMPLE_ADAPTERS.values()]
    end = threading.Event()
    with ThreadPoolExecutor(num_clients) as pool:
        asking = [pool.submit(_ask, url, adapters, end, Random(i)) for i in range(num_clients)]
        try:
            yield
        finally:
            end.set()
        for client in asking:
            client.result()


def _ask(url: str, adapters: Sequence[Adapter], end: threading.Event, random: Random) -> None:
    """Ask the base model, the adapters, and now and then an adapter that does not exist."""
    with Client(f"grpc://{url}") as client:
        while not end.is_set():
            prompt, max_tokens = random.choice(_PROMPTS), random.randrange(4, 48)
            client.generate(prompt, max_tokens=max_tokens, adapter=random.choice([None, *adapters]))
            if random.random() < 0.1:
                with suppress(AdapterNotFound):
                    client.generate(prompt, max_tokens=1, adapter=404)


def _wait(seconds: float) -> None:
    with Progress(console=console) as progress:
        task = progress.add_task("clients ask", total=seconds)
        while not progress.finished:
            time.sleep(1)
            progress.advance(task)


def _draw(prometheus: Prometheus, start: float, end: float, output: Path) -> None:
    matplotlib.use("agg")
    everything = list(panels(dashboard_queries(_RATE_INTERVAL)))
    num_rows = -(-len(everything) // _NUM_COLUMNS)
    figure, axes = pyplot.subplots(
        num_rows, _NUM_COLUMNS, figsize=(5 * _NUM_COLUMNS, 3 * num_rows), layout="constrained"
    )
    for axis, (title, queries) in zip(axes.flat, everything, strict=False):
        _draw_panel(axis, title, queries, prometheus, start, end)
    for axis in axes.flat[len(everything) :]:
        axis.axis("off")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=80)


def _draw_panel(
    axis: Any, title: str, queries: Sequence[Query], prometheus: Prometheus, start: float, end: float
) -> None:
    for query in queries:
        for series in prometheus.query_range(query.expression, start, end):
            points = [(float(at) - start, float(value)) for at, value in series["values"]]
            axis.plot(*zip(*points, strict=True), label=legend_of(series, query.legend))
    axis.set_title(f"{title} ({queries[0].unit})", fontsize=10)
    axis.set_ylim(bottom=0)
    if axis.has_data():
        axis.legend(fontsize=7)
