"""`quantization_config` as the compressed-tensors library writes it (0.20.0, `quantization/quant_config.py`)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from multilora_wire.quantized.compressed import Float8, PackedIntegers, PlainIntegers, Scales
from multilora_wire.quantized.fields import Object, choice, field, texts
from multilora_wire.quantized.names import ModuleClass, best_match, matches
from multilora_wire.quantized.scheme import QuantizationError, Scheme

MIN_BITS, MAX_BITS = 2, 8
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_STRATEGIES = ("tensor", "channel", "group", "block")
_ORDERED = (True, "group", "dynamic")
"""Values of `actorder` with which old versions stored the group of each input."""
_ACTIVATIONS = ("input_activations", "output_activations")
_OF_GROUP = frozenset({"targets", "weights", "format", *_ACTIVATIONS})
_OF_WEIGHTS = frozenset(
    {
        *("num_bits", "type", "symmetric", "group_size", "strategy", "block_structure", "actorder"),
        # The stored tensors have types of their own; the others are of the search for scales.
        *("scale_dtype", "zp_dtype", "dynamic", "observer", "observer_kwargs"),
    }
)
"""The fields that are known, as the library knows them, which takes no others."""
_ADVICE = "quantise the model again with llm-compressor, as W4A16, W8A16 or FP8_DYNAMIC"


@dataclass(frozen=True)
class CompressedTensors:
    """The schemes of a checkpoint by targets: names of modules, `re:` and a regular expression, or names of classes.

    notes: requests of the file that are not done, in sentences for a log.
    """

    schemes: dict[str, Scheme | None]
    ignore: tuple[str, ...]
    notes: tuple[str, ...]

    def scheme(self, name: str, module_class: ModuleClass, has: Callable[[str], bool]) -> Scheme | None:
        """How the module's weight is stored; None for floats, and for experts that are no modules of their own."""
        if module_class == "Experts" or any(matches(pattern, name, module_class) for pattern in self.ignore):
            return None
        target = best_match(self.schemes, name, module_class)
        return None if target is None else self.schemes[target]


def read_compressed(config: Object) -> CompressedTensors:
    """Raises QuantizationError, which names the key, for schemes that are not served."""
    _refuse_changed_models(config)
    schemes: dict[str, Scheme | None] = {}
    notes: list[str] = []
    for group_name, group in field(config, "config_groups", dict, {}).items():
        if not isinstance(group, dict):
            raise QuantizationError(f"config_groups.{group_name} must be an object, got {group!r:.80}")
        try:
            _refuse_unknown("", group, _OF_GROUP)
            scheme = _scheme(group, field(group, "format", str, "") or field(config, "format", str, ""))
            schemes |= dict.fromkeys(texts(group, "targets"), scheme)
            notes += [_activation_note(group, key) for key in _ACTIVATIONS if group.get(key)]
        except QuantizationError as error:
            raise QuantizationError(f"config_groups.{group_name}: {error}") from error
    if config.get("kv_cache_scheme"):
        notes.append("kv_cache_scheme is not followed: keys and values are stored as kv_cache_dtype says")
    return CompressedTensors(schemes, texts(config, "ignore"), tuple(dict.fromkeys(notes)))


def _refuse_unknown(where: str, values: Object, known: frozenset[str]) -> None:
    for key in sorted(values.keys() - known):
        if values[key] is not None:
            raise QuantizationError(f"{where}{key:.80} {values[key]!r:.80} is not served: it is not known; {_ADVICE}")


def _refuse_changed_models(config: Object) -> None:
    sparsity = field(config, "sparsity_config", dict, {})
    choice("sparsity_config.format", field(sparsity, "format", str, "dense"), ("dense",), _ADVICE)
    if field(field(config, "transform_config", dict, {}), "config_groups", dict, {}):
        raise QuantizationError(f"transform_config is not served: it turns activations between linears; {_ADVICE}")
    if config.get("moe_sparsity_config"):
        raise QuantizationError("moe_sparsity_config is not served: every layer must have all experts")


def _scheme(group: Object, storage: str) -> Scheme | None:
    weights = field(group, "weights", dict, {})
    if not weights:
        return None
    _refuse_unknown("weights.", weights, _OF_WEIGHTS)
    choice("format", storage, _FORMATS, _ADVICE)
    kind = choice("weights.type", field(weights, "type", str, "int").lower(), ("int", "float"), _ADVICE)
    bits, is_symmetric = field(weights, "num_bits", int, 8), field(weights, "symmetric", bool, True)
    scales = Scales(*_sizes(weights), is_ordered=weights.get("actorder") in _ORDERED)
    if kind == "float":
        choice("format of floats", storage, _FORMATS[2:], _ADVICE)
        choice("weights.num_bits of floats", bits, (8,), _ADVICE)
        choice("weights.symmetric of floats", is_symmetric, (True,), _ADVICE)
        return Float8(scales)
    choice("weights.num_bits", bits, range(MIN_BITS, MAX_BITS + 1), _ADVICE)
    if storage == "pack-quantized":
        choice("blocks of outputs in packed weights", scales.rows in (None, 1), (True,), _ADVICE)
        return PackedIntegers(bits, scales, is_symmetric)
    choice("format of integers", storage, ("int-quantized", "naive-quantized"), _ADVICE)
    return PlainIntegers(bits, scales, is_symmetric)


def _sizes(weights: Object) -> tuple[int | None, int | None]:
    """The outputs and inputs that share a scale; None for all."""
    group_size = field(weights, "group_size", int, 0)
    if group_size < -1:
        raise QuantizationError(f"weights.group_size must be positive, or -1 for channels, got {group_size}")
    inferred = {-1: "channel", 0: "tensor"}.get(group_size, "group")
    strategy = choice("weights.strategy", field(weights, "strategy", str, inferred).lower(), _STRATEGIES, _ADVICE)
    if strategy == "block":
        return block_shape(weights, "block_structure")
    if strategy == "group" and group_size == 0:
        raise QuantizationError("weights.group_size is missing")
    return None if strategy == "tensor" else 1, group_size if strategy == "group" and group_size > 0 else None


def block_shape(values: Object, key: str) -> tuple[int, int]:
    """The outputs and inputs of a block, from two positive integers or a string such as `128x128`."""
    found = values.get(key)
    sizes = [int(size) if size.isdecimal() else 0 for size in found.split("x")] if isinstance(found, str) else found
    if isinstance(sizes, list) and len(sizes) == 2 and all(type(size) is int and size > 0 for size in sizes):
        return sizes[0], sizes[1]
    raise QuantizationError(f"{key} must be two positive integers, got {found!r:.80}")


def _activation_note(group: Object, key: str) -> str:
    values = field(group, key, dict, {})
    bits, kind = values.get("num_bits"), values.get("type")
    return f"{key} of {bits} bits ({kind}) are not rounded: they stay floats"
