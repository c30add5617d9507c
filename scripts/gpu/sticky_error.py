"""Breaks an engine from outside: `import gpu.sticky_error`, a line of the environment that `scripts/gpu_serve` makes.

On SIGUSR1 an engine of that environment makes an error of CUDA that no later call recovers from. On a CPU nothing
sticks like that, and the engine's process ends. All other programs of the environment are as they were.
"""

from __future__ import annotations

import os
import signal
import sys

_ENGINE = "multilora_engine.process.main"


def _break(*_: object) -> None:
    import torch

    if not torch.cuda.is_available():
        os.kill(os.getpid(), signal.SIGKILL)
    # The second of one number: the kernel's own check fails, on the device.
    torch.zeros(1, device="cuda")[torch.ones(1, dtype=torch.long, device="cuda")]


if _ENGINE in sys.orig_argv:
    signal.signal(signal.SIGUSR1, _break)
