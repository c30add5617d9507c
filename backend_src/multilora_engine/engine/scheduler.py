"""`Scheduler`: which sequences compute how many tokens in the next step."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable, Set

from multilora_engine.engine.engine_stats import PromptWaitStats
from multilora_engine.engine.fair_queue import FairQueue
from multilora_engine.engine.fair_shares import choose_victim
from multilora_engine.engine.kv_cache import BlockAllocator
from multilora_engine.engine.pace import Pace
from multilora_engine.engine.prompt_waits import PromptWaits
from multilora_engine.engine.step import Step
from multilora_engine.lora.adapter_state import CachedAdapter
from multilora_engine.lora.memory_tiers import MemoryTiers
from multilora_engine.sequences.scheduled_sequence import ScheduledSequence
from multilora_engine.sequences.sequence import BlockCopy, Sequence, SequenceStatus

MAX_OVERTAKES = 64
"""A sequence that waits for its adapter lets at most this many later ones with an adapter pass."""


class Skipped:
    """The adapters of these sequences cannot be used yet."""

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


_LOOK_AHEAD = 8
"""Adapters that are brought to the device before there is a place for their sequences."""


class Scheduler:
    """Continuous batching with chunked prefill, preemption by recompute and adapter-aware admission.

    A step has a budget of `max_num_batched_tokens`. Running sequences that decode come first; the rest goes to
    prompts, running and waiting ones, in the order of `FairQueue`: a long prompt that has begun does not hold
    up a short one, nor one of a client that was served less. Of the prompts that run, the one that started first goes
    before all others when it got nothing in the last step, so that it always comes to its end. A waiting sequence whose
    adapter cannot be used yet is skipped, not waited for, with those behind it that want the same one, and its adapter
    is prefetched, as are those of the next in line; one that has been overtaken `MAX_OVERTAKES` times stops the
    admission of other adapters until it runs.

    When the KV cache is full, the running sequence that started last, of the largest priority, gives its blocks back
    and starts again from its tokens; its adapter stays pinned in the host tier. Since earlier ones are never the
    victims of later ones, the first always comes to its end. Tokens that the cache still holds of a sequence that
    starts, computed for itself or for another one, are not computed again. Writes `num_computed_tokens`, `status`
    and the list of running sequences.

    While clients wait that have less than their shares of the places and blocks, clients that have more give some back,
    the last that started first: nobody holds the server for as long as its answers are. A client with no more than its
    share is never the victim of that.

    A prompt that has waited longer than `PromptWaits` allows goes before all later ones of its client and adapter,
    however long it is.

    `Pace` limits the tokens of prompts, and the running sequences of clients that hold more than their shares, by the
    time that a step takes.

    The beams of a search are admitted, preempted and finished together, and compute their last tokens in the same step.
    """

    def __init__(
        self,
        blocks: BlockAllocator,
        loras: MemoryTiers,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        pace: Pace,
        waits: PromptWaits,
    ) -> None:
        """pace: told by the engine how long steps take. waits: of the prompts, from `add` on."""
        self._blocks = blocks
        self._loras = loras
        self._max_num_seqs = max_num_seqs
        self._max_num_batched_tokens = max_num_batched_tokens
        self._pace = pace
        self._waits = waits
        self._queue = FairQueue()
        self._running: list[Sequence] = []
        self._passed_over: Sequence | None = None
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
            late.is_late = True
            self._queue.hurry(late)
        num_preemptions = self.num_preemptions
        step, prompts = self._schedule_decodes()
        may_admit = self.num_preemptions == num_preemptions
        if may_admit:
            self._make_way(step)
        self._schedule_prompts(step, [s for s in prompts if s.status is SequenceStatus.RUNNING], may_admit)
        for scheduled in step.sequences:
            scheduled.sequence.num_computed_tokens += scheduled.num_tokens
            if scheduled.is_sampled:
                self._waits.discard(scheduled.sequence)
        return sorted(step.sequences, key=lambda scheduled: not scheduled.is_decode)

    def commit(self, step: list[ScheduledSequence]) -> None:
        """A scheduled step has been computed: the blocks it wrote to the KV cache may be found by other sequences.

        Sequences that have ended or were preempted meanwhile have no blocks any more.
        """
        for scheduled in step:
            if scheduled.sequence.block_table.length:
                self._blocks.commit(scheduled.sequence, scheduled.start, scheduled.start + scheduled.num_tokens)

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
        step = Step(self._max_num_batched_tokens)
        decoding: list[Sequence] = []
        prompts: list[Sequence] = []
        for sequence in self._running:
            (prompts if sequence.num_tokens - sequence.num_computed_tokens > 1 else decoding).append(sequence)
        decodes = self._pace.choose(decoding)
        if prompts or len(self._queue):
            is_shared = bool(decoding) and self._queue.has_others(decoding[0])
            burst = [] if is_shared else self._waits.burst(decoding, self._max_num_seqs)
            step.prompt_time = self._pace.prompt_time(decodes, is_shared, burst, self._waits.has_late)
        for sequence in decodes.sequences:
            self._continue(sequence, _shares(sequence, step.budget), step)
        return step, prompts

    def _schedule_prompts(self, step: Step, prompts: list[Sequence], may_admit: bool) -> None:
        """Go on with prompts and, where that is allowed, admit waiting sequences. prompts: the running ones."""
        skipped = Skipped()
        in_order = deque(
            sorted(prompts, key=lambda prompt: (prompt is not self._passed_over, self._queue.turn(prompt)))
        )
        newcomer = self._newcomer(step, skipped) if may_admit else None
        while in_order or newcomer is not None:
            if newcomer is not None and (not in_order or self._goes_first(newcomer, in_order)):
                self._admit(newcomer, step, skipped)
            else:
                self._continue_prompt(in_order.popleft(), step)
            newcomer = newcomer and self._newcomer(step, skipped)
        self._passed_over = prompts[0] if prompts and prompts[0] not in step else None
        if may_admit:
            self._look_ahead(skipped.adapters)
            self._queue.restore()

    def _continue(self, sequence: Sequence, shares: list[tuple[Sequence, int]], step: Step) -> None:
        """Compute tokens of a running sequence's beams, unless it is preempted for others or for want of blocks."""
        for beam, num_tokens in shares:
            if sequence.status is SequenceStatus.RUNNING and self._make_room(sequence, beam, num_tokens, step):
                self._compute(beam, num_tokens, step)

    def _continue_prompt(self, sequence: Sequence, step: Step) -> None:
        shares = _shares(sequence, step.room_for(sequence))
        step.prompt_time.take(sequence, sum(num_tokens for _, num_tokens in shares))
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

    def _compute(self, sequence: Sequence, num_tokens: int, step: Step) -> None:
        start = sequence.num_computed_tokens
        self._queue.charge(sequence, start, start + num_tokens)
        step.add(sequence, num_tokens)

    def _preempt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        self._stop(sequence)
        for beam in sequence.beams:
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
        sequence = self._queue.first()
        if sequence is None or len(skipped) >= self._max_num_seqs:
            return None
        return sequence if step.room_for(sequence) and self._has_room(sequence) else None

    def _goes_first(self, newcomer: Sequence, prompts: deque[Sequence]) -> bool:
        """Whether it starts before the first of the running prompts goes on."""
        if prompts[0] is self._passed_over or not self._queue.goes_before(newcomer, prompts[0]):
            return False
        # Their order is that of the step's begin; a late one may have come behind one that the newcomer goes before.
        return not (self._waits.has_late and self._queue.follows_late(newcomer, prompts))

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
        newcomer = self._queue.first()
        if newcomer is None or not self._queue.has_others(newcomer) or self._has_room(newcomer):
            return
        if not self._is_adapter_ready(newcomer):
            return
        needed = max(newcomer.width / self._max_num_seqs, self._blocks.part_of(*newcomer.beams))
        while not self._has_room(newcomer):
            victim = choose_victim(newcomer, needed, self._running, self._part_held)
            if victim is None or not self._queue.would_follow(victim, newcomer):
                return
            self._preempt(victim)
            step.remove(victim)

    def _part_held(self, sequence: Sequence) -> float:
        """The part of the server that a running sequence has: of the places, or of the blocks if that is more."""
        num_blocks = sequence.block_table.length + sum(beam.block_table.length for beam in sequence.siblings)
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
            sequence = self._queue.first()
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
