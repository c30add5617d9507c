"""The real tritonserver's page of the metrics that a model makes and withdraws."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.request import urlopen

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.http import InferenceServerClient, InferInput

from multilora_engine.serving.metrics import LOAD_SECONDS
from multilora_engine.tritonserver import ServerOptions, ServerProcess

MODEL = """
import triton_python_backend_utils as pb_utils

from multilora_engine.serving.metrics import MetricName, Sample, TritonMetrics

INFO = MetricName("adapters_info", "GAUGE", "adapters as labels")
COUNTER = MetricName("adapter_requests_total", "COUNTER", "by adapter")


class TritonPythonModel:
    def initialize(self, args):
        self.metrics, self.count = TritonMetrics(max_withdrawn=0, max_withdrawn_share=0.0), 0

    def execute(self, requests):
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "IN")
            name = tensor.as_numpy()[0].decode()
            self.count += 1
            counts = [("stays", self.count), (name, 1)]
            self.metrics.update([
                Sample(INFO, (("running", name),), 7.0),
                *(Sample(COUNTER, (("adapter", adapter),), count) for adapter, count in counts),
            ])
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", tensor.as_numpy())]) for _ in requests]

    def finalize(self):
        self.metrics.clear()
"""
"""Shows the names that it is sent."""


def metrics_after(repository: Path, model: str, texts: Sequence[str]) -> str:
    """What the metrics port of a server shows after its model was sent some texts, one by one."""
    (repository / "echo" / "1" / "model.py").write_text(model)
    options = ServerOptions(model_repository=repository, http_port=0, grpc_port=0, metrics_port=0)
    with ServerProcess(options, probe=lambda http_url: None) as server:
        server.wait_ready()
        with InferenceServerClient(server.http_url) as client:
            for text in texts:
                tensor = InferInput("IN", [1], "BYTES")
                tensor.set_data_from_numpy(np.array([text.encode()], dtype=object))
                client.infer("echo", [tensor])
        with urlopen(server.metrics_url) as answer:
            shown: str = answer.read().decode()
            return shown


def test_only_the_latest_labels_are_shown_and_counters_go_on(echo_repository: Path) -> None:
    lines = metrics_after(echo_repository, MODEL, ["first", "second", "third"]).splitlines()
    values = (line.rsplit(" ", 1) for line in lines if line.startswith("adapter"))
    assert {name: float(value) for name, value in values} == {
        'adapters_info{running="third"}': 7.0,
        'adapter_requests_total{adapter="stays"}': 3.0,
        'adapter_requests_total{adapter="third"}': 1.0,
    }


LOADS = """
import triton_python_backend_utils as pb_utils

from multilora_engine.histogram import Histogram
from multilora_engine.lora.life_cycle import Residency
from multilora_engine.serving.metrics import LoadSeconds


class TritonPythonModel:
    def initialize(self, args):
        self.metric, self.loads = LoadSeconds(), Histogram()

    def execute(self, requests):
        for request in requests:
            tensor = pb_utils.get_input_tensor_by_name(request, "IN")
            self.loads.observe(float(tensor.as_numpy()[0]))
            self.metric.update(Residency(load_seconds=self.loads.plus(Histogram())))
        return [pb_utils.InferenceResponse([pb_utils.Tensor("OUT", tensor.as_numpy())]) for _ in requests]

    def finalize(self):
        self.metric.clear()
"""
"""Shows a load of each length in seconds that it is sent."""


def test_what_loads_took_is_a_histogram_to_prometheus_own_reader(echo_repository: Path) -> None:
    text = metrics_after(echo_repository, LOADS, ["0.02", "0.3", "400"])
    (family,) = (family for family in text_string_to_metric_families(text) if family.name == LOAD_SECONDS)
    values = {
        (s.name.removeprefix(LOAD_SECONDS), s.labels["transition"], s.labels.get("le")): s.value for s in family.samples
    }
    assert family.type == "histogram"
    assert values["_bucket", "load", "0.025"] == 1
    assert values["_bucket", "load", "0.5"] == 2
    assert values["_bucket", "load", "+Inf"] == values["_count", "load", None] == 3
    assert values["_sum", "load", None] == pytest.approx(400.32)
    assert values["_count", "activate", None] == 0
