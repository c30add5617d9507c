"""`Engine`: requests in, tokens out. One thread owns it; it needs neither a server nor a socket."""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from random import Random

import torch

from multilora_engine.config import EngineConfig
from multilora_engine.engine.beam_search import BeamSearch, Continuations, continue_beams
from multilora_engine.engine.build import (
    build_fetcher,
    build_lora_manager,
    build_model_runner,
    choose_device,
    choose_dtype,
    choose_weight_dtype,
    dtype_name,
)
from multilora_engine.engine.engine_stats import AdaptersInUse, EngineStats
from multilora_engine.engine.host_work import HostWork, has_host_work
from multilora_engine.engine.kv_cache import BlockAllocator, BlockCopy
from multilora_engine.engine.memory import is_out_of_memory, plan_memory
from multilora_engine.engine.request_limits import RequestLimits
from multilora_engine.engine.scheduler import ScheduledSequence, Scheduler
from multilora_engine.engine.sequence import Sequence, SequenceStatus
from multilora_engine.engine_info import CallLimits, ClientPolicy, EngineInfo, read_version
from multilora_engine.errors import (
    AdapterNotFound,
    AdapterOverflow,
    Cancelled,
    InternalError,
    InvalidRequest,
    QueueFull,
    QueueShareFull,
    RequestError,
    TooMuchHostWork,
)
from multilora_engine.lora.adapter_events import AdapterEvents
from multilora_engine.lora.checkpoint_layout import model_sites
from multilora_engine.lora.host_tier import CachedAdapter
from multilora_engine.lora.layout import PackedAdapter
from multilora_engine.lora.manager import LoRAManager
from multilora_engine.lora.names import TaskId, label_of
from multilora_engine.lora.prefetch import prefetch_adapters
from multilora_engine.lora.remote import Fetch, RemoteAdapters
from multilora_engine.lora.sources.source import AdapterKey
from multilora_engine.models.layers import Placement
from multilora_engine.models.loader import load_model
from multilora_engine.models.model_config import read_model_config
from multilora_engine.request import FinishReason, GenerationRequest, SamplingParams, TokenOutput
from multilora_engine.sampling.guide_queue import GuideQueue, GuidesInUse
from multilora_engine.sampling.guided import GuideCompiler, GuideMatcher
from multilora_engine.sampling.logits import bias_tensors, end_tokens
from multilora_engine.sampling.prompt_log_probs import PromptLogProbs
from multilora_engine.sampling.sampler import Choice, SampledToken
from multilora_engine.text.text_stream import TextDelta, TextStream, Tokenizer
from multilora_kernels import huge_pages, load_cpu_kernels
from multilora_wire.layout import adapter_layout

_logger = logging.getLogger(__name__)

_NOTHING = TextDelta([], "")

_DISK_WAIT_S = 0.002
"""How long a step with nothing to compute waits for what is being read from disk or written to it."""

_FETCH_WAIT_S = 0.005
"""The same for one that is being fetched from a source, which takes longer anyway."""

_GUIDE_WAIT_S = 0.002
"""The same for a guide that is being compiled."""

_NUM_PAST_DEADLINES = 64
"""How many deadlines of requests that have ended are kept, at least: forgetting them one by one would take a search."""

_NUM_LORA_EVENTS = 4096
"""How many events of adapters are remembered."""


@dataclass(frozen=True)
class _StepInFlight:
    """A step that has been launched, and the choice of its tokens, which has not been read."""

    step: list[ScheduledSequence]
    choice: Choice


class Engine:
    """Continuous batching over one base model and many adapters.

    `add_request` accepts, `step` computes, every accepted request ends with exactly one final `TokenOutput`, from
    `step` or from `abort`.

    With `enable_async_scheduling`, a step stays in flight when `step` returns: the next call schedules and launches
    another one, in which the tokens that are being chosen are *pending*, and reads them then. A GPU thus never waits
    for the host's work between steps. What a sequence computed beyond the end of its answer is dropped. A step is read
    at once when any of its sequences' sampling `must_read_each_token`.
    """

    def __init__(self, config: EngineConfig, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Load everything. on_progress: called with (tensors loaded, tensors in all). Raises ConfigError."""
        self._device = device = choose_device(config)
        if device.type == "cpu":
            torch.set_num_threads(config.num_threads or len(os.sched_getaffinity(0)))
            load_cpu_kernels()
            if huge_pages.are_switched_off():
                _logger.warning(
                    "this machine gives no huge pages, which makes steps on a CPU about a third slower: "
                    "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
                )
        model_config = read_model_config(config.model_path)
        dtype = choose_dtype(config.dtype, model_config, device)
        tokenizer_path = config.tokenizer_path or config.model_path
        self._tokenizer = Tokenizer(tokenizer_path)
        placement = Placement(dtype, choose_weight_dtype(config, dtype, device), device)
        model = load_model(config.model_path, placement, on_progress)
        _logger.info(
            "weights: %.2f GiB, stored as %s", model.num_weight_bytes / (1 << 30), dtype_name(placement.weight_dtype)
        )
        lora_dtype = dtype_name(dtype) if config.lora.lora_dtype == "auto" else config.lora.lora_dtype
        layout = adapter_layout(model_sites(model_config), config.lora.max_lora_rank, lora_dtype)
        plan = plan_memory(config, model_config, layout, dtype, device)
        self.info = EngineInfo(
            model_path=str(config.model_path),
            tokenizer_path=str(tokenizer_path),
            max_model_len=plan.max_model_len,
            vocab_size=model_config.vocab_size,
            end_token_ids=model_config.end_token_ids,
            add_special_tokens=config.add_special_tokens,
            exclude_input_in_output=config.exclude_input_in_output,
            special_tokens_in_messages=config.special_tokens_in_messages,
            limits=CallLimits.of(config),
            max_adapter_bytes=int(config.lora.lora_max_adapter_bytes),
            max_uploads_per_client=config.max_uploads_per_client,
            adapter_layout=layout,
            kv_cache_tokens=plan.num_blocks * config.block_size,
            device=str(device),
            dtype=dtype_name(dtype),
            version=read_version(),
            clients=ClientPolicy.of(config),
        )
        self._timeout_s = config.request_timeout_s
        self._limits = RequestLimits(
            max_model_len=plan.max_model_len,
            vocab_size=model_config.vocab_size,
            max_logits_bytes=int(config.max_logits_bytes),
            max_beam_width=min(config.max_beam_width, config.max_num_seqs),
            num_blocks=plan.num_blocks,
            block_size=config.block_size,
        )
        self._max_loras = config.lora.max_loras
        self._max_queue_size = config.max_queue_size
        self._max_queue_share = max(1, int(config.max_queue_size * config.max_queue_share))
        self.lora_events = AdapterEvents(_NUM_LORA_EVENTS)
        self._loras = build_lora_manager(config, layout, plan, device, self.lora_events)
        if config.lora.lora_prefetch_dir is not None:
            prefetch_adapters(config.lora.lora_prefetch_dir, self._loras, layout)
        self._remote = RemoteAdapters(self._loras, build_fetcher(config, layout), self.lora_events.append)
        self._parked: dict[Fetch, list[Sequence]] = {}
        self._blocks = BlockAllocator(plan.num_blocks, config.block_size, config.enable_prefix_caching)
        self._scheduler = Scheduler(self._blocks, self._loras, config.max_num_seqs, config.max_num_batched_tokens)
        self._runner = build_model_runner(model, model_config, config, plan, dtype, device, self._loras)
        self._runs_ahead = config.enable_async_scheduling
        self._in_flight: _StepInFlight | None = None
        # Half a second and some 50 MB, which an engine that never guides does not spend.
        make_compiler = partial(GuideCompiler, self._tokenizer, model_config.vocab_size)
        self._guide_queue = GuideQueue(make_compiler, config.guide_compile_timeout_s)
        self._guides_in_use = GuidesInUse(int(config.max_guide_bytes_in_flight))
        self._host_work = HostWork(config.host_work_ms_per_step / 1e3)
        self._sequences: dict[str, Sequence] = {}
        self._num_of_client: Counter[str] = Counter()
        self._deadlines: list[tuple[float, int, str]] = []
        self._arrivals = itertools.count()

    @property
    def has_work(self) -> bool:
        """Whether a `step` would do anything."""
        is_busy = self._in_flight is not None or self._loras.is_busy or self._remote.is_busy
        return bool(self._sequences) or is_busy

    @property
    def remote(self) -> RemoteAdapters:
        """The adapters that are on their way, for whoever looks after them from the engine's thread."""
        return self._remote

    @property
    def loras(self) -> LoRAManager:
        """The adapters, for whoever looks after them from the engine's thread."""
        return self._loras

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_waiting=self._scheduler.num_waiting,
            num_running=self._scheduler.num_running,
            num_free_blocks=self._blocks.num_free,
            num_blocks=self._blocks.num_blocks,
            num_cached_adapters=self._loras.num_cached,
            num_pins=self._loras.num_pins,
            num_preemptions=self._scheduler.num_preemptions,
            prefix_cache=self._blocks.prefix_cache,
        )

    @property
    def adapters_in_use(self) -> AdaptersInUse:
        running = {_adapter_label(s) for s in self._sequences.values() if s.status is SequenceStatus.RUNNING}
        waiting = {_adapter_label(s) for s in self._sequences.values() if s.status is not SequenceStatus.RUNNING}
        return AdaptersInUse(self._max_loras, sorted(running - {""}), sorted(waiting - running - {""}))

    def put_adapter(self, lora_task_id: TaskId, adapter: PackedAdapter, name: str = "") -> None:
        """Cache an adapter, at once or as soon as there is room for it: see `LoRAManager.put`.

        Raises AdapterConflict or AdapterCacheFull.
        """
        self._loras.put(lora_task_id, adapter, name)

    def adapter_digest(self, lora_task_id: TaskId) -> str:
        """The digest of a cached adapter. Raises AdapterNotFound."""
        return self._loras.digest(lora_task_id)

    def add_request(self, request: GenerationRequest) -> None:
        """Accept a request, or raise InvalidRequest, AdapterNotFound or QueueFull, and nothing has changed.

        With sources, an adapter that no tier has is fetched: the request is parked until it has arrived, outside the
        queue, so that however long that takes it holds up nobody. So is a request with a guide until that is compiled.
        """
        assert request.request_id not in self._sequences, f"request id {request.request_id} is in use"
        self._limits.check(request)
        self._check_queue(request.sender.name)
        text = _text_stream(self._tokenizer, request.sampling)
        bias = bias_tensors(request.sampling, self._device)
        if request.sampling.guide is not None:
            self._guides_in_use.check(request.sampling.guide)
        adapter = self._pin_or_fetch(request)
        timeout_s = self._timeout_s if request.timeout_s is None else min(request.timeout_s, self._timeout_s)
        sequence = Sequence(
            request=request,
            arrival=next(self._arrivals),
            adapter=None if isinstance(adapter, Fetch) else adapter,
            text=text,
            random=Random(request.sampling.seed),
            max_output_tokens=self._limits.max_output_tokens(request),
            arrival_time_ns=time.monotonic_ns(),
            bias=bias,
            has_host_work=has_host_work(request.sampling),
            search=self._search(request, text),
            prompt_log_probs=_prompt_log_probs(request),
        )
        self._sequences[request.request_id] = sequence
        self._num_of_client[request.sender.name] += 1
        if request.sampling.guide is not None:
            self._guides_in_use.add(request.sampling.guide)
        self._note_deadline(sequence, time.monotonic() + timeout_s)
        if isinstance(adapter, Fetch):
            self._parked.setdefault(adapter, []).append(sequence)
        else:
            self._enqueue(sequence)

    def abort(self, request_id: str) -> TokenOutput | None:
        """End a request now. Its final output, with what was held back; None if it has ended before."""
        sequence = self._sequences.get(request_id)
        if sequence is None:
            return None
        return self._finish_search(sequence, "cancelled") if sequence.search else self._finish(sequence, "cancelled")

    def step(self, on_progress: Callable[[], None] = lambda: None) -> list[TokenOutput]:
        """Schedule, launch, read, postprocess: what this gave each request, if anything.

        on_progress: called for each layer, and for each request whose tokens take long between two steps, so that who
        watches can tell a long step from one that hangs.

        A step that runs out of memory fails its requests only. Any other exception is our bug or a broken device; it is
        raised, and nothing in flight can be trusted to go on.
        """
        outputs = self._end_expired() + self._end_unloadable() + self._take_up_fetched() + self._take_up_compiled()
        step = self._scheduler.schedule()
        if not step:
            return outputs + self._step_without_work(on_progress)
        _note_scheduled(self._requests_of(step))
        try:
            launched = self._launch(step, on_progress)
        except (RuntimeError, MemoryError) as error:
            failure = _out_of_memory(error, step)
            return outputs + self._read_step_in_flight(on_progress) + self._fail_step(step, failure)
        outputs += self._read_step_in_flight(on_progress)
        self._in_flight = launched
        if not self._may_stay_in_flight(launched):
            outputs += self._read_step_in_flight(on_progress)
        return outputs

    def check_integrity(self) -> None:
        """Every table agrees with every other. For tests, after every step."""
        self._scheduler.check_integrity(self._guide_queue)
        self._remote.check_integrity()
        num_parked = sum(map(len, self._parked.values()))
        num_parked += len(self._guide_queue)
        assert self._scheduler.num_waiting + self._scheduler.num_running + num_parked == len(self._sequences)
        assert all(sequences and not fetch.is_done for fetch, sequences in self._parked.items())
        pending = {} if self._in_flight is None else dict.fromkeys(self._in_flight.choice.sequences, 1)
        assert self._num_of_client == Counter(s.request.sender.name for s in self._sequences.values())
        for sequence in self._sequences.values():
            assert sequence.num_pending_tokens == pending.get(sequence, 0), "a pending token is lost"

    def close(self) -> None:
        """Drop what is in flight, without outputs, and spill adapters to disk if there is a disk tier."""
        for sequence in list(self._sequences.values()):
            self._remove(sequence)
        self._in_flight = None
        self._guide_queue.close()
        self._remote.close()
        self._loras.close()

    def _search(self, request: GenerationRequest, text: TextStream) -> BeamSearch | None:
        if request.sampling.beam_width == 1:
            return None
        ends = end_tokens(request.sampling, self.info.end_token_ids)
        return BeamSearch(request.sampling, ends, self._limits.max_output_tokens(request), text.fork())

    def _step_without_work(self, on_progress: Callable[[], None]) -> list[TokenOutput]:
        """There is nothing to launch: what the step in flight gives, or a little wait for adapters."""
        if self._in_flight is None:
            self._loras.wait(_DISK_WAIT_S)
            self._remote.wait(_FETCH_WAIT_S)
            self._guide_queue.wait(_GUIDE_WAIT_S)
        return self._read_step_in_flight(on_progress)

    def _launch(self, step: list[ScheduledSequence], on_progress: Callable[[], None]) -> _StepInFlight:
        before = None if self._in_flight is None else self._in_flight.choice
        choice = self._runner.launch(step, on_progress, before)
        for sequence in choice.sequences:
            sequence.num_pending_tokens += 1
        return _StepInFlight(step, choice)

    def _may_stay_in_flight(self, launched: _StepInFlight) -> bool:
        return self._runs_ahead and not any(
            sequence.request.sampling.must_read_each_token for sequence in launched.choice.sequences
        )

    def _read_step_in_flight(self, on_progress: Callable[[], None]) -> list[TokenOutput]:
        """Wait for the tokens of the step in flight, if there is one; what they give each request."""
        if self._in_flight is None:
            return []
        step, choice = self._in_flight.step, self._in_flight.choice
        self._in_flight = None
        for sequence in choice.sequences:
            sequence.num_pending_tokens -= 1
        try:
            tokens = choice.read()
        except (RuntimeError, MemoryError) as error:
            return self._fail_step(step, _out_of_memory(error, step))
        self._scheduler.commit(step)
        return self._postprocess(dict(zip(choice.sequences, tokens, strict=True)), on_progress)

    def _fail_step(self, step: list[ScheduledSequence], error: RequestError) -> list[TokenOutput]:
        return [self._fail(sequence, error) for sequence in self._requests_of(step)]

    def _requests_of(self, step: list[ScheduledSequence]) -> list[Sequence]:
        """The sequences that stand for the requests of a step that have not ended, in its order."""
        return self._roots(scheduled.sequence for scheduled in step)

    def _roots(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """The sequences that stand for the requests of `sequences` that have not ended."""
        unended = (s for s in sequences if s.status is not SequenceStatus.FINISHED)
        return [self._sequences[id_] for id_ in dict.fromkeys(s.request.request_id for s in unended)]

    def _check_queue(self, client: str) -> None:
        """Raises QueueFull when no further request may wait, in the queue or parked, and QueueShareFull when none of a
        client may that has a name.
        """
        num_waiting = self._scheduler.num_waiting + sum(map(len, self._parked.values())) + len(self._guide_queue)
        if num_waiting >= self._max_queue_size:
            # By arrival: it is found behind those that run.
            oldest = next(s for s in self._sequences.values() if s.status is SequenceStatus.WAITING)
            wait_s = (time.monotonic_ns() - oldest.arrival_time_ns) / 1e9
            raise QueueFull(num_waiting, self._max_queue_size, wait_s)
        if client and (num_own := self._num_of_client[client]) >= self._max_queue_share:
            raise QueueShareFull(num_own, self._max_queue_share)

    def _pin_or_fetch(self, request: GenerationRequest) -> CachedAdapter | Fetch | None:
        """The adapter of a request, pinned or on its way; None is the base model."""
        if (task_id := request.task_id) is None or request.lora_task_id is None:
            return None
        try:
            return self._loras.pin(task_id)
        except AdapterNotFound:
            if request.adapter_tenant:
                raise  # sources have the server's adapters only
            return self._remote.fetch(AdapterKey(request.lora_task_id, request.lora_name))

    def _enqueue(self, sequence: Sequence) -> None:
        assert (sequence.adapter is None) == (sequence.request.lora_task_id is None), "the base model for an adapter"
        sampling = sequence.request.sampling
        if sampling.guide is not None and sequence.guide is None:
            self._guide_queue.add(sequence, sampling.guide, end_tokens(sampling, self.info.end_token_ids))
        else:
            self._scheduler.add(sequence)

    def _note_deadline(self, sequence: Sequence, deadline_s: float) -> None:
        heapq.heappush(self._deadlines, (deadline_s, sequence.arrival, sequence.request.request_id))
        if len(self._deadlines) > 2 * len(self._sequences) + _NUM_PAST_DEADLINES:
            self._deadlines = [(at_s, arrival, id_) for at_s, arrival, id_ in self._deadlines if id_ in self._sequences]
            heapq.heapify(self._deadlines)

    def _end_expired(self) -> list[TokenOutput]:
        outputs, now = [], time.monotonic()
        while self._deadlines and self._deadlines[0][0] <= now:
            _, arrival, request_id = heapq.heappop(self._deadlines)
            sequence = self._sequences.get(request_id)
            if sequence is not None and sequence.arrival == arrival:
                outputs.append(self._fail(sequence, Cancelled("the request reached its deadline unfinished")))
        return outputs

    def _end_unloadable(self) -> list[TokenOutput]:
        """Fail the requests whose adapters could not be read from disk, or not be copied to the device."""
        errors = self._loras.poll()
        lost = [s for s in self._sequences.values() if s.adapter in errors] if errors else []
        return [self._fail(sequence, errors[sequence.adapter]) for sequence in lost if sequence.adapter is not None]

    def _take_up_fetched(self) -> list[TokenOutput]:
        """Let go on whose adapters have arrived, and fail whose have not."""
        outputs = []
        for fetch in self._remote.poll():
            for sequence in self._parked.pop(fetch, []):
                outputs += self._unpark(sequence, fetch)
        return outputs

    def _unpark(self, sequence: Sequence, fetch: Fetch) -> list[TokenOutput]:
        lora_task_id = sequence.request.lora_task_id
        assert lora_task_id == fetch.key.lora_task_id
        try:
            if fetch.error is not None:
                raise fetch.error
            sequence.adapter = self._loras.pin(fetch.key.lora_task_id)
        except RequestError as error:
            self._forget(sequence)
            return [_error_output(sequence.request, error)]
        self._enqueue(sequence)
        return []

    def _take_up_compiled(self) -> list[TokenOutput]:
        """Enqueue the sequences whose guides are compiled, and fail those whose guides cannot be."""
        outputs = []
        for sequence, guide in self._guide_queue.poll():
            if isinstance(guide, GuideMatcher):
                self._guide_queue.give_up(sequence)
                sequence.guide = guide
                self._enqueue(sequence)
            else:
                outputs.append(self._fail(sequence, guide))
        return outputs

    def _postprocess(self, chosen: dict[Sequence, SampledToken], on_progress: Callable[[], None]) -> list[TokenOutput]:
        sequences = self._roots(chosen)
        _note_tokens(sequences)
        num_charged = sum(sequence.has_host_work for sequence in sequences)
        outputs: list[TokenOutput | None] = []
        copies: list[BlockCopy] = []
        for sequence in sequences:
            if sequence.has_host_work:
                outputs.append(self._take_charged(sequence, chosen, copies, num_charged))
                on_progress()
            else:
                outputs.append(self._append(sequence, chosen[sequence]))
        if copies:
            self._runner.copy_blocks(copies)
        return [output for output in outputs if output is not None]

    def _take_charged(
        self, sequence: Sequence, chosen: dict[Sequence, SampledToken], copies: list[BlockCopy], num_charged: int
    ) -> TokenOutput | None:
        """What the chosen tokens give a request whose tokens may cost much; it ends when they cost too much."""
        started = time.thread_time()
        if sequence.search is None:
            output = self._append(sequence, chosen[sequence])
        else:
            output = self._advance(sequence, sequence.search, chosen, copies)
        if sequence.status is SequenceStatus.FINISHED:
            return output
        try:
            self._host_work.charge(sequence, time.thread_time() - started, num_charged)
        except TooMuchHostWork as error:
            return self._fail(sequence, error)
        return output

    def _advance(
        self, sequence: Sequence, search: BeamSearch, chosen: dict[Sequence, SampledToken], copies: list[BlockCopy]
    ) -> TokenOutput | None:
        """One step of a beam search; what has to be copied for it goes to `copies`."""
        before = sequence.beams
        if not all(chosen[beam].is_finite for beam in before):
            return self._fail(sequence, _overflow(sequence))
        continuations = search.advance(before, [chosen[beam].continuations or Continuations([], []) for beam in before])
        if not continuations:
            return self._finish_search(sequence)
        continue_beams(sequence, continuations)
        copies += self._scheduler.branch(sequence, before, [continuation.parent for continuation in continuations])
        return None

    def _append(self, sequence: Sequence, token: SampledToken) -> TokenOutput | None:
        if not token.is_finite:
            return self._fail(sequence, _overflow(sequence))
        if sequence.max_output_tokens == 0:
            return self._finish(sequence, "length")
        if (token_id := token.token_id) is None:
            return self._fail(sequence, _no_token_left(sequence))
        try:
            is_complete = sequence.guide is not None and sequence.guide.advance(token_id)
        except InvalidRequest as error:
            return self._fail(sequence, error)
        sequence.output_token_ids.append(token_id)
        if token.log_prob is not None:
            sequence.held_log_probs.append(token.log_prob)
        if token.logits is not None:
            sequence.held_logits.append(token.logits)
        if token_id in end_tokens(sequence.request.sampling, self.info.end_token_ids):
            return self._finish(sequence, "stop", end_token_ids=[token_id])
        delta = sequence.text.push(token_id)
        if is_complete:
            return self._finish(sequence, "stop", delta)
        if delta.stopped or len(sequence.output_token_ids) >= sequence.max_output_tokens:
            return self._finish(sequence, "length", delta)
        return self._output(sequence, delta) if delta.token_ids or delta.text else None

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        delta: TextDelta = _NOTHING,
        end_token_ids: Iterable[int] = (),
    ) -> TokenOutput:
        """Remove a sequence; its last output: `delta`, what its text stream still held, and its end token.

        A stop word is the reason whenever it was completed, even by the last token that was allowed.
        """
        self._remove(sequence)
        held = _NOTHING if delta.stopped else sequence.text.finish()
        token_ids = [*delta.token_ids, *held.token_ids, *end_token_ids]
        last = TextDelta(token_ids, delta.text + held.text)
        return self._output(sequence, last, "stop" if delta.stopped or held.stopped else reason)

    def _finish_search(self, sequence: Sequence, reason: FinishReason | None = None) -> TokenOutput:
        """Remove a search; its only output. reason: why it was ended, None when it came to its end."""
        assert sequence.search is not None
        beams = sequence.search.answers(sequence.beams, reason)
        if not beams and reason is None:
            return self._fail(sequence, _no_token_left(sequence))
        self._remove(sequence)
        return TokenOutput(
            request_id=sequence.request.request_id,
            token_ids=[],
            text="",
            finish_reason=reason or beams[0].finish_reason,
            num_prompt_tokens=len(sequence.request.prompt_token_ids),
            num_output_tokens=sum(len(beam.token_ids) for beam in beams),
            num_cached_tokens=sequence.num_cached_tokens,
            lora_digest="" if sequence.adapter is None else sequence.adapter.digest,
            perf=sequence.perf,
            beams=beams,
        )

    def _fail(self, sequence: Sequence, error: RequestError) -> TokenOutput:
        self._remove(sequence)
        return _error_output(sequence.request, error)

    def _remove(self, sequence: Sequence) -> None:
        if sequence.adapter is None and sequence.request.lora_task_id is not None:
            self._leave(sequence)
        elif self._guide_queue.give_up(sequence):
            if sequence.adapter is not None:
                self._loras.unpin(sequence.adapter)
        else:
            self._scheduler.finish(sequence)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request.request_id]
        self._num_of_client.subtract([client := sequence.request.sender.name])
        if not self._num_of_client[client]:
            del self._num_of_client[client]
        if (guide := sequence.request.sampling.guide) is not None:
            self._guides_in_use.remove(guide)

    def _leave(self, sequence: Sequence) -> None:
        """Take a parked sequence out."""
        fetch = next(fetch for fetch, parked in self._parked.items() if sequence in parked)
        self._parked[fetch].remove(sequence)
        if not self._parked[fetch]:
            del self._parked[fetch]
        self._remote.give_up(fetch)

    def _output(self, sequence: Sequence, delta: TextDelta, finish_reason: FinishReason | None = None) -> TokenOutput:
        log_probs = sequence.release_log_probs(len(delta.token_ids))
        context_logits, generation_logits = sequence.release_logits(len(delta.token_ids))
        return TokenOutput(
            request_id=sequence.request.request_id,
            token_ids=delta.token_ids,
            text=delta.text,
            finish_reason=finish_reason,
            num_prompt_tokens=len(sequence.request.prompt_token_ids),
            num_output_tokens=len(sequence.output_token_ids),
            lora_digest="" if sequence.adapter is None else sequence.adapter.digest,
            log_probs=log_probs,
            cum_log_prob=sequence.cum_log_prob,
            generation_logits=generation_logits,
            context_logits=context_logits,
            prompt_log_probs=sequence.release_prompt_log_probs(),
            num_cached_tokens=sequence.num_cached_tokens,
            perf=None if finish_reason is None else sequence.perf,
        )


def _text_stream(tokenizer: Tokenizer, sampling: SamplingParams) -> TextStream:
    return TextStream(
        tokenizer, sampling.stop_words, sampling.stop_token_sequences, sampling.include_stop_str_in_output
    )


def _prompt_log_probs(request: GenerationRequest) -> PromptLogProbs | None:
    if not request.sampling.return_prompt_log_probs:
        return None
    return PromptLogProbs(len(request.prompt_token_ids), request.sampling.num_prompt_top_log_probs)


def _adapter_label(sequence: Sequence) -> str:
    """The name of a sequence's adapter, else its task id, behind its tenant if it has one; empty for the base model."""
    task_id = sequence.request.task_id
    return "" if task_id is None else label_of(task_id, sequence.request.lora_name)


def _error_output(request: GenerationRequest, error: RequestError) -> TokenOutput:
    if isinstance(error, AdapterNotFound):
        error = error.under_name(request.lora_name)
    return TokenOutput(request.request_id, [], "", error_code=error.code, error_message=str(error))


def _out_of_memory(error: Exception, step: list[ScheduledSequence]) -> InternalError:
    """What the requests of a step hear of it. Raises any other error."""
    if not is_out_of_memory(error):
        raise error
    _logger.error("a step of %d sequences ran out of memory", len(step), exc_info=error)
    return InternalError(f"the step ran out of memory: {error}")


def _note_scheduled(sequences: list[Sequence]) -> None:
    now_ns = time.monotonic_ns()
    for sequence in sequences:
        if not sequence.first_scheduled_time_ns:
            sequence.first_scheduled_time_ns = now_ns


def _note_tokens(sampled: list[Sequence]) -> None:
    now_ns = time.monotonic_ns()
    for sequence in (s for s in sampled if s.max_output_tokens):
        sequence.last_token_time_ns = now_ns
        if not sequence.first_token_time_ns:
            sequence.first_token_time_ns = now_ns


def _overflow(sequence: Sequence) -> RequestError:
    if sequence.adapter is None:
        return InternalError("the model's logits are not finite numbers")
    return AdapterOverflow(sequence.request.lora_task_id, sequence.request.lora_name, sequence.adapter.digest)


def _no_token_left(sequence: Sequence) -> InvalidRequest:
    num_tokens = len(sequence.output_token_ids)
    return InvalidRequest(f"after {num_tokens} tokens, what the request forbids leaves no token to go on with")
