"""Names of adapters: what is one, and the task id that goes with it."""

from __future__ import annotations

import hashlib
import re

from multilora_engine.errors import InvalidRequest

_PART = r"[A-Za-z0-9_][\w.-]{0,95}"
_NAME = re.compile(f"{_PART}(?:/{_PART})?", re.ASCII)
_PATH = re.compile(f"{_PART}(?:/{_PART})*", re.ASCII)


def check_name(name: str) -> str:
    """`name`, if it is plain: letters, digits, `_`, `.`, `-`, and at most one slash between two such parts.

    Raises InvalidRequest: what is plain cannot lead out of a directory or a bucket.
    """
    if _NAME.fullmatch(name) is None:
        raise InvalidRequest(
            f"lora_name {name[:200]!r} is not plain: write letters, digits, _, . and -, with at most one / inside"
        )
    return name


def is_plain_path(path: str) -> bool:
    """Whether a relative path has parts as names have, as many as there may be, so that it cannot lead elsewhere."""
    return _PATH.fullmatch(path) is not None


def task_id_of(name: str) -> int:
    """The task id of an adapter with a name: 63 bits of the name's SHA-256, so the same everywhere and for ever."""
    return int.from_bytes(hashlib.sha256(check_name(name).encode()).digest()[:8], "big") >> 1
