from __future__ import annotations

import signal

import pytest
from started_server import sigterm_as_ctrl_c


def test_sigterm_interrupts_what_is_going_on_and_is_itself_again_afterwards() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), sigterm_as_ctrl_c():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before
