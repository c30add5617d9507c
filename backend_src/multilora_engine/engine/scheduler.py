"""`Scheduler`: which sequences compute how many tokens in the next step."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Callable, Iterable, Set
from itertools import chain, islice, takewhile

from multilora_engine.engine.accounts import Accounts, FairQueue
from multilora_engine.engine.engine_stats import PromptWaitStats
from multilora_engine.engine.kv_cache import BlockAllocator
from multilora_engine.engine.pace import Pace, Step, num_rows
from multilora_engine.lora.adapter_state import CachedAdapter
from multilora_engine.lora.memory_tiers import MemoryTiers
from multilora_engine.sequences.sequence import BlockCopy, ScheduledSequence, Sequence, SequenceStatus

MAX_PROMPT_WAIT_S = 10.0
"""A prompt that waits longer goes before later ones."""

MAX_OVERTAKES = 64
"""A sequence that waits for its adapter lets at most this many later ones with an adapter pass."""

_LOOK_AHEAD = 8
"""Adapters that are brought to the device before there is a place for their sequences."""


class PromptWaits:
    """The sequences whose prompts are not computed, in the order in which they came, and the times since then.

    The time in which a sequence is parked, for an adapter from a source or for a guide, does not count.
    """

    def __init__(self, bound_s: float = MAX_PROMPT_WAIT_S, clock: Callable[[], float] = time.monotonic) -> None:
        """A sequence is late when it has waited for more than `bound_s` seconds of the clock."""
        self._bound_s = bound_s
        self._clock = clock
        self._since: dict[Sequence, float] = {}
        self._late: dict[Sequence, float] = {}
        self._num_late = 0

    @property
    def stats(self) -> PromptWaitStats:
        # The late ones came before all others.
        since = next(iter((self._late or self._since).values()), None)
        return PromptWaitStats(0.0 if since is None else self._clock() - since, self._num_late)

    def num_burst(self, answers: list[Sequence], most: int) -> int:
        """How many prompts, at most `most`, arrived before the first of the running answers began."""
        # An answer whose first token is not chosen yet has no time.
        start_ns = min((answer.times.first_token_ns for answer in answers if answer.times.first_token_ns), default=0)
        came_before = takewhile(lambda one: one.times.arrival_ns < start_ns, chain(self._late, self._since))
        # One that lacks a single token is scheduled with the answers.
        return len(list(islice((one for one in came_before if one.num_missing_tokens > 1), most)))

    def add(self, sequence: Sequence) -> None:
        """A sequence waits from now on."""
        self._since[sequence] = self._clock()

    def discard(self, sequence: Sequence) -> None:
        """The prompt of a sequence is computed, or it has ended."""
        if self._since.pop(sequence, None) is None:
            self._late.pop(sequence, None)

    def take_late(self) -> list[Sequence]:
        """The sequences that are late now and were not when this was called last."""
        end_s = self._clock() - self._bound_s
        late = list(takewhile(lambda sequence: self._since[sequence] < end_s, self._since))
        for sequence in late:
            self._late[sequence] = self._since.pop(sequence)
        self._num_late += len(late)
        return late


class Skipped:
    """The waiting sequences that a step passes over: their adapters cannot be used yet."""

    def __init__(self) -> None:
        self.adapters: set[CachedAdapter] = set()
        self.must_not_be_overtaken = False
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, sequence: Sequence) -> None:
        assert sequence.adapter is not None
        self.adapters.add(sequence.adapter)
        self.must_not_be_overtaken |= sequence.num_overtakes >= MAX_OVERTAKES
        self._sequences.append(sequence)

    def overtake(self) -> None:
        """A later sequence with an adapter starts."""
        for sequence in self._sequences:
            sequence.num_overtakes += 1
            self.must_not_be_overtaken |= sequence.num_overtakes >= MAX_OVERTAKES


class Scheduler:
    """Continuous batching with chunked prefill, preemption by recompute and adapter-aware admission.

    A step has a budget of `max_num_batched_tokens`. A source is encoded whole in the step in which its prompt starts;
    the sources of a step have a budget of their own, `max_num_encoder_tokens`, and wait for it in the queue's order. A
    source that the cache still holds is not encoded again. Running sequences that decode come first; the rest goes to
    prompts, running and waiting ones, in the order of `FairQueue`: a long prompt that has begun does not hold
    up a short one, nor one of a client that has used less. Of the prompts that run, the one that started first goes
    before all others when it got nothing in the last step, so that it always comes to its end. A waiting sequence whose
    adapter cannot be used yet is skipped, not waited for, with the later ones of its client that want the same adapter.
    Its adapter is prefetched, as are the adapters of the next in line. A sequence that has been overtaken
    `MAX_OVERTAKES` times stops the admission of other adapters until it runs.

    When the KV cache is full, the running sequence that started last, of the largest priority, gives its blocks back
    and starts again from its tokens; its adapter stays pinned in the host tier. Since earlier ones are never the
    victims of later ones, the first always comes to its end. Tokens that the cache still holds of a sequence that
    starts, computed for itself or for another one, are not computed again.

    While a client with less than its share of the places and blocks waits, and has used less, clients with more than
    their shares give some back, the last that started first: a client with long answers cannot occupy the server. A
    client with no more than its share never gives way.

    A prompt that has waited longer than `PromptWaits` allows goes before all later ones of its client and adapter,
    however long it is.

    `Pace` limits the tokens of prompts, and the running sequences of clients that hold more than their shares, by the
    time that a step takes. A step's time is charged to the accounts: each token costs what one more token takes, and
    the rest of the time is split by all tokens. Tokens that a preemption lost are computed again without charge: the
    answers of other clients may have caused it.

    The beams of a search are admitted, preempted and finished together, and compute their last tokens in the same step.
    """

    def __init__(
        self,
        blocks: BlockAllocator,
        loras: MemoryTiers,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_num_encoder_tokens: int,
        pace: Pace,
        accounts: Accounts,
        waits: PromptWaits,
    ) -> None:
        """pace: told by the engine how long steps take. waits: of the prompts, from `add` on."""
        self._blocks = blocks
        self._loras = loras
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._max_num_encoder_tokens = max_num_encoder_tokens
        self._pace = pace
        self._accounts = accounts
        self._waits = waits
        self._queue = FairQueue(accounts)
        self._running: list[Sequence] = []
        self._passed_over: Sequence | None = None
        self._last_turn = 0
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def prompt_waits(self) -> PromptWaitStats:
        return self._waits.stats

    @property
    def _num_free_places(self) -> int:
        return self._max_num_seqs - sum(sequence.width for sequence in self._running)

    def add(self, sequence: Sequence) -> None:
        """Queue a new sequence."""
        self._queue.add(sequence)
        self._waits.add(sequence)

    def schedule(self) -> list[ScheduledSequence]:
        """The next step, the tokens of answers first; empty if there is nothing to do."""
        for late in self._waits.take_late():
            self._queue.hurry(late)
        num_preemptions = self.num_preemptions
        step, prompts = self._schedule_decodes()
        may_admit = self.num_preemptions == num_preemptions
        if may_admit:
            self._make_way(step)
        self._schedule_prompts(step, [s for s in prompts if s.status is SequenceStatus.RUNNING], may_admit)
        rest_s = self._pace.finish(step)
        scheduled = step.sequences
        for one in scheduled:
            one.sequence.num_computed_tokens += one.num_tokens
            if one.encodes_source and one.sequence.source is not None:
                one.sequence.source.is_computed = True
            self._accounts.charge(one.sequence, (one.num_tokens + one.num_source_tokens) * rest_s)
            if one.is_sampled:
                self._waits.discard(one.sequence)
        return sorted(scheduled, key=lambda one: not one.is_decode)

    def commit(self, step: list[ScheduledSequence]) -> None:
        """A scheduled step has been computed: the blocks it wrote to the KV cache may be found by other sequences.

        Sequences that have ended or were preempted meanwhile have no blocks any more, or, if they have started again,
        others, which this step has not written.
        """
        for scheduled in step:
            sequence, end = scheduled.sequence, scheduled.start + scheduled.num_tokens
            if sequence.block_table.length and scheduled.num_starts == sequence.block_table.num_starts:
                if scheduled.encodes_source:
                    self._blocks.commit_source(sequence)
                self._blocks.commit(sequence, scheduled.start, end)

    def branch(self, sequence: Sequence, before: list[Sequence], parents: list[int]) -> list[BlockCopy]:
        """Let the beams of a search go on: beam i where beam parents[i] of `before` is. The blocks to copy.

        The search is preempted when there are too few blocks.
        """
        copies = self._blocks.branch(before, sequence.beams, parents)
        if copies is None:
            for beam in before:
                self._blocks.free(beam)
            self._preempt(sequence)
            return []
        num_computed_tokens = before[parents[0]].num_computed_tokens
        for beam in sequence.beams:
            beam.num_computed_tokens = num_computed_tokens
        return copies

    def finish(self, sequence: Sequence) -> None:
        """Take a sequence out, wherever it is, with its blocks, its place on the device and its pin."""
        if sequence.status is SequenceStatus.RUNNING:
            self._running.remove(sequence)
            self._stop(sequence)
        self._queue.discard(sequence)
        self._waits.discard(sequence)
        sequence.status = SequenceStatus.FINISHED
        if sequence.adapter is not None:
            self._loras.unpin(sequence.adapter)

    def check_integrity(self, others: Iterable[Sequence] = ()) -> None:
        """Blocks, statuses and pins agree with the queues. For tests, after every step.

        others: sequences that have come this far with their pins and are not here yet.
        """
        self._blocks.check_integrity(beam for sequence in self._running for beam in sequence.beams)
        self._queue.check_integrity(self._running)
        assert all(s.status is SequenceStatus.RUNNING for s in self._running)
        assert self._running == sorted(self._running, key=_priority)
        assert self._num_free_places >= 0
        pinned = [s for s in [*self._running, *self._queue, *others] if s.adapter is not None]
        assert self._loras.num_pins == len(pinned), "a pin is lost or left behind"
        self._loras.check_integrity()

    def _schedule_decodes(self) -> tuple[Step, list[Sequence]]:
        """A step with the answers that get a token, and the running prompts, in the order in which they started."""
        decoding: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in self._running:
            (prompts if sequence.num_missing_tokens > 1 else decoding).append(sequence)
        is_shared = bool(decoding) and self._accounts.has_others(decoding[0])
        has_burst = bool(decoding) and not is_shared and (prompts or len(self._queue))
        num_burst = self._waits.num_burst(decoding, self._max_num_seqs - len(decoding)) if has_burst else 0
        over = self._over(decoding) if is_shared else set()
        step = self._pace.plan(self._max_num_batched_tokens, decoding, over, is_shared, num_burst)
        step.source_budget = self._max_num_encoder_tokens
        for sequence in step.turns:
            # Sequences of one step are numbered, too: else the first of them would always be first again.
            self._last_turn += 1
            sequence.last_turn = self._last_turn
        for sequence in step.answers:
            self._continue(sequence, _shares(sequence, step.budget), step)
        return step, prompts

    def _schedule_prompts(self, step: Step, prompts: list[Sequence], may_admit: bool) -> None:
        """Go on with prompts and, where that is allowed, admit waiting sequences. prompts: the running ones."""
        if not step.has_time:
            return
        skipped = Skipped()
        left = list(prompts)
        while step.budget and step.has_time:
            prompt = min(left, key=self._turn, default=None)
            newcomer = self._newcomer(step, skipped) if may_admit else None
            if newcomer is not None and (prompt is None or self._turn(newcomer) < self._turn(prompt)):
                self._admit(newcomer, step, skipped)
            elif prompt is not None:
                left.remove(prompt)
                self._continue_prompt(prompt, step)
            else:
                break
        self._passed_over = prompts[0] if prompts and prompts[0] not in step else None
        if may_admit:
            self._look_ahead(skipped.adapters)
            self._queue.restore()

    def _turn(self, sequence: Sequence) -> tuple[bool, tuple[int, float, int]]:
        """Sorts prompts, running or waiting, in the order in which they are computed."""
        return sequence is not self._passed_over, self._queue.turn(sequence)

    def _over(self, decoding: list[Sequence]) -> set[Sequence]:
        """The running answers, and their beams, of clients that have more of them than their shares."""
        over = self._accounts.over_their_shares(((s, len(s.siblings) + 1) for s in decoding), num_rows(decoding))
        return {beam for s in decoding if self._accounts.client(s) in over for beam in s.beams} if over else set()

    def _continue(self, sequence: Sequence, shares: list[tuple[Sequence, int]], step: Step) -> None:
        """Compute tokens of a running sequence's beams, unless it is preempted for others or for want of blocks."""
        for beam, num_tokens in shares:
            if sequence.status is SequenceStatus.RUNNING and self._make_room(sequence, beam, num_tokens, step):
                num_again = max(0, beam.num_lost_tokens - beam.num_computed_tokens)
                num_new = max(0, num_tokens - num_again)
                added = step.add(beam, num_tokens)
                num_new += 0 if beam.num_lost_tokens else added.num_source_tokens
                self._accounts.charge(sequence, num_new * self._pace.times.token_s)

    def _continue_prompt(self, sequence: Sequence, step: Step) -> None:
        shares = _shares(sequence, step.room_for(sequence, sequence.num_missing_source_tokens))
        step.take_time(sequence, sum(num_tokens for _, num_tokens in shares))
        self._continue(sequence, shares, step)

    def _make_room(self, sequence: Sequence, beam: Sequence, num_tokens: int, step: Step) -> bool:
        """Blocks for `num_tokens` more of a beam of `sequence`, preempting from the end of the order.

        False if `sequence` itself had to go.
        """
        while not self._blocks.grow(beam, beam.num_computed_tokens + num_tokens):
            victim = self._running[-1]
            self._preempt(victim)
            step.remove(victim)
            if victim is sequence:
                return False
        return True

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._stop(sequence)
        for beam in sequence.beams:
            beam.num_lost_tokens = max(beam.num_lost_tokens, beam.num_computed_tokens)
            beam.num_computed_tokens = 0
        sequence.status = SequenceStatus.WAITING
        self._queue.put_back(sequence)
        self.num_preemptions += 1

    def _stop(self, sequence: Sequence) -> None:
        for beam in sequence.beams:
            self._blocks.free(beam)
        if sequence.adapter is not None:
            self._loras.release(sequence.adapter)

    def _newcomer(self, step: Step, skipped: Skipped) -> Sequence | None:
        """The waiting sequence that starts next, as far as places, blocks and the step's tokens are concerned."""
        sequence = self._queue.first
        if sequence is None or len(skipped) >= self._max_num_seqs:
            return None
        num_source_tokens = sequence.num_missing_source_tokens
        if num_source_tokens and self._blocks.knows_source(sequence):
            num_source_tokens = 0
        return sequence if step.room_for(sequence, num_source_tokens) and self._has_room(sequence) else None

    def _admit(self, sequence: Sequence, step: Step, skipped: Skipped) -> None:
        """Start a waiting sequence, or skip it for want of its adapter."""
        if self._acquire_adapter(sequence, skipped):
            self._start(sequence)
            self._continue_prompt(sequence, step)
        else:
            self._queue.set_aside(sequence)
            skipped.add(sequence)

    def _has_room(self, sequence: Sequence) -> bool:
        """Whole prompts are admitted, so that two half-computed ones never wait for each other's blocks."""
        return sequence.width <= self._num_free_places and self._blocks.can_start(*sequence.beams)

    def _make_way(self, step: Step) -> None:
        """Preempt sequences of clients that hold more than their shares, if the one that starts next lacks room."""
        newcomer = self._queue.first
        if newcomer is None or not self._accounts.has_others(newcomer) or self._has_room(newcomer):
            return
        if not self._is_adapter_ready(newcomer):
            return
        while not self._has_room(newcomer):
            victim = self._victim(newcomer)
            if victim is None or self._queue.turn(victim)[:2] <= self._queue.turn(newcomer)[:2]:
                return
            self._preempt(victim)
            step.remove(victim)

    def _victim(self, newcomer: Sequence) -> Sequence | None:
        """The sequence that started last among the sequences of clients above their shares of the server.

        None if no sequence has to go: a newcomer whose client would hold more than its own share, or is less urgent,
        waits like everybody.
        """
        needed = max(newcomer.width / self._max_num_seqs, self._blocks.part_of(*newcomer.beams))
        held = ((sequence, self._part_held(sequence)) for sequence in self._running)
        over = self._accounts.over_their_shares([(newcomer, needed), *held], 1.0)
        if self._accounts.client(newcomer) in over:
            return None
        victims = (sequence for sequence in reversed(self._running) if self._accounts.client(sequence) in over)
        return next((victim for victim in victims if victim.request.priority >= newcomer.request.priority), None)

    def _part_held(self, sequence: Sequence) -> float:
        """The part of the server that a running sequence has: of the places, or of the blocks if that is more."""
        num_blocks = sum(beam.block_table.length for beam in sequence.beams)
        if sequence.source is not None:
            num_blocks += sequence.source.block_table.length
        return max(sequence.width / self._max_num_seqs, num_blocks / self._blocks.num_blocks)

    def _is_adapter_ready(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence could run at once, as far as its adapter is concerned."""
        if sequence.adapter is None:
            return True
        if not self._loras.acquire(sequence.adapter):
            return False
        self._loras.release(sequence.adapter)
        return True

    def _look_ahead(self, wanted: Set[CachedAdapter]) -> None:
        """Have the adapters of the next sequences brought to the device, where that costs none of the `wanted`."""
        wanted = set(wanted)
        for _ in range(_LOOK_AHEAD):
            sequence = self._queue.first
            if sequence is None:
                return
            if sequence.adapter is not None:
                self._loras.prefetch(sequence.adapter, wanted)
                wanted.add(sequence.adapter)
            self._queue.set_aside(sequence)

    def _acquire_adapter(self, sequence: Sequence, skipped: Skipped) -> bool:
        """Whether `sequence` may run as far as its adapter is concerned; `skipped`: earlier sequences that may not."""
        if sequence.adapter is None:
            return True
        if skipped.must_not_be_overtaken or not self._loras.acquire(sequence.adapter, skipped.adapters):
            return False
        skipped.overtake()
        return True

    def _start(self, sequence: Sequence) -> None:
        self._queue.take(sequence)
        for beam in sequence.beams:
            beam.num_computed_tokens = self._blocks.start(beam)
        sequence.status = SequenceStatus.RUNNING
        insort(self._running, sequence, key=_priority)


def _shares(sequence: Sequence, budget: int) -> list[tuple[Sequence, int]]:
    """How many tokens each beam computes in a step; beams without any are left out.

    The last ones of all beams go together, since they are ranked together.
    """
    if sequence.is_complete:
        return []
    if not sequence.siblings:
        # Nearly all sequences in nearly all steps.
        num_tokens = min(sequence.num_tokens - sequence.num_computed_tokens, budget)
        return [(sequence, num_tokens)] if num_tokens else []
    missing = [(beam, beam.num_tokens - beam.num_computed_tokens) for beam in sequence.beams]
    if sum(num_tokens for _, num_tokens in missing) <= budget:
        return missing
    shares = []
    for beam, num_tokens in missing:
        if share := min(num_tokens - 1, budget):
            shares.append((beam, share))
            budget -= share
    return shares


def _priority(sequence: Sequence) -> int:
    """Smaller is served first; of equal ones the first that started."""
    return sequence.request.priority
