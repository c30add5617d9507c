"""The sites of a model by the fields of its `config.json`; the engine and the client read them here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from multilora_wire.module_names import (
    ATTN_DENSE,
    ATTN_K,
    ATTN_Q,
    ATTN_V,
    CROSS_DENSE,
    CROSS_K,
    CROSS_Q,
    CROSS_V,
    MLP_4H_TO_H,
    MLP_GATE,
    MLP_H_TO_4H,
)
from multilora_wire.sites import (
    GPT_OSS_EXPERTS,
    PLAIN_EXPERTS,
    PLAIN_MLP,
    ExpertsForm,
    LayerStack,
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
    """The linears of each layer, the embeddings and the head; of an encoder-decoder model the linears alone.

    fields: of config.json as it is, or completed by transformers with its `model_type`. A model type that is not
    listed here has Llama's linears.

    Raises KeyError, TypeError or ArithmeticError where a size is missing or is no number, and ValueError for experts
    of a model type that is not listed.
    """
    model_type = fields.get("model_type", "")
    if (encoder_decoder := _ENCODER_DECODERS.get(model_type)) is not None:
        return encoder_decoder(fields)
    hidden, num_heads = fields["hidden_size"], fields["num_attention_heads"]
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


def _t5(fields: Fields) -> ModelSites:
    """Both stacks have the same sizes, and heads whose outputs together need not have the model's size."""
    hidden, inner, mlp_size = fields["d_model"], fields["num_heads"] * fields["d_kv"], fields["d_ff"]
    activation = fields.get("feed_forward_proj", "relu" if fields["model_type"] == "t5" else "gated-gelu")
    inner_linears = ("wi_0", "wi_1") if activation.startswith("gated") else ("wi",)

    def layer(attentions: Mapping[str, tuple[int, ...]]) -> list[SiteShape]:
        shapes = []
        for index, (attention, ids) in enumerate(attentions.items()):
            *inputs, output = (f"layer.{index}.{attention}.{linear}" for linear in "qkvo")
            shapes += [SiteShape(path, i, hidden, inner) for path, i in zip(inputs, ids, strict=False)]
            shapes.append(SiteShape(output, ids[-1], inner, hidden))
        mlp = f"layer.{len(attentions)}.DenseReluDense"
        ids_of_inputs = zip(inner_linears, (MLP_H_TO_4H, MLP_GATE), strict=False)
        shapes += [SiteShape(f"{mlp}.{linear}", i, hidden, mlp_size) for linear, i in ids_of_inputs]
        return [*shapes, SiteShape(f"{mlp}.wo", MLP_4H_TO_H, mlp_size, hidden)]

    num_decoder_layers = fields.get("num_decoder_layers")
    if num_decoder_layers is None:
        num_decoder_layers = fields["num_layers"]
    decoder = [layer({"SelfAttention": _SELF, "EncDecAttention": _CROSS})] * num_decoder_layers
    encoder = [layer({"SelfAttention": _SELF})] * fields["num_layers"]
    return _stacked(decoder, encoder, hidden, "decoder.block", "encoder.block")


def _bart(fields: Fields) -> ModelSites:
    """The stacks differ in their MLPs. All heads together have the model's size."""
    hidden = fields["d_model"]

    def layer(attentions: Mapping[str, tuple[int, ...]], mlp_size: int) -> list[SiteShape]:
        shapes = []
        for attention, ids in attentions.items():
            linears = ("q_proj", "k_proj", "v_proj", "out_proj")
            shapes += [SiteShape(f"{attention}.{n}", i, hidden, hidden) for n, i in zip(linears, ids, strict=True)]
        fc1 = SiteShape("fc1", MLP_H_TO_4H, hidden, mlp_size)
        return [*shapes, fc1, SiteShape("fc2", MLP_4H_TO_H, mlp_size, hidden)]

    decoder = [layer({"self_attn": _SELF, "encoder_attn": _CROSS}, fields["decoder_ffn_dim"])]
    encoder = [layer({"self_attn": _SELF}, fields["encoder_ffn_dim"])]
    decoder, encoder = decoder * fields["decoder_layers"], encoder * fields["encoder_layers"]
    return _stacked(decoder, encoder, hidden, "model.decoder.layers", "model.encoder.layers")


_SELF, _CROSS = (ATTN_Q, ATTN_K, ATTN_V, ATTN_DENSE), (CROSS_Q, CROSS_K, CROSS_V, CROSS_DENSE)
"""Module ids of q, k, v and the output of attention."""


def _stacked(
    decoder: list[list[SiteShape]], encoder: list[list[SiteShape]], hidden: int, decoder_name: str, encoder_name: str
) -> ModelSites:
    """Sites of an encoder-decoder model. Layer i of the encoder has the number of the decoder's layers + i."""
    if not decoder or not encoder:
        raise ValueError(f"the decoder has {len(decoder)} layers and the encoder {len(encoder)}; each needs one")
    stacks = (LayerStack(decoder_name), LayerStack(encoder_name, len(decoder)))
    return model_sites([*decoder, *encoder], hidden, stacks=stacks)


_ENCODER_DECODERS: Mapping[str, Callable[[Fields], ModelSites]] = {
    "bart": _bart,
    "mbart": _bart,
    "mt5": _t5,
    "t5": _t5,
}
"""Model types with an encoder and a decoder."""

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
