"""The log tells how far a start has come while one item takes long."""

from __future__ import annotations

import logging
import threading

import pytest

from multilora_engine.execution.self_test import StartProgress


class _Heard(logging.Handler):
    """Sets an event for each of the first lines."""

    def __init__(self, *events: threading.Event) -> None:
        super().__init__()
        self.lines: list[str] = []
        self._events = events

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        for event in self._events[: len(self.lines)]:
            event.set()


def test_an_item_that_takes_long_is_told_again_and_again_and_the_end_ends_it() -> None:
    first, second = threading.Event(), threading.Event()
    heard = _Heard(first, second)
    logger = logging.getLogger("multilora_engine.execution.self_test")
    before = logger.level
    logger.addHandler(heard)
    logger.setLevel(logging.INFO)
    try:
        with StartProgress("self-test", interval_s=0.01) as progress:
            progress.note(3, 40, "lora_apply")
            assert first.wait(60)
            assert second.wait(60)
        num_lines = len(heard.lines)
        assert all(line.startswith("self-test: 3 of 40 are done; now lora_apply, for 0 s") for line in heard.lines)
        assert "start-progress" not in {thread.name for thread in threading.enumerate()}
        assert len(heard.lines) == num_lines
    finally:
        logger.removeHandler(heard)
        logger.setLevel(before)


def test_a_failure_passes_and_nothing_is_told_before_the_first_item(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), pytest.raises(RuntimeError, match="out"), StartProgress("kernels", 0.001):
        raise RuntimeError("out")
    assert caplog.messages == []
