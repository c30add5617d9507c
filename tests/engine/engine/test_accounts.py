"""Who starts next: by priority, then whose client has used least, then whose adapter has, then who came first."""

from __future__ import annotations

import itertools
from collections import Counter
from random import Random
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multilora_engine.engine import accounts
from multilora_engine.engine.accounts import TOKENS_OF_A_PLACE, Accounts, FairQueue
from multilora_engine.errors import TooMuchHostWork
from multilora_engine.request import GenerationRequest, SamplingParams, Sender
from multilora_engine.sequences.sequence import Sequence, SequenceStatus
from multilora_engine.text.text_stream import TextStream

MAX_TOKENS = 50
NOBODY, ACME, BOLT = Sender(), Sender(name="acme"), Sender(name="bolt")


class Shop:
    """Serves a queue with so many sequences at once, each for one to `MAX_TOKENS` tokens of a second each."""

    def __init__(self, max_num_seqs: int = 1) -> None:
        self.accounts = Accounts()
        self.queue = FairQueue(self.accounts)
        self.max_num_seqs = max_num_seqs
        self.running: dict[Sequence, int] = {}
        self.served: Counter[int | None] = Counter()
        self.started: list[Sequence] = []
        self._arrivals = itertools.count()

    def add(
        self,
        task: int | None = None,
        priority: int = 0,
        num_tokens: int = 10,
        sender: Sender = NOBODY,
        prompt_len: int = 1,
        num_tokens_ahead: int = 0,
    ) -> Sequence:
        request = GenerationRequest(
            "r",
            [1] * prompt_len,
            SamplingParams(num_tokens),
            lora_task_id=task,
            priority=priority,
            sender=sender,
            num_tokens_ahead=num_tokens_ahead,
        )
        sequence = Sequence(request, next(self._arrivals), None, cast(TextStream, None), Random(0), num_tokens)
        self.queue.add(sequence)
        return sequence

    def step(self, num_tokens: int = 1) -> None:
        """Start whom there is room for, and compute some tokens of each that runs."""
        while len(self.running) < self.max_num_seqs and (sequence := self.queue.first) is not None:
            self.queue.take(sequence)
            sequence.status = SequenceStatus.RUNNING
            self.running[sequence] = 0
            self.started.append(sequence)
        for sequence, start in list(self.running.items()):
            end = min(start + num_tokens, sequence.request.sampling.max_tokens)
            self.accounts.charge(sequence, max(0, end - max(start, sequence.num_lost_tokens)))
            self.served[sequence.request.lora_task_id] += end - start
            self.running[sequence] = end
            if end == sequence.request.sampling.max_tokens:
                self.end(sequence)
        self.queue.check_integrity(self.running)

    def preempt(self) -> None:
        sequence, num_tokens = self.running.popitem()
        sequence.num_lost_tokens = max(sequence.num_lost_tokens, num_tokens)
        sequence.status = SequenceStatus.WAITING
        self.queue.put_back(sequence)

    def end(self, sequence: Sequence) -> None:
        self.running.pop(sequence, None)
        self.queue.discard(sequence)
        sequence.status = SequenceStatus.FINISHED

    def clients(self, num_steps: int) -> list[str]:
        """The clients of those that start in so many steps."""
        self.tasks(num_steps)
        return [sequence.request.sender.name for sequence in self.started]

    def tasks(self, num_steps: int) -> list[int | None]:
        """The adapters of those that start in so many steps."""
        self.started.clear()
        for _ in range(num_steps):
            self.step(num_tokens=MAX_TOKENS)
        return [sequence.request.lora_task_id for sequence in self.started]


def test_an_adapter_with_many_requests_takes_turns_with_one_that_has_few() -> None:
    shop = Shop()
    for task in [1] * 20 + [2] * 3 + [None]:
        shop.add(task)
    assert shop.tasks(8) == [1, 2, None, 1, 2, 1, 2, 1]


def test_turns_are_counted_in_tokens() -> None:
    shop = Shop()
    for _ in range(20):
        shop.add(1, num_tokens=10)
        shop.add(2, num_tokens=40)
    counts = Counter(shop.tasks(15))
    assert counts == {1: 12, 2: 3}


def test_one_adapter_alone_is_served_in_order_of_arrival() -> None:
    shop = Shop()
    sequences = [shop.add(5, num_tokens=1 + i % 7) for i in range(10)]
    shop.tasks(10)
    assert shop.started == sequences


def test_a_small_request_passes_long_prompts_and_requests_of_many_sequences_whoever_sent_them() -> None:
    shop = Shop()
    long = [shop.add(prompt_len=320) for _ in range(4)]
    many = [shop.add(num_tokens_ahead=64 * place) for place in range(4)]
    small = [shop.add() for _ in range(4)]
    shop.tasks(12)
    places = {"many": [4, 7, 10, 13], "small": [8, 9, 10, 11], "long": [10, 11, 12, 13]}
    by_place = zip([*places["long"], *places["many"], *places["small"]], [*long, *many, *small], strict=True)
    assert shop.started == [sequence for _, sequence in sorted(by_place, key=lambda pair: pair[0])]


@settings(max_examples=100, deadline=None)
@given(sizes=st.lists(st.integers(1, 2000), min_size=1, max_size=40), seed=st.integers(0, 1 << 30))
def test_nobody_is_passed_by_more_later_ones_than_its_tokens_pay_for(sizes: list[int], seed: int) -> None:
    shop, rng = Shop(), Random(seed)
    pending, arrived = list(reversed(sizes)), []
    while pending or len(shop.queue):
        if pending and rng.random() < 0.7:
            arrived.append(shop.add(prompt_len=pending.pop()))
        if rng.random() < 0.2 and shop.running:
            shop.preempt()
        shop.step(num_tokens=rng.choice([1, MAX_TOKENS]))
    order = list(dict.fromkeys(shop.started))
    assert len(order) == len(sizes)
    for sequence in arrived:
        num_passed = sum(other.arrival > sequence.arrival for other in order[: order.index(sequence)])
        assert num_passed <= len(sequence.request.prompt_token_ids) // TOKENS_OF_A_PLACE


def test_who_had_nothing_waiting_has_not_saved_up() -> None:
    shop = Shop()
    for _ in range(30):
        shop.add(1)
    assert set(shop.tasks(10)) == {1}
    for _ in range(10):
        shop.add(2)
    assert Counter(shop.tasks(10)) == {1: 5, 2: 5}


def test_a_client_with_many_adapters_takes_turns_with_one_that_has_one() -> None:
    shop = Shop()
    for task in range(10):
        shop.add(task, sender=ACME)
    for _ in range(5):
        shop.add(7, sender=BOLT)
    assert shop.clients(10) == ["acme", "bolt"] * 5


def test_the_adapters_of_a_client_take_turns_among_themselves() -> None:
    shop = Shop()
    for task in [1, 1, 1, 2]:
        shop.add(task, sender=ACME)
    for _ in range(4):
        shop.add(1, sender=BOLT)
    shop.tasks(8)
    assert [s.request.lora_task_id for s in shop.started if s.request.sender is ACME] == [1, 2, 1, 1]


def test_a_client_of_twice_the_weight_is_served_twice_as_much() -> None:
    shop, heavy = Shop(), Sender(name="heavy", weight=2.0)
    for _ in range(30):
        shop.add(sender=heavy)
        shop.add(sender=ACME)
    assert Counter(shop.clients(30)) == {"heavy": 20, "acme": 10}


def test_equal_task_ids_of_two_tenants_are_charged_apart() -> None:
    shop = Shop()
    for sender in [ACME, ACME, ACME, BOLT]:
        shop.add(7, sender=sender)
    assert shop.clients(4) == ["acme", "bolt", "acme", "acme"]


def test_a_client_whose_adapters_are_all_set_aside_lets_others_pass_and_keeps_its_turn() -> None:
    shop = Shop()
    for task, sender in [(1, ACME), (2, ACME), (1, BOLT)]:
        shop.add(task, sender=sender)
    passed = []
    while (sequence := shop.queue.first) is not None:
        passed.append((sequence.request.sender.name, sequence.request.lora_task_id))
        shop.queue.set_aside(sequence)
    assert passed == [("acme", 1), ("acme", 2), ("bolt", 1)]
    shop.queue.restore()
    shop.queue.check_integrity([])
    assert shop.clients(3) == ["acme", "bolt", "acme"]


def test_a_smaller_priority_goes_before_any_larger_one() -> None:
    shop = Shop()
    later = [shop.add(task, priority=1) for task in (1, 2, 3)]
    sooner = [shop.add(1) for _ in range(3)]
    shop.tasks(6)
    assert shop.started[:3] == sooner
    assert shop.started[3:] == [later[1], later[2], later[0]], "the first adapter was served before"


def test_a_sequence_that_was_set_aside_comes_back_with_its_turn() -> None:
    shop = Shop()
    for task in [1, 2, 2, 3]:
        shop.add(task)
    first = shop.queue.first
    assert first is not None
    shop.queue.set_aside(first)
    next_one = shop.queue.first
    assert next_one is not None
    assert next_one.request.lora_task_id == 2
    shop.queue.restore()
    assert shop.queue.first is first


def test_a_preempted_sequence_goes_before_its_adapters_others_and_pays_once() -> None:
    shop = Shop()
    first = shop.add(1, num_tokens=30)
    shop.add(1, num_tokens=30)
    shop.add(2, num_tokens=30)
    shop.step(num_tokens=20)
    shop.preempt()
    assert [first.request.lora_task_id, *shop.tasks(3)] == [1, 2, 1, 1]
    assert shop.started[1] is first
    assert len(shop.queue) == 0


@settings(max_examples=100, deadline=None)
@given(weights=st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=2, max_size=4), seed=st.integers(0, 1 << 30))
def test_what_two_waiting_clients_were_served_over_their_weights_differs_by_what_runs_at_once(
    weights: list[float], seed: int
) -> None:
    shop, rng = Shop(max_num_seqs=3), Random(seed)
    senders = [Sender(name=str(index), weight=weight) for index, weight in enumerate(weights)]
    for _ in range(150):
        for sender in senders:
            while sum(sequence.request.sender is sender for sequence in shop.queue) < 4:
                shop.add(rng.randint(0, 3), num_tokens=rng.randint(1, MAX_TOKENS), sender=sender)
        if rng.random() < 0.1 and shop.running:
            shop.preempt()
        shop.step(num_tokens=rng.choice([1, 5, MAX_TOKENS]))
        served = [client.use_s for client in shop.accounts.clients.parts.values()]
        assert max(served) - min(served) <= (3 + 1) * MAX_TOKENS


@settings(max_examples=100, deadline=None)
@given(max_num_seqs=st.integers(1, 6), num_tasks=st.integers(2, 5), seed=st.integers(0, 1 << 30))
def test_what_two_waiting_adapters_were_served_differs_by_what_runs_at_once(
    max_num_seqs: int, num_tasks: int, seed: int
) -> None:
    shop, rng = Shop(max_num_seqs), Random(seed)
    tasks = list(range(num_tasks))
    waiting: dict[int, list[Sequence]] = {task: [] for task in tasks}
    for _ in range(150):
        for task in tasks:
            # All but the last are greedy; everybody always has something waiting.
            while len(waiting[task]) < (max_num_seqs + 1 if task == tasks[-1] else 20):
                waiting[task].append(shop.add(task, num_tokens=rng.randint(1, MAX_TOKENS)))
        if rng.random() < 0.1 and shop.running:
            shop.preempt()
        shop.step(num_tokens=rng.choice([1, 5, MAX_TOKENS]))
        for sequences in waiting.values():
            sequences[:] = [s for s in sequences if s.status is SequenceStatus.WAITING]
        adapters = shop.accounts.clients.parts[""].parts
        charged = [adapters[task].use_s for task in tasks]
        assert max(charged) - min(charged) <= (max_num_seqs + 1) * MAX_TOKENS


@pytest.mark.parametrize("num_tasks", [1, 500])
def test_ten_thousand_cancelled_requests_leave_nothing_behind_one_that_waits(num_tasks: int) -> None:
    shop = Shop()
    stuck = shop.add(7)
    for i in range(10_000):
        shop.end(shop.add(i % num_tasks, priority=i % 3))
        assert len(shop.queue) == 1
    assert [len(client.parts) for client in shop.accounts.clients.parts.values()] == [1]
    shop.queue.check_integrity([])
    shop.end(stuck)
    shop.queue.check_integrity([])
    assert shop.accounts.clients.parts == {}


def test_the_seconds_of_the_hosts_work_and_of_guides_count_as_those_of_tokens_do() -> None:
    shop = Shop()
    for sender in (ACME, BOLT):
        for _ in range(30):
            shop.add(num_tokens=10, sender=sender)
    first = shop.queue.first
    assert first is not None
    assert first.request.sender is ACME
    shop.accounts.charge_host_work(first, 60.0, 1)
    shop.accounts.client(first).guide_s += 40.0
    assert shop.clients(20) == ["bolt"] * 10 + ["acme", "bolt"] * 5


@pytest.fixture
def host_work_s(monkeypatch: pytest.MonkeyPatch) -> float:
    monkeypatch.setattr(accounts, "HOST_WORK_S", 0.05)
    return 0.05


def test_who_takes_no_more_than_its_share_of_the_hosts_work_may_go_on_for_ever(host_work_s: float) -> None:
    shop = Shop()
    modest = shop.add()
    for _ in range(10_000):
        shop.accounts.charge_host_work(modest, host_work_s / 4, num_sharing=4)


def test_who_takes_more_than_its_share_in_step_after_step_ends(host_work_s: float) -> None:
    shop = Shop()
    greedy = shop.add()
    for _ in range(5):
        shop.accounts.charge_host_work(greedy, 0.06, num_sharing=4)
    with pytest.raises(TooMuchHostWork, match=r"took 285 ms more .* 50 ms of a step, and 4 share that"):
        shop.accounts.charge_host_work(greedy, 0.06, num_sharing=4)


def test_one_step_alone_ends_nobody_and_is_paid_off(host_work_s: float) -> None:
    shop = Shop()
    unlucky = shop.add()
    for _ in range(50):
        shop.accounts.charge_host_work(unlucky, 100.0, num_sharing=1)
        shop.accounts.charge_host_work(unlucky, 0.0, num_sharing=1)
    assert unlucky.host_debt_s == 0.0


def over(*held: tuple[str, float], weights: dict[str, float] | None = None, whole: float = 1.0) -> set[str]:
    """The clients over their shares."""
    shop = Shop()
    senders = {name: Sender(name=name, weight=(weights or {}).get(name, 1.0)) for name, _ in held}
    sequences = [(shop.add(sender=senders[name]), part) for name, part in held]
    found = shop.accounts.over_their_shares(sequences, whole)
    return {name for name, client in shop.accounts.clients.parts.items() if client in found and isinstance(name, str)}


def test_who_holds_more_than_its_share_is_over_it_and_nobody_else() -> None:
    assert over(("acme", 0.25), ("acme", 0.25), ("acme", 0.25), ("bolt", 0.25)) == {"acme"}
    assert over(("acme", 0.5), ("bolt", 0.5)) == set()
    assert over(("acme", 1.0)) == set()
    assert over(("acme", 0.7), ("bolt", 0.1), ("cord", 0.1)) == {"acme"}


def test_a_share_goes_by_the_weight() -> None:
    assert over(("acme", 0.75), ("bolt", 0.25), weights={"acme": 3.0}) == set()
    assert over(("acme", 0.8), ("bolt", 0.2), weights={"acme": 3.0}) == {"acme"}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), min_size=1, max_size=9))
def test_never_are_all_over_their_shares(held: list[tuple[str, int]]) -> None:
    assert over(*held, whole=sum(part for _, part in held)) < {name for name, _ in held}
