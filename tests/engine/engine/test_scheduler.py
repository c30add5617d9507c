"""The scheduler under random arrivals, adapters, cancellations and cache sizes, its books checked after each step."""

from __future__ import annotations

import math
from collections import Counter
from random import Random
from typing import Any, cast

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.adapters import TINY, wire_adapter
from support.known_pace import TOKEN_S, KnownTimes, known_pace, seconds_of
from support.paged_memory import NEXT_TOKEN, PoisonedBlocks

from multilora_engine.engine.accounts import Accounts
from multilora_engine.engine.engine_stats import PromptWaitStats
from multilora_engine.engine.pace import Pace, StepWork
from multilora_engine.engine.scheduler import PromptWaits, Scheduler
from multilora_engine.lora.device_tier import DeviceTier
from multilora_engine.lora.format import pack_adapter
from multilora_engine.lora.host_tier import HostTier
from multilora_engine.lora.layout import PackedAdapter
from multilora_engine.lora.manager import LoRAManager
from multilora_engine.request import GenerationRequest, SamplingParams, Sender
from multilora_engine.sequences.sequence import ScheduledSequence, Sequence, SequenceStatus, Source
from multilora_engine.text.text_stream import TextStream

MAX_LORAS = 2
BLOCK_SIZE = 4
NUM_ADAPTERS = 5
MAX_ARRIVALS = 25
NOBODY, ACME, BOLT = Sender(), Sender(name="acme"), Sender(name="bolt")


def _packed(seed: int) -> PackedAdapter:
    wire = wire_adapter(TINY, [(1, 0, 2)], seed=seed)
    return pack_adapter(wire.weights, wire.config, TINY)


ADAPTERS = [_packed(task) for task in range(NUM_ADAPTERS)]
NEW_VERSIONS = [_packed(NUM_ADAPTERS + task) for task in range(NUM_ADAPTERS)]


class World:
    """A scheduler with real tiers and blocks; computing a step is to write what its tokens' keys and values depend on,
    and to append a token to what was sampled: at once, or, where it runs ahead, after the next step was scheduled.
    Beams go on from beams that are drawn; where the scheduler runs ahead there are none.
    """

    def __init__(
        self,
        num_blocks: int = 12,
        max_num_seqs: int = 4,
        budget: int = 8,
        enable_prefix_caching: bool = True,
        runs_ahead: bool = False,
        pace: Pace | None = None,
        max_wait_s: float = math.inf,
        encoder_budget: int = 12,
    ) -> None:
        host = HostTier(NUM_ADAPTERS + MAX_ARRIVALS, TINY.page_bytes)
        self.loras = LoRAManager(host, DeviceTier(TINY, host.pool, host.pool, MAX_LORAS), "replace")
        for task, packed in enumerate(ADAPTERS):
            self.loras.put(task, packed)
        self.pace = pace or Pace(0)
        self.blocks = PoisonedBlocks(num_blocks, BLOCK_SIZE, enable_prefix_caching)
        self.now_s = 0.0
        waits = PromptWaits(max_wait_s, lambda: self.now_s)
        self.accounts = Accounts()
        self.scheduler = Scheduler(
            self.blocks, self.loras.memory, max_num_seqs, budget, encoder_budget, self.pace, self.accounts, waits
        )
        self.budget = budget
        self.encoder_budget = encoder_budget
        self.rng = Random(budget)
        self.runs_ahead = runs_ahead
        self.in_flight: list[ScheduledSequence] = []
        self.alive: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.arrivals = 0

    def add(
        self,
        prompt_len: int,
        max_tokens: int,
        task: int | None = None,
        priority: int = 0,
        text: int = 1,
        sender: Sender = NOBODY,
        source_len: int = 0,
        width: int = 1,
    ) -> Sequence:
        """text: two prompts are equal, as far as both go, if their text is, and so are two sources."""
        request = GenerationRequest(
            f"r{self.arrivals}",
            [text] * prompt_len,
            SamplingParams(max_tokens, beam_width=1 if self.runs_ahead else width),
            lora_task_id=task,
            priority=priority,
            sender=sender,
            source_token_ids=[text] * source_len,
        )
        adapter = None if task is None else self.loras.pin(task)
        sequence = Sequence(request, self.arrivals, adapter, cast(TextStream, None), Random(0), max_tokens)
        sequence.source = Source(request.source_token_ids) if source_len else None
        sequence.times.arrival_ns = self.now_ns
        self.arrivals += 1
        self.scheduler.add(sequence)
        self.alive.append(sequence)
        return sequence

    @property
    def now_ns(self) -> int:
        return round(self.now_s * 1e9)

    def finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)
        self.alive.remove(sequence)
        self.finished.append(sequence)

    def replace(self, task: int) -> None:
        """Give a task id the other one of its two versions."""
        is_old = self.loras.inventory.info(task).digest == ADAPTERS[task].digest
        self.loras.put(task, NEW_VERSIONS[task] if is_old else ADAPTERS[task])

    def step(self) -> list[ScheduledSequence]:
        step = self.scheduler.schedule()
        self.check_step(step)
        self.compute(step)
        work = self.pace.launch(step) if step else StepWork(0, 0)
        if step:
            self.pace.times.observe(work, seconds_of(work))
        self.now_s += seconds_of(work)
        for scheduled in step:
            scheduled.sequence.num_pending_tokens += scheduled.is_sampled
        if self.runs_ahead:
            self.in_flight, step_to_read = step, self.in_flight
        else:
            step_to_read = step
        self.read(step_to_read)
        self.scheduler.check_integrity()
        self.loras.check_integrity()
        return step

    def read(self, step: list[ScheduledSequence]) -> None:
        """Learn the tokens of a step, of which some sequences may have ended meanwhile."""
        self.scheduler.commit(step)
        for sequence in [scheduled.sequence for scheduled in step if scheduled.is_sampled]:
            sequence.num_pending_tokens -= 1
            if sequence in self.alive:
                sequence.times.note_token(self.now_ns)
                if len(sequence.output_token_ids) + 1 == sequence.max_output_tokens:
                    sequence.output_token_ids.append(NEXT_TOKEN)
                    self.finish(sequence)
                elif sequence.width == 1:
                    sequence.output_token_ids.append(NEXT_TOKEN)
                else:
                    self.branch(sequence)

    def branch(self, root: Sequence) -> None:
        """The beams of a search go on, as `continue_beams` has them."""
        before = root.beams
        parents = [self.rng.randrange(len(before)) for _ in range(self.rng.randint(1, root.width))]
        answers = [[*before[parent].output_token_ids, self.rng.randint(2, 3)] for parent in parents]
        missing = max(0, len(parents) - len(before))
        root.siblings = [*root.siblings, *(root.sibling() for _ in range(missing))][: len(parents) - 1]
        for beam, answer in zip(root.beams, answers, strict=True):
            beam.output_token_ids = answer
        for copy in self.scheduler.branch(root, before, parents):
            self.blocks.copy(copy.source, copy.target)

    def compute(self, step: list[ScheduledSequence]) -> None:
        """What a step reads was written by the steps before: its own writes come at the same time."""
        for scheduled in step:
            self.blocks.check_read(scheduled.sequence, scheduled.start)
            if scheduled.encodes_source:
                self.blocks.encode(scheduled.sequence)
        for scheduled in step:
            if scheduled.sequence.source is not None:
                self.blocks.check_source(scheduled.sequence)
            self.blocks.write(scheduled.sequence, scheduled.start, scheduled.start + scheduled.num_tokens)

    def check_step(self, step: list[ScheduledSequence]) -> None:
        assert sum(s.num_tokens for s in step) <= self.budget
        lengths = [s.num_tokens for s in step]
        assert all(length > 0 for length in lengths)
        assert sorted(step, key=lambda s: not s.is_decode) == step, "the tokens of answers come first"
        assert len({s.sequence for s in step}) == len(step)
        encoded = [s.sequence.source for s in step if s.encodes_source]
        assert len(set(encoded)) == len(encoded)
        assert sum(s.num_source_tokens for s in step) <= self.encoder_budget
        assert all(s.sequence.source is None or s.sequence.source.is_computed for s in step)
        in_use = {s.sequence.adapter for s in step if s.sequence.adapter is not None}
        assert len(in_use) <= MAX_LORAS
        assert len({self.loras.device.lora_index(adapter) for adapter in in_use}) == len(in_use)
        for scheduled in step:
            end = scheduled.start + scheduled.num_tokens
            assert scheduled.sequence.num_computed_tokens == end
            assert len(scheduled.sequence.block_table) * BLOCK_SIZE >= end
            num_prompt_tokens = len(scheduled.sequence.request.prompt_token_ids)
            assert end < num_prompt_tokens + scheduled.sequence.max_output_tokens, "after the answer's end"

    def run_dry(self, max_steps: int = 2000) -> None:
        for _ in range(max_steps):
            if not self.alive:
                return
            self.step()
        raise AssertionError(f"{len(self.alive)} sequences never finished")


ARRIVAL = st.tuples(
    st.integers(1, 30),
    st.integers(1, 18),
    st.none() | st.integers(0, NUM_ADAPTERS - 1),
    st.integers(0, 2),
    st.integers(1, 3),
    st.sampled_from([NOBODY, ACME, BOLT, Sender(name="heavy", weight=3.0)]),
)


SEARCH = st.tuples(
    st.integers(1, 6),
    st.integers(1, 6),
    st.none() | st.integers(0, NUM_ADAPTERS - 1),
    st.integers(0, 2),
    st.integers(1, 3),
    st.sampled_from([NOBODY, ACME, BOLT]),
    st.sampled_from([0, 3, 7, 8, 12]),
    st.integers(1, 3),
)
"""With up to three beams, most of them with a source: at the most all of twelve blocks."""


@settings(max_examples=200, deadline=None)
@given(
    arrivals=st.lists(ARRIVAL, min_size=1, max_size=MAX_ARRIVALS) | st.lists(SEARCH, min_size=1, max_size=MAX_ARRIVALS),
    num_blocks=st.integers(12, 30),
    budget=st.integers(4, 20),
    enable_prefix_caching=st.booleans(),
    runs_ahead=st.booleans(),
    target_s=st.sampled_from([0.0, None, 0.03]),
    seed=st.integers(0, 1 << 30),
)
def test_everything_that_arrives_finishes_whatever_happens(
    arrivals: list[tuple[Any, ...]],
    num_blocks: int,
    budget: int,
    enable_prefix_caching: bool,
    runs_ahead: bool,
    target_s: float | None,
    seed: int,
) -> None:
    pace, rng = Pace(target_s), Random(seed)
    world = World(num_blocks, 4, budget, enable_prefix_caching, runs_ahead, pace)
    pending = list(arrivals)
    while pending or rng.random() < 0.5:
        if pending and rng.random() < 0.5:
            world.add(*pending.pop())
        if world.alive and rng.random() < 0.05:
            world.finish(rng.choice(world.alive))
        if rng.random() < 0.1:
            world.replace(rng.randrange(NUM_ADAPTERS))
        world.step()
    world.run_dry()
    assert len(world.finished) == len(arrivals)
    assert world.blocks.num_free == num_blocks
    assert world.loras.memory.num_pins == 0


LONG_ARRIVAL = st.tuples(
    st.integers(1, 300), st.integers(1, 12), st.none(), st.just(0), st.integers(1, 9), st.sampled_from([ACME, BOLT])
)


@settings(max_examples=25, deadline=None)
@given(
    arrivals=st.lists(LONG_ARRIVAL, min_size=1, max_size=8),
    target_s=st.sampled_from([None, 0.030, 0.060]),
    seed=st.integers(0, 1 << 30),
)
@example(
    # The last token of the longest prompt comes alone, and counts as that of an answer in the time of the step.
    arrivals=[
        (138, 12, None, 0, 1, BOLT),
        (3, 3, None, 0, 1, BOLT),
        (279, 1, None, 0, 2, BOLT),
        (21, 8, None, 0, 1, ACME),
        (86, 12, None, 0, 2, BOLT),
        (1, 4, None, 0, 1, ACME),
        (1, 1, None, 0, 1, ACME),
        (1, 1, None, 0, 7, ACME),
    ],
    target_s=None,
    seed=287,
)
def test_no_running_answer_waits_longer_than_the_target_and_no_prompt_longer_than_three_times_its_own_time(
    arrivals: list[tuple[int, int, None, int, int, Sender]], target_s: float | None, seed: int
) -> None:
    pending, rng = list(arrivals), Random(seed)
    world = World(num_blocks=700, max_num_seqs=16, budget=256, pace=known_pace(target_s))
    num_mixed = 0
    for _ in range(3000):
        if not pending and not world.alive:
            break
        if pending and rng.random() < 0.3:
            world.add(*pending.pop())
        # The last token of a prompt alone is scheduled as that of an answer.
        running = [s for s in world.alive if s.status is SequenceStatus.RUNNING and s.num_missing_tokens == 1]
        is_shared = len({s.request.sender.name for s in world.alive}) > 1
        start_ns = min((s.times.first_token_ns for s in running if s.output_token_ids), default=0)
        burst = [s for s in world.alive if s.num_missing_tokens > 1 and s.times.arrival_ns < start_ns]
        step = world.step()
        assert world.scheduler.num_preemptions == 0
        if running:
            check_pace(step, running, is_shared, [] if is_shared else burst, target_s, world, num_mixed)
        has_both = bool(running) and any(scheduled.sequence not in running for scheduled in step)
        num_mixed = num_mixed + 1 if has_both or len(step) < len(running) else 0
    assert not world.alive, "never finished"


def check_pace(
    step: list[ScheduledSequence],
    running: list[Sequence],
    is_shared: bool,
    burst: list[Sequence],
    target_s: float | None,
    world: World,
    num_mixed: int,
) -> None:
    """running: the sequences that lacked one token before the step. is_shared: whether both clients had work. burst:
    the prompts of a client alone that came before its answers began. num_mixed: steps since one of answers alone."""
    own_s = KnownTimes().own_s
    served = {scheduled.sequence for scheduled in step}
    waiting = [sequence.request.sender.name for sequence in running if sequence not in served]
    # Of two clients with equal weights, only the one with more running answers takes turns.
    by_client = Counter(sequence.request.sender.name for sequence in running)
    assert not waiting or set(waiting) == {by_client.most_common(1)[0][0]}
    if target_s is not None:
        target = target_s
    elif is_shared:
        target = 2.0 * own_s(min(by_client.values()) if len(set(by_client.values())) > 1 else len(running))
    else:
        target = max(2.5 * own_s(len(running)), 2.0 * own_s(len(running) + len(burst)))
    answers_s = own_s(len(running) - len(waiting))
    longest = max(target, 1.5 * answers_s, answers_s + TOKEN_S)
    assert own_s(sum(scheduled.num_tokens for scheduled in step)) <= longest + 2 * TOKEN_S
    has_more = any(s.num_tokens - s.num_computed_tokens > 1 for s in world.alive if s.status is SequenceStatus.RUNNING)
    if has_more and sum(scheduled.num_tokens for scheduled in step) < world.budget:
        num_prompt_tokens = sum(scheduled.num_tokens for scheduled in step if scheduled.sequence not in running)
        is_third = (num_prompt_tokens + 1) * TOKEN_S >= answers_s / 2
        assert is_third or (num_prompt_tokens == 0 and num_mixed >= 15), "less than a third for prompts"


WAITING_ARRIVAL = st.tuples(
    st.integers(1, 300),
    st.integers(1, 12),
    st.none() | st.integers(0, 1),
    st.just(0),
    st.integers(1, 9),
    st.sampled_from([ACME, BOLT]),
)


@settings(max_examples=40, deadline=None)
@given(
    arrivals=st.lists(WAITING_ARRIVAL, min_size=1, max_size=14),
    target_s=st.sampled_from([None, 0.030, 0.060]),
    max_wait_s=st.sampled_from([0.0, 0.2, 1.0]),
    seed=st.integers(0, 1 << 30),
)
def test_a_prompt_that_has_waited_too_long_waits_for_nothing_that_came_later_for_its_client_and_adapter(
    arrivals: list[tuple[int, int, int | None, int, int, Sender]], target_s: float | None, max_wait_s: float, seed: int
) -> None:
    """By the time of steps whose cost is known. What came before it, and other clients' and adapters' turns, may go on
    for as long as they take: then it comes to its end within a bound of its own."""
    pending, rng = list(arrivals), Random(seed)
    world = World(700, max_num_seqs=16, budget=256, pace=known_pace(target_s), max_wait_s=max_wait_s)
    came_s: dict[Sequence, float] = {}
    late: set[Sequence] = set()
    while pending or world.alive:
        if pending and rng.random() < 0.5:
            came_s[world.add(*pending.pop())] = world.now_s
        if not world.alive:
            continue
        waiting = {s for s in world.alive if not s.output_token_ids}
        is_over = {s for s in waiting if world.now_s - came_s[s] > max_wait_s}
        late |= is_over
        running = {s for s in waiting if s.status is SequenceStatus.RUNNING}
        # The last token of a prompt alone is scheduled as that of an answer.
        takes_turns = {s for s in running if s.num_missing_tokens == 1}
        step = world.step()
        assert world.scheduler.num_preemptions == 0
        check_late({s.sequence for s in step}, waiting, is_over - takes_turns, running)
    assert world.scheduler.prompt_waits == PromptWaitStats(0.0, len(late))


def check_late(served: set[Sequence], waiting: set[Sequence], late: set[Sequence], running: set[Sequence]) -> None:
    """waiting, late, running: before the step the prompts, those that had waited too long, those that had begun."""
    prompts = served & waiting
    for sequence in late - served:
        assert sequence.place <= sequence.arrival
        overtaking = [one for one in prompts if _line(one) == _line(sequence) and one.arrival > sequence.arrival]
        # One that had begun before it goes on.
        assert all(one in running for one in overtaking)


def _line(sequence: Sequence) -> tuple[str, int | None]:
    return sequence.request.sender.name, sequence.request.lora_task_id


def test_a_long_prompt_is_overtaken_by_short_ones_until_it_has_waited_too_long() -> None:
    for max_wait_s, is_overtaken in ((math.inf, True), (0.5, False)):
        world = World(num_blocks=4000, max_num_seqs=2, budget=32, pace=known_pace(None), max_wait_s=max_wait_s)
        blocking = [world.add(40, 40, text=number) for number in (1, 2)]
        long = world.add(1600, 1, text=3)
        shorts = []
        while blocking[0] in world.alive or blocking[1] in world.alive:
            shorts.append(world.add(8, 1, text=4 + len(shorts)))
            world.step()
        assert world.now_s > 0.5
        while long.status is SequenceStatus.WAITING:
            world.step()
        assert (shorts[0] in world.finished) == is_overtaken
        assert (world.scheduler.prompt_waits.num_late > 0) != is_overtaken
        assert world.scheduler.prompt_waits.longest_seconds > 0.5


@settings(max_examples=50, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(100, 300), st.integers(1, 40)), min_size=1, max_size=6),
    budget=st.integers(4, 32),
    seed=st.integers(0, 1 << 30),
)
def test_prompts_of_a_client_that_was_served_more_hold_up_no_other_one_for_two_steps(
    lengths: list[tuple[int, int]], budget: int, seed: int
) -> None:
    """One client sends long prompts, and another one short ones."""
    world, rng = World(num_blocks=1000, max_num_seqs=16, budget=budget), Random(seed)
    held_up = set[str]()
    for index, (num_long, num_short) in enumerate(lengths):
        world.add(num_long, 1, text=index, sender=ACME)
        for _ in range(rng.randrange(8)):
            held_up = _held_up(world, held_up)
        world.add(num_short, 1, text=100 + index, sender=BOLT)
    while world.alive:
        held_up = _held_up(world, held_up)


def _held_up(world: World, before: set[str]) -> set[str]:
    """The clients with waiting sequences that get nothing in a step in which one gets tokens of prompts that was served
    more. before: those of the last step."""
    if not world.alive:
        return set()
    clients = world.accounts.clients.parts
    served = {s.request.sender.name: clients[s.request.sender.name].use_s for s in world.alive}
    waiting = {s.request.sender.name for s in world.alive if s.status is SequenceStatus.WAITING}
    step = world.step()
    most = max((served[s.sequence.request.sender.name] for s in step if s.num_tokens > 1), default=0)
    waiting -= {scheduled.sequence.request.sender.name for scheduled in step}
    held_up = {name for name in waiting if served[name] < most}
    assert not held_up & before
    return held_up


def test_a_short_prompt_goes_before_what_is_left_of_a_long_one_of_the_same_client_and_equal_ones_in_order() -> None:
    world = World(num_blocks=400, max_num_seqs=8, budget=10)
    long, equal = (world.add(600, 1, text=number) for number in range(2))
    world.step()
    assert [s.sequence for s in world.step()] == [long], "an equal one came first"
    world.finish(equal)
    short = world.add(10, 1, text=2)
    assert [[s.sequence for s in world.step()] for _ in range(2)] == [[short], [long]]


def test_prompts_of_several_adapters_are_computed_one_after_the_other_so_that_the_first_answers_begin_early() -> None:
    world = World(num_blocks=200, max_num_seqs=8, budget=10)
    prompts = [world.add(30, 1, task) for task in (0, 1, None)]
    assert [[s.sequence for s in world.step()] for _ in range(9)] == [[p] for p in prompts for _ in range(3)]


def test_a_prompt_that_has_begun_comes_to_its_end_though_new_clients_come_for_ever() -> None:
    world = World(num_blocks=400, max_num_seqs=16, budget=10)
    long = world.add(100, 1, sender=ACME)
    num_steps = 0
    while long in world.alive:
        world.add(10, 1, text=2 + num_steps, sender=Sender(name=f"client-{num_steps}"))
        world.step()
        num_steps += 1
    assert num_steps <= 2 * 10


def test_decodes_come_before_prompts_and_long_prompts_are_cut_into_chunks() -> None:
    world = World(num_blocks=40, budget=8)
    first = world.add(3, 10)
    world.step()
    second = world.add(20, 2)
    chunks = []
    for _ in range(3):
        step = world.step()
        assert [s.sequence for s in step] == [first, second]
        assert step[0].num_tokens == 1
        chunks.append(step[1].num_tokens)
    assert chunks == [7, 7, 6]


def test_a_sequence_that_waits_for_its_adapter_is_skipped_not_waited_for() -> None:
    world = World(num_blocks=60, max_num_seqs=8, budget=20)
    for task in range(MAX_LORAS):
        world.add(2, 10, task)
    blocked = world.add(2, 3, MAX_LORAS)
    base, warm = world.add(2, 3), world.add(2, 3, 0)
    scheduled = [s.sequence for s in world.step()]
    assert blocked not in scheduled
    assert base in scheduled
    assert warm in scheduled


def test_a_skipped_sequence_is_not_overtaken_for_ever() -> None:
    world = World(num_blocks=60, max_num_seqs=4, budget=8)
    for task in range(MAX_LORAS):
        world.add(2, 6, task)
    world.step()
    blocked = world.add(2, 3, MAX_LORAS)
    steps = 0
    while blocked in world.alive:
        while world.scheduler.num_waiting < 4:
            world.add(2, 6, world.arrivals % MAX_LORAS)
        world.step()
        steps += 1
        assert steps < 400, "starved"


def test_the_last_in_line_is_preempted_and_starts_again_from_its_tokens() -> None:
    world = World(num_blocks=12, max_num_seqs=4, budget=30)
    first, last = world.add(16, 24), world.add(16, 24, 3)
    world.run_dry()
    assert world.scheduler.num_preemptions > 0
    assert world.finished == [first, last]
    assert len(last.output_token_ids) == 24


def test_tokens_that_a_preemption_lost_are_computed_again_without_charge() -> None:
    world = World(num_blocks=12, max_num_seqs=4, budget=30, enable_prefix_caching=False, pace=known_pace(0.0))
    world.add(16, 24, text=1, sender=ACME)
    last = world.add(16, 24, text=2, sender=BOLT)
    while not world.scheduler.num_preemptions:
        world.step()
    before_s = world.accounts.client(last).use_s
    assert last.num_missing_tokens == last.num_lost_tokens + 1 > 16
    num_steps = 0
    while last.num_missing_tokens > 1:
        world.step()
        num_steps += 1
    # Of each step it pays its part of the time that answers take, and of all its tokens the newest one.
    assert world.accounts.client(last).use_s - before_s <= num_steps * KnownTimes().own_s(2) + TOKEN_S
    assert num_steps < 16
    world.run_dry()


def test_what_was_computed_is_found_again_by_others_and_after_a_preemption() -> None:
    world = World(num_blocks=12, max_num_seqs=2, budget=30)
    world.add(16, 1, task=0)
    world.step()
    for task, is_known in [(0, True), (1, False), (None, False)]:
        again = world.add(16, 1, task)
        (scheduled,) = world.step()
        assert scheduled.start == again.block_table.num_reused * BLOCK_SIZE == (12 if is_known else 0)

    world = World(num_blocks=12, max_num_seqs=4, budget=30)
    first, last = world.add(16, 24, text=1), world.add(16, 24, text=2)
    world.run_dry()
    assert world.scheduler.num_preemptions > 0
    assert world.finished == [first, last]
    assert last.block_table.num_reused > 0
    assert world.blocks.prefix_cache.hit_tokens == last.block_table.num_reused * BLOCK_SIZE


def test_a_step_that_was_not_computed_is_not_reused() -> None:
    world = World(num_blocks=12, budget=30)
    lost = world.add(16, 4)
    world.scheduler.schedule()
    world.finish(lost)
    world.add(16, 4)
    (scheduled,) = world.step()
    assert scheduled.start == 0


@pytest.mark.parametrize("source_len", [0, 8])
def test_a_step_before_a_preemption_makes_nothing_known_of_the_blocks_after_it(source_len: int) -> None:
    world = World(num_blocks=12, budget=12, encoder_budget=8)
    one = world.add(12, 4, source_len=source_len)
    before = world.scheduler.schedule()
    assert [s.num_tokens for s in before] == [12]
    world.scheduler._preempt(one)
    world.scheduler._max_num_batched_tokens = 2
    after = world.scheduler.schedule()
    assert [s.num_tokens for s in after] == [2]
    world.compute(after)
    world.scheduler.commit(before)
    world.scheduler.commit(after)
    other = world.add(12, 4, source_len=source_len)
    world.scheduler._max_num_batched_tokens = 12
    (scheduled,) = [s for s in world.scheduler.schedule() if s.sequence is other]
    assert (scheduled.start, scheduled.encodes_source) == (0, False)


def test_a_step_before_a_preemption_makes_nothing_known_of_blocks_whose_own_step_fails() -> None:
    world = World(num_blocks=12, budget=12)
    one = world.add(12, 4)
    before = world.scheduler.schedule()
    world.scheduler._preempt(one)
    assert [s.num_tokens for s in world.scheduler.schedule()] == [12]
    world.scheduler.commit(before)
    world.finish(one)
    world.add(12, 4)
    (scheduled,) = world.step()
    assert scheduled.start == 0


def test_an_adapter_with_one_request_waits_for_no_long_queue_of_another() -> None:
    world = World(num_blocks=60, max_num_seqs=2, budget=20)
    many = [world.add(2, 3, 0) for _ in range(30)]
    world.step()
    (single, base) = world.add(2, 3, 1), world.add(2, 3)
    world.run_dry()
    assert world.finished.index(single) < 6
    assert world.finished.index(base) < 6
    assert [s for s in world.finished if s in many] == many


def test_those_that_started_first_are_never_preempted_for_later_ones() -> None:
    world = World(num_blocks=12, max_num_seqs=4, budget=30)
    many = [world.add(12, 20, 0, text=i) for i in range(4)]
    world.step()
    single = world.add(12, 20, 1, text=9)
    world.run_dry()
    assert world.scheduler.num_preemptions > 0
    assert world.finished[0] is many[0]
    assert single in world.finished[:3]


def test_smaller_priority_goes_first() -> None:
    world = World(num_blocks=60, max_num_seqs=1, budget=20)
    later, sooner = world.add(2, 1, priority=1), world.add(2, 1, priority=0)
    world.run_dry()
    assert world.finished == [sooner, later]


def test_the_adapters_of_the_next_in_line_are_brought_to_the_device_while_all_places_are_taken() -> None:
    world = World(max_num_seqs=1)
    for task in range(3):
        world.add(4, 3, task=task)
    world.step()
    assert world.scheduler.num_running == 1
    assert [world.loras.inventory.info(task).location for task in range(4)] == ["DEVICE"] * 3 + ["HOST"]
    world.run_dry()


def test_a_client_with_all_places_gives_back_what_is_beyond_its_share_and_no_more() -> None:
    world = World(num_blocks=60, max_num_seqs=4, budget=32)
    hoard = [world.add(2, 30, sender=ACME) for _ in range(8)]
    for _ in range(4):
        world.step()
    late = [world.add(2, 30, sender=BOLT) for _ in range(4)]

    def running() -> list[Sequence]:
        return [s for s in [*hoard, *late] if s.status is SequenceStatus.RUNNING]

    world.step()
    assert running() == [*hoard[:3], late[0]]
    for _ in range(4):
        world.step()
    for _ in range(10):
        assert running() == [*hoard[:2], *late[:2]], "places change hands without need"
        world.step()
    world.run_dry()


def test_answers_that_may_be_abandoned_unheard_give_places_to_streams_where_nobody_is_known() -> None:
    world = World(num_blocks=60, max_num_seqs=4, budget=32)
    hoard = [world.add(2, 30, sender=Sender(is_unheard=True)) for _ in range(8)]
    for _ in range(4):
        world.step()
    streams = [world.add(2, 30, sender=NOBODY) for _ in range(2)]
    for _ in range(4):
        world.step()
    assert [s.status is SequenceStatus.RUNNING for s in [*hoard, *streams]] == [True] * 2 + [False] * 6 + [True] * 2
    world.run_dry()


def test_a_client_alone_and_clients_without_names_keep_their_places() -> None:
    for sender in (ACME, NOBODY):
        world = World(num_blocks=60, max_num_seqs=2, budget=32)
        first = [world.add(2, 30, sender=sender) for _ in range(2)]
        world.step()
        world.add(2, 30, sender=sender)
        world.step()
        assert all(s.status is SequenceStatus.RUNNING for s in first)


def test_a_client_with_all_blocks_gives_back_what_is_beyond_its_share() -> None:
    world = World(num_blocks=12, max_num_seqs=4, budget=64)
    hoard = [world.add(22, 10, text=i, sender=ACME) for i in range(2)]
    for _ in range(2):
        world.step()
    late = world.add(4, 4, text=9, sender=BOLT)
    world.step()
    assert late.status is SequenceStatus.RUNNING
    assert [s.status for s in hoard] == [SequenceStatus.RUNNING, SequenceStatus.WAITING]
    world.run_dry()


def test_sources_wait_in_the_queues_order_for_a_budget_of_their_own_and_answers_go_on() -> None:
    world = World(num_blocks=100, max_num_seqs=9, budget=9, encoder_budget=12)
    first = world.add(1, 20, text=1, source_len=8)
    world.step()
    long, short, last = (world.add(1, 20, text=text, source_len=n) for text, n in [(2, 10), (3, 2), (4, 1)])
    for encoded in ({first: 0, long: 10, short: 2}, {first: 0, long: 0, short: 0, last: 1}):
        assert {s.sequence: s.num_source_tokens for s in world.step()} == encoded
    assert not any(s.encodes_source for s in world.step())


def test_equal_sources_of_one_step_are_encoded_each_and_later_ones_not_at_all() -> None:
    world = World(num_blocks=100, max_num_seqs=9, encoder_budget=16)
    twins = [world.add(1, 9, text=1, source_len=8) for _ in range(2)]
    assert [s.encodes_source for s in world.step()] == [True, True]
    later = [world.add(1, 9, text=1, source_len=8) for _ in range(4)]
    others = [world.add(1, 9, task=0, text=1, source_len=8), world.add(1, 9, text=1, source_len=7)]
    step = world.step()
    assert [s.sequence for s in step if s.encodes_source] == others
    assert {s.sequence for s in step} == {*twins, *later, *others}
    assert [one.num_cached_tokens for one in (*twins, *later, *others)] == [0, 0, 8, 8, 8, 8, 0, 0]
    world.run_dry()
    assert world.blocks.num_free == 100


@pytest.mark.parametrize("enable_prefix_caching", [False, True])
def test_a_preempted_sequence_is_encoded_again_unless_its_source_is_known(enable_prefix_caching: bool) -> None:
    world = World(12, budget=30, enable_prefix_caching=enable_prefix_caching, encoder_budget=20)
    first, last = (world.add(1, 28, text=text, source_len=8) for text in (1, 2))
    encoded = []
    while world.alive:
        encoded += [s.sequence for s in world.step() if s.encodes_source]
    assert world.scheduler.num_preemptions > 0
    assert world.finished == [first, last]
    assert encoded[:2] == [first, last]
    # The first answer takes its blocks where there are no others.
    assert set(encoded[2:]) <= {last}
    assert bool(encoded[2:]) or enable_prefix_caching
    assert last.num_cached_tokens == 0


def test_a_source_takes_time_of_a_step_but_the_first_one_is_encoded_whatever_it_takes() -> None:
    world = World(num_blocks=400, max_num_seqs=16, budget=256, encoder_budget=256, pace=known_pace(0.030))
    world.add(1, 60, text=1, source_len=4)
    world.step()
    waiting = [world.add(1, 60, text=2 + i, source_len=n) for i, n in enumerate([100, 8, 8, 8])]
    # There is time for 19 tokens beside an answer's, each source has a token of a prompt, and short ones pass the long.
    assert [[s.num_source_tokens for s in world.step() if s.encodes_source] for _ in range(3)] == [[8, 8], [100], [8]]
    assert all(one.output_token_ids for one in waiting)


def test_a_source_is_charged_once_and_counts_in_the_measured_time_of_its_step() -> None:
    world = World(num_blocks=12, budget=30, enable_prefix_caching=False, pace=known_pace(0.0), encoder_budget=20)
    world.add(1, 28, text=1, sender=ACME, source_len=8)
    last = world.add(1, 28, text=2, sender=BOLT, source_len=8)
    step = world.scheduler.schedule()
    assert world.pace.launch(step) == StepWork(2, 16)
    world.compute(step)
    assert world.accounts.client(last).use_s >= 9 * TOKEN_S
    for scheduled in step:
        scheduled.sequence.num_pending_tokens += 1
    world.read(step)
    while not world.scheduler.num_preemptions:
        world.step()
    before_s = world.accounts.client(last).use_s
    while last.status is SequenceStatus.WAITING:
        world.step()
    assert world.accounts.client(last).use_s - before_s <= KnownTimes().own_s(2) + TOKEN_S
    world.run_dry()
