"""A client's text on its way into a log or an error: one printable line of a bounded length."""

from __future__ import annotations

import logging

_MAX_LINE_CHARS = 8192


def one_line(text: str, max_chars: int) -> str:
    """`text` with unprintable characters escaped, and cut after `max_chars`. The number of missing characters follows.

    >>> one_line("a\\nb" + "c" * 100, 5)
    'a\\\\nbcc... (98 more)'
    """
    start = text[:max_chars]
    shown = start if start.isprintable() else "".join(map(_escape, start))
    return shown if len(text) <= max_chars else f"{shown}... ({len(text) - max_chars} more)"


class OneLineFormatter(logging.Formatter):
    """No text of a client can begin a line of its own, or steer a terminal. Tracebacks, which are ours, may."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        record.message = one_line(record.message, _MAX_LINE_CHARS)
        return super().formatMessage(record)


def configure_logging(name: str) -> None:
    """Log to stderr, under the name of this process."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLineFormatter(f"%(asctime)s %(levelname)s {name}[%(process)d] %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _escape(char: str) -> str:
    return char if char.isprintable() else char.encode("unicode_escape").decode()
