"""Every panel and every alert, asked of a real Prometheus that scrapes the real server while requests come in."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from support.monitoring import Alert, Prometheus, Query, alerts, dashboard_queries

from multilora_client import Adapter, AdapterNotFound, Client
from multilora_engine.tritonserver import ServerProcess

NEEDS_WAITS = "Waits for adapters"
"""The mean of nothing while no request waited for its adapter: not a number, and drawn as a gap."""


def send_requests(client: Client, adapter: Adapter) -> None:
    client.generate("The capital of France is", max_tokens=8)
    client.generate("The capital of France is", max_tokens=8, adapter=adapter)
    with pytest.raises(AdapterNotFound):
        client.generate("Who are you?", max_tokens=2, adapter=404_404)


@pytest.fixture(scope="module")
def prometheus(server: ServerProcess, pirate: Adapter) -> Iterator[Prometheus]:
    """It has seen two rounds of requests, so that every counter has moved between scrapes."""
    with Prometheus(server.metrics_url.removeprefix("http://").split("/")[0]) as prometheus:
        with Client(f"grpc://{server.grpc_url}") as client:
            for _ in range(2):
                before = prometheus.value("sum(multilora_requests_total)")
                send_requests(client, pirate)
                prometheus.wait_until(
                    lambda before=before: prometheus.value("sum(multilora_requests_total)") >= before + 3
                )
        yield prometheus


@pytest.mark.parametrize("query", dashboard_queries("1m"), ids=lambda query: f"{query.panel}-{query.legend}")
def test_a_panel_has_data(prometheus: Prometheus, query: Query) -> None:
    vector = prometheus.query(query.expression)
    assert vector
    if query.panel != NEEDS_WAITS:
        assert any(math.isfinite(float(series["value"][1])) for series in vector)


@pytest.mark.parametrize("alert", alerts(), ids=lambda alert: alert.name)
def test_an_alert_asks_for_metrics_that_are_there_and_is_silent(prometheus: Prometheus, alert: Alert) -> None:
    names = set(re.findall(r"multilora_\w+", alert.expression)) or {"up"}
    assert all(prometheus.query(f"count({name})") for name in names)
    assert prometheus.query(alert.expression) == []


def test_the_autoscaler_has_its_metric(prometheus: Prometheus) -> None:
    rules = (Path(__file__).parents[2] / "docker" / "kubernetes" / "prometheus_adapter.yaml").read_text()
    assert prometheus.query(autoscaler_query(rules))


def autoscaler_query(rules: str) -> str:
    (rule,) = yaml.safe_load(rules)["rules"]
    query: str = rule["metricsQuery"]
    return query.replace("<<.GroupBy>>", "instance").replace("<<.LabelMatchers>>", 'job="multilora"')
