"""The sites of a decoder by the fields of its `config.json`; the engine and the client read them here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from multilora_wire.sites import (
    GPT_OSS_EXPERTS,
    PLAIN_EXPERTS,
    PLAIN_MLP,
    ExpertsForm,
    ModelSites,
    SiteShape,
    attention_shapes,
    expert_shapes,
    mlp_shapes,
    model_sites,
    shared_expert_shapes,
)

Fields = Mapping[str, Any]


def config_sites(fields: Fields) -> ModelSites:
    """The linears of each layer, the embeddings and the head.

    fields: of config.json as it is, or completed by transformers with its `model_type`. A model type that is not
    listed here has Llama's linears.

    Raises KeyError, TypeError or ArithmeticError where a size is missing or is no number, and ValueError for experts
    of a model type that is not listed.
    """
    hidden, num_heads = fields["hidden_size"], fields["num_attention_heads"]
    model_type = fields.get("model_type", "")
    if model_type not in _MLPS and any(fields.get(name) for name in _NUMBERS_OF_EXPERTS):
        raise ValueError(f"experts of model type {model_type!r} are not known")
    head_size = fields.get("head_dim") or hidden // num_heads
    num_kv_heads = fields.get("num_key_value_heads") or num_heads
    attention = attention_shapes(hidden, num_heads * head_size, num_kv_heads * head_size)
    mlp = _MLPS.get(model_type, _gated)
    layers = [attention + mlp(fields, layer) for layer in range(fields["num_hidden_layers"])]
    is_tied = fields.get("tie_word_embeddings", model_type in _TIED)
    form = _EXPERTS_FORMS.get(model_type, PLAIN_EXPERTS)
    return model_sites(layers, hidden, fields.get("vocab_size", 0), is_tied, form)


def _gated(fields: Fields, _layer: int) -> list[SiteShape]:
    return mlp_shapes(fields["hidden_size"], fields["intermediate_size"])


def _plain(fields: Fields, _layer: int) -> list[SiteShape]:
    return mlp_shapes(fields["hidden_size"], fields["intermediate_size"], PLAIN_MLP)


def _experts(fields: Fields, _layer: int) -> list[SiteShape]:
    """A mixture in every layer, and one size for all MLPs."""
    return expert_shapes(fields["hidden_size"], fields["intermediate_size"], _num_experts(fields))


def _qwen3_experts(fields: Fields, layer: int) -> list[SiteShape]:
    """A mixture in some layers, an MLP in the others."""
    if not _is_sparse(fields, layer):
        return _gated(fields, layer)
    return expert_shapes(fields["hidden_size"], fields["moe_intermediate_size"], _num_experts(fields))


def _qwen2_experts(fields: Fields, layer: int) -> list[SiteShape]:
    """As in Qwen 3, with an expert in each mixture that all tokens use."""
    if not _is_sparse(fields, layer):
        return _gated(fields, layer)
    shared = shared_expert_shapes(fields["hidden_size"], fields["shared_expert_intermediate_size"])
    return _qwen3_experts(fields, layer) + shared


def _is_sparse(fields: Fields, layer: int) -> bool:
    """Whether a layer of Qwen's mixtures has experts."""
    if not _num_experts(fields) or layer in (fields.get("mlp_only_layers") or ()):
        return False
    return bool((layer + 1) % fields.get("decoder_sparse_step", 1) == 0)


def _num_experts(fields: Fields) -> int:
    """Transformers has two names for the number."""
    num_experts: int = fields["num_experts" if "num_experts" in fields else "num_local_experts"]
    return num_experts


_NUMBERS_OF_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Fields that mixtures of all model types have one of."""

_MLPS: Mapping[str, Callable[[Fields, int], list[SiteShape]]] = {
    "gpt_oss": _experts,
    "mixtral": _experts,
    "olmoe": _experts,
    "qwen2_moe": _qwen2_experts,
    "qwen3_moe": _qwen3_experts,
    "starcoder2": _plain,
}
"""The linears of a layer's MLP by model type; `_gated` for all others."""

_EXPERTS_FORMS: Mapping[str, ExpertsForm] = {"gpt_oss": GPT_OSS_EXPERTS}
"""How transformers holds the experts, by model type, where it is not as in most."""

_TIED = frozenset({"cohere2", "gemma2", "gemma3_text", "smollm3", "starcoder2"})
"""Model types whose embeddings and head are one matrix unless `config.json` says otherwise."""
