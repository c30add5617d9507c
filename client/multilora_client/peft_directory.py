"""A PEFT adapter directory, read and checked without PEFT and without torch.

Only `adapter_config.json` and `adapter_model.safetensors` are read, both by allow-list: a field or a tensor that nobody
here understands is refused by its name, unless it changes no answer. An adapter serves as it was trained or not at all.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors

from multilora_client.adapter import AdapterDtype, check_origin
from multilora_client.base_weights import MODEL_CONFIG_FILE, read_header
from multilora_client.bfloat16 import bfloat16_to_float32
from multilora_client.errors import AdapterError
from multilora_wire.adapter_origin import AdaptedLinear, AdapterOrigin
from multilora_wire.module_names import MODULE_IDS
from multilora_wire.sites import ModelSites

PEFT_CONFIG_FILE = "adapter_config.json"
PEFT_WEIGHTS_FILE = "adapter_model.safetensors"


# The name of a decoder layer's module in PEFT's model: of a text model, or of the text part of one with pictures.
_LORA_KEY = re.compile(
    r"(?:base_model\.model\.)?"
    r"(?P<module>(?:model|(?:model\.)?(?:language_model|text_model)(?:\.model)?)"
    r"\.layers\.(?P<layer>[0-9]{1,6})\.(?P<path>[\w.]+))"
    r"\.lora_(?:(?P<side>A|B)\.weight|(?P<magnitude>magnitude_vector)(?:\.weight)?)"
)

_WHOLE_MATRIX = (
    "is a whole matrix, and only LoRA matrices are served. PEFT saves the embeddings and the head beside them once the "
    "vocabulary was resized or embeddings were targeted. If they are the base model's own, save the adapter again with "
    "save_pretrained(..., save_embedding_layers=False)"
)
_ON_HEAD = "LoRA on the output head is not supported"
_ON_EMBEDDINGS = "LoRA on embeddings is not supported"
_MLX_MATRIX = "is MLX's form of a matrix, which is transposed"
_BIAS = "biases are not supported"

_OTHER_PART = (
    "it belongs to the part of the model that reads pictures or sound, and only the text part is served; train with "
    "PEFT's exclude_modules for that part"
)

_REFUSED_KEYS: Mapping[re.Pattern[str], str] = {
    re.compile(pattern): reason
    for pattern, reason in {
        r"\.lora_embedding_": _ON_EMBEDDINGS,
        r"token_adapter|trainable_tokens_": "trained rows of the embeddings are not supported",
        r"modules_to_save": "whole saved modules (modules_to_save) are not supported",
        r"\.bias$": _BIAS,
        r"\.lora_[ab]$": _MLX_MATRIX,
        r"vision|visual|image|multi_?modal|connector|projector|audio": _OTHER_PART,
        r"(^|\.)(embed_tokens|lm_head)(\.base_layer)?\.weight$": _WHOLE_MATRIX,
        r"(^|\.)lm_head\.": _ON_HEAD,
        r"(^|\.)embed_tokens\.": _ON_EMBEDDINGS,
        r"norm\.weight$": "whole saved norms are not supported",
    }.items()
}
"""What a tensor with such a key is, and why it is refused; the first that matches tells."""

_HARMLESS_FIELDS = frozenset(
    {
        # These say how the adapter was trained, saved or loaded.
        "task_type",
        "auto_mapping",
        "peft_version",
        "revision",
        "inference_mode",
        "lora_dropout",
        "runtime_config",
        "merge_weights",
        # These say which modules were adapted, which the file tells by itself.
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "ensure_weight_tying",
        # PEFT itself resets this one for linear layers.
        "fan_in_fan_out",
        # These count only beside another field, which is read or refused.
        "megatron_core",
        "qalora_group_size",
        "loftq_config",
        "eva_config",
        "corda_config",
        "lora_ga_config",
        # A trained VeLoRA computes as LoRA: only its gradients differ.
        "velora_config",
    }
)
"""Fields that change no answer, whatever their values."""

_READ_FIELDS = frozenset(
    {
        "peft_type",
        "r",
        "lora_alpha",
        "use_rslora",
        "use_dora",
        "rank_pattern",
        "alpha_pattern",
        "init_lora_weights",
        "bias",
        "base_model_name_or_path",
    }
)

_REFUSED_FIELDS: Mapping[str, str] = {
    "modules_to_save": "whole saved modules are not supported",
    "lora_bias": _BIAS,
    "trainable_token_indices": "trained embedding rows are not supported",
    "target_parameters": "LoRA on bare parameters is not supported",
    "layer_replication": "replicated layers are not supported",
    "alora_invocation_tokens": "activated LoRA is not supported",
    "invocation_string": "activated LoRA is not supported; this is the form of IBM's package alora, for which PEFT has "
    "alora_invocation_tokens, not supported either",
    "use_qalora": "QA-LoRA is not supported",
    "use_bdlora": "block-diagonal LoRA is not supported",
    "arrow_config": "routed LoRA is not supported",
    "kasa_config": "KaSA, which changes the base model's weights, is not supported",
    "monteclora_config": "MonteCLoRA is not supported",
    "megatron_config": "LoRA on Megatron's parallel layers is not supported",
}

_REFUSED_LISTS = frozenset(
    {"modules_to_save", "trainable_token_indices", "target_parameters", "layer_replication", "alora_invocation_tokens"}
)
"""Those of them that do nothing where they are empty."""

_MLX_FIELDS = ("fine_tune_type", "lora_parameters")

_MLX = (
    "MLX wrote this adapter, and PEFT's form is served: adapter_model.safetensors with lora_A.weight = lora_a "
    "transposed and lora_B.weight = lora_b transposed for each module, and adapter_config.json with peft_type LORA, r "
    "and lora_alpha = scale x r"
)

_BASE_IS_CHANGED = "save it with PEFT's path_initial_model_for_weight_conversion"

# Weights trained with these are no difference to the original model, whose weights these change first.
_REFUSED_INITIALISATIONS: Mapping[str, str] = {
    **dict.fromkeys(("pissa", "olora", "corda", "lora_ga"), _BASE_IS_CHANGED),
    "loftq": "it belongs to the weights that LoftQ made of them",
}
_INITIALISATIONS = ("gaussian", "eva", "orthogonal", "mica")
_BIASES = ("none", "all", "lora_only")

_MAX_QUOTED_CHARS = 200

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
    """All modules, by layer and module id. `dtype` is that of the file, FP32 when the file mixes several.

    origin: the model that the adapter was made for; its linears are those of `modules`.
    """

    modules: list[LoRAModule]
    dtype: AdapterDtype
    origin: AdapterOrigin


@dataclass(frozen=True)
class _StoredTensor:
    dtype: AdapterDtype
    values: npt.NDArray[Any]

    def to_float32(self) -> npt.NDArray[np.float32]:
        return bfloat16_to_float32(self.values) if self.dtype == "BF16" else self.values.astype(np.float32)


def is_peft(directory: Path) -> bool:
    """Whether `directory` claims to be a PEFT adapter."""
    return (directory / PEFT_CONFIG_FILE).exists()


def read_peft_directory(directory: Path, sites: ModelSites | None = None, model: str = "") -> PeftAdapter:
    """Read and check an adapter. sites: of the model that it meets, where they are known; model: the name of that one.

    Raises AdapterError naming the file, field or key that stands in the way, or the module that another model has.
    """
    config, places, origin = _read_places(directory)
    if sites is not None:
        check_origin(origin, sites, model)
    tensors = _read_tensors(_weights_path(directory))
    modules = [_module(place, tensors, config) for place in places]
    dtypes = {tensor.dtype for tensor in tensors.values()}
    dtype: AdapterDtype = dtypes.pop() if len(dtypes) == 1 else "FP32"
    return PeftAdapter(modules, dtype, origin)


def check_peft_directory(directory: Path, sites: ModelSites, model: str = "") -> None:
    """The checks of `read_peft_directory` that read no values: those of fields, keys and sides. Raises AdapterError."""
    _, _, origin = _read_places(directory)
    check_origin(origin, sites, model)


def _read_places(directory: Path) -> tuple[dict[str, Any], list[_Place], AdapterOrigin]:
    """The configuration, and the modules by layer and module id."""
    config = _read_config(directory / PEFT_CONFIG_FILE)
    shapes = {key: stored.shape for key, (stored, _) in read_header(_weights_path(directory)).items()}
    places = sorted(_pair_keys(shapes, config), key=lambda place: (place.layer, place.module_id))
    _check_targets(config, places)
    return config, places, AdapterOrigin(tuple(_linear(place, shapes) for place in places), _base_model(config))


def describe_foreign(names: Collection[str]) -> str:
    """What a directory with files of these names holds, if PEFT's adapter is not in it, and what to do with it.

    "" where nobody can tell.
    """
    adapters = sorted(name for name in names if name.startswith(("adapter", "lora")))
    if any(name.endswith("adapters.safetensors") for name in names):
        return f"adapters.safetensors: {_MLX}"
    if pickles := [name for name in adapters if name.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt"))]:
        return (
            f"{pickles[0]} is a pickle, which can run code when it is read; only safetensors is read. Save the adapter "
            "again with save_pretrained(..., safe_serialization=True)"
        )
    if ggufs := sorted(name for name in names if name.endswith(".gguf")):
        return f"{ggufs[0]} is llama.cpp's form; take the folder of PEFT that it was made from"
    if MODEL_CONFIG_FILE in names and not {PEFT_CONFIG_FILE, PEFT_WEIGHTS_FILE} & set(names):
        return (
            f"{MODEL_CONFIG_FILE} belongs to the checkpoint of a whole model, which is no adapter; "
            "multilora-serve --model serves it"
        )
    if others := [name for name in adapters if name.endswith(".safetensors") and name != PEFT_WEIGHTS_FILE]:
        return f"{others[0]} is not in PEFT's form, which is {PEFT_CONFIG_FILE} with {PEFT_WEIGHTS_FILE}"
    return ""


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
    if any(field in config for field in _MLX_FIELDS):
        raise AdapterError(f"{path}: {_MLX}")
    _check_config(config, path)
    return config


def _check_config(config: Mapping[str, Any], path: Path) -> None:
    if config.get("peft_type", "LORA") != "LORA":
        raise AdapterError(f"{path}: peft_type is {_quoted(config['peft_type'])}; only LORA is supported")
    for field, value in config.items():
        if field in _REFUSED_FIELDS and not _is_off(field, value):
            raise AdapterError(f"{path}: {field} is {_quoted(value)}; {_REFUSED_FIELDS[field]}")
        if value and field not in _READ_FIELDS | _HARMLESS_FIELDS:
            raise AdapterError(
                f"{path}: {field[:_MAX_QUOTED_CHARS]} is {_quoted(value)}, and this field of the configuration is not "
                "known: the adapter might not be plain LoRA. Set the field to null if it changes nothing"
            )
    if config.get("bias", "none") not in _BIASES:
        raise AdapterError(f"{path}: bias is {_quoted(config['bias'])}; expected {', '.join(_BIASES)}")
    initialisation = config.get("init_lora_weights", True)
    if isinstance(initialisation, bool | None):
        return
    name = initialisation.lower() if isinstance(initialisation, str) else ""
    for start, advice in _REFUSED_INITIALISATIONS.items():
        if name.startswith(start):
            raise AdapterError(
                f"{path}: init_lora_weights is {_quoted(initialisation)}, so the adapter is no difference to the "
                f"original model; {advice}"
            )
    if name not in _INITIALISATIONS:
        raise AdapterError(
            f"{path}: init_lora_weights is {_quoted(initialisation)}, which is not known: the adapter might be no "
            f"difference to the original model. Known are true, false, {', '.join(_INITIALISATIONS)}"
        )


def _is_off(field: str, value: object) -> bool:
    """Whether PEFT computes as without the field. An empty object is a variant with its default settings."""
    return value is None or value is False or (field in _REFUSED_LISTS and not value)


def _check_targets(config: Mapping[str, Any], places: Sequence[_Place]) -> None:
    """Refuse a file with matrices of modules that PEFT would leave out, and its matrices with them.

    Lists are looked at. Regular expressions are not: one from a stranger can take for ever.
    """
    targets, excluded, layers = (config.get(f) for f in ("target_modules", "exclude_modules", "layers_to_transform"))
    patterns = config.get("layers_pattern")
    for place in places:
        left_out_by = ""
        if isinstance(excluded, list) and _names(excluded, place.peft_name):
            left_out_by = "exclude_modules"
        elif isinstance(targets, list) and targets and not _names(targets, place.peft_name):
            left_out_by = "target_modules"
        elif isinstance(targets, list) and place.peft_name not in targets and layers not in (None, []):
            if place.layer not in (layers if isinstance(layers, list) else [layers]):
                left_out_by = "layers_to_transform"
            elif patterns and "layers" not in (patterns if isinstance(patterns, list) else [patterns]):
                left_out_by = "layers_pattern"
        if left_out_by:
            raise AdapterError(
                f"{PEFT_CONFIG_FILE}: {left_out_by} is {_quoted(config[left_out_by])}, which leaves out "
                f"{place.peft_name}, and {PEFT_WEIGHTS_FILE} has matrices for it"
            )


def _names(listed: list[object], module: str) -> bool:
    """PEFT's rule: a name is a module's whole name, or its end after a dot."""
    return any(isinstance(name, str) and (module == name or module.endswith(f".{name}")) for name in listed)


def _base_model(config: Mapping[str, Any]) -> str:
    name = config.get("base_model_name_or_path")
    return name if isinstance(name, str) else ""


def _quoted(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _MAX_QUOTED_CHARS else f"{text[:_MAX_QUOTED_CHARS]}..."


def _weights_path(directory: Path) -> Path:
    path = directory / PEFT_WEIGHTS_FILE
    if path.is_file():
        return path
    if foreign := describe_foreign([entry.name for entry in directory.iterdir()]):
        raise AdapterError(f"{directory}/{foreign}")
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
    """Where a module sits, and the keys of its two matrices and, with DoRA, its magnitude.

    peft_name: the module's name in PEFT's model, which patterns of the configuration match.
    """

    module: str
    peft_name: str
    module_id: int
    layer: int
    a_key: str
    b_key: str
    magnitude_key: str | None


def _pair_keys(keys: Collection[str], config: Mapping[str, Any]) -> Iterator[_Place]:
    """Every key has its place or is an error: nothing is dropped but what only VeLoRA's gradients need."""
    if not keys:
        raise AdapterError(f"{PEFT_WEIGHTS_FILE} holds no tensors")
    matched: dict[tuple[int, str], dict[str, re.Match[str]]] = {}
    for key in keys:
        if key.endswith(".lora_velora_embed") and not _is_off("velora_config", config.get("velora_config")):
            continue
        match = _match_key(key)
        sides = matched.setdefault((int(match["layer"]), match["path"]), {})
        other = sides.setdefault(match["side"] or match["magnitude"], match)
        if other is not match:
            raise AdapterError(f"{key} and {other.string} are the same matrix")
    for (layer, path), sides in matched.items():
        first = next(iter(sides.values()))
        for side in ("A", "B"):
            if side not in sides:
                raise AdapterError(f"{first.string} has no lora_{side} beside it")
        magnitude = sides.get("magnitude_vector")
        yield _Place(
            f"model.layers.{layer}.{path}",
            first["module"],
            MODULE_IDS[path],
            layer,
            sides["A"].string,
            sides["B"].string,
            magnitude and magnitude.string,
        )


def _match_key(key: str) -> re.Match[str]:
    shown = key[:_MAX_QUOTED_CHARS]
    match = _LORA_KEY.fullmatch(key)
    if match is None:
        for pattern, reason in _REFUSED_KEYS.items():
            if pattern.search(key):
                separator = " " if reason.startswith("is ") else ": "
                advice = f". {_MLX}" if reason == _MLX_MATRIX else ""
                raise AdapterError(f"{shown}{separator}{reason}{advice}")
        raise AdapterError(
            f"{shown} is not a LoRA matrix of a decoder layer ([base_model.model.]model.layers.N...., also below "
            "language_model or text_model)"
        )
    if match["path"] not in MODULE_IDS:
        raise AdapterError(
            f"{shown}: unknown module {match['path'][:_MAX_QUOTED_CHARS]!r}; supported are {', '.join(MODULE_IDS)}"
        )
    return match


def _linear(place: _Place, shapes: Mapping[str, tuple[int, ...]]) -> AdaptedLinear:
    for key in (place.a_key, place.b_key):
        if len(shapes[key]) != 2 or 0 in shapes[key]:
            raise AdapterError(f"{key} has shape {list(shapes[key])}; a matrix is expected")
    return AdaptedLinear(
        place.module, place.module_id, place.layer, in_size=shapes[place.a_key][1], out_size=shapes[place.b_key][0]
    )


def _module(place: _Place, tensors: Mapping[str, _StoredTensor], config: Mapping[str, Any]) -> LoRAModule:
    lora_a = _finite(place.a_key, tensors[place.a_key])
    lora_b = _finite(place.b_key, tensors[place.b_key])
    rank = lora_a.shape[0]
    if lora_b.shape[1] != rank:
        raise AdapterError(
            f"{place.a_key} {list(lora_a.shape)} and {place.b_key} {list(lora_b.shape)} have different ranks"
        )
    expected_rank = _module_setting(config, "rank_pattern", "r", place.peft_name)
    if rank != expected_rank:
        raise AdapterError(f"{place.a_key} has rank {rank}, but {PEFT_CONFIG_FILE} says {expected_rank:g}")
    alpha = _module_setting(config, "alpha_pattern", "lora_alpha", place.peft_name)
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
    if not abs(value) <= _LARGEST_SETTING:
        raise AdapterError(f"{PEFT_CONFIG_FILE}: {default_field} of {module} is beyond {_LARGEST_SETTING:g}")
    return value


def _matches(pattern: str, module: str, field: str) -> bool:
    try:
        return re.match(rf"(.*\.)?({pattern})$", module) is not None
    except re.error as error:
        raise AdapterError(f"{PEFT_CONFIG_FILE}: {field} has the invalid pattern {pattern!r}: {error}") from error
