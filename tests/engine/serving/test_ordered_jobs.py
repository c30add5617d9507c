from __future__ import annotations

import os
import threading
from collections import defaultdict
from collections.abc import Iterator
from functools import partial
from random import Random

import pytest
from support.fronts import TIMEOUT_S

from multilora_engine.serving.ordered_jobs import OrderedJobs


@pytest.fixture
def jobs() -> Iterator[OrderedJobs]:
    jobs = OrderedJobs(2, "test")
    yield jobs
    jobs.close()


def test_a_short_job_runs_at_once_on_the_thread_that_submits_it(jobs: OrderedJobs) -> None:
    threads: list[int] = []
    may_end = threading.Event()
    jobs.submit(["other"], lambda: assert_set(may_end), is_long=True)
    jobs.submit(["a"], lambda: threads.append(threading.get_ident()), is_long=False)
    assert threads == [threading.get_ident()]
    may_end.set()


def test_long_jobs_leave_the_cores_to_the_steps_and_short_ones_run_as_they_are(jobs: OrderedJobs) -> None:
    niceness: dict[str, int] = {}

    def note(name: str) -> None:
        niceness[name] = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    jobs.submit(["a"], partial(note, "short"), is_long=False)
    jobs.submit(["b"], partial(note, "long"), is_long=True)
    jobs.close()
    assert niceness["long"] > niceness["short"] == os.getpriority(os.PRIO_PROCESS, 0)


def test_a_job_waits_for_the_earlier_ones_with_its_key_and_keeps_no_thread_meanwhile(jobs: OrderedJobs) -> None:
    may_end, done, others = threading.Event(), list[str](), threading.Event()
    jobs.submit(["a"], lambda: (assert_set(may_end), done.append("long"))[0], is_long=True)
    for i in range(3):
        jobs.submit(["a", i], partial(done.append, f"short {i}"), is_long=False)
    jobs.submit(["b"], others.set, is_long=True)
    assert others.wait(TIMEOUT_S)
    assert done == []
    may_end.set()
    jobs.close()
    assert done == ["long", "short 0", "short 1", "short 2"]


def test_jobs_of_a_key_run_one_by_one_in_their_order_whatever_else_they_wait_for(jobs: OrderedJobs, seed: int) -> None:
    random, running = Random(seed), set[str]()
    submitted, run = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    lock = threading.Lock()

    def work(number: int, keys: list[str]) -> None:
        with lock:
            assert running.isdisjoint(keys)
            running.update(keys)
        for key in keys:
            run[key].append(number)
        with lock:
            running.difference_update(keys)

    for number in range(2000):
        keys = random.sample("abcde", random.randint(1, 3))
        for key in keys:
            submitted[key].append(number)
        jobs.submit(keys, partial(work, number, keys), is_long=random.random() < 0.5)
    jobs.close()
    assert run == submitted


def test_owners_take_turns_with_the_threads() -> None:
    jobs, may_begin, done = OrderedJobs(1, "test"), threading.Event(), list[str]()
    jobs.submit([], lambda: assert_set(may_begin), is_long=True)
    for owner, number in [("a", 4), ("b", 1), ("c", 2)]:
        for i in range(number):
            jobs.submit([], partial(done.append, f"{owner}{i}"), is_long=True, owner=owner)
    may_begin.set()
    jobs.close()
    assert done == ["a0", "b0", "c0", "a1", "c1", "a2", "a3"]


def assert_set(event: threading.Event) -> None:
    assert event.wait(TIMEOUT_S)
