"""An engine in this process that takes steps of a known kind, and the least time that they can take."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Self

import msgspec
import torch

from benchmarks.machine_limits import Limits, PlainLoops, Yardsticks, matrix_rate, seconds_of
from multilora_engine.config import CPU_STEP_TOKENS, EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.engine.memory import kv_bytes_per_token
from multilora_engine.lora_config import LoRAConfig
from multilora_engine.models.checkpoint import checkpoint_files, opened
from multilora_engine.models.model_config import EMBEDDINGS, ModelConfig
from multilora_engine.models.registry import read_model_config
from multilora_engine.request import GenerationRequest, SamplingParams, TokenOutput

GREEDY = (SamplingParams(1),)
NUM_ADAPTERS = 16
RANK = 16
CHUNK = CPU_STEP_TOKENS


class RepeatedLimits:
    """The limits of the machine, measured again and again between everything else.

    dtype: of products; float32 where the processor multiplies no numbers of the wanted type.
    """

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype if PlainLoops().operations(dtype) else torch.float32
        self._yardsticks = Yardsticks("cpu", self.dtype)
        self._seconds: dict[str, list[float]] = {name: [] for name in self._yardsticks.steps}
        self._rates: list[float] = []

    def measure(self) -> None:
        """Measure once more."""
        for name, step in self._yardsticks.steps.items():
            self._seconds[name].append(seconds_of(step))
        if self.dtype == torch.float32:
            self._rates.append(matrix_rate())

    @property
    def limits(self) -> Limits:
        """The limits by medians. Threads that multiply each by itself may be faster than ones that share a product."""
        seconds = {name: statistics.median(values) for name, values in self._seconds.items()}
        shared = self._yardsticks.limits(seconds)
        rates = [statistics.median(self._rates)] if self._rates else []
        return Limits(shared.bandwidth, max([shared.peak, *rates]))


class Work:
    """The bytes that a step of one model must at least read, and the flops. weight_dtype: of linears and the head."""

    def __init__(self, model: ModelConfig, dtype: torch.dtype, weight_dtype: torch.dtype = torch.float32) -> None:
        layer = model.hidden_size * (2 * model.q_size + 2 * model.kv_size + 3 * model.intermediate_size)
        self._layers = model.num_layers * layer
        self._head = model.hidden_size * model.vocab_size
        self._attention = 4 * model.num_layers * model.q_size
        self._kv_bytes = kv_bytes_per_token(model, dtype)
        self._weight_bytes = (self._layers + self._head) * weight_dtype.itemsize

    @classmethod
    def of_codes(cls, model: ModelConfig, dtype: torch.dtype, checkpoint: Path) -> Self:
        """Of a quantised checkpoint, scales and all: the bytes of all tensors but the embeddings'."""
        work = cls(model, dtype)
        work._weight_bytes = 0
        for file in checkpoint_files(checkpoint):
            with opened(file) as tensors:
                names = [name for name in tensors.keys() if not name.startswith(EMBEDDINGS)]  # noqa: SIM118 - no mapping
                work._weight_bytes += sum(tensors.get_tensor(name).nbytes for name in names)
        return work

    def decode_seconds(self, contexts: Sequence[int], limits: Limits) -> float:
        """The least seconds for one token of each of the sequences with so many keys."""
        num_bytes = self._weight_bytes + sum(contexts) * self._kv_bytes
        flops = 2 * (self._layers + self._head) * len(contexts) + self._attention * sum(contexts)
        return limits.seconds(num_bytes, flops)

    def prefill_flops(self, num_tokens: int) -> int:
        """The flops of a whole prompt and the logits of its last token."""
        return 2 * (self._layers * num_tokens + self._head) + self._attention * num_tokens * (num_tokens + 1) // 2


WARM_UP_STEPS = 16
"""Steps of a batch that are not measured, as in the middle of an answer: in these caches come to hold what they can of
the weights. A step of one sequence with w4a16 took 5.1 ms at first, and 3.8 after 12 others."""


class Bench:
    """An engine that has taken all of its memory, and batches of requests that never end by themselves."""

    def __init__(self, model: Path, lora_dtype: str = "auto", max_loras: int = NUM_ADAPTERS, **options: object) -> None:
        lora = LoRAConfig.model_validate({"max_loras": max_loras, "max_lora_rank": RANK, "lora_dtype": lora_dtype})
        self.engine = Engine(
            EngineConfig.model_validate({"model_path": model, "device": "cpu", "lora": lora, **options})
        )
        self.engine.take_kv_memory()
        self.model = read_model_config(model)
        self._request_ids = itertools.count()
        self._random = Random(0)

    def close(self) -> None:
        self.engine.close()

    @contextmanager
    def batch(
        self,
        num_sequences: int,
        prompt_tokens: int,
        tasks: Sequence[int | None] = (None,),
        sampling: Sequence[SamplingParams] = GREEDY,
        source_tokens: int = 0,
    ) -> Iterator[list[str]]:
        """Request ids of sequences that have computed their prompts and decode from here on.

        source_tokens: of each sequence, for an encoder-decoder model.
        """
        request_ids = [f"bench-{next(self._request_ids)}" for _ in range(num_sequences)]
        for i, request_id in enumerate(request_ids):
            prompt = self.prompt(prompt_tokens)
            params = unending(sampling[i % len(sampling)], seed=i)
            source, task = self.prompt(source_tokens), tasks[i % len(tasks)]
            self.engine.add_request(GenerationRequest(request_id, prompt, params, task, source_token_ids=source))
        started: set[str] = set()
        while len(started) < num_sequences:
            started |= {output.request_id for output in self.engine.step()}
        yield request_ids
        for request_id in request_ids:
            self.engine.abort(request_id)

    def prompt(self, num_tokens: int) -> list[int]:
        return [self._random.randrange(self.model.vocab_size) for _ in range(num_tokens)]

    def first_token_seconds(self, prompt: list[int], before_step: Callable[[], object] = lambda: None) -> float:
        """The seconds from the request to the end of the step that gives its first token, with nothing else to do.

        before_step: called before each step; its own time does not count.
        """
        request = GenerationRequest(f"bench-{next(self._request_ids)}", prompt, SamplingParams(1, end_id=-1))
        seconds, outputs = seconds_of(lambda: self.engine.add_request(request)), list[TokenOutput]()
        while not outputs:
            before_step()
            started = time.perf_counter()
            outputs = self.engine.step()
            seconds += time.perf_counter() - started
        return seconds

    def step_seconds(self, num_steps: int) -> list[float]:
        """The seconds of each of the next steps."""
        return [seconds_of(self.engine.step) for _ in range(num_steps)]


def unending(sampling: SamplingParams, seed: int) -> SamplingParams:
    """The same sampling, with neither an end token nor a last token, and a seed."""
    return msgspec.structs.replace(sampling, max_tokens=1 << 30, end_id=-1, seed=seed)
