"""A PEFT adapter directory, read and checked without PEFT and without torch.

Only `adapter_config.json` and `adapter_model.safetensors` are read. Content that this format can express and the wire
format cannot (biases, whole saved modules, ...) is refused by name: an adapter serves as it was trained or not at all.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

from multilora_client.adapter import AdapterDtype
from multilora_client.bfloat16 import bfloat16_to_float32
from multilora_client.errors import AdapterError
from multilora_wire.module_names import MODULE_IDS

PEFT_CONFIG_FILE = "adapter_config.json"
PEFT_WEIGHTS_FILE = "adapter_model.safetensors"
_PICKLE_FILES = ("adapter_model.bin", "adapter_model.pt")

_LORA_KEY = re.compile(
    r"(?:base_model\.model\.)?"
    r"(?P<module>model\.layers\.(?P<layer>\d+)\.(?P<path>[\w.]+))"
    r"\.lora_(?:(?P<side>A|B)\.weight|(?P<magnitude>magnitude_vector)(?:\.weight)?)"
)

_REFUSED_KEY_PARTS: Mapping[str, str] = {
    "lora_embedding_": "LoRA on embeddings is not supported",
    "embed_tokens": "LoRA on embeddings is not supported",
    "lm_head": "LoRA on the output head is not supported",
    "modules_to_save": "whole saved modules (modules_to_save) are not supported",
    ".bias": "biases are not supported",
}

_REFUSED_FIELDS: Mapping[str, str] = {
    "modules_to_save": "whole saved modules are not supported",
    "fan_in_fan_out": "transposed base weights are not supported",
    "lora_bias": "biases are not supported",
    "trainable_token_indices": "trained embedding rows are not supported",
    "target_parameters": "LoRA on bare parameters is not supported",
    "layer_replication": "replicated layers are not supported",
    "alora_invocation_tokens": "activated LoRA is not supported",
    "use_qalora": "QA-LoRA is not supported",
    "use_bdlora": "block-diagonal LoRA is not supported",
    "arrow_config": "routed LoRA is not supported",
    "kasa_config": "KaSA is not supported",
}

# Weights trained with these are no difference to the original model, whose weights these change first.
_REFUSED_INITIALISATIONS: Mapping[str, str] = {
    **dict.fromkeys(
        ("pissa", "olora", "corda", "lora_ga"), "save it with PEFT's path_initial_model_for_weight_conversion"
    ),
    "loftq": "it belongs to the weights that LoftQ made of them",
}

_LARGEST_SETTING = 1e30
"""Of ranks and alphas: float32 holds it."""

_FILE_DTYPES: Mapping[str, tuple[AdapterDtype, type[np.generic]]] = {
    "F16": ("FP16", np.float16),
    "BF16": ("BF16", np.uint16),
    "F32": ("FP32", np.float32),
}


@dataclass(frozen=True, eq=False)
class LoRAModule:
    """One adapted linear layer: y += scaling * x A^T B^T.

    name: the module's name in the base model, for messages and patterns.
    module_id, layer: its place in the wire format.
    lora_a: float32 `[rank, in]`. lora_b: float32 `[out, rank]`. scaling: alpha / rank, or alpha / sqrt(rank).
    magnitude: float32 `[out]`, of a DoRA module (arXiv:2402.09353): how long the rows of its adapted weight are made.
    """

    name: str
    module_id: int
    layer: int
    lora_a: npt.NDArray[np.float32]
    lora_b: npt.NDArray[np.float32]
    scaling: float
    magnitude: npt.NDArray[np.float32] | None = None

    @property
    def rank(self) -> int:
        return self.lora_a.shape[0]


@dataclass(frozen=True, eq=False)
class PeftAdapter:
    """All modules, by layer and module id. `dtype` is that of the file, FP32 when the file mixes several."""

    modules: list[LoRAModule]
    dtype: AdapterDtype


@dataclass(frozen=True)
class _StoredTensor:
    dtype: AdapterDtype
    values: npt.NDArray[Any]

    def to_float32(self) -> npt.NDArray[np.float32]:
        return bfloat16_to_float32(self.values) if self.dtype == "BF16" else self.values.astype(np.float32)


def is_peft(directory: Path) -> bool:
    """Whether `directory` claims to be a PEFT adapter."""
    return (directory / PEFT_CONFIG_FILE).exists()


def read_peft_directory(directory: Path) -> PeftAdapter:
    """Read and check an adapter. Raises AdapterError naming the file, field or key that stands in the way."""
    config = _read_config(directory / PEFT_CONFIG_FILE)
    tensors = _read_tensors(_weights_path(directory))
    modules = [_module(places, tensors, config) for places in _pair_keys(tensors)]
    dtypes = {tensor.dtype for tensor in tensors.values()}
    dtype: AdapterDtype = dtypes.pop() if len(dtypes) == 1 else "FP32"
    return PeftAdapter(sorted(modules, key=lambda module: (module.layer, module.module_id)), dtype)


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise AdapterError(f"{path} is missing")
    try:
        config = json.loads(path.read_bytes())
    except ValueError as error:
        raise AdapterError(f"{path} is not JSON: {error}") from error
    except RecursionError:
        raise AdapterError(f"{path} is nested too deeply") from None
    if not isinstance(config, dict):
        raise AdapterError(f"{path} is not a JSON object")
    _check_config(config, path)
    return config


def _check_config(config: Mapping[str, Any], path: Path) -> None:
    if config.get("peft_type", "LORA") != "LORA":
        raise AdapterError(f"{path}: peft_type is {config['peft_type']!r}; only LORA is supported")
    for field, reason in _REFUSED_FIELDS.items():
        if config.get(field):
            raise AdapterError(f"{path}: {field} is {config[field]!r}; {reason}")
    if config.get("bias", "none") != "none":
        raise AdapterError(f"{path}: bias is {config['bias']!r}; only 'none' is supported")
    initialisation = config.get("init_lora_weights", True)
    for name, advice in _REFUSED_INITIALISATIONS.items():
        if isinstance(initialisation, str) and initialisation.lower().startswith(name):
            raise AdapterError(
                f"{path}: init_lora_weights is {initialisation!r}, so the adapter is no difference to the original "
                f"model; {advice}"
            )


def _weights_path(directory: Path) -> Path:
    path = directory / PEFT_WEIGHTS_FILE
    if path.is_file():
        return path
    for name in _PICKLE_FILES:
        if (directory / name).exists():
            raise AdapterError(
                f"{directory / name} is a pickle, which can run code when it is read; only safetensors "
                "is read. Save the adapter again with save_pretrained(..., safe_serialization=True)"
            )
    raise AdapterError(f"{path} is missing")


def _read_tensors(path: Path) -> dict[str, _StoredTensor]:
    """All tensors of a file. Parsed from raw bytes, since safetensors' NumPy front cannot read bfloat16."""
    try:
        entries = safetensors.deserialize(path.read_bytes())  # type: ignore[no-untyped-call]
    except safetensors.SafetensorError as error:
        raise AdapterError(f"{path} is not a safetensors file: {error}") from error
    return {key: _stored_tensor(key, entry) for key, entry in entries}


def _stored_tensor(key: str, entry: Mapping[str, Any]) -> _StoredTensor:
    if entry["dtype"] not in _FILE_DTYPES:
        raise AdapterError(f"{key} is {entry['dtype']}; F16, BF16 and F32 are supported")
    dtype, numpy_dtype = _FILE_DTYPES[entry["dtype"]]
    return _StoredTensor(dtype, np.frombuffer(entry["data"], numpy_dtype).reshape(entry["shape"]))


@dataclass(frozen=True)
class _Place:
    """Where a module sits, and the keys of its two matrices and, with DoRA, its magnitude."""

    module: str
    module_id: int
    layer: int
    a_key: str
    b_key: str
    magnitude_key: str | None


def _pair_keys(tensors: Mapping[str, _StoredTensor]) -> Iterator[_Place]:
    """Every key has its place or is an error: nothing is dropped."""
    if not tensors:
        raise AdapterError(f"{PEFT_WEIGHTS_FILE} holds no tensors")
    keys: dict[tuple[str, int, int], dict[str, str]] = {}
    for key in tensors:
        match = _match_key(key)
        place = (match["module"], MODULE_IDS[match["path"]], int(match["layer"]))
        side = match["side"] or match["magnitude"]
        if keys.setdefault(place, {}).setdefault(side, key) != key:
            raise AdapterError(f"{key} and {keys[place][side]} are the same matrix")
    for (module, module_id, layer), sides in keys.items():
        for side in ("A", "B"):
            if side not in sides:
                raise AdapterError(f"{next(iter(sides.values()))} has no lora_{side} beside it")
        yield _Place(module, module_id, layer, sides["A"], sides["B"], sides.get("magnitude_vector"))


def _match_key(key: str) -> re.Match[str]:
    for part, reason in _REFUSED_KEY_PARTS.items():
        if part in key:
            raise AdapterError(f"{key}: {reason}")
    match = _LORA_KEY.fullmatch(key)
    if match is None:
        raise AdapterError(f"{key} is not a LoRA matrix of a decoder layer ([base_model.model.]model.layers.N....)")
    if match["path"] not in MODULE_IDS:
        raise AdapterError(f"{key}: unknown module {match['path']!r}; supported are {', '.join(MODULE_IDS)}")
    return match


def _module(place: _Place, tensors: Mapping[str, _StoredTensor], config: Mapping[str, Any]) -> LoRAModule:
    lora_a = _matrix(place.a_key, tensors[place.a_key])
    lora_b = _matrix(place.b_key, tensors[place.b_key])
    rank = lora_a.shape[0]
    if lora_b.shape[1] != rank:
        raise AdapterError(
            f"{place.a_key} {list(lora_a.shape)} and {place.b_key} {list(lora_b.shape)} have different ranks"
        )
    expected_rank = _module_setting(config, "rank_pattern", "r", place.module)
    if rank != expected_rank:
        raise AdapterError(f"{place.a_key} has rank {rank}, but {PEFT_CONFIG_FILE} says {expected_rank:g}")
    alpha = _module_setting(config, "alpha_pattern", "lora_alpha", place.module)
    scaling = alpha / math.sqrt(rank) if config.get("use_rslora") else alpha / rank
    magnitude = _magnitude(place, tensors, bool(config.get("use_dora")), out_size=lora_b.shape[0])
    return LoRAModule(place.module, place.module_id, place.layer, lora_a, lora_b, scaling, magnitude)


def _magnitude(
    place: _Place, tensors: Mapping[str, _StoredTensor], use_dora: bool, out_size: int
) -> npt.NDArray[np.float32] | None:
    key = place.magnitude_key
    if use_dora != (key is not None):
        found = f"has {key}" if key else f"has no lora_magnitude_vector of {place.module}"
        raise AdapterError(f"{PEFT_CONFIG_FILE}: use_dora is {use_dora}, but {PEFT_WEIGHTS_FILE} {found}")
    if key is None:
        return None
    if tensors[key].values.shape != (out_size,):
        raise AdapterError(f"{key} has shape {list(tensors[key].values.shape)}, expected [{out_size}]")
    return _finite(key, tensors[key])


def _matrix(key: str, tensor: _StoredTensor) -> npt.NDArray[np.float32]:
    if tensor.values.ndim != 2 or 0 in tensor.values.shape:
        raise AdapterError(f"{key} has shape {list(tensor.values.shape)}; a matrix is expected")
    return _finite(key, tensor)


def _finite(key: str, tensor: _StoredTensor) -> npt.NDArray[np.float32]:
    values = tensor.to_float32()
    if not np.isfinite(values).all():
        raise AdapterError(f"{key} holds NaN or infinite values")
    return values


def _module_setting(config: Mapping[str, Any], pattern_field: str, default_field: str, module: str) -> float:
    """PEFT's rule: the first pattern that matches the end of the module's name, at a dot, decides."""
    value = config.get(default_field)
    patterns = config.get(pattern_field) or {}
    if not isinstance(patterns, dict):
        raise AdapterError(f"{PEFT_CONFIG_FILE}: {pattern_field} is {patterns!r}, an object is expected")
    for pattern, pattern_value in patterns.items():
        if _matches(pattern, module, pattern_field):
            value = pattern_value
            break
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise AdapterError(f"{PEFT_CONFIG_FILE}: {default_field} of {module} is {value!r}, not a number")
    if abs(value) > _LARGEST_SETTING:
        raise AdapterError(f"{PEFT_CONFIG_FILE}: {default_field} of {module} is beyond {_LARGEST_SETTING:g}")
    return value


def _matches(pattern: str, module: str, field: str) -> bool:
    try:
        return re.match(rf"(.*\.)?({pattern})$", module) is not None
    except re.error as error:
        raise AdapterError(f"{PEFT_CONFIG_FILE}: {field} has the invalid pattern {pattern!r}: {error}") from error
