from __future__ import annotations

import signal

import pytest

from servers.started_server import sigterm_as_ctrl_c


def test_sigterm_interrupts_what_is_going_on_and_is_itself_again_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), sigterm_as_ctrl_c():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_second_sigterm_does_not_disturb_what_is_being_closed() -> None:
    closed = []

    def work() -> None:
        try:
            signal.raise_signal(signal.SIGTERM)
        finally:
            signal.raise_signal(signal.SIGTERM)
            closed.append(True)

    with pytest.raises(KeyboardInterrupt), sigterm_as_ctrl_c():
        work()
    assert closed
