"""`ModelConfig`: the shape of a checkpoint, read from its Hugging Face `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from multilora_engine.errors import ConfigError

_MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}

_ROPE_PARAMETERS = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor", "original_max_position_embeddings"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}
"""rope_type -> the numbers it cannot do without."""

_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelConfig:
    """What the model definition, the KV cache and the adapter format need to know of a Llama-family checkpoint.

    rope_scaling: the normalised Hugging Face dict (`rope_type` llama3, linear, yarn, dynamic; `factor`, ...), or None.
    sliding_window: one entry per layer, keys further back than this are not attended to; None is full attention.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: Mapping[str, Any] | None
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    qk_norm: bool
    sliding_window: tuple[int | None, ...]
    dtype: str
    end_token_ids: tuple[int, ...]

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def read_model_config(path: Path) -> ModelConfig:
    """Read `config.json` (and the end tokens of `generation_config.json`) of a checkpoint directory.

    transformers fills in each architecture's defaults and brings the older spellings into one form. What this engine
    does not do (another architecture, activation, rope type, a quantized checkpoint) raises ConfigError.
    """
    raw = _read_json(path / "config.json")
    architecture = _architecture(raw)
    _refuse_quantized(raw)
    hf = _transformers_config(path)
    _require_silu(hf)
    rope = _rope_parameters(hf)
    attention_bias = bool(getattr(hf, "attention_bias", False))
    config = ModelConfig(
        architecture=architecture,
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        num_heads=hf.num_attention_heads,
        num_kv_heads=hf.num_key_value_heads,
        head_dim=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        intermediate_size=hf.intermediate_size,
        vocab_size=hf.vocab_size,
        max_position_embeddings=hf.max_position_embeddings,
        rms_norm_eps=hf.rms_norm_eps,
        rope_theta=float(rope["rope_theta"]),
        rope_scaling=None if rope["rope_type"] == "default" else rope,
        tie_word_embeddings=bool(hf.tie_word_embeddings),
        qkv_bias=attention_bias or architecture == "Qwen2ForCausalLM",
        output_bias=attention_bias,
        mlp_bias=bool(getattr(hf, "mlp_bias", False)),
        qk_norm=architecture == "Qwen3ForCausalLM",
        sliding_window=_sliding_windows(hf),
        dtype=_dtype(raw),
        end_token_ids=_end_token_ids(path, raw),
    )
    _check_shape(config)
    return config


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return content


def _architecture(raw: dict[str, Any]) -> str:
    """The one supported name in `architectures`, whose `model_type` must agree."""
    names = raw.get("architectures") or []
    known = [name for name in names if _MODEL_TYPES.get(name) == raw.get("model_type")]
    if len(known) != 1 or len(names) != 1:
        raise ConfigError(
            f"config.json: architectures {names} with model_type {raw.get('model_type')!r} is not supported; "
            f"supported are: {', '.join(_MODEL_TYPES)}"
        )
    return str(known[0])


def _refuse_quantized(raw: dict[str, Any]) -> None:
    if raw.get("quantization_config"):
        raise ConfigError(
            "config.json: quantization_config is not supported; use a checkpoint in float32, bfloat16 or float16"
        )


def _transformers_config(path: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # its validators raise many types, all of them about this one file
        raise ConfigError(f"{path / 'config.json'}: {error}") from error


def _require_silu(hf: Any) -> None:
    if hf.hidden_act not in ("silu", "swish"):
        raise ConfigError(f"config.json: hidden_act {hf.hidden_act!r} is not supported; supported is: silu")


def _rope_parameters(hf: Any) -> dict[str, Any]:
    """The normalised `rope_parameters`, with every number its type needs."""
    rope = dict(hf.rope_parameters)
    rope_type = rope.get("rope_type")
    if rope_type not in _ROPE_PARAMETERS:
        raise ConfigError(
            f"config.json: rope_type {rope_type!r} is not supported; supported are: {', '.join(_ROPE_PARAMETERS)}"
        )
    for name in ("rope_theta", *_ROPE_PARAMETERS[rope_type]):
        if isinstance(rope.get(name), bool) or not isinstance(rope.get(name), (int, float)) or rope[name] <= 0:
            raise ConfigError(f"config.json: rope_type {rope_type!r} needs a positive {name}, got {rope.get(name)!r}")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ConfigError(
            f"config.json: partial_rotary_factor {rope['partial_rotary_factor']} is not supported; supported is: 1.0"
        )
    return rope


def _sliding_windows(hf: Any) -> tuple[int | None, ...]:
    """One entry per layer: the window counts for all layers, or for those that `layer_types` names."""
    window: int | None = getattr(hf, "sliding_window", None)
    types: list[str] | None = getattr(hf, "layer_types", None)
    if types is None:
        return (window,) * int(hf.num_hidden_layers)
    if not set(types) <= {"full_attention", "sliding_attention"}:
        raise ConfigError(
            f"config.json: layer_types {types} is not supported; supported are: full_attention, sliding_attention"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _dtype(raw: dict[str, Any]) -> str:
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if dtype not in _DTYPES:
        raise ConfigError(f"config.json: dtype {dtype!r} is not supported; supported are: {', '.join(_DTYPES)}")
    return str(dtype)


def _end_token_ids(path: Path, raw: dict[str, Any]) -> tuple[int, ...]:
    """The union of `eos_token_id` (one id or a list) in both files, those of generation_config.json first."""
    generation = path / "generation_config.json"
    sources = [_read_json(generation) if generation.is_file() else {}, raw]
    values = [source.get("eos_token_id") for source in sources]
    ids = [i for value in values if value is not None for i in (value if isinstance(value, list) else [value])]
    if not all(type(i) is int for i in ids):
        raise ConfigError(f"eos_token_id of {path} must be a token id or a list of them, got {ids}")
    return tuple(dict.fromkeys(ids))


def _check_shape(config: ModelConfig) -> None:
    if config.num_kv_heads < 1 or config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads {config.num_heads} is not a multiple of "
            f"num_key_value_heads {config.num_kv_heads}"
        )
    if config.head_dim < 2 or config.head_dim % 2:
        raise ConfigError(f"config.json: head_dim {config.head_dim} must be even: rotary embeddings turn pairs")
    if any(window is not None and window < 1 for window in config.sliding_window):
        raise ConfigError(f"config.json: sliding_window {config.sliding_window} must be positive, or null for none")
