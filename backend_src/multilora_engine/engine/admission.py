"""`Admission`: the way of a request to the scheduler."""

from __future__ import annotations

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from random import Random

import torch
from msgspec.structs import replace

from multilora_engine.engine.accounts import has_host_work
from multilora_engine.engine.guide_queue import GuideQueue, GuidesInUse
from multilora_engine.engine.outputs import error_output, failure_output
from multilora_engine.engine.request_limits import RequestLimits
from multilora_engine.engine.scheduler import Scheduler
from multilora_engine.errors import (
    AdapterNotFound,
    AdapterNotInvoked,
    InvalidRequest,
    QueueFull,
    QueueShareFull,
    RequestError,
)
from multilora_engine.guides.guided import GuideMatcher
from multilora_engine.guides.thinking import thinking_of
from multilora_engine.lora.adapter_sets import AdapterSets
from multilora_engine.lora.adapter_state import CachedAdapter
from multilora_engine.lora.manager import LoRAManager
from multilora_engine.lora.remote import Fetch, RemoteAdapters
from multilora_engine.lora.sources.source import AdapterKey
from multilora_engine.lora.versions import Expectation
from multilora_engine.models.rope_config import AdapterRopes
from multilora_engine.request import GenerationRequest, TokenOutput
from multilora_engine.sampling.logits import bias_tensors, end_tokens
from multilora_engine.sequences.beam_search import BeamSearch
from multilora_engine.sequences.prompt_log_probs import PromptLogProbs
from multilora_engine.sequences.sequence import PromptReport, Sequence, SequenceStatus, Source, Times
from multilora_engine.text.text_stream import TextStream
from multilora_engine.text.tokenizer import Tokenizer
from multilora_wire.adapter_use import use_digest


@dataclass(frozen=True)
class QueueLimits:
    """max_waiting: requests that wait. A client with a name may have half as many, waiting and running."""

    max_waiting: int

    @property
    def max_of_client(self) -> int:
        return max(1, self.max_waiting // 2)

    def check(self, client: str, num_waiting: int, live: LiveRequests) -> None:
        """Raises QueueFull or QueueShareFull when a further request of a client may not wait."""
        if num_waiting >= self.max_waiting:
            wait_s = (time.monotonic_ns() - live.oldest_waiting().times.arrival_ns) / 1e9
            raise QueueFull(num_waiting, self.max_waiting, wait_s)
        if client and (num_own := live.num_of(client)) >= self.max_of_client:
            raise QueueShareFull(num_own, self.max_of_client)


class Parking:
    """Sequences wait here outside of the queue, so that a fetch holds up nobody, however long it takes."""

    def __init__(self, remote: RemoteAdapters) -> None:
        self._remote = remote
        self._parked: dict[Fetch, list[Sequence]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._parked.values()))

    def add(self, sequence: Sequence, fetch: Fetch) -> None:
        """Let a sequence wait for a fetch that it has asked for."""
        self._parked.setdefault(fetch, []).append(sequence)

    def take_arrived(self) -> Iterator[tuple[Sequence, Fetch]]:
        """The sequences whose fetches are done; they are here no more."""
        for fetch in self._remote.poll():
            for sequence in self._parked.pop(fetch, []):
                yield sequence, fetch

    def give_up(self, sequence: Sequence) -> None:
        """Take out a sequence that waits no longer."""
        fetch = next(fetch for fetch, parked in self._parked.items() if sequence in parked)
        self._parked[fetch].remove(sequence)
        if not self._parked[fetch]:
            del self._parked[fetch]
        self._remote.give_up(fetch)

    def check_integrity(self) -> None:
        """Nobody waits for a fetch that is done. For tests, after every step."""
        self._remote.check_integrity()
        assert all(sequences and not fetch.is_done for fetch, sequences in self._parked.items())


@dataclass(frozen=True)
class NewSequences:
    """end_token_ids: the checkpoint's. device: where biases go."""

    tokenizer: Tokenizer
    limits: RequestLimits
    end_token_ids: tuple[int, ...]
    device: torch.device
    _arrivals: itertools.count[int] = field(default_factory=itertools.count)

    def make(self, request: GenerationRequest) -> Sequence:
        """The sequence of a request that keeps the limits, without adapter and guide. Raises InvalidRequest."""
        text = _text_stream(self.tokenizer, request)
        return Sequence(
            request=request,
            arrival=next(self._arrivals),
            adapter=None,
            text=text,
            random=Random(request.sampling.seed),
            max_output_tokens=self.limits.max_output_tokens(request),
            times=Times(arrival_ns=time.monotonic_ns()),
            bias=bias_tensors(request.sampling, self.device),
            has_host_work=has_host_work(request.sampling),
            source=Source(request.source_token_ids) if request.source_token_ids else None,
            search=self._search(request, text),
            prompt_report=PromptReport(log_probs=_prompt_log_probs(request)),
        )

    def _search(self, request: GenerationRequest, text: TextStream) -> BeamSearch | None:
        if request.sampling.beam_width == 1:
            return None
        ends = end_tokens(request.sampling, self.end_token_ids)
        return BeamSearch(request.sampling, ends, self.limits.max_output_tokens(request), text.fork())


def _text_stream(tokenizer: Tokenizer, request: GenerationRequest) -> TextStream:
    sampling = request.sampling
    is_start = bool(request.source_token_ids) and not any(map(tokenizer.token_bytes, request.prompt_token_ids))
    return TextStream(
        tokenizer,
        sampling.stop_words,
        sampling.stop_token_sequences,
        sampling.include_stop_str_in_output,
        is_start,
        sampling.num_tokens_without_stops,
    )


def _prompt_log_probs(request: GenerationRequest) -> PromptLogProbs | None:
    if not request.sampling.return_prompt_log_probs:
        return None
    return PromptLogProbs(len(request.prompt_token_ids), request.sampling.num_prompt_top_log_probs)


_NUM_PAST_DEADLINES = 64
"""How many deadlines of requests that have ended are kept, at least: forgetting them one by one would take a search."""


class LiveRequests:
    """Each request from acceptance to its end, by its sequence, in order of arrival."""

    def __init__(self) -> None:
        self._sequences: dict[str, Sequence] = {}
        self._num_of_client: Counter[str] = Counter()
        self._deadlines: list[tuple[float, int, str]] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._sequences

    def get(self, request_id: str) -> Sequence | None:
        """The sequence of a request, None if it has ended."""
        return self._sequences.get(request_id)

    def num_of(self, client: str) -> int:
        """How many requests of a client are in the engine."""
        return self._num_of_client[client]

    def oldest_waiting(self) -> Sequence:
        """The request that waits and arrived first. There must be one."""
        return next(sequence for sequence in self if sequence.status is SequenceStatus.WAITING)

    def roots(self, sequences: Iterable[Sequence]) -> list[Sequence]:
        """The sequences that stand for the requests of `sequences` that have not ended, each once, in their order.

        Of a search the first beam alone knows that it has ended.
        """
        unended = (s.request.request_id for s in sequences if s.status is not SequenceStatus.FINISHED)
        return [self._sequences[id_] for id_ in dict.fromkeys(unended) if id_ in self._sequences]

    def add(self, sequence: Sequence, deadline_s: float) -> None:
        """A request was accepted. deadline_s: by the monotonic clock."""
        request = sequence.request
        self._sequences[request.request_id] = sequence
        self._num_of_client[request.sender.account] += 1
        heapq.heappush(self._deadlines, (deadline_s, sequence.arrival, request.request_id))
        if len(self._deadlines) > 2 * len(self._sequences) + _NUM_PAST_DEADLINES:
            self._deadlines = [deadline for deadline in self._deadlines if deadline[2] in self._sequences]
            heapq.heapify(self._deadlines)

    def replace(self, sequence: Sequence, other: Sequence) -> None:
        """Let `other` stand for the request of `sequence`, with its place in the order and its deadline."""
        other.arrival, other.times = sequence.arrival, sequence.times
        self._sequences[sequence.request.request_id] = other

    def remove(self, sequence: Sequence) -> None:
        """A request has ended."""
        del self._sequences[sequence.request.request_id]
        self._num_of_client.subtract([client := sequence.request.sender.account])
        if not self._num_of_client[client]:
            del self._num_of_client[client]

    def take_expired(self, now_s: float) -> list[Sequence]:
        """The requests whose deadlines have passed, each told of once."""
        expired = []
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, arrival, request_id = heapq.heappop(self._deadlines)
            sequence = self._sequences.get(request_id)
            if sequence is not None and sequence.arrival == arrival:
                expired.append(sequence)
        return expired

    def check_integrity(self) -> None:
        """Clients are counted as their requests are. For tests, after every step."""
        assert self._num_of_client == Counter(sequence.request.sender.account for sequence in self)
        assert {request_id for _, _, request_id in self._deadlines} >= set(self._sequences), "a deadline is lost"


class Admission:
    """Checks a request, pins or fetches its adapter, has its chat written by the adapter's use and its guide compiled,
    and hands its sequence to the scheduler.

    A sequence waits outside of the scheduler's queue until it has its adapter, then its prompt, and then its guide. The
    adapter is pinned when the prompt is asked for, so that the version which answers is the one that the prompt was
    written for. The only writer of `Sequence.adapter`, `Sequence.lora_start` and `Sequence.guide`.
    """

    def __init__(
        self,
        new_sequences: NewSequences,
        queue_limits: QueueLimits,
        timeout_s: float,
        loras: LoRAManager,
        remote: RemoteAdapters,
        sets: AdapterSets,
        ropes: AdapterRopes,
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
        self._sets = sets
        self._ropes = ropes
        self._parking = Parking(remote)
        self._guide_queue = guide_queue
        self._guides_in_use = guides_in_use
        self._scheduler = scheduler
        self._live = live
        self._unwritten: dict[str, Sequence] = {}
        self._asked: list[TokenOutput] = []

    @property
    def num_outside(self) -> int:
        """Sequences that wait outside of the scheduler's queue."""
        return len(self._parking) + len(self._unwritten) + len(self._guide_queue)

    @property
    def waits_for_prompts(self) -> bool:
        """Whether requests wait for a front to write their chats."""
        return bool(self._unwritten)

    def resolve(self, request: GenerationRequest, call_id: str) -> GenerationRequest:
        """The request with a member in place of an alias; see `Aliases.resolve`."""
        return self._loras.aliases.resolve(request, call_id, self._loras.inventory.digest)

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
        if isinstance(adapter, CachedAdapter):
            self._give(sequence, adapter)
        self._live.add(sequence, time.monotonic() + self._seconds_of(request))
        if request.sampling.guide is not None:
            self._guides_in_use.add(request.sampling.guide)
        if isinstance(adapter, Fetch):
            self._parking.add(sequence, adapter)
            return
        try:
            self._pass_on(sequence)
        except Exception:
            self._let_go(sequence)
            raise

    def give_prompt(self, request: GenerationRequest) -> int:
        """Take the prompt and the options that a front has written for a request by the use of its adapter.

        Returns the number of tokens of the prompt that the request had before; of a request that has ended meanwhile,
        the new one's. Raises a RequestError, and the request has ended then.
        """
        unwritten = self._unwritten.pop(request.request_id, None)
        if unwritten is None:
            return len(request.prompt_token_ids)
        adapter = unwritten.adapter
        assert adapter is not None, "it is pinned before a prompt is asked for"
        assert request.chat_use == use_digest(adapter.traits.use), "the prompt was written by another use"
        request = replace(
            # Which has the member of an alias that was chosen.
            unwritten.request,
            prompt_token_ids=request.prompt_token_ids,
            sampling=request.sampling,
            chat_use=request.chat_use,
        )
        try:
            sequence = self._rewritten(unwritten, request)
        except Exception:
            self._loras.memory.unpin(adapter)
            self._forget(unwritten)
            raise
        try:
            self._give(sequence, adapter)
        except Exception:
            self._forget(sequence)
            raise
        try:
            self._pass_on(sequence)
        except Exception:
            self._let_go(sequence)
            raise
        return len(unwritten.request.prompt_token_ids)

    def _rewritten(self, unwritten: Sequence, request: GenerationRequest) -> Sequence:
        """The sequence of a request with its prompt, in the place of the one without. Raises a RequestError."""
        self._new_sequences.limits.check(request)
        sequence = self._new_sequences.make(request)
        before, guide = unwritten.request.sampling.guide, request.sampling.guide
        if guide is not None and guide != before:
            self._guides_in_use.check(guide)
        if before is not None:
            self._guides_in_use.remove(before, None)
        if guide is not None:
            self._guides_in_use.add(guide)
        self._live.replace(unwritten, sequence)
        return sequence

    def take_up(self) -> list[TokenOutput]:
        """Pass on the sequences whose adapters have arrived and those whose guides are compiled.

        Returns the last outputs of the requests whose fetch or guide failed, and the outputs that ask for prompts.
        """
        ended = [*self._take_up_fetched(), *self._take_up_compiled()]
        asked, self._asked = self._asked, []
        return [*ended, *(output for output in asked if output.request_id in self._unwritten)]

    def withdraw(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, with its pin."""
        if self._unwritten.pop(sequence.request.request_id, None) is not None:
            assert sequence.adapter is not None
            self._loras.memory.unpin(sequence.adapter)
        elif sequence.adapter is None and sequence.request.lora_task_id is not None:
            self._parking.give_up(sequence)
        elif self._guide_queue.give_up(sequence):
            if sequence.adapter is not None:
                self._loras.memory.unpin(sequence.adapter)
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
        self._loras.check_integrity()
        num_placed = self._scheduler.num_waiting + self._scheduler.num_running + self.num_outside
        assert num_placed == len(self._live), "a request is lost"

    def _pin_or_fetch(self, request: GenerationRequest) -> CachedAdapter | Fetch | None:
        """The adapter of a request, pinned or on its way; None is the base model.

        Of a request with a path, an adapter that did not come from there, or has not the digest that the request
        demands, is read again and compared.
        """
        if (task_id := request.task_id) is None or request.lora_task_id is None:
            return None
        demanded = request.lora_expected_digest
        expectation = Expectation(answering=demanded)
        if request.lora_set:
            fetch = self._sets.fetch(task_id, request.lora_set, replaces=True, expectation=expectation)
            return fetch or self._pin(request)
        key = AdapterKey(request.lora_task_id, request.lora_name)
        if request.lora_path and not self._remote.has_from(task_id, request.lora_path, demanded):
            assert not request.adapter_tenant, "sources have the server's adapters only"
            return self._remote.fetch(key, path=request.lora_path, expectation=expectation)
        try:
            return self._pin(request)
        except AdapterNotFound:
            if request.adapter_tenant:
                raise  # sources have the server's adapters only
            return self._remote.fetch(key, expectation=expectation)

    def _pin(self, request: GenerationRequest) -> CachedAdapter:
        """Raises AdapterNotFound, AdapterCacheFull, or AdapterVersionNotFound before the adapter is touched."""
        assert request.task_id is not None
        if found := self._loras.inventory.digest(request.task_id):
            Expectation(request.lora_expected_digest).check(request.lora_task_id, request.lora_name, found, found)
        return self._loras.pin(request.task_id)

    def _give(self, sequence: Sequence, adapter: CachedAdapter) -> None:
        """Give a sequence its adapter, which is pinned. Raises AdapterNotInvoked; the pin is gone then.

        A chat that was not written by the adapter's use waits for the prompt that is.
        """
        request, use = sequence.request, adapter.traits.use
        if request.chat_use is not None and request.chat_use != use_digest(use):
            sequence.adapter = adapter
            self._unwritten[request.request_id] = sequence
            self._asked.append(TokenOutput(request.request_id, [], "", lora_digest=adapter.digest, asked_use=use))
            return
        try:
            sequence.lora_start = _lora_start(sequence.request, adapter)
            self._limit_length(sequence, adapter)
        except Exception:
            self._loras.memory.unpin(adapter)
            raise
        sequence.adapter = adapter

    def _limit_length(self, sequence: Sequence, adapter: CachedAdapter) -> None:
        """An adapter with rotary embeddings of its own has its own longest sequence. Raises InvalidRequest."""
        if (max_length := self._ropes.max_length(adapter.traits.rope)) is None:
            return
        num_prompt_tokens, wanted = len(sequence.request.prompt_token_ids), sequence.max_output_tokens
        room = max_length - num_prompt_tokens
        if room < (min(1, wanted) if sequence.search is None else wanted):
            raise InvalidRequest(
                f"the prompt has {num_prompt_tokens} tokens and its answer up to {wanted}, and the rotary embeddings "
                f"of LoRA task {sequence.request.lora_task_id} are made for {max_length} tokens"
            )
        sequence.max_output_tokens = min(wanted, room)

    def _seconds_of(self, request: GenerationRequest) -> float:
        return self._timeout_s if request.timeout_s is None else min(request.timeout_s, self._timeout_s)

    def _pass_on(self, sequence: Sequence) -> None:
        """To the guide queue or to the scheduler, whichever is next; nowhere while it waits for its prompt."""
        if sequence.request.request_id in self._unwritten:
            return
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
                self._give(sequence, self._pin_fetched(sequence, fetch))
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
        assert sequence.request.task_id == fetch.task_id
        fetch.check(Expectation(answering=sequence.request.lora_expected_digest))
        return self._pin(sequence.request)

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
        if sequence.request.sampling.guide_after_thinking:
            thinking = thinking_of(sequence.request.prompt_token_ids, self._new_sequences.tokenizer)
            if thinking is not None:
                compiled.let_think(thinking)
        # In this order its client's account stays open.
        self._pass_on(sequence)
        self._guide_queue.give_up(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        """Take out a sequence that could not be passed on, with its pin."""
        self._guide_queue.give_up(sequence)
        if sequence.adapter is not None:
            self._loras.memory.unpin(sequence.adapter)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        self._live.remove(sequence)
        if (guide := sequence.request.sampling.guide) is not None:
            self._guides_in_use.remove(guide, sequence.guide)


def _lora_start(request: GenerationRequest, adapter: CachedAdapter) -> int:
    """The position from which on the adapter of a request computes. Raises AdapterNotInvoked."""
    if request.lora_start is not None:
        return request.lora_start
    start = adapter.traits.start(request.prompt_token_ids)
    if start is None:
        tokens, num_prompt_tokens = adapter.traits.invocation_tokens, len(request.prompt_token_ids)
        raise AdapterNotInvoked(request.lora_task_id, request.lora_name, tokens, num_prompt_tokens)
    return start
