"""Whether a device is dead.

After some errors of a kernel a GPU fails every later call, whatever it is for, until the process ends: in CUDA's words
the error is sticky. It may come up in a copy that is as sound as before. So after a failure the device is asked.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass, field

import torch

from multilora_engine.batch import transfer
from multilora_engine.batch.transfer import FromDevice, to_device
from multilora_engine.out_of_memory import is_out_of_memory

_LIMIT_S = 10.0
"""Longer than a healthy device takes for the steps in flight, and shorter than a watchdog waits."""

_logger = logging.getLogger(__name__)


def is_device_dead(device: torch.device, limit_s: float = _LIMIT_S) -> bool:
    """Whether a device computes nothing any more, so that only a new process may help. Logs why.

    Sends a number there and back, after the device's earlier work. A device is dead if that fails for another reason
    than memory, or takes longer than `limit_s` seconds. A device whose memory is the host's is never dead.
    """
    if not transfer.is_apart(device):
        return False
    answers: list[Exception | None] = []

    def ask() -> None:
        try:
            FromDevice(to_device(torch.ones(1), device)).wait()
        except Exception as error:
            answers.append(error)
        else:
            answers.append(None)

    # A call of a device that hangs does not come back: a thread of its own waits for it.
    thread = threading.Thread(target=ask, name="device-probe", daemon=True)
    try:
        thread.start()
    except RuntimeError as refusal:
        _logger.warning("nobody can ask whether %s is dead: %s", device, refusal)
        return False
    thread.join(limit_s)
    if not answers:
        _logger.error("%s is dead: a number that was sent there has not come back after %g s", device, limit_s)
        return True
    (error,) = answers
    if error is None or is_out_of_memory(error):
        return False
    _logger.error("%s is dead: a number cannot be sent there and back: %s: %s", device, type(error).__name__, error)
    return True


@dataclass
class DeviceProbe:
    """Asks a device until it is dead, which it stays: the next one who asks need not wait as long again."""

    device: torch.device
    _is_known_dead: bool = field(default=False, init=False)

    def is_dead(self) -> bool:
        """As of `is_device_dead`."""
        self._is_known_dead = self._is_known_dead or is_device_dead(self.device)
        return self._is_known_dead
