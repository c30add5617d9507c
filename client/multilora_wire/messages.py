"""Errors' texts of a bounded length, whatever a client's input in them is."""

from __future__ import annotations

_MAX_CHARS = 600
_MAX_START_CHARS = 300
_MAX_NAME_CHARS = 200


def shortened(message: str) -> str:
    """The start and the end of a message that is too long: what it quotes is in the middle.

    >>> len(shortened("role is " + "x" * 4_000_000 + ", expected a name")) < 650
    True
    """
    if len(message) <= _MAX_CHARS:
        return message
    end_chars = _MAX_CHARS - _MAX_START_CHARS
    missing = len(message) - _MAX_CHARS
    return f"{message[:_MAX_START_CHARS]}... ({missing} more characters) ...{message[-end_chars:]}"


def shown(name: str) -> str:
    """A name that a stranger gave, for an error's text: of a bounded length, and escaped if it cannot be printed.

    >>> shown("q_proj"), shown("\\ud800\\n")
    ('q_proj', "'\\\\ud800\\\\n'")
    """
    name = name[:_MAX_NAME_CHARS]
    return name if name.isprintable() else repr(name)
