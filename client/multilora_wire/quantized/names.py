"""Which modules of a model a pattern of a quantised checkpoint's configuration means."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Literal

from multilora_wire.quantized.scheme import QuantizationError

ModuleClass = Literal["Linear", "Embedding", "Experts"]
"""torch's classes of the modules whose weights may be quantised. Experts: all experts' linears of one name in one."""

_REGEX = "re:"


def matches_name(pattern: str, name: str) -> bool:
    """Whether a module's full name is `pattern`, or begins as the regular expression after `re:` says."""
    if not pattern.startswith(_REGEX):
        return pattern == name
    return compiled(pattern.removeprefix(_REGEX)).match(name) is not None


def matches(pattern: str, name: str, module_class: ModuleClass) -> bool:
    """`matches_name`, or the pattern names the module's class."""
    return pattern in (module_class, "Module") or matches_name(pattern, name)


def best_match(patterns: Iterable[str], name: str, module_class: ModuleClass) -> str | None:
    """The pattern that decides: a full name before a regular expression before a class, each in alphabetical order.

    As compressed-tensors 0.20.0 decides (`utils/match.py`, `match_targets`).
    """
    found = [pattern for pattern in patterns if matches(pattern, name, module_class)]
    return min(found, key=lambda pattern: (not matches_name(pattern, name), _REGEX in pattern, pattern), default=None)


def check_pattern(key: str, pattern: str) -> None:
    """Raises QuantizationError, which names the key, if the text after `re:` is no regular expression."""
    if pattern.startswith(_REGEX):
        try:
            compiled(pattern.removeprefix(_REGEX))
        except QuantizationError as error:
            raise QuantizationError(f"{key}: {error}") from error


def compiled(pattern: str) -> re.Pattern[str]:
    """Raises QuantizationError for a pattern that is no regular expression."""
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise QuantizationError(f"{pattern!r:.80} is no regular expression: {error}") from error


def overrides(dynamic: Mapping[str, object], name: str) -> object:
    """The entry of GPTQModel's `dynamic` for a module: the value of its first pattern that fits, None without one.

    A pattern begins with `+:` or nothing; one with `-:` excludes modules, and its value is False.
    """
    for pattern, value in dynamic.items():
        if compiled(pattern.removeprefix("+:").removeprefix("-:")).match(name):
            return False if pattern.startswith("-:") else value
    return None
