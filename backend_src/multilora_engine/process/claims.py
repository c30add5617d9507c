"""`Claims`: the part that a call to the engine has of the limits that all calls share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


class Claims:
    """Shares of limits that a call holds: some until the engine has its adapter, others until the call has ended.

    The end of the call gives back both, each once.
    """

    def __init__(self) -> None:
        self.until_taken = ExitStack()
        self.until_ended = ExitStack()

    @contextmanager
    def closed_on_error(self) -> Iterator[None]:
        """Give back both when the block raises: the call never came to the engine."""
        try:
            yield
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self.until_taken.close()
        self.until_ended.close()
