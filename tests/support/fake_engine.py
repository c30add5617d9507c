"""An engine without a model: it answers a prompt with its own tokens, again and again. Its adapters are real.

Run as a program it is an engine process, for tests of what happens when one dies.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence

import msgspec
import torch

from multilora_engine.config import EngineConfig
from multilora_engine.engine.block_events import BlockEvents
from multilora_engine.engine.engine_stats import AdaptersInUse, EngineStats, WeightInfo, WeightStats
from multilora_engine.engine_info import CallLimits, EngineInfo
from multilora_engine.errors import AdapterNotFound, ConfigError, InvalidRequest, UnpackedWeightsFull
from multilora_engine.lora.adapter_events import AdapterEventLog
from multilora_engine.lora.adapter_sets import AdapterSets
from multilora_engine.lora.device_tier import DeviceTier
from multilora_engine.lora.disk_tier import DiskTier
from multilora_engine.lora.host_tier import HostTier
from multilora_engine.lora.layout import PackedAdapter, set_digest
from multilora_engine.lora.manager import LoRAManager
from multilora_engine.lora.names import TaskId
from multilora_engine.lora.remote import RemoteAdapters
from multilora_engine.lora.sources.fetcher import AdapterFetcher
from multilora_engine.process.adapter_operator import PendingSwitch
from multilora_engine.process.main import main
from multilora_engine.request import BeamOutput, FinishReason, GenerationRequest, PerfMetrics, TokenLogProb, TokenOutput
from multilora_wire.adapter_use import use_digest
from support.adapters import TINY

HOLD, FAIL_STEP, DIE, BUG, HANG, KILL_DEVICE = 1001, 1002, 1003, 1004, 1005, 1006
"""First tokens of prompts that never end, fail the step, end the process, hit a bug on acceptance, freeze it, or fail
the step and every later call of the device."""

INFO = EngineInfo(
    model_path="/nowhere",
    tokenizer_path="/nowhere",
    max_model_len=64,
    vocab_size=2048,
    end_token_ids=(2,),
    add_special_tokens=True,
    exclude_input_in_output=False,
    special_tokens_in_messages=True,
    limits=CallLimits(
        max_prompt_bytes=10_000,
        max_sequences_per_request=16,
        max_prompt_tokens_per_request=256,
        max_prompt_log_probs_per_request=500,
        max_words_per_request=12,
        max_word_bytes_per_request=64,
        max_biases_per_request=20,
        max_guides_per_request=2,
        max_metadata_bytes=1000,
        max_logits_bytes=1 << 20,
        max_streamed_logits_bytes=1 << 20,
        max_logits_bytes_in_flight=3 << 19,
        max_uploads_per_client=2,
    ),
    max_adapter_bytes=1_000_000,
    adapter_layout=TINY,
    kv_cache_tokens=1024,
    device="cpu",
    dtype="float32",
    kv_cache_dtype="float32",
    version="1.2.3",
)


def text_of(token_id: int) -> str:
    return f"<{token_id}>"


class FakeWeights:
    """Of a model without quantised weights."""

    stats = WeightStats()

    def describe(self, patterns: Sequence[str]) -> list[WeightInfo]:
        return []

    def pack(self, patterns: Sequence[str]) -> list[WeightInfo]:
        return []

    def unpack(self, patterns: Sequence[str]) -> PendingSwitch:
        raise UnpackedWeightsFull(1, 64, 0, 0)


class FakeEngine:
    """step_gate: a step waits for it: a test decides when steps happen. changed: notified when a request ends."""

    def __init__(
        self,
        config: EngineConfig | None = None,
        fetcher: AdapterFetcher | None = None,
        disk: DiskTier | None = None,
    ) -> None:
        if config is not None and config.num_threads == 13:
            raise ConfigError("parameter num_threads=13: unlucky")
        if config is not None and config.num_threads == 14:
            raise RuntimeError("no such device")
        self.info = INFO
        self.step_gate = threading.Event()
        self.step_gate.set()
        self.changed = threading.Condition()
        self.adapters: dict[TaskId, PackedAdapter] = {}
        self.lora_events = AdapterEventLog(capacity=8)
        host = HostTier(num_pages=64, page_bytes=TINY.page_bytes)
        device = DeviceTier(TINY, host.pool, host.pool, max_loras=8)
        self.block_events = BlockEvents()
        self.loras = LoRAManager(host, device, "refuse", self.lora_events.append, disk)
        self.weights = FakeWeights()
        self.remote = RemoteAdapters(self.loras, fetcher, self.lora_events.append)
        self.sets = AdapterSets(self.loras, self.remote)
        self.accepted: list[GenerationRequest] = []
        self.requests: dict[str, GenerationRequest] = {}
        self.produced: dict[str, list[int]] = {}
        self.aborted: list[str] = []
        self.unwritten: dict[str, str] = {}
        self.waiting: set[str] = set()
        self.is_closed = False
        self.has_dead_device = False

    @property
    def has_work(self) -> bool:
        return bool(self.requests) or self.remote.is_busy or self.loras.is_busy

    @property
    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self.requests), num_free_blocks=3, num_blocks=4)

    @property
    def adapters_in_use(self) -> AdaptersInUse:
        return AdaptersInUse(max_loras=8, running=["7"], waiting=["8", "pirate"])

    def put_adapter(self, lora_task_id: TaskId, adapter: PackedAdapter, name: str = "") -> None:
        self.loras.put(lora_task_id, adapter, name)
        self.adapters[lora_task_id] = adapter

    def add_request(self, request: GenerationRequest, call_id: str = "") -> GenerationRequest:
        request = self.loras.aliases.resolve(request, call_id or request.request_id, self.loras.inventory.digest)
        if request.prompt_token_ids[0] == BUG:
            raise RuntimeError("a bug in the engine")
        if request.sampling.max_tokens < 1:
            raise InvalidRequest("max_tokens is 0")
        info = self.loras.inventory.info
        if request.lora_set and request.task_id is not None:
            digest = set_digest((info(member.task_id).digest, member.weight) for member in request.lora_set)
            self.adapters[request.task_id] = PackedAdapter(digest, [], torch.empty(0, 0))
        elif request.task_id is not None:
            try:
                info(request.task_id)
            except AdapterNotFound as error:
                raise error.under_name(request.lora_name) from None
        self.accepted.append(request)
        adapter = None if request.task_id is None else self.adapters.get(request.task_id)
        if adapter is not None and request.chat_use not in (None, use_digest(adapter.traits.use)):
            self.unwritten[request.request_id] = adapter.traits.use
        self.requests[request.request_id] = request
        self.produced[request.request_id] = []
        return request

    def give_prompt(self, request: GenerationRequest) -> int:
        if request.sampling.max_tokens > self.info.max_model_len:
            del self.requests[request.request_id]
            raise InvalidRequest("the answer is too long")
        self.accepted.append(request)
        self.requests[request.request_id] = request
        self.waiting.discard(request.request_id)
        return 1

    def abort(self, request_id: str) -> TokenOutput | None:
        if request_id not in self.requests:
            return None
        with self.changed:
            output = self._output(self.requests.pop(request_id), [], "cancelled")
            self.aborted.append(request_id)
            self.changed.notify_all()
        return output

    def step(self, on_progress: Callable[[], None]) -> list[TokenOutput]:
        self.step_gate.wait()
        self.loras.poll()
        for _ in self.remote.poll():
            """It is in the host tier now."""
        for request in self.requests.values():
            if request.prompt_token_ids[0] == FAIL_STEP:
                raise RuntimeError("the device is on fire")
            if request.prompt_token_ids[0] == KILL_DEVICE:
                self.has_dead_device = True
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            if request.prompt_token_ids[0] == DIE:
                os._exit(3)
            if request.prompt_token_ids[0] == HANG:
                os.kill(os.getpid(), signal.SIGSTOP)
        asked = [TokenOutput(request_id, [], "", asked_use=use) for request_id, use in self.unwritten.items()]
        self.waiting |= self.unwritten.keys()
        self.unwritten.clear()
        ready = [request for request_id, request in self.requests.items() if request_id not in self.waiting]
        return asked + [self._next(request) for request in ready if request.prompt_token_ids[0] != HOLD]

    def is_device_dead(self) -> bool:
        return self.has_dead_device

    def note_sent(self) -> None:
        """It keeps no pace."""

    def close(self) -> None:
        self.is_closed = True

    def _search(self, request: GenerationRequest) -> TokenOutput:
        """Two beams, whatever the width: the first token, and twice the one after it."""
        with self.changed:
            del self.requests[request.request_id]
            self.changed.notify_all()
        first = request.prompt_token_ids[0]
        answers: list[tuple[list[int], FinishReason]] = [([first], "stop"), ([first + 1] * 2, "length")]
        beams = [
            BeamOutput(ids, "".join(map(text_of, ids)), reason, [TokenLogProb(-1.0) for _ in ids], -float(len(ids)))
            for ids, reason in answers
        ]
        return msgspec.structs.replace(self._output(request, [], "stop"), beams=beams)

    def _next(self, request: GenerationRequest) -> TokenOutput:
        if request.sampling.beam_width > 1:
            return self._search(request)
        produced = self.produced[request.request_id]
        token_id = request.prompt_token_ids[len(produced) % len(request.prompt_token_ids)]
        produced.append(token_id)
        if len(produced) < request.sampling.max_tokens:
            return self._output(request, [token_id], None)
        with self.changed:
            del self.requests[request.request_id]
            self.changed.notify_all()
        return self._output(request, [token_id], "length")

    def _output(self, request: GenerationRequest, token_ids: list[int], reason: str | None) -> TokenOutput:
        adapter = None if request.task_id is None else self.adapters[request.task_id]
        return TokenOutput(
            request_id=request.request_id,
            token_ids=token_ids,
            text="".join(map(text_of, token_ids)),
            finish_reason=reason,
            num_prompt_tokens=len(request.prompt_token_ids),
            num_output_tokens=len(self.produced[request.request_id]),
            lora_digest="" if adapter is None else adapter.digest,
            lora_name=request.lora_name,
            perf=PerfMetrics() if reason or request.tells_perf else None,
        )


if __name__ == "__main__":
    main(FakeEngine)
