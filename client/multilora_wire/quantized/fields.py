"""Values of a JSON object with the types that they must have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from multilora_wire.quantized.scheme import QuantizationError

T = TypeVar("T")
Object = Mapping[str, Any]


def field(values: Object, key: str, kind: type[T], default: T) -> T:
    """The value at `key`; `default` where it is missing or null. Raises QuantizationError for another type."""
    value = values.get(key)
    if value is None:
        return default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise QuantizationError(f"{key} must be {_WORDS[kind]}, got {value!r:.80}")
    return value


def texts(values: Object, key: str) -> tuple[str, ...]:
    """A list of strings, empty where it is missing or null."""
    found = field(values, key, list, [])
    if not all(isinstance(value, str) for value in found):
        raise QuantizationError(f"{key} must be a list of strings, got {found!r:.80}")
    return tuple(found)


def one_of(values: Object, keys: Sequence[str], kind: type[T], default: T) -> T:
    """The value at the first of several names of the same thing that is there."""
    return next((field(values, key, kind, default) for key in keys if values.get(key) is not None), default)


def choice(key: str, value: T, served: Sequence[T], advice: str) -> T:
    """`value`, if it is served. Raises QuantizationError, which ends with `advice`."""
    if value not in served:
        raise QuantizationError(f"{key} {value!r:.80} is not served, only {', '.join(map(repr, served))}; {advice}")
    return value


_WORDS: Mapping[type, str] = {
    int: "an integer",
    bool: "true or false",
    str: "a string",
    list: "a list",
    dict: "an object",
}
