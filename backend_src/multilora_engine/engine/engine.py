"""`Engine`: requests in, tokens out. One thread owns it; it needs neither a server nor a socket."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from multilora_engine.config import EngineConfig, on_device
from multilora_engine.engine.accounts import Accounts
from multilora_engine.engine.admission import Admission, LiveRequests, NewSequences, QueueLimits
from multilora_engine.engine.answers import Answers
from multilora_engine.engine.base_model import BaseModel, describe_engine, load_base_model
from multilora_engine.engine.block_events import BlockEvents
from multilora_engine.engine.build import build_fetcher, build_lora_manager, build_model_runner, choose_device
from multilora_engine.engine.engine_stats import AdaptersInUse, EngineStats
from multilora_engine.engine.guide_queue import GuideQueue, GuidesInUse
from multilora_engine.engine.kv_cache import BlockAllocator
from multilora_engine.engine.outputs import error_output, failure_output, prompt_output
from multilora_engine.engine.pace import Pace, StepWork
from multilora_engine.engine.padded_times import step_times
from multilora_engine.engine.request_limits import RequestLimits
from multilora_engine.engine.scheduler import PromptWaits, Scheduler
from multilora_engine.engine.unpacked_weights import UnpackedWeights
from multilora_engine.errors import AdapterNotFound, Cancelled, InternalError, InvalidRequest, RequestError
from multilora_engine.execution.device_probe import DeviceProbe
from multilora_engine.guides.guided import GuideCompiler
from multilora_engine.lora.adapter_events import AdapterEventLog
from multilora_engine.lora.adapter_sets import AdapterSets
from multilora_engine.lora.folder_use import UseReader
from multilora_engine.lora.layout import AdapterTraits, PackedAdapter
from multilora_engine.lora.manager import LoRAManager
from multilora_engine.lora.names import TaskId, label_of
from multilora_engine.lora.preload import preload_adapters
from multilora_engine.lora.remote import RemoteAdapters
from multilora_engine.models.rope_config import AdapterRopes
from multilora_engine.out_of_memory import is_out_of_memory
from multilora_engine.request import GenerationRequest, TokenOutput
from multilora_engine.sampling.sampler import Choice, SampledToken
from multilora_engine.sequences.sequence import BlockCopy, ScheduledSequence, Sequence, SequenceStatus
from multilora_kernels import forget_adapters

_logger = logging.getLogger(__name__)

_DISK_WAIT_S = 0.002
"""How long a step with nothing to compute waits for adapters that are being read from disk or written to it."""

_FETCH_WAIT_S = 0.005
"""How long it waits for an adapter that is being fetched from a source, which takes longer anyway."""

_GUIDE_WAIT_S = 0.002
"""How long it waits for a guide that is being compiled."""

_PROMPT_WAIT_S = 0.001
"""How long it waits for a front that writes a chat."""

_NUM_LORA_EVENTS = 4096
"""How many events of adapters are remembered."""


@dataclass(frozen=True)
class _StepInFlight:
    """A step that has been launched, and the choice of its tokens, which has not been read.

    started_s, work: for `Pace`.
    """

    step: list[ScheduledSequence]
    choice: Choice
    started_s: float
    work: StepWork


class Engine:
    """Continuous batching over one base model and many adapters.

    `add_request` accepts, `step` computes, every accepted request ends with exactly one final `TokenOutput`, from
    `step` or from `abort`.

    With `enable_async_scheduling`, a step stays in flight when `step` returns: the next call schedules and launches
    another one, in which the tokens that are being chosen are *pending*, and reads them then. A GPU thus never waits
    for the host's work between steps. Tokens that a sequence computed beyond the end of its answer are dropped. A step
    is read at once when any of its sequences' sampling `must_read_each_token`.
    """

    def __init__(self, config: EngineConfig, on_progress: Callable[[int, int], None] | None = None) -> None:
        """Load everything. on_progress, errors: as of `load_base_model`."""
        config = on_device(config, choose_device(config).type)
        base = load_base_model(config, on_progress)
        self.info = describe_engine(config, base)
        self._device_probe = DeviceProbe(base.device)
        self._tokenizer = base.tokenizer
        self._max_loras = config.lora.max_loras
        self.lora_events = AdapterEventLog(_NUM_LORA_EVENTS)
        self._ropes = AdapterRopes(base.config.ropes)
        self._loras = build_lora_manager(
            config,
            base.layout,
            base.plan,
            self._device_probe,
            self.lora_events,
            partial(_check_traits, base, self._ropes),
        )
        uses = UseReader(base.tokenizer, config.model_path, base.config.vocab_size)
        if config.lora.lora_prefetch_dir is not None:
            preload_adapters(config.lora.lora_prefetch_dir, self._loras, base.layout, uses)
        self._remote = RemoteAdapters(self._loras, build_fetcher(config, base.layout, uses), self.lora_events.append)
        self._sets = AdapterSets(self._loras, self._remote)
        self._block_events = BlockEvents()
        self._blocks = BlockAllocator(
            base.plan.num_blocks, config.block_size, config.enable_prefix_caching, self._block_events
        )
        self._runner = build_model_runner(base.model, config, base.plan, base.device, self._loras.device)
        times = step_times(self._runner.prompt_sizes, config.max_num_batched_tokens)
        self._pace = Pace(config.inter_token_latency_target_s, times)
        accounts = Accounts()
        self._scheduler = Scheduler(
            self._blocks,
            self._loras.memory,
            config.max_num_seqs,
            config.max_num_batched_tokens,
            config.max_num_encoder_tokens,
            self._pace,
            accounts,
            PromptWaits(),
        )
        self.weights = UnpackedWeights(
            base.model, base.plan.spare_bytes, base.device, self._blocks.forget_known, self._runner.num_graphs > 0
        )
        self._runs_ahead = config.enable_async_scheduling is True
        self._in_flight: _StepInFlight | None = None
        make_compiler = partial(GuideCompiler, base.tokenizer, base.config.vocab_size)
        self._guide_queue = GuideQueue(make_compiler, accounts)
        self._live = LiveRequests()
        self._admission = self._make_admission(config, base)
        self._answers = Answers(base.config.end_token_ids, accounts, self._scheduler)

    @property
    def has_work(self) -> bool:
        """Whether a `step` would do anything."""
        is_busy = self._in_flight is not None or self._loras.is_busy or self._remote.is_busy
        return bool(self._live) or is_busy

    @property
    def remote(self) -> RemoteAdapters:
        """The adapters that are on their way. Only the engine's thread may use the object."""
        return self._remote

    @property
    def sets(self) -> AdapterSets:
        """The sets that are made of adapters. Only the engine's thread may use the object."""
        return self._sets

    @property
    def loras(self) -> LoRAManager:
        """The adapters in memory and on disk. Only the engine's thread may use the object."""
        return self._loras

    @property
    def block_events(self) -> BlockEvents:
        """The prefix cache's events: the blocks it comes to know and forgets."""
        return self._block_events

    @property
    def stats(self) -> EngineStats:
        return EngineStats(
            num_waiting=self._scheduler.num_waiting,
            num_running=self._scheduler.num_running,
            num_free_blocks=self._blocks.num_free,
            num_blocks=self._blocks.num_blocks,
            kv_cache_bytes=self._runner.kv_cache_bytes,
            num_cached_adapters=len(self._loras.host),
            num_pins=self._loras.memory.num_pins,
            num_preemptions=self._scheduler.num_preemptions,
            prefix_cache=self._blocks.prefix_cache,
            pace=self._pace.stats,
            prompt_waits=self._scheduler.prompt_waits,
            weights=self.weights.stats,
            num_cuda_graphs=self._runner.num_graphs,
        )

    @property
    def adapters_in_use(self) -> AdaptersInUse:
        running = {_adapter_label(s) for s in self._live if s.status is SequenceStatus.RUNNING}
        waiting = {_adapter_label(s) for s in self._live if s.status is not SequenceStatus.RUNNING}
        return AdaptersInUse(self._max_loras, sorted(running - {""}), sorted(waiting - running - {""}))

    def warm_up(self) -> None:
        """Do now the work that the first request of its kind would make the steps of all others wait for."""
        self._guide_queue.warm_up()

    def take_kv_memory(self) -> None:
        """Take the memory of the whole KV cache now. Else steps have it taken as they use it, which disturbs them."""
        self._runner.take_kv_memory()

    def put_adapter(self, lora_task_id: TaskId, adapter: PackedAdapter, name: str = "") -> None:
        """Cache an adapter, at once or as soon as there is room for it: see `LoRAManager.put`.

        Raises AdapterConflict or AdapterCacheFull.
        """
        self._loras.put(lora_task_id, adapter, name)
        self._remote.supersede(lora_task_id)

    def add_request(self, request: GenerationRequest, call_id: str = "") -> GenerationRequest:
        """Accept a request, or raise InvalidRequest, AdapterNotFound or QueueFull, and nothing has changed.

        Returns the request as it was accepted: by an adapter's name, where it came by an alias. call_id: as of
        `Aliases.resolve`; empty: the request's own id.

        With sources, an adapter that no tier has is fetched: the request is parked until it has arrived, outside the
        queue, so that however long that takes it holds up nobody. So is a request with a guide until that is compiled.
        """
        accepted = self._admission.resolve(request, call_id or request.request_id)
        try:
            self._admission.accept(accepted)
        except AdapterNotFound as error:
            raise error.under_name(accepted.lora_name) from None
        return accepted

    def give_prompt(self, request: GenerationRequest) -> int:
        """Go on with a request whose chat a front has written, as the output with `asked_use` asked.

        Returns the number of tokens of the prompt that it had before. Raises a RequestError; it has ended then.
        """
        return self._admission.give_prompt(request)

    def abort(self, request_id: str) -> TokenOutput | None:
        """End a request now. Its final output, with the part that was held back; None if it has ended before."""
        sequence = self._live.get(request_id)
        if sequence is None:
            return None
        output = self._answers.cancel(sequence)
        self._admission.withdraw(sequence)
        return output

    def step(self, on_progress: Callable[[], None] = lambda: None) -> list[TokenOutput]:
        """Schedule a step, launch it, read the tokens of the one before or of this one, and extend the answers by them.

        Returns the outputs of the requests that have any. on_progress: called between layers, and for each request
        whose tokens take long between two steps, so that a watcher can tell a long step from one that hangs.

        A step that runs out of memory fails its requests only, and the host's work for one request that raises fails
        that one only. Any other exception is our bug or a dead device (`is_device_dead`); it is raised, and nothing in
        flight can be trusted to go on.
        """
        started_s = self._pace.begin()
        outputs = self._end_expired() + self._end_unloadable() + self._admission.take_up()
        step = self._scheduler.schedule()
        if not step:
            return outputs + self._step_without_work(on_progress)
        self._note_step(step)
        try:
            launched = self._launch(step, on_progress, started_s)
        except (RuntimeError, MemoryError) as error:
            failure = self._out_of_memory(error, step)
            return outputs + self._read_step_in_flight(on_progress) + self._fail_step(step, failure)
        outputs += self._read_step_in_flight(on_progress)
        self._in_flight = launched
        if not self._may_stay_in_flight(launched):
            outputs += self._read_step_in_flight(on_progress)
        return outputs

    def is_device_dead(self) -> bool:
        """Whether the device computes nothing any more. To be asked after an exception; may take some seconds."""
        return self._device_probe.is_dead()

    def note_sent(self) -> None:
        """The outputs of the last `step` have left. With that known, steps that send much are kept short, too."""
        self._pace.note_sent()

    def check_integrity(self) -> None:
        """Every table agrees with every other. For tests, after every step."""
        self._admission.check_integrity()
        pending = {} if self._in_flight is None else dict.fromkeys(self._in_flight.choice.sequences, 1)
        for sequence in self._live:
            assert sequence.num_pending_tokens == pending.get(sequence, 0), "a pending token is lost"

    def close(self) -> None:
        """Drop the requests in flight, without outputs, and spill adapters to disk if there is a disk tier."""
        self._admission.close()
        self._in_flight = None
        self._guide_queue.close()
        self._sets.close()
        self._remote.close()
        self.weights.close()
        self._loras.close()
        forget_adapters()

    def _make_admission(self, config: EngineConfig, base: BaseModel) -> Admission:
        limits = RequestLimits(
            max_model_len=base.plan.max_model_len,
            vocab_size=base.config.vocab_size,
            max_logits_bytes=self.info.limits.max_logits_bytes,
            max_beam_width=min(self.info.limits.max_beam_width, config.max_num_seqs),
            num_blocks=base.plan.num_blocks,
            block_size=config.block_size,
            source=self.info.source,
            max_num_encoder_tokens=config.max_num_encoder_tokens,
        )
        return Admission(
            NewSequences(base.tokenizer, limits, base.config.end_token_ids, base.device),
            QueueLimits(config.max_queue_size),
            config.request_timeout_s,
            self._loras,
            self._remote,
            self._sets,
            self._ropes,
            self._guide_queue,
            GuidesInUse(),
            self._scheduler,
            self._live,
        )

    def _note_step(self, step: list[ScheduledSequence]) -> None:
        now_ns = time.monotonic_ns()
        for sequence in self._requests_of(step):
            sequence.times.note_step(now_ns)

    def _step_without_work(self, on_progress: Callable[[], None]) -> list[TokenOutput]:
        """There is nothing to launch: the outputs of the step in flight, or a little wait for adapters and guides."""
        if self._in_flight is None:
            self._loras.wait(_DISK_WAIT_S)
            self._remote.wait(_FETCH_WAIT_S)
            self._guide_queue.wait(_GUIDE_WAIT_S)
            if self._admission.waits_for_prompts:
                time.sleep(_PROMPT_WAIT_S)
        return self._read_step_in_flight(on_progress)

    def _launch(
        self, step: list[ScheduledSequence], on_progress: Callable[[], None], started_s: float
    ) -> _StepInFlight:
        before = None if self._in_flight is None else self._in_flight.choice
        work = self._pace.launch(step)
        choice = self._runner.launch(step, on_progress, before)
        for sequence in choice.sequences:
            sequence.num_pending_tokens += 1
        return _StepInFlight(step, choice, started_s, work)

    def _may_stay_in_flight(self, launched: _StepInFlight) -> bool:
        return self._runs_ahead and not any(
            sequence.request.sampling.must_read_each_token or sequence.failure is not None
            for sequence in launched.choice.sequences
        )

    def _read_step_in_flight(self, on_progress: Callable[[], None]) -> list[TokenOutput]:
        """Wait for the tokens of the step in flight, if there is one, and extend the answers by them."""
        if self._in_flight is None:
            return []
        in_flight, self._in_flight = self._in_flight, None
        step, choice = in_flight.step, in_flight.choice
        for sequence in choice.sequences:
            sequence.num_pending_tokens -= 1
        try:
            tokens = choice.read()
        except (RuntimeError, MemoryError) as error:
            return self._fail_step(step, self._out_of_memory(error, step))
        self._scheduler.commit(step)
        outputs = self._extend_answers(dict(zip(choice.sequences, tokens, strict=True)), on_progress)
        outputs += self._prompt_outputs(step)
        self._pace.note_read(in_flight.started_s, in_flight.work)
        return outputs

    def _extend_answers(
        self, chosen: dict[Sequence, SampledToken], on_progress: Callable[[], None]
    ) -> list[TokenOutput]:
        sequences = self._live.roots(chosen)
        _note_tokens(sequences)
        num_charged = sum(sequence.has_host_work for sequence in sequences)
        outputs: list[TokenOutput] = []
        copies: list[BlockCopy] = []
        for sequence in sequences:
            output: TokenOutput | None
            try:
                if sequence.has_host_work:
                    output = self._answers.extend_charged(sequence, chosen, copies, num_charged)
                else:
                    output = self._answers.extend(sequence, chosen[sequence])
            except Exception as error:
                output = failure_output(sequence, error)
            if sequence.has_host_work:
                on_progress()
            if output is not None:
                outputs.append(output)
                if output.is_final:
                    self._admission.withdraw(sequence)
        if copies:
            self._runner.copy_blocks(copies)
        return outputs

    def _prompt_outputs(self, step: list[ScheduledSequence]) -> list[TokenOutput]:
        """The outputs about prompts of this step that did not leave with a token. Steps end with the prompts."""
        prompts = takewhile(lambda scheduled: not scheduled.is_decode, reversed(step))
        outputs: list[TokenOutput] = []
        for sequence in self._live.roots(scheduled.sequence for scheduled in prompts):
            try:
                if sequence.failure is not None:
                    raise sequence.failure
                if sequence.prompt_report.logits:
                    outputs.append(prompt_output(sequence))
            except Exception as error:
                outputs.append(failure_output(sequence, error))
                self._admission.withdraw(sequence)
        return outputs

    def _requests_of(self, step: list[ScheduledSequence]) -> list[Sequence]:
        """The sequences that stand for the requests of a step that have not ended, in its order."""
        return self._live.roots(scheduled.sequence for scheduled in step)

    def _fail_step(self, step: list[ScheduledSequence], error: RequestError) -> list[TokenOutput]:
        return self._fail((sequence, error) for sequence in self._requests_of(step))

    def _out_of_memory(self, error: Exception, step: list[ScheduledSequence]) -> InternalError:
        """The error that the requests of a step get. Raises any other error, and this one if the device is dead."""
        if not is_out_of_memory(error) or self.is_device_dead():
            raise error
        _logger.error("a step of %d sequences ran out of memory", len(step), exc_info=error)
        return InternalError(f"the step ran out of memory: {error}")

    def _end_expired(self) -> list[TokenOutput]:
        expired = self._live.take_expired(time.monotonic())
        return self._fail((s, Cancelled("the request reached its deadline unfinished")) for s in expired)

    def _end_unloadable(self) -> list[TokenOutput]:
        """Fail the requests whose adapters could not be read from disk, or not be copied to the device."""
        if not (errors := self._loras.poll()):
            return []
        lost = [(s, errors[s.adapter]) for s in self._live if s.adapter is not None and s.adapter in errors]
        return self._fail(lost)

    def _fail(self, failures: Iterable[tuple[Sequence, RequestError]]) -> list[TokenOutput]:
        outputs = []
        for sequence, error in failures:
            self._admission.withdraw(sequence)
            outputs.append(error_output(sequence.request, error))
        return outputs


def _check_traits(base: BaseModel, ropes: AdapterRopes, traits: AdapterTraits) -> None:
    """Raises InvalidRequest for an adapter that the model cannot have."""
    if base.config.source is None:
        ropes.check(traits.rope)
    elif traits.rope or traits.invocation_tokens:
        names = {"rotary embeddings of its own": traits.rope, "alora_invocation_tokens": traits.invocation_tokens}
        named = " and ".join(name for name, is_given in names.items() if is_given)
        raise InvalidRequest(f"the adapter has {named}, which an encoder-decoder model does not take")


def _adapter_label(sequence: Sequence) -> str:
    """The name of a sequence's adapter, else its task id, after its tenant if it has one; empty for the base model."""
    task_id = sequence.request.task_id
    return "" if task_id is None else label_of(task_id, sequence.request.lora_name)


def _note_tokens(sampled: list[Sequence]) -> None:
    now_ns = time.monotonic_ns()
    for sequence in sampled:
        if sequence.max_output_tokens:
            sequence.times.note_token(now_ns)
