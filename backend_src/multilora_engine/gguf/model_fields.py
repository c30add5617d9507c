"""`config.json` of a GGUF file's model.

Metadata is read by allow-list: a key of the model's architecture that nobody here understands is refused by its name.
llama.cpp reads no keys of other names, apart from those of `general`, `tokenizer` and `split`.
Source: llama.cpp `convert_hf_to_gguf.py`, and `src/llama-model.cpp` for what is not in the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from multilora_engine.errors import ConfigError
from multilora_wire.gguf.blocks import TYPES
from multilora_wire.gguf.checkpoint import ROPE_TENSORS
from multilora_wire.gguf.file import GGUFFile

T = TypeVar("T", int, float, str, bool)
Fields = dict[str, Any]
Factors = Callable[[str], list[float]]
"""The values of a vector of the file, by its name."""

_QUANTIZATION_VERSION = 2
_LOCAL_ROPE_THETA = 10000.0
_LAYERS_OF_27B = {"gemma2": 46, "gemma3": 62}


class _Metadata:
    """The keys of one architecture. `finish` refuses the keys that nobody has read."""

    def __init__(self, values: Mapping[str, Any], architecture: str) -> None:
        prefix = f"{architecture}."
        self.architecture = architecture
        self._prefix = prefix
        self._left = {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}

    def find(self, key: str, kind: type[T]) -> T | None:
        """The value of a key; None without one. Raises ConfigError for another type."""
        value = self._left.pop(key, None)
        if value is None:
            return None
        if isinstance(value, list) and value and all(one == value[0] for one in value):
            value = value[0]  # of each layer
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
            raise ConfigError(f"{self._prefix}{key} is {_quoted(value)}, and one {kind.__name__} is expected")
        return value

    def get(self, key: str, kind: type[T]) -> T:
        value = self.find(key, kind)
        if value is None:
            raise ConfigError(f"{self._prefix}{key} is missing")
        return value

    def expect(self, key: str, *expected: object) -> None:
        """Check that a key is not there, or has one of some values."""
        value = self._left.pop(key, expected[0])
        if value not in expected:
            supported = " or ".join(map(str, expected))
            raise ConfigError(f"{self._prefix}{key} {_quoted(value)} is not supported; supported is: {supported}")

    def finish(self) -> None:
        if self._left:
            key, value = next(iter(self._left.items()))
            raise ConfigError(f"{self._prefix}{key} {_quoted(value)} is not supported: nobody here knows this key")


@dataclass(frozen=True)
class _Family:
    """name, model_type: of config.json. norm_eps: its field for the norms' epsilon. read: the family's own fields.

    may_turn_in_part: whether fewer elements of a head may turn than it has.
    """

    name: str
    model_type: str
    norm_eps: str = "rms_norm_eps"
    read: Callable[[_Metadata, Fields, Fields], None] = lambda _metadata, _fields, _rope: None
    may_turn_in_part: bool = False


def _read_granite(metadata: _Metadata, fields: Fields, _rope: Fields) -> None:
    fields["attention_multiplier"] = metadata.find("attention.scale", float) or fields["head_dim"] ** -0.5
    for key, name in (
        ("embedding_scale", "embedding_multiplier"),
        ("residual_scale", "residual_multiplier"),
        ("logit_scale", "logits_scaling"),
    ):
        fields[name] = metadata.find(key, float) or 1.0


def _read_gemma(metadata: _Metadata, fields: Fields, rope: Fields) -> None:
    is_27b = fields["num_hidden_layers"] == _LAYERS_OF_27B[metadata.architecture]
    head_dim = fields["hidden_size"] // fields["num_attention_heads"] if is_27b else fields["head_dim"]
    fields["query_pre_attn_scalar"] = head_dim
    fields["sliding_window"] = metadata.get("attention.sliding_window", int)
    if (cap := metadata.find("final_logit_softcapping", float)) is not None:
        fields["final_logit_softcapping"] = cap
    if metadata.architecture == "gemma2":
        metadata.expect("attention.sliding_window_pattern", 2)
        if (cap := metadata.find("attn_logit_softcapping", float)) is not None:
            fields["attn_logit_softcapping"] = cap
        return
    metadata.expect("attention.sliding_window_pattern", 6)
    theta = metadata.find("rope.freq_base_swa", float) or _LOCAL_ROPE_THETA
    local = {"rope_type": "default", "rope_theta": theta}
    fields["rope_parameters"] = {"full_attention": rope, "sliding_attention": local}


def _read_cohere2(metadata: _Metadata, fields: Fields, _rope: Fields) -> None:
    fields["logit_scale"] = metadata.get("logit_scale", float)
    fields["sliding_window"] = metadata.get("attention.sliding_window", int)
    metadata.expect("attention.sliding_window_pattern", 4)


def _read_phi3(metadata: _Metadata, fields: Fields, _rope: Fields) -> None:
    fields["sliding_window"] = metadata.find("attention.sliding_window", int) or None


_FAMILIES: Mapping[str, _Family] = {
    "llama": _Family("LlamaForCausalLM", "llama"),
    "qwen2": _Family("Qwen2ForCausalLM", "qwen2"),
    "qwen3": _Family("Qwen3ForCausalLM", "qwen3"),
    "granite": _Family("GraniteForCausalLM", "granite", read=_read_granite),
    "smollm3": _Family("SmolLM3ForCausalLM", "smollm3"),
    "gemma2": _Family("Gemma2ForCausalLM", "gemma2", read=_read_gemma),
    "gemma3": _Family("Gemma3ForCausalLM", "gemma3_text", read=_read_gemma),
    "phi3": _Family("Phi3ForCausalLM", "phi3", read=_read_phi3, may_turn_in_part=True),
    "olmo2": _Family("Olmo2ForCausalLM", "olmo2"),
    "glm4": _Family("Glm4ForCausalLM", "glm4", may_turn_in_part=True),
    "cohere2": _Family("Cohere2ForCausalLM", "cohere2", "layer_norm_eps", _read_cohere2),
    "starcoder2": _Family("Starcoder2ForCausalLM", "starcoder2", "norm_epsilon"),
}
"""By `general.architecture`."""

_EPSILONS = {"rms_norm_eps": "attention.layer_norm_rms_epsilon"}
_LAYER_NORM_EPSILON = "attention.layer_norm_epsilon"


def read_model_fields(file: GGUFFile, factors: Factors) -> Fields:
    """The content of config.json, without the tokens' ids. Raises ConfigError, which names the key."""
    architecture = _architecture(file.metadata)
    family, metadata = _FAMILIES[architecture], _Metadata(file.metadata, architecture)
    fields: Fields = {
        "architectures": [family.name],
        "model_type": family.model_type,
        "hidden_size": metadata.get("embedding_length", int),
        "intermediate_size": metadata.get("feed_forward_length", int),
        "num_hidden_layers": metadata.get("block_count", int),
        "num_attention_heads": metadata.get("attention.head_count", int),
        "max_position_embeddings": metadata.get("context_length", int),
        family.norm_eps: metadata.get(_EPSILONS.get(family.norm_eps, _LAYER_NORM_EPSILON), float),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
        **_biases(file, architecture),
    }
    if fields["num_attention_heads"] < 1:
        raise ConfigError(f"{architecture}.attention.head_count {fields['num_attention_heads']} must be positive")
    kv_heads = metadata.find("attention.head_count_kv", int)
    fields["num_key_value_heads"] = fields["num_attention_heads"] if kv_heads is None else kv_heads
    head_dim = metadata.find("attention.key_length", int) or fields["hidden_size"] // fields["num_attention_heads"]
    fields["head_dim"] = head_dim
    for key in ("attention.value_length", "attention.key_length_swa", "attention.value_length_swa"):
        metadata.expect(key, head_dim)
    rope = _read_rope(
        metadata, family, fields, factors if any(name in file.tensors for name in ROPE_TENSORS) else None, file
    )
    fields["rope_parameters"] = rope
    family.read(metadata, fields, rope)
    metadata.expect("vocab_size", fields["vocab_size"])
    metadata.expect("attention.causal", True)
    for key in ("expert_count", "expert_used_count", "attention.max_alibi_bias", "attention.clamp_kqv"):
        metadata.expect(key, 0)
    metadata.find("tensor_data_layout", str)  # Of the file that the converter read.
    metadata.finish()
    return fields


def _architecture(metadata: Mapping[str, Any]) -> str:
    kind, architecture = metadata.get("general.type", "model"), metadata.get("general.architecture")
    if kind != "model":
        raise ConfigError(f"general.type is {_quoted(kind)}, and a model is expected")
    if architecture not in _FAMILIES:
        raise ConfigError(
            f"general.architecture {_quoted(architecture)} is not supported; supported are: {', '.join(_FAMILIES)}"
        )
    version = metadata.get("general.quantization_version", _QUANTIZATION_VERSION)
    if version != _QUANTIZATION_VERSION:
        raise ConfigError(f"general.quantization_version {version!r} is not supported; supported is: 2")
    return str(architecture)


def _read_rope(metadata: _Metadata, family: _Family, fields: Fields, factors: Factors | None, file: GGUFFile) -> Fields:
    head_dim = fields["head_dim"]
    rope: Fields = {"rope_type": "default", "rope_theta": metadata.find("rope.freq_base", float) or 10000.0}
    rotary_dim = metadata.find("rope.dimension_count", int) or head_dim
    metadata.expect("rope.dimension_count_swa", rotary_dim)
    if family.may_turn_in_part:
        rope["partial_rotary_factor"] = rotary_dim / head_dim
    elif rotary_dim != head_dim:
        raise ConfigError(
            f"{metadata.architecture}.rope.dimension_count {rotary_dim} is not supported; supported is: {head_dim}, "
            "the size of a head"
        )
    factor = metadata.find("rope.scaling.factor", float)
    kind = metadata.find("rope.scaling.type", str) or ("linear" if factor else "none")
    original = metadata.find("rope.scaling.original_context_length", int)
    attention_factor = metadata.find("rope.scaling.attn_factor", float)
    metadata.find("rope.scaling.finetuned", bool)
    metadata.expect("rope.scaling.yarn_ext_factor", 1.0)
    metadata.expect("rope.scaling.yarn_attn_factor", 1.0)
    metadata.expect("rope.scaling.yarn_log_multiplier", 0.0)
    betas = {
        name: value
        for name in ("beta_fast", "beta_slow")
        if (value := metadata.find(f"rope.scaling.yarn_{name}", float)) is not None
    }
    if factors is not None:
        if kind not in ("none", "longrope"):
            raise ConfigError(f"{metadata.architecture}.rope.scaling.type {kind!r} beside factors is not supported")
        original = original or fields["max_position_embeddings"]
        short, long = (
            ("rope_freqs.weight",) * 2 if ROPE_TENSORS[0] in file.tensors else (ROPE_TENSORS[2], ROPE_TENSORS[1])
        )
        for name in (short, long):
            if name not in file.tensors:
                raise ConfigError(f"tensor {name} is missing")
        return rope | {
            "rope_type": "longrope",
            "short_factor": factors(short),
            "long_factor": factors(long),
            "original_max_position_embeddings": original,
            "factor": fields["max_position_embeddings"] / original,
            "attention_factor": 1.0 if attention_factor is None else attention_factor,
        }
    if attention_factor not in (None, 1.0):
        raise ConfigError(f"{metadata.architecture}.rope.scaling.attn_factor {attention_factor} is not supported")
    if kind == "none" or (kind == "linear" and factor in (None, 0.0, 1.0)):
        return rope
    if kind == "linear":
        return rope | {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and factor:
        original = original or fields["max_position_embeddings"]
        return rope | {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original, **betas}
    raise ConfigError(
        f"{metadata.architecture}.rope.scaling.type {kind!r} with factor {factor} is not supported; supported are: "
        "none, linear, yarn, and factors in tensors"
    )


def _vocab_size(file: GGUFFile) -> int:
    if "token_embd.weight" not in file.tensors:
        raise ConfigError("tensor token_embd.weight is missing")
    return file.tensors["token_embd.weight"].shape[0]


def _dtype(file: GGUFFile) -> str:
    """The type that config.json names, in which a GPU computes."""
    found = {place.dtype for place in file.tensors.values() if len(place.shape) == 2}
    if any(TYPES[dtype].is_quantized for dtype in found) or "BF16" in found:
        return "bfloat16"
    return "float16" if "F16" in found else "float32"


def _biases(file: GGUFFile, architecture: str) -> Fields:
    """Which linears have biases; only the tensors tell."""
    has_biases = {name: f"blk.0.{name}.bias" in file.tensors for name in ("attn_q", "ffn_up")}
    if architecture == "starcoder2":
        return {"use_bias": has_biases["attn_q"]}
    if architecture in ("llama", "granite", "smollm3"):
        return {"attention_bias": has_biases["attn_q"], "mlp_bias": has_biases["ffn_up"]}
    return {"attention_bias": has_biases["attn_q"]} if architecture in ("qwen3", "olmo2", "glm4") else {}


def _quoted(value: object) -> str:
    return repr(value)[:80]
