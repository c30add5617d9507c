"""Settings as TensorRT-LLM's users write them, `key:value,key:value`, filled into a model repository of ours.

A key is a parameter of `generation`, or one of the holes of upstream's templates: a hole with a meaning here is
translated, and any other is reported with the reason. Only the values in the `config.pbtxt` files change, comments
stay.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

from multilora_engine.config import parameter_descriptions, unknown_parameters
from multilora_engine.engine_info import CallLimits
from multilora_engine.errors import ConfigError
from multilora_engine.tritonserver.repository import CONFIG_NAME, ENGINE_MODEL, model_names, read_config
from multilora_engine.tritonserver.upstream_models import UpstreamModels, add_upstream_models

RENAMED: Mapping[str, str] = MappingProxyType(
    {
        "tokenizer_dir": "tokenizer_path",
        "lora_cache_max_adapter_size": "max_lora_rank",
        "enable_kv_cache_reuse": "enable_prefix_caching",
    }
)
"""Upstream's keys that are parameters of `generation` under another name."""

_NO_ENGINE_FILES = "there are no engine files; give model_path, the directory of a Hugging Face checkpoint"
_IN_FLIGHT = "requests always join and leave the batch in flight"
_ONE_INSTANCE = "one instance serves any number of requests at once"
_ONE_GPU = "one server uses one GPU, that of CUDA_VISIBLE_DEVICES"
_NO_DRAFTS = "this server has no speculative decoding"
_NO_IMAGES = "this server has no images or videos"
_NO_FEATURES = "this server has no models whose encoders take features"
_KV_CACHE = "see kv_cache_memory_bytes and gpu_memory_utilization, which mean something else"
_WHOLE_CONTEXT = "every token attends to the whole context that the model gives it"
_OWN_KERNELS = "it chooses among kernels of TensorRT-LLM"
_ONE_ENGINE = "one engine computes prompts and answers"
_CUDA_GRAPHS = "a GPU replays its steps as CUDA graphs, of sizes that the engine chooses"
_METRICS = "the metrics are always on, and cost nothing that could be saved"

IGNORED: Mapping[str, str] = MappingProxyType(
    {
        "triton_backend": "all models are Python models before one engine",
        "engine_dir": _NO_ENGINE_FILES,
        "encoder_engine_dir": _NO_ENGINE_FILES,
        "hf_model_path": _NO_IMAGES,
        "multimodal_model_path": _NO_IMAGES,
        "multimodal_encoders_name": _NO_IMAGES,
        "visual_model_path": _NO_IMAGES,
        "max_num_images": _NO_IMAGES,
        "tokenizer_type": "the tokenizer's own files tell its type",
        "max_num_sequences": "see max_num_seqs",
        "context_model_name": _ONE_ENGINE,
        "generation_model_name": _ONE_ENGINE,
        "disaggregated_serving_bls_count": _ONE_ENGINE,
        "n_mels": _NO_FEATURES,
        "zero_pad": _NO_FEATURES,
        "max_queue_delay_microseconds": "a request joins the running batch at its next step",
        "batching_strategy": _IN_FLIGHT,
        "batch_scheduler_policy": _IN_FLIGHT,
        "postprocessing_instance_count": "several instances would put the pieces of a stream out of order",
        "bls_instance_count": _ONE_INSTANCE,
        "accumulate_tokens": "text is always decoded in the context of all tokens",
        "skip_special_tokens": "texts are always without special tokens",
        "tensorrt_llm_model_name": "tensorrt_llm_bls reaches the engine without a model between",
        "tensorrt_llm_draft_model_name": _NO_DRAFTS,
        "enable_chunked_context": "prompts are always computed in chunks, of max_num_batched_tokens",
        "kv_cache_free_gpu_mem_fraction": _KV_CACHE,
        "max_tokens_in_paged_kv_cache": _KV_CACHE,
        "kv_cache_host_memory_bytes": "blocks of the KV cache never leave the device",
        "kv_cache_onboard_blocks": "blocks of the KV cache never leave the device",
        "cross_kv_cache_fraction": "keys and values of sources lie in the KV cache, as many as requests need",
        "encoder_input_features_data_type": _NO_FEATURES,
        "prompt_embedding_table_data_type": "this server has no prompt tables",
        "logits_datatype": "logits are FP32",
        "max_attention_window_size": _WHOLE_CONTEXT,
        "sink_token_length": _WHOLE_CONTEXT,
        "enable_trt_overlap": "a GPU always computes a step while the next one is prepared",
        "max_beam_width": f"a request may have {CallLimits.max_beam_width} beams",
        "enable_context_fmha_fp32_acc": _OWN_KERNELS,
        "multi_block_mode": _OWN_KERNELS,
        "cuda_graph_mode": _CUDA_GRAPHS,
        "cuda_graph_cache_size": _CUDA_GRAPHS,
        "gpu_weights_percent": "all weights are on the device",
        "gpu_device_ids": _ONE_GPU,
        "participant_ids": _ONE_GPU,
        "num_nodes": _ONE_GPU,
        "normalize_log_probs": "log-probabilities are never normalised by length",
        "cancellation_check_period_ms": "cancellations are seen at every step",
        "stats_check_period_ms": _METRICS,
        "iter_stats_max_iterations": _METRICS,
        "request_stats_max_iterations": _METRICS,
        "lora_cache_optimal_adapter_size": "an adapter of any rank takes just the room it needs",
        "decoding_mode": "each request says how it samples",
        "lookahead_window_size": _NO_DRAFTS,
        "lookahead_ngram_size": _NO_DRAFTS,
        "lookahead_verification_set_size": _NO_DRAFTS,
        "medusa_choices": _NO_DRAFTS,
        "eagle_choices": _NO_DRAFTS,
        "speculative_decoding_fast_logits": _NO_DRAFTS,
        "guided_decoding_backend": "llguidance, always",
        "xgrammar_tokenizer_info_path": "guides read the model's own tokenizer",
    }
)
"""Upstream's keys that mean nothing here, with the reasons."""


@dataclass
class Filling:
    """The result of filling in the keys: `written` has the place of each value, `ignored` the reason of each key."""

    written: dict[str, str] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)


def parse_substitutions(text: str) -> dict[str, str]:
    """`key:value,key:value`; a backslash before a comma or a backslash takes it as it is.

    Raises ConfigError for a key that neither this server nor upstream has, and for a value that cannot be.
    """
    substitutions = {}
    for pair in re.findall(r"(?:\\.|[^,\\])+", text):
        key, separator, value = pair.partition(":")
        if not separator or not key.strip():
            raise ConfigError(f"{pair!r} is no key:value; write key:value,key:value, and \\, for a comma in a value")
        substitutions[key.strip()] = re.sub(r"\\(.)", r"\1", value)
    for key, value in substitutions.items():
        _check(key, value)
    return substitutions


def copy_repository(repository: Path, target: Path) -> None:
    """Copy all models of `repository`, with the files that their links lead to. Raises ConfigError if it exists."""
    if target.exists():
        raise ConfigError(f"{target} exists; give a directory that is to be made, or -i to change one in place")
    for name in model_names(repository):
        shutil.copytree(repository / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))


def fill(repository: Path, substitutions: Mapping[str, str]) -> Filling:
    """Write the values from `parse_substitutions` into the config.pbtxt files of `repository`. Raises ConfigError."""
    filling = Filling()
    for key, value in substitutions.items():
        if reason := _reason_to_ignore(key, value):
            filling.ignored[key] = reason
        elif key in _SETTINGS:
            filling.written[key] = _SETTINGS[key].write(repository, value)
        else:
            filling.written[key] = _set_parameter(repository, RENAMED.get(key, key), value)
    return filling


def known_keys() -> list[str]:
    """All keys that `fill` takes, sorted."""
    return sorted({*parameter_descriptions(), *RENAMED, *_SETTINGS, *IGNORED})


def _check(key: str, value: str) -> None:
    known = known_keys()
    if key not in known:
        raise ConfigError(unknown_parameters([key], known))
    if key in _SETTINGS and not re.fullmatch(_SETTINGS[key].pattern, value):
        raise ConfigError(f"{key}: {value!r} is not {_SETTINGS[key].expected}")
    if re.search(r'["\\\n]', value):
        raise ConfigError(f"{key}: {value!r} holds a character that config.pbtxt cannot hold as it is")


def _reason_to_ignore(key: str, value: str) -> str | None:
    if key == "max_queue_size" and value == "0":
        return "0 is no limit upstream; here there always is one"
    return IGNORED.get(key)


def _set_parameter(repository: Path, name: str, value: str) -> str:
    path = repository / ENGINE_MODEL / CONFIG_NAME
    pattern = rf'(parameters \{{ key: "{name}"\s+value \{{ string_value: ")[^"]*'
    _replace(path, pattern, value)
    assert read_config(path).parameters[name].string_value == value
    return f"{name} of {ENGINE_MODEL}"


def _set_max_batch_size(repository: Path, value: str) -> str:
    # The model `adapters` takes one operation a request, in every configuration.
    models = [name for name in model_names(repository) if read_config(_config(repository, name)).max_batch_size > 1]
    for name in models:
        _replace(_config(repository, name), r"(max_batch_size: )\d+", value)
    return f"max_batch_size of {', '.join(models)}"


def _set_preprocessing_instances(repository: Path, value: str) -> str:
    _replace(_config(repository, "preprocessing"), r"(instance_group \[ \{ count: )\d+", value)
    return "the instances of preprocessing"


def _add_decoupled_models(repository: Path, value: str) -> str:
    for name in ("tensorrt_llm", "tensorrt_llm_bls"):
        shutil.rmtree(repository / name, ignore_errors=True)
    models = UpstreamModels.DECOUPLED if value.lower() == "true" else UpstreamModels.UNARY
    add_upstream_models(repository, models)
    return f"the models tensorrt_llm, tensorrt_llm_bls and ensemble, {models}"


@dataclass(frozen=True)
class _Setting:
    """A key that is no parameter. write: given a repository and a value, writes it and says where."""

    write: Callable[[Path, str], str]
    pattern: str
    expected: str


_SETTINGS: Mapping[str, _Setting] = MappingProxyType(
    {
        "triton_max_batch_size": _Setting(_set_max_batch_size, r"[1-9]\d*", "a number >= 1"),
        "preprocessing_instance_count": _Setting(_set_preprocessing_instances, r"[1-9]\d*", "a number >= 1"),
        "decoupled_mode": _Setting(_add_decoupled_models, r"(?i:true|false)", "true or false"),
    }
)


def _config(repository: Path, model: str) -> Path:
    return repository / model / CONFIG_NAME


def _replace(path: Path, pattern: str, value: str) -> None:
    """Write `value` after the first place where `pattern` matches. Raises ConfigError if there is no such place."""
    text, count = re.subn(pattern, lambda match: match[1] + value, path.read_text(), count=1)
    if not count:
        raise ConfigError(f"{path}: it has no place for the value {value!r}; is it one of our files?")
    path.write_text(text)
