"""A checkpoint directory's quantisation: the scheme of each linear, and the modules it rules out for adapters."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from multilora_wire.quantized.adapter_rules import AdapterRules, read_adapter_rules, together
from multilora_wire.quantized.compressed_config import read_compressed
from multilora_wire.quantized.fields import Object
from multilora_wire.quantized.ggml import GGUFCheckpoint
from multilora_wire.quantized.names import ModuleClass
from multilora_wire.quantized.packed_layouts import MXFP4Checkpoint, read_awq, read_fp8, read_gptq
from multilora_wire.quantized.scheme import QuantizationError, Scheme


class Schemes(Protocol):
    """Tells the scheme of each module of a checkpoint."""

    @property
    def notes(self) -> tuple[str, ...]:
        """The requests of the file that are not done, in sentences for a log."""
        ...

    def scheme(self, name: str, module_class: ModuleClass, has: Callable[[str], bool]) -> Scheme | None:
        """How the module's weight is stored; None for floats. has: whether the module has a tensor of this name."""
        ...


@dataclass(frozen=True)
class Quantization:
    """schemes: None for a checkpoint of floats."""

    schemes: Schemes | None = None
    rules: AdapterRules = field(default_factory=AdapterRules)

    def scheme(self, name: str, module_class: ModuleClass, has: Callable[[str], bool]) -> Scheme | None:
        """See `Schemes.scheme`."""
        return None if self.schemes is None else self.schemes.scheme(name, module_class, has)


_READERS: Mapping[str, Callable[[Object], Schemes]] = {
    "compressed-tensors": read_compressed,
    "gptq": read_gptq,
    "awq": read_awq,
    "fp8": read_fp8,
    "mxfp4": lambda _: MXFP4Checkpoint(),
    "gguf": lambda _: GGUFCheckpoint(),
}
_CONFIG_KEYS = ("quantization_config", "compression_config")
_OTHER_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}
"""The files in which AutoGPTQ, AutoAWQ and NVIDIA's modelopt write the data that others put into config.json."""
_MARKS = {
    "compressed-tensors": ("config_groups", "sparsity_config"),
    "bitsandbytes": ("load_in_8bit", "load_in_4bit"),
}
"""Keys by which a configuration without `quant_method` is known."""
_MLX_KEY = "quantization"
_ADVICE = "quantise the original model again with llm-compressor, or serve it in float32, bfloat16 or float16"


def read_quantization(directory: Path) -> Quantization:
    """Raises QuantizationError, which names the file and the key, for schemes that are not served."""
    main, metadata = directory / "config.json", directory / "lora_metadata.json"
    whole = _read_object(main)
    path, method = main, "MLX" if isinstance(whole.get(_MLX_KEY), dict) else ""
    found = next((whole[key] for key in (*_CONFIG_KEYS, _MLX_KEY) if whole.get(key)), None)
    for name in _OTHER_FILES if found is None else ():
        if (directory / name).is_file():
            path, method = directory / name, _OTHER_FILES[name]
            found = _read_object(path)
            break
    with _named(path):
        config = _object(found or {})
        schemes = _schemes(config, method) if config else None
    places = [(main, whole), (path, config)]
    if metadata.is_file():
        places.append((metadata, _read_object(metadata)))
    rules = []
    for place, values in places:
        with _named(place):
            rules.append(read_adapter_rules(values))
    return Quantization(schemes, together(rules))


def _schemes(config: Object, default_method: str) -> Schemes:
    method = config.get("quant_method") or default_method or _guessed_method(config)
    if not isinstance(method, str) or method not in _READERS:
        raise QuantizationError(
            f"quantization_config.quant_method {method!r:.80} is not served, only {', '.join(_READERS)}; {_ADVICE}"
        )
    return _READERS[method](config)


def _guessed_method(config: Object) -> str:
    return next((method for method, keys in _MARKS.items() if any(key in config for key in keys)), "")


@contextlib.contextmanager
def _named(path: Path) -> Iterator[None]:
    """Errors of the body begin with the file's name."""
    try:
        yield
    except QuantizationError as error:
        raise QuantizationError(f"{path}: {error}") from error


def _read_object(path: Path) -> Object:
    try:
        return _object(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, RecursionError) as error:
        raise QuantizationError(f"cannot read {path}: {error}") from error


def _object(value: object) -> Object:
    if not isinstance(value, dict):
        raise QuantizationError(f"expected an object, got {value!r:.80}")
    return value
