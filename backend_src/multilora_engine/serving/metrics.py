"""`MetricsPublisher`: the engine's counts of requests and adapters, on the server's metrics port.

Every change of a metric is a round trip to the server, so they are made once a second, by a thread of their own, and
only where a value has changed: a request never waits for them.

Gateways that route by adapter read some of them, by names that their configuration gives: they know vLLM's by default,
which differ by the prefix `vllm:` in the place of `multilora_`.
- The Gateway API inference extension, and the `lora-affinity-scorer` of llm-d-router, which has taken over its endpoint
  picker: `lora_requests_info`, for adapters that requests use now.
- The `lora-load-state-scorer` and `lora-residency-filter` of llm-d-router: `lora_adapter_loaded` (`loraLoadedSpec`; a
  series at 0 counts as absent), `num_gpu_loaded_lora_adapters` (`loraGPULoadedSpec`), `max_gpu_lora_adapters`
  (`loraGPUSlotsSpec`) and the histogram `lora_adapter_load_seconds`, for adapters in memory, used or not.
- All their scorers of load: `requests_waiting`, `requests_running`, `kv_cache_usage_ratio`.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Set
from dataclasses import asdict, dataclass
from itertools import accumulate
from typing import Any, Literal

import msgspec

from multilora_engine.engine.engine_stats import AdaptersInUse, EngineStats
from multilora_engine.histogram import SECONDS, Histogram
from multilora_engine.lora.life_cycle import Residency
from multilora_engine.process.client import EngineClient
from multilora_engine.process.operations import ReadStats, StatsReport
from multilora_engine.process.telemetry import RequestStats
from multilora_engine.request import TokenOutput
from multilora_engine.serving.triton_api import backend_utils

LOAD_SECONDS = "multilora_lora_adapter_load_seconds"
LOAD_SECONDS_MEANING = "Seconds to load an adapter into host memory, or to activate it: from there to the device"


@dataclass
class _LoadSeries:
    """One metric of the server's, and the observations it has been told."""

    handle: Any
    told: Histogram


class LoadSeconds:
    """A histogram of the server's own kind, with the label `transition`: gateways read no other. For one thread.

    The server takes single observations: it gets some that make the same histogram.
    """

    def __init__(self) -> None:
        pb = backend_utils()
        family = pb.MetricFamily(name=LOAD_SECONDS, description=LOAD_SECONDS_MEANING, kind=pb.MetricFamily.HISTOGRAM)
        self._family = family
        self._series = {
            transition: _LoadSeries(
                family.Metric(labels={"transition": transition}, buckets=list(SECONDS)), Histogram()
            )
            for transition in ("load", "activate")
        }

    def update(self, residency: Residency) -> None:
        """Tell of the loads since the last time."""
        self._observe(self._series["load"], residency.load_seconds)
        self._observe(self._series["activate"], residency.activate_seconds)

    def clear(self) -> None:
        """Remove the histogram."""
        self._series.clear()
        self._family = None

    @staticmethod
    def _observe(series: _LoadSeries, latest: Histogram) -> None:
        for seconds in latest.since(series.told).observations():
            series.handle.observe(seconds)
        series.told = latest


_INTERVAL_S = 1.0
_BOOT_S = time.time() - time.monotonic()
"""When the monotonic clock was zero, by the wall clock as it is at the start: together, a time that is never set."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class MetricName:
    """A family of metrics as Prometheus knows it."""

    name: str
    kind: Literal["COUNTER", "GAUGE"]
    description: str


@dataclass(frozen=True)
class Sample:
    """The value of one metric of a family at one moment, a counter's since the engine started."""

    metric: MetricName
    labels: tuple[tuple[str, str], ...]
    value: float


def _gauge(name: str, description: str) -> MetricName:
    return MetricName(f"multilora_{name}", "GAUGE", description)


def _counter(name: str, description: str) -> MetricName:
    return MetricName(f"multilora_{name}_total", "COUNTER", description)


TIER_METRICS: Mapping[str, MetricName] = {
    "bytes_used": _gauge("lora_tier_used_bytes", "Bytes of adapters in a tier"),
    "bytes_total": _gauge("lora_tier_size_bytes", "Bytes a tier may hold"),
    "num_adapters": _gauge("lora_tier_adapters", "Adapters in a tier"),
    "hits": _counter("lora_tier_hits", "Requests that found their adapter in a tier"),
    "misses": _counter("lora_tier_misses", "Requests that did not find their adapter in a tier"),
    "evictions": _counter("lora_tier_evictions", "Adapters that a tier dropped to make room"),
    "copies": _counter("lora_tier_copies", "Adapters copied into a tier"),
    "copy_seconds": _counter("lora_tier_copy_seconds", "Seconds spent on copies into a tier"),
    "failures": _counter("lora_tier_failures", "Adapters that could not be written, read, copied or fetched"),
}
"""The metrics by field of `TierStats`, with the label `tier`."""

ENGINE_METRICS: Mapping[str, MetricName] = {
    "insertions": _counter("lora_insertions", "Adapters that came in"),
    "replacements": _counter("lora_replacements", "Adapters that took the task id of another version"),
    "waits": _counter("lora_waits", "Times that a request waited for its adapter"),
    "wait_seconds": _counter("lora_wait_seconds", "Seconds that requests waited for their adapters"),
}
"""The metrics by field of `LoRAStats`, without labels."""

USAGE_METRICS: Mapping[str, MetricName] = {
    "requests": _counter("lora_requests", "Requests that ended, by adapter"),
    "prompt_tokens": _counter("lora_prompt_tokens", "Tokens of prompts, by adapter"),
    "output_tokens": _counter("lora_output_tokens", "Generated tokens, by adapter"),
}
"""The metrics by field of `Usage`. The label `lora_task_id` is a number, or TENANT@NUMBER for a tenant's adapter, or
`other` for the adapters without metrics of their own."""

CLIENT_METRICS: Mapping[str, MetricName] = {
    "requests": _counter("client_requests", "Requests that ended, by tenant or client"),
    "prompt_tokens": _counter("client_prompt_tokens", "Tokens of prompts, by tenant or client"),
    "output_tokens": _counter("client_output_tokens", "Generated tokens, by tenant or client"),
}
"""By field of `Usage`, with the label `client`: the tenant of the API key, or the client that a proxy names, as many as
there are adapters with metrics of their own; empty for the rest of them."""


REQUESTS = _counter("requests", "Requests that ended, by finish reason or error code")
PROMPT_TOKENS = _counter("prompt_tokens", "Tokens of prompts")
OUTPUT_TOKENS = _counter("output_tokens", "Generated tokens")
REQUESTS_RUNNING = _gauge("requests_running", "Requests that take part in steps")
REQUESTS_WAITING = _gauge("requests_waiting", "Requests that wait for their first step")
KV_CACHE_BLOCKS = _gauge("kv_cache_blocks", "Blocks of the KV cache")
WEIGHT_BYTES = _gauge("weight_bytes", "Bytes of linears and embeddings as they were loaded")
UNPACKED_WEIGHT_BYTES = _gauge("unpacked_weight_bytes", "Bytes of floats that are kept beside quantised weights")
CUDA_GRAPHS = _gauge("cuda_graphs", "Sizes of steps that are replayed as CUDA graphs, 0 where none is")
KV_CACHE_BYTES = _gauge("kv_cache_bytes", "Bytes of the KV cache")
KV_CACHE_USAGE = _gauge("kv_cache_usage_ratio", "Share of the KV cache that requests in flight hold")
PREEMPTIONS = _counter("preemptions", "Times that a request lost its KV cache to others and had to start again")
STEP_TARGET = _gauge("step_target_seconds", "How long a step with running answers and prompts may take")
LIMITED_STEPS = _counter("limited_steps", "Steps that had no time for further tokens of prompts")
TURNS = _counter("turns", "Steps in which the answers of a client over its share took turns")
PROMPT_WAIT = _gauge("longest_prompt_wait_seconds", "The time that a prompt which is not computed has waited, at most")
LATE_PROMPTS = _counter("late_prompts", "Prompts that waited longer than 10 s")
PREFIX_QUERIED = _counter("prefix_cache_queried_tokens", "Tokens of requests looked up in the prefix cache")
PREFIX_HITS = _counter("prefix_cache_hit_tokens", "Tokens whose keys and values the prefix cache had")
PREFIX_BASE_HITS = _counter(
    "prefix_cache_base_hit_tokens", "Tokens of requests with an adapter whose keys and values were the base model's"
)
ENGINE_RESTARTS = _counter("engine_restarts", "Times that the engine process died or hung and was started again")
LORA_REQUESTS_INFO = _gauge(
    "lora_requests_info", "Adapters in use, as gateways read them; the value is the time: the largest is the latest"
)
"""Metrics in the shape that the Gateway API inference extension reads: adapters as comma-separated labels."""

LORA_ADAPTER_LOADED = _gauge("lora_adapter_loaded", "1 for an adapter in memory, by the fastest level that has it")
"""Metrics of adapters on the device and of the latest used in host memory, as many in all as `AdapterUsage` counts."""

NUM_GPU_LOADED = _gauge("num_gpu_loaded_lora_adapters", "Adapters on the device")
NUM_CPU_LOADED = _gauge("num_cpu_loaded_lora_adapters", "Adapters in host memory, where those of the device are, too")
MAX_GPU_ADAPTERS = _gauge("max_gpu_lora_adapters", "Distinct adapters that a step can use (max_loras)")
"""Gateways compare the number on the device with it; more than so many may be there. Host memory has no such maximum:
it is bounded by bytes, `multilora_lora_tier_size_bytes`."""

HISTOGRAMS: Mapping[str, tuple[str, str]] = {
    "queue_seconds": ("queue_seconds", "Seconds from a request's arrival to its first step"),
    "first_token_seconds": ("time_to_first_token_seconds", "Seconds from a request's arrival to its first token"),
    "inter_token_seconds": ("inter_token_seconds", "Seconds between tokens of a request"),
    "request_seconds": ("request_seconds", "Seconds from a request's arrival to its end"),
    "batch_size": ("batch_size", "Requests that got tokens from a step"),
    "batch_adapters": ("batch_adapters", "Different adapters of these requests"),
}
"""The metrics by field of `RequestStats`: name and description."""

_MAX_LISTED_ADAPTERS = 64
"""Waiting adapters that a label names; the running ones are `max_loras` at most."""


def samples(report: StatsReport, model_name: str) -> Iterator[Sample]:
    """Every metric that the engine's statistics have a value for. model_name: of the base model."""
    for field, value in asdict(report.tiers).items():
        if isinstance(value, dict):
            yield from _samples(TIER_METRICS, value, ("tier", field))
        elif field in ENGINE_METRICS:
            yield Sample(ENGINE_METRICS[field], (), value)
    for label, usage in {**report.usage, "other": report.other_usage}.items():
        yield from _samples(USAGE_METRICS, asdict(usage), ("lora_task_id", label))
    for client, usage in report.clients.items():
        yield from _samples(CLIENT_METRICS, asdict(usage), ("client", client))
    if report.clients:
        yield from _samples(CLIENT_METRICS, asdict(report.other_clients), ("client", ""))
    yield from _engine_samples(report.load.engine)
    yield from _request_samples(report.load.requests)
    yield _lora_requests_info(report.load.adapters)
    yield from _residency_samples(report.residency, model_name)


def _engine_samples(stats: EngineStats) -> Iterator[Sample]:
    yield Sample(REQUESTS_RUNNING, (), stats.num_running)
    yield Sample(REQUESTS_WAITING, (), stats.num_waiting)
    yield Sample(KV_CACHE_BLOCKS, (), stats.num_blocks)
    yield Sample(WEIGHT_BYTES, (), stats.weights.packed_bytes)
    yield Sample(UNPACKED_WEIGHT_BYTES, (), stats.weights.unpacked_bytes)
    yield Sample(CUDA_GRAPHS, (), stats.num_cuda_graphs)
    yield Sample(KV_CACHE_BYTES, (), stats.kv_cache_bytes)
    yield Sample(KV_CACHE_USAGE, (), 1 - stats.num_free_blocks / max(1, stats.num_blocks))
    yield Sample(PREEMPTIONS, (), stats.num_preemptions)
    yield Sample(STEP_TARGET, (), stats.pace.target_seconds)
    yield Sample(LIMITED_STEPS, (), stats.pace.num_limited_steps)
    yield Sample(TURNS, (), stats.pace.num_turns)
    yield Sample(PROMPT_WAIT, (), stats.prompt_waits.longest_seconds)
    yield Sample(LATE_PROMPTS, (), stats.prompt_waits.num_late)
    yield Sample(PREFIX_QUERIED, (), stats.prefix_cache.queried_tokens)
    yield Sample(PREFIX_HITS, (), stats.prefix_cache.hit_tokens)
    yield Sample(PREFIX_BASE_HITS, (), stats.prefix_cache.base_hit_tokens)


def _request_samples(stats: RequestStats) -> Iterator[Sample]:
    for outcome, count in stats.requests.items():
        yield Sample(REQUESTS, (("outcome", outcome),), count)
    yield Sample(PROMPT_TOKENS, (), stats.prompt_tokens)
    yield Sample(OUTPUT_TOKENS, (), stats.output_tokens)
    for field in HISTOGRAMS:
        yield from _histogram_samples(*HISTOGRAMS[field], getattr(stats, field))


def _histogram_samples(name: str, description: str, histogram: Histogram) -> Iterator[Sample]:
    """A histogram as Prometheus keeps it: cumulative counts by upper bound, sum and count.

    Each is a counter of the server's: its own histograms take one observation a call, which a token is too small for.
    """
    bucket = MetricName(f"multilora_{name}_bucket", "COUNTER", description)
    for bound, count in zip((*histogram.bounds, "+Inf"), accumulate(histogram.counts), strict=True):
        yield Sample(bucket, (("le", str(bound)),), count)
    yield Sample(MetricName(f"multilora_{name}_sum", "COUNTER", description), (), histogram.total)
    yield Sample(MetricName(f"multilora_{name}_count", "COUNTER", description), (), sum(histogram.counts))


def _lora_requests_info(adapters: AdaptersInUse) -> Sample:
    labels = (
        ("max_lora", str(adapters.max_loras)),
        ("running_lora_adapters", ",".join(adapters.running)),
        ("waiting_lora_adapters", ",".join(adapters.waiting[:_MAX_LISTED_ADAPTERS])),
    )
    # Not the wall clock: when it is set back, an older series would become the latest one.
    return Sample(LORA_REQUESTS_INFO, labels, _BOOT_S + time.monotonic())


def _residency_samples(residency: Residency, model_name: str) -> Iterator[Sample]:
    for adapter in residency.adapters:
        labels = (
            ("adapter_name", adapter.name),
            ("level", adapter.level),
            ("pinned", str(adapter.is_pinned).lower()),
            ("rank", str(adapter.rank)),
        )
        yield Sample(LORA_ADAPTER_LOADED, labels, 1)
    # Gateways know the requests that need no adapter by this label.
    yield Sample(NUM_GPU_LOADED, (("model_name", model_name),), residency.num_on_device)
    yield Sample(NUM_CPU_LOADED, (), residency.num_in_memory)
    yield Sample(MAX_GPU_ADAPTERS, (), residency.max_loras)


def _samples(metrics: Mapping[str, MetricName], values: Mapping[str, float], label: tuple[str, str]) -> list[Sample]:
    return [Sample(metric, (label,), values[field]) for field, metric in metrics.items()]


_MAX_WITHDRAWN = 8
"""Metrics of a family without a sample that the server may go on to tell: `LORA_REQUESTS_INFO` leaves one a second."""

_MAX_WITHDRAWN_SHARE = 0.5
"""And if they are more, the share of the family that they may be: `LORA_ADAPTER_LOADED` leaves many, and has many."""

Key = tuple[MetricName, tuple[tuple[str, str], ...]]
"""A metric's family and its labels."""


@dataclass
class _Series:
    """One metric of the server's. value: the latest sample; shown: the server's value, which never falls for a
    counter, even when a new engine counts from zero."""

    handle: Any
    value: float = 0.0
    shown: float = 0.0


class TritonMetrics:
    """The server's metrics, kept equal to samples. Belongs to one thread.

    The server goes on to tell a metric of which no sample is left until its whole family is gone (24.10: the Python
    backend's family holds on to it): a gauge as 0, a counter as it was. A family of which more than `max_withdrawn`,
    and more than `max_withdrawn_share`, have no sample is made anew, with the metrics that stay. Not at once, since the
    server keeps some 190 bytes of every family that there was.
    """

    def __init__(self, max_withdrawn: int = _MAX_WITHDRAWN, max_withdrawn_share: float = _MAX_WITHDRAWN_SHARE) -> None:
        self._max_withdrawn = max_withdrawn
        self._max_withdrawn_share = max_withdrawn_share
        self._families: dict[MetricName, Any] = {}
        self._series: dict[Key, _Series] = {}

    def update(self, latest: Iterable[Sample]) -> None:
        """Take over the values."""
        current = {(sample.metric, sample.labels): sample.value for sample in latest}
        self._withdraw(self._series.keys() - current.keys(), current.keys())
        for key, value in current.items():
            self._change(key, value)

    def clear(self) -> None:
        """Remove all metrics."""
        for metric in list(self._families):
            self._remake(metric, staying=())

    def _withdraw(self, withdrawn: Set[Key], staying: Set[Key]) -> None:
        """Take over that metrics are `withdrawn`, having no sample, while others are `staying` or new."""
        sizes = Counter(metric for metric, _ in withdrawn | staying)
        for metric, count in Counter(metric for metric, _ in withdrawn).items():
            if count > max(self._max_withdrawn, self._max_withdrawn_share * sizes[metric]):
                self._remake(metric, staying)
        for key in withdrawn & self._series.keys():
            if key[0].kind == "GAUGE":
                self._change(key, 0)

    def _remake(self, metric: MetricName, staying: Container[Key]) -> None:
        """Remove a family, and show those of its metrics again that are `staying`."""
        family = {key: self._series.pop(key) for key in list(self._series) if key[0] == metric}
        for series in family.values():
            series.handle = None
        del self._families[metric]
        for key, series in family.items():
            if key in staying:
                self._series[key] = _Series(self._new_handle(key), series.value)
                self._show(key, series.shown)

    def _change(self, key: Key, value: float) -> None:
        if key not in self._series:
            self._series[key] = _Series(self._new_handle(key))
        series = self._series[key]
        if value != series.value:
            # An engine that was restarted counts from zero again.
            grown = value - series.value if value >= series.value else value
            self._show(key, value if key[0].kind == "GAUGE" else series.shown + grown)
            series.value = value

    def _show(self, key: Key, value: float) -> None:
        series = self._series[key]
        if key[0].kind == "GAUGE":
            series.handle.set(value)
        else:
            series.handle.increment(value - series.shown)
        series.shown = value

    def _new_handle(self, key: Key) -> Any:
        metric, labels = key
        if metric not in self._families:
            pb = backend_utils()
            kind = getattr(pb.MetricFamily, metric.kind)
            self._families[metric] = pb.MetricFamily(name=metric.name, description=metric.description, kind=kind)
        return self._families[metric].Metric(labels=dict(labels))


class MetricsPublisher:
    """Asks the engine for its statistics once a second and publishes them, until it is closed."""

    unsent_bytes = 0

    def __init__(
        self, client: EngineClient, num_restarts: Callable[[], int], model_name: str, interval_s: float = _INTERVAL_S
    ) -> None:
        self._client = client
        self._num_restarts = num_restarts
        self._model_name = model_name
        self._interval_s = interval_s
        self._answers: queue.SimpleQueue[TokenOutput | None] = queue.SimpleQueue()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def on_output(self, output: TokenOutput) -> None:
        """Called by the client's thread with the engine's answer."""
        self._answers.put(output)

    def flush(self) -> None:
        """Nothing is held back."""

    def is_cancelled(self) -> bool:
        return False

    def close(self) -> None:
        self._closing.set()
        self._answers.put(None)
        self._thread.join()

    def _run(self) -> None:
        metrics, load_seconds = TritonMetrics(), LoadSeconds()
        while not self._closing.is_set():
            try:
                self._publish(metrics, load_seconds)
            except Exception:
                logger.exception("the metrics cannot be published")
            self._closing.wait(self._interval_s)
        metrics.clear()
        load_seconds.clear()

    def _publish(self, metrics: TritonMetrics, load_seconds: LoadSeconds) -> None:
        self._client.operate(self, uuid.uuid4().hex, ReadStats())
        answer = self._answers.get()
        # Without an engine there is nothing new to tell.
        if answer is not None and answer.error_code is None:
            report = msgspec.json.decode(answer.text, type=StatsReport)
            restarts = Sample(ENGINE_RESTARTS, (), self._num_restarts())
            metrics.update([*samples(report, self._model_name), restarts])
            load_seconds.update(report.residency)
