from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack

import psutil
import pytest
from support.fronts import TIMEOUT_S

from trials.process_deaths import Deaths


@pytest.fixture
def children() -> Iterator[dict[str, subprocess.Popen[bytes]]]:
    with ExitStack() as resources:
        yield {
            name: resources.enter_context(subprocess.Popen(["cat"], stdin=subprocess.PIPE))
            for name in ("first", "second")
        }


def watched(children: dict[str, subprocess.Popen[bytes]]) -> Deaths:
    return Deaths({name: psutil.Process(child.pid) for name, child in children.items()})


def test_the_first_to_die_is_named_whoever_dies_after_it(children: dict[str, subprocess.Popen[bytes]]) -> None:
    with watched(children) as deaths:
        children["first"].kill()
        assert deaths.wait(TIMEOUT_S) == {"first"}
        children["second"].kill()
        children["second"].wait()
        assert deaths.wait(TIMEOUT_S) == {"first"}


def test_while_all_live_there_is_none(children: dict[str, subprocess.Popen[bytes]]) -> None:
    with watched(children) as deaths:
        assert deaths.wait(0.0) == frozenset()
    assert deaths.wait(0.0) == frozenset()


def test_one_that_was_dead_before_is_the_first(children: dict[str, subprocess.Popen[bytes]]) -> None:
    deaths = watched(children)
    children["second"].kill()
    children["second"].wait()
    with deaths:
        assert deaths.wait(TIMEOUT_S) == {"second"}
