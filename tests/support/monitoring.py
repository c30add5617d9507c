"""Runs Prometheus over a server with the setup of docker/prometheus, and reads the queries of dashboard and alerts."""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPException
from pathlib import Path
from typing import Any, Self

import yaml

from multilora_engine.process.liveness import wait_for_end
from repository import REPOSITORY

SETTINGS = REPOSITORY / "docker" / "prometheus"
DASHBOARD = REPOSITORY / "docker" / "grafana" / "dashboards" / "multilora.json"

_TIMEOUT_S = 60.0
_POLL_S = 0.2
_SCRAPE_INTERVAL = "1s"


@dataclass(frozen=True)
class Query:
    """One line of a panel: its expression with Grafana's variables filled in, and the template of its legend."""

    panel: str
    unit: str
    expression: str
    legend: str


@dataclass(frozen=True)
class Alert:
    """One alert rule."""

    name: str
    expression: str


def dashboard_queries(rate_interval: str) -> list[Query]:
    """Every line of every panel, for all instances. rate_interval: a few scrape intervals, like `20s`."""
    return [
        Query(
            panel["title"],
            panel["fieldConfig"]["defaults"]["unit"],
            _filled(line["expr"], rate_interval),
            line["legendFormat"],
        )
        for panel in json.loads(DASHBOARD.read_text())["panels"]
        for line in panel.get("targets", [])
    ]


def alerts() -> list[Alert]:
    groups = yaml.safe_load((SETTINGS / "alerts.yml").read_text())["groups"]
    return [Alert(rule["alert"], rule["expr"]) for group in groups for rule in group["rules"]]


class Prometheus:
    """Debian's Prometheus, scraping one server every second with our rules. Needs `scripts/deployment/prometheus`."""

    def __init__(self, metrics_address: str) -> None:
        self._metrics_address = metrics_address
        self._resources = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as resources:
            folder = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="multilora-prometheus-")))
            address = f"127.0.0.1:{_free_port()}"
            self._api = f"http://{address}/api/v1"
            command: list[Path | str] = [
                REPOSITORY / "scripts" / "deployment" / "prometheus",
                f"--config.file={self._write_settings(folder)}",
                f"--storage.tsdb.path={folder / 'data'}",
                f"--web.listen-address={address}",
                "--log.level=error",
            ]
            self._process = subprocess.Popen(command)
            resources.callback(self._process.wait)
            resources.callback(self._process.terminate)
            self._resources = resources.pop_all()
        self.wait_until(lambda: bool(self.query("up == 1")))
        return self

    def __exit__(self, *_: object) -> None:
        self._resources.close()

    def query(self, expression: str) -> list[dict[str, Any]]:
        """The vector that `expression` has now. Raises ValueError when Prometheus refuses it."""
        return self._get("query", query=expression)

    def query_range(self, expression: str, start: float, end: float) -> list[dict[str, Any]]:
        """The series of `expression` between two times, a point a second."""
        return self._get("query_range", query=expression, start=str(start), end=str(end), step="1")

    def value(self, expression: str) -> float:
        """The one number that `expression` has now; 0 if there is none yet."""
        vector = self.query(expression)
        return float(vector[0]["value"][1]) if vector else 0.0

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds. Raises TimeoutError, and ChildProcessError if Prometheus ends meanwhile."""
        deadline = time.monotonic() + _TIMEOUT_S
        while not self._holds(condition):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not within {_TIMEOUT_S:.0f} s")
            if wait_for_end(self._process.pid, _POLL_S):
                raise ChildProcessError(f"Prometheus ended with status {self._process.wait()}")

    def _holds(self, condition: Callable[[], bool]) -> bool:
        try:
            return condition()
        except (urllib.error.URLError, HTTPException):
            return False  # it has not started

    def _get(self, path: str, **parameters: str) -> list[dict[str, Any]]:
        url = f"{self._api}/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
                result: list[dict[str, Any]] = json.load(response)["data"]["result"]
        except urllib.error.HTTPError as error:
            if error.code == HTTPStatus.SERVICE_UNAVAILABLE:
                raise  # it listens, and is not ready
            raise ValueError(f"{parameters['query']}: {json.load(error)['error']}") from None
        return result

    def _write_settings(self, folder: Path) -> Path:
        settings = yaml.safe_load((SETTINGS / "prometheus.yml").read_text())
        settings["global"] = {"scrape_interval": _SCRAPE_INTERVAL, "evaluation_interval": _SCRAPE_INTERVAL}
        settings["rule_files"] = [str(SETTINGS / name) for name in settings["rule_files"]]
        settings["scrape_configs"][0]["static_configs"][0]["targets"] = [self._metrics_address]
        path = folder / "prometheus.yml"
        path.write_text(yaml.safe_dump(settings))
        return path


def legend_of(series: dict[str, Any], template: str) -> str:
    """A legend such as `{{tier}}`, for one series."""
    for name, value in series["metric"].items():
        template = template.replace("{{" + name + "}}", value)
    return template


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port: int = probe.getsockname()[1]
        return port


def _filled(expression: str, rate_interval: str) -> str:
    return expression.replace("$__rate_interval", rate_interval).replace("$instance", ".*")


def panels(queries: list[Query]) -> Iterator[tuple[str, list[Query]]]:
    """Queries by panel, in the dashboard's order."""
    for title in dict.fromkeys(query.panel for query in queries):
        yield title, [query for query in queries if query.panel == title]
