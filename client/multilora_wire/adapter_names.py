"""Names of adapters: which ones are plain, and the task id of a name."""

from __future__ import annotations

import hashlib
import re

PLAIN_PART = r"[A-Za-z0-9_][\w.-]{0,95}"
"""A part of a name: letters, digits, `_`, `.` and `-`; no part leads out of a directory."""

MAX_SESSION_BYTES = 1024
"""Of the session that keeps its member of an alias."""

_PLAIN_NAME = re.compile(f"{PLAIN_PART}(?:/{PLAIN_PART})?", re.ASCII)


def is_plain_name(name: str) -> bool:
    """Whether a server takes the name: one plain part, or two with a slash between them."""
    return _PLAIN_NAME.fullmatch(name) is not None


def task_id_of_name(name: str) -> int:
    """63 bits of the name's SHA-256, so the same everywhere and for ever."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 1
