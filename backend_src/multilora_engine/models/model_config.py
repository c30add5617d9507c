"""`ModelConfig`: the shape of a checkpoint, read from its Hugging Face `config.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from multilora_engine.engine_info import SourceFacts
from multilora_engine.errors import ConfigError
from multilora_engine.models.hf_config import check_sizes
from multilora_engine.models.rope_config import Rope, read_ropes
from multilora_wire.config_sites import config_sites
from multilora_wire.sites import ModelSites

EMBEDDINGS, HEAD = "model.embed_tokens", "lm_head"
"""Names of the modules before and after the layers, in most models."""

Activation = Literal["silu", "gelu_tanh", "gelu", "relu"]

_ACTIVATIONS: dict[str, Activation] = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_DTYPES = ("float32", "bfloat16", "float16")
_NORM_EPS = ("rms_norm_eps", "layer_norm_eps", "norm_epsilon")
_POSITIVE = (
    *("decoder_sparse_step", "moe_intermediate_size", "num_experts_per_tok", "num_local_experts"),
    "shared_expert_intermediate_size",
)
"""Fields of mixtures. Other families may have them, too, and ignore them: so they are checked when they are read."""


@dataclass(frozen=True)
class Routing:
    """How the router of a mixture chooses: a softmax over all experts, and the `top_k` largest.

    is_normalised: the weights of the chosen experts are divided by their sum.
    """

    top_k: int
    is_normalised: bool


@dataclass(frozen=True)
class GeneralDecoder:
    """A decoder whose layers are transformers' modules (`models/general`), by a trace of them.

    checkpoint: its directory. embeddings, head, body: names of modules; the body makes the rows that the head reads.
    attentions: the modules that attend, by layer.
    groups: the linears with sites; those of one group have the same input.
    """

    checkpoint: Path
    embeddings: str
    head: str
    body: str
    attentions: tuple[str, ...]
    groups: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class DistanceBuckets:
    """The distances between two tokens that share a bias of scores, as in T5 (arXiv:1910.10683).

    Half of the buckets are for the shortest distances, one bucket each. The others grow with the logarithm of the
    distance up to `max_distance`, and the last has all longer distances.
    """

    num_buckets: int
    max_distance: int


@dataclass(frozen=True)
class Encoder:
    """The numbers in which an encoder differs from its decoder, and the names of the weights that both share.

    num_layers: layer i of the encoder has the number i + the decoder's layers.
    distances: of the biases of scores in encoder and decoder; None for a model that embeds positions.
    embeddings: the module of the embeddings. copies: modules whose weight is the same.
    """

    num_layers: int
    num_heads: int
    head_dim: int
    embeddings: str
    copies: tuple[str, ...]
    distances: DistanceBuckets | None = None


@dataclass(frozen=True)
class ModelConfig:
    """The numbers of a decoder that the KV cache, the adapters and the families' layers read.

    sites: the linears of each layer, which say how large its MLP or its experts are. routing: of layers with experts.
    clamp_limit: of the experts' gate and up, as in gpt-oss; 0 for the plain gate.
    ropes: rotary embeddings by name. layer_ropes: for each layer the name of its rotary embeddings, None for a layer
        without.
    sliding_window: for each layer the keys a token attends to, its own included; None is all.
    attention_scale: factor of q K^T, None is 1 / sqrt(head_dim). attention_softcap, logit_softcap: scores and logits
        become softcap * tanh(x / softcap); 0 leaves them.
    embedding_scale, residual_scale, logit_scale: factors of embeddings, of each update of the residual stream, and of
        logits.
    end_token_ids: of config.json and generation_config.json, tokens of the vocabulary.
    source, encoder: None for a model without an encoder. The other numbers are the decoder's.
    general: None for a model whose layers are the engine's own. With it, fields that only those layers read are empty.
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
    norm_eps: float
    ropes: Mapping[str, Rope]
    layer_ropes: tuple[str | None, ...]
    sliding_window: tuple[int | None, ...]
    tie_word_embeddings: bool
    dtype: str
    end_token_ids: tuple[int, ...]
    sites: ModelSites
    routing: Routing | None = None
    clamp_limit: float = 0.0
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    activation: Activation = "silu"
    attention_scale: float | None = None
    attention_softcap: float = 0.0
    logit_softcap: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    general: GeneralDecoder | None = None
    source: SourceFacts | None = None
    encoder: Encoder | None = None

    @property
    def implementation(self) -> Literal["native", "transformers"]:
        """Who computes the layers."""
        return "native" if self.general is None else "transformers"

    @property
    def embeddings_name(self) -> str:
        """The module of the embeddings."""
        if self.encoder is not None:
            return self.encoder.embeddings
        return EMBEDDINGS if self.general is None else self.general.embeddings

    @property
    def embedding_copies(self) -> tuple[str, ...]:
        """The modules whose weight is that of the embeddings, so that a checkpoint may have it once or more often."""
        head = (self.head_name,) if self.tie_word_embeddings else ()
        return head if self.encoder is None else (*head, *self.encoder.copies)

    @property
    def head_name(self) -> str:
        """The module of the head."""
        return HEAD if self.general is None else self.general.head

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def decoder_config(path: Path, raw: Mapping[str, Any], fields: Mapping[str, Any], architecture: str) -> ModelConfig:
    """The numbers that `config.json` has under the names that nearly all decoders share.

    raw: the content of config.json. fields: its completed fields (`begin_completing`). Raises ConfigError.
    """
    check_sizes(fields)
    for name in (*_POSITIVE, "num_experts"):
        # Transformers takes any value under a second name of a field.
        if type(value := fields.get(name, 1)) is not int:
            raise ConfigError(f"config.json: {name} {value!r} must be a whole number")
        if value < 1 and name in _POSITIVE:
            raise ConfigError(f"config.json: {name} {fields[name]} must be positive")
    head_dim = fields["head_dim"]
    if head_dim is None:
        head_dim = fields["hidden_size"] // fields["num_attention_heads"]
    if not isinstance(head_dim, int) or head_dim < 2 or head_dim % 2:
        raise ConfigError(f"config.json: head_dim {head_dim!r} must be even: rotary embeddings turn pairs")
    ropes, layer_ropes = read_ropes(fields, head_dim)
    attention_bias = bool(fields.get("attention_bias"))
    num_kv_heads = fields["num_key_value_heads"]
    return ModelConfig(
        architecture=architecture,
        num_layers=fields["num_hidden_layers"],
        hidden_size=fields["hidden_size"],
        num_heads=fields["num_attention_heads"],
        num_kv_heads=fields["num_attention_heads"] if num_kv_heads is None else num_kv_heads,
        head_dim=head_dim,
        intermediate_size=fields["intermediate_size"],
        vocab_size=fields["vocab_size"],
        max_position_embeddings=fields["max_position_embeddings"],
        norm_eps=_norm_eps(fields),
        ropes=ropes,
        layer_ropes=layer_ropes,
        sliding_window=_sliding_windows(fields),
        tie_word_embeddings=fields["tie_word_embeddings"],
        dtype=read_dtype(raw),
        end_token_ids=read_end_token_ids(path, raw, fields["vocab_size"]),
        sites=config_sites({"model_type": raw["model_type"], **fields}),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=bool(fields.get("mlp_bias")),
        activation=_activation(fields),
    )


def encoder_decoder_config(
    path: Path,
    raw: Mapping[str, Any],
    fields: Mapping[str, Any],
    architecture: str,
    encoder: Encoder,
    max_source_tokens: int | None,
    *,
    num_layers: int,
    num_heads: int,
    **numbers: Any,
) -> ModelConfig:
    """The numbers of an encoder-decoder model.

    raw, fields: as in `decoder_config`. max_source_tokens: None for a model without an end of positions.
    num_layers, num_heads: of the decoder. numbers: the fields of `ModelConfig` that families read differently.
    Raises ConfigError.
    """
    for name, supported in (("is_encoder_decoder", True), ("is_decoder", False)):
        if raw.get(name, supported) is not supported:
            raise ConfigError(f"config.json: {name} {raw[name]!r} is not supported for {architecture}")
    vocab_size = fields["vocab_size"]
    return ModelConfig(
        architecture=architecture,
        num_layers=num_layers,
        hidden_size=fields["d_model"],
        num_heads=num_heads,
        num_kv_heads=num_heads,
        vocab_size=vocab_size,
        ropes={},
        layer_ropes=(None,) * num_layers,
        sliding_window=(None,) * num_layers,
        tie_word_embeddings=fields.get("tie_word_embeddings", True),
        dtype=read_dtype(raw),
        end_token_ids=read_end_token_ids(path, raw, vocab_size),
        sites=config_sites({"model_type": raw["model_type"], **fields}),
        source=_source_facts(path, raw, fields, max_source_tokens),
        encoder=encoder,
        **numbers,
    )


def read_size(fields: Mapping[str, Any], name: str) -> int:
    """A size of a model. Raises ConfigError for anything but a positive whole number."""
    value = fields[name]
    if type(value) is not int or value < 1:
        raise ConfigError(f"config.json: {name} {value!r} must be a positive whole number")
    return value


def _source_facts(path: Path, raw: Mapping[str, Any], fields: Mapping[str, Any], max_tokens: int | None) -> SourceFacts:
    """The tokens that begin and end an answer, as in transformers' `generate`.

    They are generation_config.json's where that file is; else config.json's, else those of the model type.
    """
    generation = path / "generation_config.json"
    of_model: list[Mapping[str, Any]] = [raw, fields]
    told: list[Mapping[str, Any]] = [read_json(generation)] if generation.is_file() else of_model

    def token(name: str, sources: list[Mapping[str, Any]]) -> int | None:
        value = next((value for source in sources if (value := source.get(name)) is not None), None)
        if value is not None and (type(value) is not int or not 0 <= value < fields["vocab_size"]):
            raise ConfigError(
                f"{name} of {path} must be a token of the vocabulary of {fields['vocab_size']}, got {value}"
            )
        return value

    start = token("decoder_start_token_id", told)
    if start is None:
        start = token("bos_token_id", told)
    if start is None:
        start = token("decoder_start_token_id", of_model)  # transformers' generate fails
    if start is None:
        raise ConfigError(f"{path}: decoder_start_token_id is missing from config.json: nothing begins an answer")
    pad = token("pad_token_id", [*told, *of_model])
    return SourceFacts(
        max_tokens=max_tokens,
        decoder_start_token_id=start,
        forced_first_token_id=token("forced_bos_token_id", told),
        forced_last_token_id=token("forced_eos_token_id", told),
        pad_token_id=start if pad is None else pad,
    )


def read_json(path: Path) -> dict[str, Any]:
    """Raises ConfigError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return content


def check_shape(config: ModelConfig) -> None:
    """Raises ConfigError where numbers of the config contradict each other."""
    if config.num_kv_heads < 1 or config.num_heads % config.num_kv_heads:
        raise ConfigError(
            f"config.json: num_attention_heads {config.num_heads} is not a multiple of "
            f"num_key_value_heads {config.num_kv_heads}"
        )
    if any(window is not None and window < 1 for window in config.sliding_window):
        raise ConfigError(f"config.json: sliding_window {config.sliding_window} must be positive, or null for none")


def _norm_eps(fields: Mapping[str, Any]) -> float:
    return float(next(fields[name] for name in _NORM_EPS if name in fields))


def _activation(fields: Mapping[str, Any]) -> Activation:
    field = "hidden_activation" if "hidden_activation" in fields else "hidden_act"
    name = fields[field]
    if name not in _ACTIVATIONS:
        raise ConfigError(f"config.json: {field} {name!r} is not supported; supported are: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _sliding_windows(fields: Mapping[str, Any]) -> tuple[int | None, ...]:
    """One entry per layer: the window counts for all layers, or for the layers that `layer_types` names."""
    window: int | None = fields.get("sliding_window")
    types = fields.get("layer_types")
    if types is None:
        return (window,) * int(fields["num_hidden_layers"])
    if not set(types) <= {"full_attention", "sliding_attention"}:
        raise ConfigError(
            f"config.json: layer_types {types} is not supported; supported are: full_attention, sliding_attention"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def read_dtype(raw: Mapping[str, Any]) -> str:
    """The type that config.json names, float32 if it names none. Raises ConfigError for another than a float."""
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"
    if dtype not in _DTYPES:
        raise ConfigError(f"config.json: dtype {dtype!r} is not supported; supported are: {', '.join(_DTYPES)}")
    return str(dtype)


def read_end_token_ids(path: Path, raw: Mapping[str, Any], vocab_size: int) -> tuple[int, ...]:
    """The union of `eos_token_id` (one id or a list) in both files, those of generation_config.json first.

    Ids that no token has, as of a tokenizer with more tokens than the model, end nothing and are left out.
    """
    generation = path / "generation_config.json"
    sources = [read_json(generation) if generation.is_file() else {}, raw]
    values = [source.get("eos_token_id") for source in sources]
    ids = [i for value in values if value is not None for i in (value if isinstance(value, list) else [value])]
    if not all(type(i) is int for i in ids):
        raise ConfigError(f"eos_token_id of {path} must be a token id or a list of them, got {ids}")
    return tuple(i for i in dict.fromkeys(ids) if 0 <= i < vocab_size)
