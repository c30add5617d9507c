"""The part of a Triton stub that our models touch: requests, tensors, responses, and the module they come from."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.dlpack import to_dlpack

from multilora_engine.serving.immediate_model import ImmediateModel
from multilora_engine.serving.ordered_jobs import OrderedJobs
from support.fronts import TIMEOUT_S

LOG_PROB_NAMES = ("cum_log_probs", "output_log_probs")
PERF_NAMES = (
    "arrival_time_ns",
    "first_scheduled_time_ns",
    "first_token_time_ns",
    "last_token_time_ns",
    "kv_cache_alloc_total_blocks",
    "kv_cache_alloc_new_blocks",
    "kv_cache_reused_blocks",
    "acceptance_rate",
    "total_accepted_draft_tokens",
    "total_draft_tokens",
)
OUTPUT_NAMES = (
    "output_ids",
    "sequence_length",
    "text_output",
    "flat_text_output",
    "finish_reason",
    "num_input_tokens",
    "num_cached_tokens",
    "num_output_tokens",
    "num_output_tokens_so_far",
    "stop_id",
    "sequence_index",
    "batch_index",
    "lora_task_id_out",
    "lora_digest",
    "lora_name_out",
    *LOG_PROB_NAMES,
    *PERF_NAMES,
)

FINAL = 1


class FakeTensor:
    """Strings are given as bytes, BF16 as a torch tensor, which `as_numpy` refuses as the real one does."""

    def __init__(self, name: str, value: NDArray[Any] | torch.Tensor) -> None:
        self._name = name
        self.value = value

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> NDArray[Any]:
        if isinstance(self.value, torch.Tensor):
            raise RuntimeError("tensor dtype is bf16 and cannot be converted to numpy")
        return self.value

    def to_dlpack(self) -> Any:
        return to_dlpack(self.value if isinstance(self.value, torch.Tensor) else torch.from_numpy(self.value))


class FakeTritonError:
    """The codes are their own names."""

    INVALID_ARG, NOT_FOUND, ALREADY_EXISTS = "INVALID_ARG", "NOT_FOUND", "ALREADY_EXISTS"
    UNSUPPORTED, UNAVAILABLE, CANCELLED, INTERNAL = "UNSUPPORTED", "UNAVAILABLE", "CANCELLED", "INTERNAL"

    def __init__(self, message: str, code: str) -> None:
        self.message = message
        self.code = code


class FakeResponse:
    def __init__(self, output_tensors: list[FakeTensor], error: FakeTritonError | None = None) -> None:
        self.arrays = {tensor.name(): tensor.as_numpy() for tensor in output_tensors}
        self.error = error

    def texts(self) -> list[str]:
        return [text.decode() for text in self.arrays["text_output"].reshape(-1)]


class FakeSender:
    """Records responses; sending after the final one is an error, as in the server."""

    def __init__(self) -> None:
        self.responses: list[FakeResponse] = []
        self.threads: set[int] = set()
        self.cancelled = threading.Event()
        self._final: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._is_closed = False

    def send(self, response: FakeResponse, flags: int) -> None:
        assert not self._is_closed, "a response after the final one"
        self._is_closed = flags == FINAL
        self.responses.append(response)
        self.threads.add(threading.get_ident())
        if self._is_closed:
            self._final.put(None)

    def is_cancelled(self) -> bool:
        return self.cancelled.is_set()

    def wait(self) -> list[FakeResponse]:
        """All responses, once the final one was sent."""
        self._final.get(timeout=TIMEOUT_S)
        return self.responses


@dataclass
class FakeTrace:
    """context: None where the server makes no traces of OpenTelemetry."""

    context: str | None = None

    def get_context(self) -> str | None:
        return self.context


@dataclass
class FakeRequest:
    """tensors: name -> value; a list is made an array, with text as bytes.

    own_parameters: those that the client wrote into the request, which come before the headers that Triton passes on.
    """

    tensors: dict[str, Any]
    id: str = ""
    output_names: tuple[str, ...] = OUTPUT_NAMES
    timeout_us: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    own_parameters: dict[str, str] = field(default_factory=dict)
    trace_context: str | None = None
    sender: FakeSender = field(default_factory=FakeSender)

    def inputs(self) -> list[FakeTensor]:
        return [FakeTensor(name, _tensor(name, value)) for name, value in self.tensors.items()]

    def request_id(self) -> str:
        return self.id

    def requested_output_names(self) -> tuple[str, ...]:
        return self.output_names

    def timeout(self) -> int:
        return self.timeout_us

    def parameters(self) -> str:
        members = [*self.own_parameters.items(), *self.headers.items()]
        return "{" + ", ".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in members) + "}"

    def trace(self) -> FakeTrace:
        return FakeTrace(self.trace_context)

    def get_response_sender(self) -> FakeSender:
        return self.sender


class AtOnce:
    """A client of the engine whose tasks run at once."""

    def call_soon(self, task: Callable[[], None]) -> None:
        task()


def answer_of(model: ImmediateModel, link: Any, request: FakeRequest) -> FakeResponse:
    """The one response of a model that was not started. link: an engine's link, without a client."""
    link.client = AtOnce()
    jobs = OrderedJobs(1, "test")
    vars(model).update(_link=link, _jobs=jobs)
    model.execute([request])
    jobs.close()
    (response,) = request.sender.wait()
    return response


class FakeMetricFamily:
    """Counts in `published`, (name, labels) -> value, what a server would show; in `observed` what histograms got.

    A metric is there while its family lives, whatever became of its handle, as in the real server.
    """

    COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
    published: ClassVar[dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
    observed: ClassVar[dict[tuple[str, tuple[tuple[str, str], ...]], list[float]]] = {}
    num_calls: ClassVar[int] = 0

    def __init__(self, name: str, description: str, kind: str) -> None:
        self._name, self._kind = name, kind

    def Metric(self, labels: dict[str, str], buckets: list[float] | None = None) -> FakeMetric:
        assert (buckets is not None) == (self._kind == self.HISTOGRAM)
        return FakeMetric((self._name, tuple(labels.items())), self._kind)

    def __del__(self) -> None:
        for shown in (self.published, self.observed):
            for key in [key for key in shown if key[0] == self._name]:
                del shown[key]


class FakeMetric:
    def __init__(self, key: tuple[str, tuple[tuple[str, str], ...]], kind: str) -> None:
        self._key, self._kind = key, kind
        if kind == FakeMetricFamily.HISTOGRAM:
            FakeMetricFamily.observed.setdefault(key, [])
        else:
            FakeMetricFamily.published.setdefault(key, 0.0)

    def set(self, value: float) -> None:
        assert self._kind == FakeMetricFamily.GAUGE
        FakeMetricFamily.published[self._key] = value
        FakeMetricFamily.num_calls += 1

    def increment(self, value: float) -> None:
        assert self._kind == FakeMetricFamily.COUNTER
        assert value >= 0
        FakeMetricFamily.published[self._key] += value
        FakeMetricFamily.num_calls += 1

    def observe(self, value: float) -> None:
        assert self._kind == FakeMetricFamily.HISTOGRAM
        FakeMetricFamily.observed[self._key].append(value)


def fake_backend_utils() -> ModuleType:
    module = ModuleType("triton_python_backend_utils")
    vars(module).update(
        Tensor=FakeTensor,
        TritonError=FakeTritonError,
        InferenceResponse=FakeResponse,
        MetricFamily=FakeMetricFamily,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
    )
    return module


_DTYPES = {
    "seed": np.uint64,
    "lora_task_id": np.uint64,
    "temperature": np.float32,
    "runtime_top_p": np.float32,
    "runtime_top_p_decay": np.float32,
    "runtime_top_p_min": np.float32,
    "min_p": np.float32,
    "repetition_penalty": np.float32,
    "presence_penalty": np.float32,
    "frequency_penalty": np.float32,
    "len_penalty": np.float32,
    "beam_search_diversity_rate": np.float32,
    "embedding_bias": np.float32,
    "embedding_bias_weights": np.float32,
}


def _tensor(name: str, value: Any) -> NDArray[Any] | torch.Tensor:
    if not isinstance(value, list):
        return value
    if isinstance(value[0][0], str):
        return np.array([[item.encode() for item in row] for row in value], object)
    return np.array(value, bool if isinstance(value[0][0], bool) else _DTYPES.get(name, np.int32))
