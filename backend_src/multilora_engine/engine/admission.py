"""`Admission`: the way of a request to the scheduler."""

from __future__ import annotations

import time
from collections.abc import Iterator

from multilora_engine.engine.live_requests import LiveRequests
from multilora_engine.engine.new_sequences import NewSequences
from multilora_engine.engine.outputs import error_output, failure_output
from multilora_engine.engine.parking import Parking
from multilora_engine.engine.queue_limits import QueueLimits
from multilora_engine.engine.scheduler import Scheduler
from multilora_engine.engine.sequence import Sequence
from multilora_engine.errors import AdapterNotFound, RequestError
from multilora_engine.lora.cached_adapter import CachedAdapter
from multilora_engine.lora.manager import LoRAManager
from multilora_engine.lora.remote import Fetch, RemoteAdapters
from multilora_engine.lora.sources.source import AdapterKey
from multilora_engine.request import GenerationRequest, TokenOutput
from multilora_engine.sampling.guide_queue import GuideQueue, GuidesInUse
from multilora_engine.sampling.guided import GuideMatcher
from multilora_engine.sampling.logits import end_tokens


class Admission:
    """Checks a request, pins or fetches its adapter, has its guide compiled, and hands its sequence to the scheduler.

    A sequence waits outside of the scheduler's queue until it has its adapter and then its guide. The only writer of
    `Sequence.adapter` and `Sequence.guide`.
    """

    def __init__(
        self,
        new_sequences: NewSequences,
        queue_limits: QueueLimits,
        timeout_s: float,
        loras: LoRAManager,
        remote: RemoteAdapters,
        guide_queue: GuideQueue,
        guides_in_use: GuidesInUse,
        scheduler: Scheduler,
        live: LiveRequests,
    ) -> None:
        """timeout_s: the longest time from acceptance to the end. live: the requests that are in the engine."""
        self._new_sequences = new_sequences
        self._queue_limits = queue_limits
        self._timeout_s = timeout_s
        self._loras = loras
        self._remote = remote
        self._parking = Parking(remote)
        self._guide_queue = guide_queue
        self._guides_in_use = guides_in_use
        self._scheduler = scheduler
        self._live = live

    @property
    def num_outside(self) -> int:
        """Sequences that wait outside of the scheduler's queue."""
        return len(self._parking) + len(self._guide_queue)

    def accept(self, request: GenerationRequest) -> None:
        """Take a request in. Raises a RequestError, and nothing has changed."""
        assert request.request_id not in self._live, f"request id {request.request_id} is in use"
        num_waiting = self._scheduler.num_waiting + self.num_outside
        self._new_sequences.limits.check(request)
        self._queue_limits.check(request.sender.account, num_waiting, self._live)
        sequence = self._new_sequences.make(request)
        if request.sampling.guide is not None:
            self._guides_in_use.check(request.sampling.guide)
        adapter = self._pin_or_fetch(request)
        self._live.add(sequence, time.monotonic() + self._seconds_of(request))
        if request.sampling.guide is not None:
            self._guides_in_use.add(request.sampling.guide)
        if isinstance(adapter, Fetch):
            self._parking.add(sequence, adapter)
            return
        sequence.adapter = adapter
        try:
            self._pass_on(sequence)
        except Exception:
            self._let_go(sequence)
            raise

    def take_up(self) -> list[TokenOutput]:
        """Pass on the sequences whose adapters have arrived and those whose guides are compiled.

        Returns the last outputs of the requests whose fetch or guide failed.
        """
        return [*self._take_up_fetched(), *self._take_up_compiled()]

    def withdraw(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, with its pin."""
        if sequence.adapter is None and sequence.request.lora_task_id is not None:
            self._parking.give_up(sequence)
        elif self._guide_queue.give_up(sequence):
            if sequence.adapter is not None:
                self._loras.unpin(sequence.adapter)
        else:
            self._scheduler.finish(sequence)
        self._forget(sequence)

    def close(self) -> None:
        """Withdraw every request."""
        for sequence in list(self._live):
            self.withdraw(sequence)

    def check_integrity(self) -> None:
        """Every request is in one place. For tests, after every step."""
        self._live.check_integrity()
        self._parking.check_integrity()
        self._scheduler.check_integrity(self._guide_queue)
        num_placed = self._scheduler.num_waiting + self._scheduler.num_running + self.num_outside
        assert num_placed == len(self._live), "a request is lost"

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

    def _seconds_of(self, request: GenerationRequest) -> float:
        return self._timeout_s if request.timeout_s is None else min(request.timeout_s, self._timeout_s)

    def _pass_on(self, sequence: Sequence) -> None:
        """To the guide queue or to the scheduler, whichever is next."""
        assert (sequence.adapter is None) == (sequence.request.lora_task_id is None), "the base model for an adapter"
        sampling = sequence.request.sampling
        if sampling.guide is not None and sequence.guide is None:
            ends = end_tokens(sampling, self._new_sequences.end_token_ids)
            self._guide_queue.add(sequence, sampling.guide, ends)
        else:
            self._scheduler.add(sequence)

    def _take_up_fetched(self) -> Iterator[TokenOutput]:
        for sequence, fetch in self._parking.take_arrived():
            try:
                sequence.adapter = self._pin_fetched(sequence, fetch)
            except RequestError as error:
                self._forget(sequence)
                yield error_output(sequence.request, error)
                continue
            try:
                self._pass_on(sequence)
            except Exception as error:
                self._let_go(sequence)
                yield failure_output(sequence, error)

    def _pin_fetched(self, sequence: Sequence, fetch: Fetch) -> CachedAdapter:
        assert sequence.request.lora_task_id == fetch.key.lora_task_id
        if fetch.error is not None:
            raise fetch.error
        return self._loras.pin(fetch.key.lora_task_id)

    def _take_up_compiled(self) -> Iterator[TokenOutput]:
        for sequence, guide in self._guide_queue.poll():
            try:
                self._take_matcher(sequence, guide)
            except RequestError as error:
                self._let_go(sequence)
                yield error_output(sequence.request, error)
            except Exception as error:
                self._let_go(sequence)
                yield failure_output(sequence, error)

    def _take_matcher(self, sequence: Sequence, compiled: GuideMatcher | RequestError) -> None:
        """Raises the reason that the sequence gets none."""
        if isinstance(compiled, RequestError):
            raise compiled
        assert sequence.request.sampling.guide is not None
        self._guides_in_use.compiled(sequence.request.sampling.guide, compiled)
        sequence.guide = compiled
        self._guide_queue.give_up(sequence)
        self._pass_on(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        """Take out a sequence that could not be passed on, with its pin."""
        self._guide_queue.give_up(sequence)
        if sequence.adapter is not None:
            self._loras.unpin(sequence.adapter)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        self._live.remove(sequence)
        if (guide := sequence.request.sampling.guide) is not None:
            self._guides_in_use.remove(guide, sequence.guide)
