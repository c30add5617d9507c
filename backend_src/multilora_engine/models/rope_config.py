"""`Rope`: the rotary embeddings of some layers, as `config.json` describes them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, TypeGuard

import msgspec

from multilora_engine.errors import ConfigError, InvalidRequest

_NUMBERS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings",),
}
"""rope_type -> the numbers it cannot do without."""

_MORE_NUMBERS = {
    "yarn": ("beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor"),
    "longrope": ("factor", "attention_factor"),
}
"""rope_type -> the numbers that it may have besides."""

_LISTS = {"longrope": ("short_factor", "long_factor")}
"""rope_type -> the lists it cannot do without: a number for each pair of dimensions."""

_LARGEST_NUMBER = 1e30
_SMALLEST_NUMBER = 1e-9
"""Of positive numbers: float32 holds frequencies of these, and their angles."""

_ABOVE_ONE = ("rope_theta", "original_max_position_embeddings")
"""Numbers whose logarithms divide."""

_ALL_LAYERS = "all"

_MAX_ADAPTER_ROPES = 64


@dataclass(frozen=True)
class Rope:
    """Rotary embeddings: the first `rotary_dim` elements of each head turn in pairs, the others stay.

    scaling: the normalised Hugging Face dict (`rope_type` llama3, linear, yarn, dynamic, longrope; `factor`, ...), or
        None.
    is_interleaved: elements 2i and 2i + 1 form a pair, as in GPT-J; otherwise i and i + rotary_dim / 2.
    """

    theta: float
    rotary_dim: int
    max_position_embeddings: int
    scaling: Mapping[str, Any] | None = None
    is_interleaved: bool = False


def read_ropes(fields: Mapping[str, Any], head_dim: int) -> tuple[dict[str, Rope], tuple[str | None, ...]]:
    """The rotary embeddings by name, and the name for each layer. Raises ConfigError.

    fields: the completed fields. `rope_parameters` is one object for all layers, or one for each layer type.
    """
    parameters, num_layers = fields["rope_parameters"] or {}, fields["num_hidden_layers"]
    max_position_embeddings = fields["max_position_embeddings"]
    if not any(isinstance(value, dict) for value in parameters.values()):
        return {_ALL_LAYERS: _read_rope(parameters, max_position_embeddings, head_dim)}, (_ALL_LAYERS,) * num_layers
    kinds = fields.get("layer_types") or []
    if missing := {kind for kind in kinds if not isinstance(parameters.get(kind), dict)}:
        raise ConfigError(f"config.json: rope_parameters has no object for layers of type {', '.join(sorted(missing))}")
    return {kind: _read_rope(parameters[kind], max_position_embeddings, head_dim) for kind in set(kinds)}, tuple(kinds)


def _read_rope(parameters: Mapping[str, Any], max_position_embeddings: int, head_dim: int) -> Rope:
    rope_type = parameters.get("rope_type")
    if not isinstance(rope_type, str):
        raise ConfigError(f"config.json: rope_type must be a name, got {rope_type!r}")
    if rope_type not in _NUMBERS:
        raise ConfigError(
            f"config.json: rope_type {rope_type!r} is not supported; supported are: {', '.join(_NUMBERS)}"
        )
    factor = parameters.get("partial_rotary_factor", 1.0)
    if not _is_number(factor):
        raise ConfigError(f"config.json: partial_rotary_factor must be a number, got {factor!r}")
    rotary_dim = int(head_dim * factor)
    _check_rotary_dim(rotary_dim, head_dim, parameters)
    _check_numbers(parameters, rope_type)
    _check_lists(parameters, rope_type, rotary_dim)
    scaling = None if rope_type == "default" else parameters
    return Rope(float(parameters["rope_theta"]), rotary_dim, max_position_embeddings, scaling)


@dataclass(frozen=True)
class AdapterRope:
    """The rotary embeddings of an adapter that was trained with others than the base's.

    ropes: by the base's names. max_length: tokens of the longest sequence that they are made for.
    """

    ropes: Mapping[str, Rope]
    max_length: int


class AdapterRopes:
    """Reads the rotary embeddings that adapters bring. It keeps the ones that it read last."""

    def __init__(self, base: Mapping[str, Rope]) -> None:
        """base: the model's rotary embeddings."""
        self.read = lru_cache(_MAX_ADAPTER_ROPES)(partial(_read_adapter_rope, base))

    def check(self, text: str) -> None:
        """Raises InvalidRequest for rotary embeddings that the model cannot have. text: empty for the base's."""
        if not text:
            return
        try:
            self.read(text)
        except ConfigError as error:
            reason = str(error).removeprefix("config.json: ")
            raise InvalidRequest(f"the adapter's own rotary embeddings cannot be used here: {reason}") from None

    def max_length(self, text: str) -> int | None:
        """The longest sequence that rotary embeddings of an adapter are made for; None for the base's."""
        return self.read(text).max_length if text else None


def _read_adapter_rope(base: Mapping[str, Rope], text: str) -> AdapterRope:
    """An adapter's `AdapterTraits.rope`. base: the model's rotary embeddings. Raises ConfigError.

    `{"context_length": n}` is the form of vLLM's former long-context LoRA: positions are interpolated linearly, by the
    smallest whole factor that makes the base's length n or more. Any other object is transformers' `rope_parameters`;
    theta and the turned part of a head are the base's where it does not tell.
    """
    parameters = msgspec.json.decode(text)
    if len(base) != 1:
        raise ConfigError(
            f"the model has {len(base)} kinds of rotary embeddings, and an adapter's own take the place of exactly one"
        )
    ((name, rope),) = base.items()
    if (length := parameters.get("context_length")) is not None:
        return AdapterRope({name: _interpolated(rope, length)}, length)
    own = _checked_rope({"rope_theta": rope.theta} | parameters, rope)
    return AdapterRope({name: own}, _length_of(own))


def _interpolated(rope: Rope, length: int) -> Rope:
    if rope.scaling is not None:
        raise ConfigError(
            f"context_length stretches unscaled rotary embeddings, and the model's are of rope_type "
            f"{rope.scaling['rope_type']!r}; write rope_parameters"
        )
    factor = -(-length // rope.max_position_embeddings)
    scaling = None if factor == 1 else {"rope_type": "linear", "factor": float(factor), "rope_theta": rope.theta}
    return replace(rope, scaling=scaling)


def _checked_rope(parameters: Mapping[str, Any], base: Rope) -> Rope:
    rope_type = parameters.get("rope_type", parameters.get("type", "default"))
    if not isinstance(rope_type, str) or rope_type not in _NUMBERS:
        raise ConfigError(f"rope_type {rope_type!r} is not supported; supported are: {', '.join(_NUMBERS)}")
    known = {"rope_type", "type", "rope_theta", *_NUMBERS[rope_type], *_LISTS.get(rope_type, ())}
    known |= {*_MORE_NUMBERS.get(rope_type, ()), "truncate", "original_max_position_embeddings"}
    if unknown := sorted(parameters.keys() - known):
        raise ConfigError(f"rope_type {rope_type!r} of an adapter has no {', '.join(unknown)}")
    parameters = {"original_max_position_embeddings": base.max_position_embeddings, **parameters}
    _check_number(parameters, rope_type, "original_max_position_embeddings")
    _check_numbers(parameters, rope_type)
    _check_lists(parameters, rope_type, base.rotary_dim)
    scaling = None if rope_type == "default" else {**parameters, "rope_type": rope_type}
    return replace(base, theta=float(parameters["rope_theta"]), scaling=scaling)


def _length_of(rope: Rope) -> int:
    """The tokens that rotary embeddings are stretched to."""
    scaling = rope.scaling or {}
    original = scaling.get("original_max_position_embeddings") or rope.max_position_embeddings
    return max(1, int(original * (scaling.get("factor") or 1)))


def _check_rotary_dim(rotary_dim: int, head_dim: int, parameters: Mapping[str, Any]) -> None:
    if rotary_dim % 2 or not 2 <= rotary_dim <= head_dim:
        raise ConfigError(
            f"config.json: partial_rotary_factor {parameters.get('partial_rotary_factor', 1.0)} turns {rotary_dim} of "
            f"{head_dim} elements of a head; an even number from 2 to {head_dim} is needed"
        )


def _check_numbers(parameters: Mapping[str, Any], rope_type: str) -> None:
    for name in ("rope_theta", *_NUMBERS[rope_type]):
        _check_number(parameters, rope_type, name)
    for name in _MORE_NUMBERS.get(rope_type, ()):
        value = parameters.get(name)
        if value is not None and not (_is_number(value) and (value == 0 or _is_in_range(value))):
            raise ConfigError(f"config.json: rope_type {rope_type!r}: {name} must be a number from 0, got {value!r}")


def _check_number(parameters: Mapping[str, Any], rope_type: str, name: str) -> None:
    """Check a number that its rope_type cannot do without."""
    value = parameters.get(name)
    if not (_is_number(value) and value > 0):
        raise ConfigError(f"config.json: rope_type {rope_type!r} needs a positive {name}, got {value!r}")
    if not _is_in_range(value) or (name in _ABOVE_ONE and value <= 1):
        smallest = "above 1" if name in _ABOVE_ONE else f"from {_SMALLEST_NUMBER:g}"
        raise ConfigError(
            f"config.json: rope_type {rope_type!r} needs {name} {smallest} and up to {_LARGEST_NUMBER:g}, got {value!r}"
        )


def _is_in_range(value: float) -> bool:
    return _SMALLEST_NUMBER <= value <= _LARGEST_NUMBER


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _check_lists(parameters: Mapping[str, Any], rope_type: str, rotary_dim: int) -> None:
    for name in _LISTS.get(rope_type, ()):
        values = parameters.get(name)
        is_list = isinstance(values, list) and all(_is_number(value) and _is_in_range(value) for value in values)
        if not is_list or len(values or ()) != rotary_dim // 2:
            raise ConfigError(
                f"config.json: rope_type {rope_type!r} needs a {name} of {rotary_dim // 2} positive numbers, "
                f"got {values!r}"
            )
