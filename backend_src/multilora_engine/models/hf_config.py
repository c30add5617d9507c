"""The fields of a `config.json` as transformers' own class for the model type completes them.

Importing transformers takes a second, and memory that stays. So a child process imports it, completes the fields and
ends. A process that has imported transformers before needs no child. `python -m multilora_engine.models.hf_config` is
the child: it reads the content of config.json on stdin and writes an `_Outcome` on stdout.
"""

from __future__ import annotations

import copy
import dataclasses
import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypedDict

from multilora_engine.errors import ConfigError
from multilora_engine.log_lines import one_line

_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "max_position_embeddings",
    *("d_model", "d_kv", "d_ff", "num_heads", "num_layers", "num_decoder_layers"),
    *("encoder_layers", "encoder_attention_heads", "encoder_ffn_dim"),
    *("decoder_layers", "decoder_attention_heads", "decoder_ffn_dim"),
)

_LARGEST = (1 << 31) - 1
_LAYERS = ("num_hidden_layers", "num_layers", "num_decoder_layers", "encoder_layers", "decoder_layers")
_LARGEST_OF = dict.fromkeys(_LAYERS, 1 << 12) | dict.fromkeys(("num_experts", "num_local_experts"), 1 << 16)
"""Whatever is larger is a mistake; lists and tensors of such sizes could not be made."""

_OBJECTS = ("rope_parameters", "rope_scaling")

_CHECKED_HERE = ("dtype", "torch_dtype")

_READ = frozenset(
    {
        *_POSITIVE,
        "activation_function",
        "attention_bias",
        "attention_multiplier",
        "attn_logit_softcapping",
        "bos_token_id",
        "clip_qkv",
        "decoder_sparse_step",
        "decoder_start_token_id",
        "embedding_multiplier",
        "feed_forward_proj",
        "final_logit_softcapping",
        "forced_eos_token_id",
        "head_dim",
        "hidden_act",
        "hidden_activation",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "layer_types",
        "logit_scale",
        "logits_scaling",
        "mlp_bias",
        "mlp_only_layers",
        "moe_intermediate_size",
        "no_rope_layers",
        "norm_epsilon",
        "norm_topk_prob",
        "num_experts",
        "num_experts_per_tok",
        "num_key_value_heads",
        "num_local_experts",
        "pad_token_id",
        "qkv_bias",
        "query_pre_attn_scalar",
        "relative_attention_max_distance",
        "relative_attention_num_buckets",
        "residual_multiplier",
        "rms_norm_eps",
        "rope_parameters",
        "scale_embedding",
        "shared_expert_intermediate_size",
        "sliding_window",
        "swiglu_alpha",
        "swiglu_limit",
        "tie_word_embeddings",
        "use_bias",
        "use_bidirectional_attention",
    }
)
"""The fields that the engine reads from the completed config."""

_WITHOUT_EFFECT = frozenset(
    {
        "activation_dropout",
        "attention_dropout",
        "classifier_dropout",
        "decoder_layerdrop",
        "dropout",
        "dropout_rate",
        "embd_pdrop",
        "embedding_dropout",
        "encoder_layerdrop",
        "eos_token_id",  # read from the files, because generation_config.json counts too
        "init_std",
        "initializer_factor",
        "initializer_range",
        "max_window_layers",  # becomes layer_types
        "no_rope_layer_interval",  # becomes no_rope_layers
        "original_max_position_embeddings",  # becomes part of rope_parameters
        "output_router_logits",  # of training's loss
        "pretraining_tp",
        "resid_pdrop",
        "residual_dropout",
        "router_aux_loss_coef",
        "router_jitter_noise",  # of training
        "use_cache",
        "use_sliding_window",  # becomes sliding_window
    }
)
"""The fields that change no answer by themselves: transformers has put their meaning into another field, or they are
for training."""

_MAX_ERROR_CHARS = 500


class _Outcome(TypedDict):
    """fields: the completed fields. error: why there are none; empty when there are."""

    fields: dict[str, Any]
    error: str


def begin_completing(raw: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    """Start a child that completes the fields. The returned function waits for them; it raises ConfigError, too.

    raw: the content of a config.json whose model_type is served. Raises ConfigError, which names the field.
    """
    _check(raw)
    wait = partial(_complete, raw) if _is_imported() else _start_child(raw)
    return lambda: _fields_of(wait())


def _fields_of(outcome: _Outcome) -> dict[str, Any]:
    if outcome["error"]:
        raise ConfigError(f"config.json: {outcome['error']}")
    return outcome["fields"]


def check_sizes(fields: Mapping[str, Any]) -> None:
    """Raises ConfigError for a number among the fields that are read that no model has."""
    for name in sorted(_READ & fields.keys()):
        largest = _LARGEST_OF.get(name, _LARGEST)
        if isinstance(value := fields[name], int) and value > largest:
            raise ConfigError(f"config.json: {name} {value} must be at most {largest}")


def _check(raw: Mapping[str, Any]) -> None:
    """Refuse what transformers takes and the engine does not do, and what transformers refuses in unclear words."""
    for name in _POSITIVE:
        value = raw.get(name)
        if isinstance(value, int) and value < 1:
            raise ConfigError(f"config.json: {name} {value} must be positive")
    for name in _OBJECTS:
        if not isinstance(raw.get(name), dict | None):
            raise ConfigError(f"config.json: {name} must be an object, got {raw[name]!r}")
    if raw.get("is_causal") not in (None, True):
        raise ConfigError("config.json: is_causal false is not supported: answers come token by token; write true")
    if raw.get("per_layer_config") is not None:
        raise ConfigError("config.json: per_layer_config is not supported: all layers must have one shape")


def _is_imported() -> bool:
    return "transformers" in sys.modules


def _complete(raw: Mapping[str, Any]) -> _Outcome:
    from transformers import AutoConfig, PreTrainedConfig

    fields = copy.deepcopy(dict(raw))  # transformers changes what it gets
    model_type = fields.pop("model_type")
    for name in _CHECKED_HERE:
        fields.pop(name, None)
    if model_type == "mistral" and "layer_types" in fields:
        model_type = "ministral"  # as AutoConfig.from_pretrained does
    if model_type == "phi3":
        _rename_first_longrope(fields)
    try:
        config = AutoConfig.for_model(model_type, **fields)
        if getattr(config, "rope_parameters", None):
            config.standardize_rope_params()  # once more, as the layers do: some lengths count only then
    except Exception as error:  # its refusals have many types
        kind = f"{type(error).__name__}: " if type(error).__module__ == "builtins" else ""
        text = one_line(" ".join(str(error).split()), _MAX_ERROR_CHARS)
        return _Outcome(fields={}, error=f"transformers refuses it: {kind}{text}")
    of_all_families = {field.name for field in dataclasses.fields(PreTrainedConfig)}
    own = [field for field in dataclasses.fields(config) if field.name not in of_all_families]
    for field in own:
        value = getattr(config, field.name)
        if field.name not in _READ | _WITHOUT_EFFECT and value != field.default:
            return _Outcome(
                fields={}, error=f"{field.name} {value!r} is not supported: the engine does not know this field"
            )
    completed = {field.name: getattr(config, field.name) for field in own if field.name in _READ}
    # Layers of all families ask for it, whether their class declares it or not.
    return _Outcome(fields={"head_dim": getattr(config, "head_dim", None)} | completed, error="")


def _rename_first_longrope(fields: dict[str, Any]) -> None:
    """Rename `su`: the first Phi-3 checkpoints of long contexts call `longrope` so. Transformers does it too late."""
    for name in _OBJECTS:
        rope = fields.get(name) or {}
        for key in ("type", "rope_type"):
            if rope.get(key) == "su":
                fields[name] = rope = {**rope, key: "longrope"}


def _start_child(raw: Mapping[str, Any]) -> Callable[[], _Outcome]:
    with tempfile.TemporaryFile("w+", encoding="utf-8") as content:
        json.dump(raw, content)
        content.seek(0)
        command = [sys.executable, "-P", "-m", __name__]
        child = subprocess.Popen(command, stdin=content, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    return partial(_wait_for, child)


def _wait_for(child: subprocess.Popen[str]) -> _Outcome:
    answer, errors = child.communicate()
    if child.returncode:
        last = errors.strip().rpartition("\n")[2]
        raise ConfigError(f"cannot read config.json: the process that reads it ended with {child.returncode}: {last}")
    outcome: _Outcome = json.loads(answer)
    return outcome


def _main() -> None:
    gc.disable()  # A tenth of the time of the import.
    # Transformers imports torch where it finds it, which takes two seconds. Configs need no torch.
    sys.modules["torch"] = None  # type: ignore[assignment]
    json.dump(_complete(json.load(sys.stdin)), sys.stdout)


if __name__ == "__main__":
    _main()
