"""`StartProgress`: how far a part of an engine's start has come, in the log."""

from __future__ import annotations

import logging
import threading
import time
from types import TracebackType
from typing import Self

_logger = logging.getLogger(__name__)


class StartProgress:
    """Writes a line every few seconds, also while one item takes long: a load that compiles does not look hung.

        with StartProgress("self-test") as progress:
            progress.note(3, 40, "lora_apply")

    It has a thread of its own, since compilers keep the engine's for as long as a kernel takes.
    """

    def __init__(self, part: str, interval_s: float = 5.0) -> None:
        self._part, self._interval_s = part, interval_s
        self._item: tuple[int, int, str, float] | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tell, name="start-progress", daemon=True)

    def note(self, done: int, total: int, item: str) -> None:
        """So many of all items are done, and this one begins."""
        self._item = (done, total, item, time.monotonic())

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()

    def _tell(self) -> None:
        while not self._ended.wait(self._interval_s):
            if self._item is not None:
                done, total, item, began_s = self._item
                seconds = time.monotonic() - began_s
                _logger.info("%s: %d of %d are done; now %s, for %.0f s", self._part, done, total, item, seconds)
