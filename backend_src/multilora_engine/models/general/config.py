"""Reads the `config.json` of a decoder of transformers' modules, and refuses what cannot run, with the reason."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.pytorch_utils import Conv1D

from multilora_engine.errors import ConfigError
from multilora_engine.log_lines import one_line
from multilora_engine.models.general.model import is_linear, linear_sizes
from multilora_engine.models.general.trace import (
    NO_INTERFACE,
    NOT_BY_TOKEN,
    OTHER_EXPERTS,
    OTHER_MASK,
    Trace,
    Unserved,
    trace,
)
from multilora_engine.models.general.tree import TRACED, are_plain_experts, build_tree, is_experts, read_hf_config
from multilora_engine.models.model_config import (
    GeneralDecoder,
    ModelConfig,
    check_shape,
    read_dtype,
    read_end_token_ids,
)
from multilora_wire.module_names import FUSED_NAMES, MODULE_IDS
from multilora_wire.sites import FIRST_OWN_MODULE, LayerStack, ModelSites, SiteShape, expert_shapes, model_sites

_MAX_ERROR_CHARS = 500
_TRACED_LENGTH = 4096
"""For a config without a longest sequence, which is refused in the end."""
_USUAL_EXPERTS = "mlp.experts"
_USUAL_EMBEDDINGS, _USUAL_HEAD = "model.embed_tokens", "lm_head"
_FUSED = frozenset(FUSED_NAMES.values())

_ROPES_OF_THE_BATCH = ("dynamic", "longrope")
_PARTS_OF_THE_TEXT_MODEL = frozenset({"attn_config", "ffn_config"})
_MIXERS = frozenset({"conv", "linear_attention", "mamba", "recurrent", "hybrid"})
"""Kinds of layers in `layer_types`."""

OTHER_PARTS = "it has parts for pictures, sound or an encoder"
SHARED_KEYS = "its layers share keys and values"
ROPE_OF_THE_BATCH = "its rotary embeddings change with the longest sequence of a batch"
OTHER_ENDS = "its embeddings and head are no plain matrices of one vocabulary"
OTHER_POSITIONS = "its positions begin after that of its padding"
NO_LENGTH = "its config has no length of the longest sequence"


def read_general_config(path: Path, raw: Mapping[str, Any]) -> ModelConfig:
    """raw: the content of config.json in the directory `path`. Raises ConfigError with the reason."""
    name = _architecture_name(raw)
    try:
        config = read_hf_config(path)
        _check_config(config)
        tree = build_tree(config, torch.float32, TRACED)
        _check_tree(tree)
        traced = trace(tree, is_linear, getattr(config, "max_position_embeddings", None) or _TRACED_LENGTH)
        return _model_config(path, raw, tree, traced, _max_length(config))
    except Unserved as error:
        raise ConfigError(f"config.json: {name} is not served: {error}") from error
    except ConfigError:
        raise
    except Exception as error:  # transformers' refusals have many types
        if isinstance(error, KeyError) and error.args == (TRACED,):  # of a class that knows names of its own alone
            raise ConfigError(f"config.json: {name} is not served: {NO_INTERFACE}") from Unserved(NO_INTERFACE)
        text = one_line(" ".join(str(error).split()), _MAX_ERROR_CHARS)
        raise ConfigError(f"config.json: transformers refuses it: {type(error).__name__}: {text}") from error


def _architecture_name(raw: Mapping[str, Any]) -> str:
    """The class in `architectures`. Raises ConfigError unless it is transformers' decoder for the `model_type`."""
    names, model_type = raw.get("architectures"), raw.get("model_type")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ConfigError(f"config.json: architectures must be a list of one name, got {names!r}")
    name: str = names[0]
    known = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(model_type) if isinstance(model_type, str) else None
    if raw.get("auto_map"):
        raise ConfigError(
            f"config.json: {name} brings code of its own (auto_map), which never runs here; if its tensors are those "
            f"of transformers' class{'' if known is None else f' {known}'}, remove auto_map"
        )
    if known != name:
        raise ConfigError(
            f"config.json: architectures {names} with model_type {model_type!r} is not supported: no decoder of "
            f"transformers {transformers.__version__} has these names"
        )
    return name


def _check_config(config: PreTrainedConfig) -> None:
    """Raises Unserved for what only the config tells."""
    parts = sorted(config.sub_configs.keys() - _PARTS_OF_THE_TEXT_MODEL)
    mixers = sorted(_MIXERS.intersection(getattr(config, "layer_types", None) or ()))
    kinds = {str(kind) for parameters in _ropes(config) for kind in (parameters.get("rope_type"),) if kind}
    for is_refused, reason, detail in (
        (bool(parts), OTHER_PARTS, ", ".join(parts)),
        (bool(config.is_encoder_decoder), OTHER_PARTS, "is_encoder_decoder"),
        (bool(getattr(config, "add_cross_attention", False)), OTHER_PARTS, "add_cross_attention"),
        (not getattr(config, "is_causal", True), OTHER_MASK, "is_causal is false"),
        (bool(getattr(config, "use_bidirectional_attention", False)), OTHER_MASK, "use_bidirectional_attention"),
        (bool(getattr(config, "num_kv_shared_layers", 0)), SHARED_KEYS, ""),
        (bool(mixers), NOT_BY_TOKEN, ", ".join(mixers)),
        (not kinds.isdisjoint(_ROPES_OF_THE_BATCH), ROPE_OF_THE_BATCH, ", ".join(sorted(kinds))),
    ):
        if is_refused:
            raise Unserved(reason, detail)


def _check_tree(tree: PreTrainedModel) -> None:
    """Raises Unserved for modules that no trace can run."""
    plain = {name for name, module in tree.named_modules() if is_experts(module) and are_plain_experts(module)}
    stacked = [
        name
        for name, parameter in tree.named_parameters()
        if parameter.dim() > 2
        and any(word in name for word in ("expert", "moe"))
        and name.rpartition(".")[0] not in plain
    ]
    convolutions = [name for name, module in tree.named_modules() if isinstance(module, torch.nn.Conv1d)]
    padded = [
        name
        for name, module in tree.named_modules()
        if isinstance(module, torch.nn.Embedding) and "position" in name and module.padding_idx is not None
    ]
    embeddings, head = tree.get_input_embeddings(), tree.get_output_embeddings()
    tied = sorted(set(tree.all_tied_weights_keys) - {f"{_name_of(tree, head)}.weight"})
    for is_refused, reason, detail in (
        (bool(convolutions), NOT_BY_TOKEN, convolutions[:1]),
        (bool(padded), OTHER_POSITIONS, padded[:1]),
        (not tree._can_set_attn_implementation(), NO_INTERFACE, ""),
        (bool(stacked), OTHER_EXPERTS, stacked[:1]),
        (bool(tied), OTHER_ENDS, f"{tied[:1]} are tied"),
        (type(head) is not torch.nn.Linear, OTHER_ENDS, "the head"),
        (not isinstance(embeddings, torch.nn.Embedding), OTHER_ENDS, "the embeddings"),
    ):
        if is_refused:
            raise Unserved(reason, "".join(detail))


def _ropes(config: PreTrainedConfig) -> list[Mapping[str, Any]]:
    """The parameters of all kinds of layers."""
    parameters = getattr(config, "rope_parameters", None) or {}
    return [parameters, *(value for value in parameters.values() if isinstance(value, dict))]


def _max_length(config: PreTrainedConfig) -> int:
    """Tokens of the longest sequence. Raises Unserved where the config has no limit."""
    length = getattr(config, "max_position_embeddings", None)
    if not isinstance(length, int) or length < 1:
        raise Unserved(NO_LENGTH, f"max_position_embeddings is {length!r}")
    return length


def _model_config(
    path: Path, raw: Mapping[str, Any], tree: PreTrainedModel, traced: Trace, max_length: int
) -> ModelConfig:
    embeddings, head = tree.get_input_embeddings(), tree.get_output_embeddings()
    assert isinstance(embeddings, torch.nn.Embedding)
    assert isinstance(head, torch.nn.Linear)
    if embeddings.num_embeddings != head.out_features:
        raise Unserved(OTHER_ENDS, f"embeddings of {embeddings.num_embeddings} tokens, a head of {head.out_features}")
    names = {name: _name_of(tree, module) for name, module in (("embeddings", embeddings), ("head", head))}
    is_tied = f"{names['head']}.weight" in tree.all_tied_weights_keys
    attentions, shape = traced.attentions, traced.attentions[0]
    sites = _sites(tree, traced, names, is_tied)
    config = ModelConfig(
        architecture=type(tree).__name__,
        num_layers=len(attentions),
        hidden_size=head.in_features,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=max(sizes[1] for sizes in traced.linears.values()),
        vocab_size=head.out_features,
        max_position_embeddings=max_length,
        norm_eps=0.0,
        ropes={},
        layer_ropes=(None,) * len(attentions),
        sliding_window=tuple(attention.window for attention in attentions),
        tie_word_embeddings=is_tied,
        dtype=read_dtype(raw),
        end_token_ids=read_end_token_ids(path, raw, head.out_features),
        sites=sites,
        general=GeneralDecoder(
            path,
            **names,
            body=traced.body,
            attentions=tuple(attention.name for attention in attentions),
            groups=_groups(tree, traced, {sites.full_name(site.name) for site in sites.sites}),
        ),
    )
    check_shape(config)
    return config


def _expert_sites(layer: torch.nn.Module) -> list[SiteShape]:
    """The linears of a layer's experts, where experts have the usual name, by which files of adapters call them."""
    experts = dict(layer.named_modules()).get(_USUAL_EXPERTS)
    if experts is None or not is_experts(experts):
        return []
    num_experts, hidden_size, inner_size = experts.down_proj.shape
    return expert_shapes(int(hidden_size), int(inner_size), int(num_experts))[1:]  # without the router


def _routers(layer: torch.nn.Module) -> set[str]:
    """The linears beside the experts of a layer that have an output for each of them. Adapters change none of these."""
    found = set()
    for name, module in layer.named_modules():
        if is_experts(module):
            parent = name.rpartition(".")[0]
            for child, linear in layer.get_submodule(parent).named_modules():
                if is_linear(linear) and linear_sizes(linear)[1] == module.num_experts:
                    found.add(f"{parent}.{child}" if parent else child)
    return found


def _groups(tree: PreTrainedModel, traced: Trace, sites: Container[str]) -> tuple[tuple[str, ...], ...]:
    """The groups of linears with sites. A transposed linear is alone."""
    groups: list[tuple[str, ...]] = []
    for group in traced.groups:
        names = [name for name in group if name in sites]
        has_transposed = any(isinstance(tree.get_submodule(name), Conv1D) for name in names)
        groups += [(name,) for name in names] if has_transposed else [tuple(names)] if names else []
    return tuple(groups)


def _sites(tree: PreTrainedModel, traced: Trace, names: Mapping[str, str], is_tied: bool) -> ModelSites:
    """The linears of the layers by their names. Ids of the wire where names and sizes are the usual ones."""
    own_ids: dict[str, int] = {}
    layers: list[list[SiteShape]] = []
    shape, head = traced.attentions[0], tree.get_output_embeddings()
    assert isinstance(head, torch.nn.Linear)
    is_usual = _usual_sizes(head.in_features, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim)
    for layer in range(len(traced.attentions)):
        prefix = f"{traced.layers_name}.{layer}."
        linears = {
            name.removeprefix(prefix): sizes for name, sizes in traced.linears.items() if name.startswith(prefix)
        }
        shapes = []
        routers = _routers(tree.get_submodule(prefix.removesuffix(".")))
        for path, (in_size, out_size) in linears.items():
            if path in routers:
                continue
            if path in MODULE_IDS and path not in _FUSED and is_usual(path, in_size, out_size):
                module_id = MODULE_IDS[path]
            else:
                module_id = own_ids.setdefault(path, FIRST_OWN_MODULE - len(own_ids))
            shapes.append(SiteShape(path, module_id, in_size, out_size))
        layers.append([*shapes, *_expert_sites(tree.get_submodule(prefix.removesuffix(".")))])
    is_plain = not any(isinstance(module, Conv1D) for module in tree.modules())
    has_usual_ends = names == {"embeddings": _USUAL_EMBEDDINGS, "head": _USUAL_HEAD} and head.bias is None
    return model_sites(
        layers,
        head.in_features,
        head.out_features if has_usual_ends else 0,
        is_tied,
        stacks=[LayerStack(traced.layers_name)],
        has_dora=is_plain,
    )


def _usual_sizes(hidden_size: int, q_size: int, kv_size: int) -> Callable[[str, int, int], bool]:
    expected = {
        "self_attn.q_proj": (hidden_size, q_size),
        "self_attn.k_proj": (hidden_size, kv_size),
        "self_attn.v_proj": (hidden_size, kv_size),
        "self_attn.o_proj": (q_size, hidden_size),
    }

    def is_usual(path: str, in_size: int, out_size: int) -> bool:
        if path in expected:
            return expected[path] == (in_size, out_size)
        return hidden_size == (out_size if path in ("mlp.down_proj", "mlp.c_proj") else in_size)

    return is_usual


def _name_of(tree: PreTrainedModel, module: torch.nn.Module) -> str:
    """The name of a module in the tree, "" for one that is not there."""
    return next((name for name, other in tree.named_modules() if other is module), "")
