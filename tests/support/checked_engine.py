"""The engine process of adapter_soak: checks its own tables as it goes, and leaves its counts in a file.

The engine's supervisor starts it as a program; a failed check fails the requests in flight, with INTERNAL.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import msgspec

from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.lora.life_cycle import LoRAStats
from multilora_engine.process import main, server
from multilora_engine.request import TokenOutput

_STEPS_PER_CHECK = 32


class Counts(msgspec.Struct, frozen=True):
    """The counts of one engine from start to end."""

    num_steps: int
    num_preemptions: int
    loras: LoRAStats


class CheckedEngine(Engine):
    """Asserts now and then that all tables agree with each other."""

    def __init__(self, file: Path, config: EngineConfig) -> None:
        super().__init__(config)
        self._file = file
        self._num_steps = 0

    def step(self, on_progress: Callable[[], None] = lambda: None) -> list[TokenOutput]:
        outputs = super().step(on_progress)
        self._num_steps += 1
        if self._num_steps % _STEPS_PER_CHECK == 0 or not self.has_work:
            self.check_integrity()
        return outputs

    def close(self) -> None:
        super().close()
        counts = Counts(self._num_steps, self.stats.num_preemptions, self._loras.stats)
        self._file.write_bytes(msgspec.json.encode(counts))


if __name__ == "__main__":
    # One line a request would make tens of thousands of lines.
    logging.getLogger(server.__name__).setLevel(logging.WARNING)
    main.main(partial(CheckedEngine, Path(sys.argv[1])))
