"""The models by which clients of other Triton backends know the engine, in the protocols of these backends.

They are further doors to the engine of `generation`, and no ensembles, so that cancelling works.

- TensorRT-LLM's `inflight_batcher_llm`: `tensorrt_llm` is `generation_unary` under another name, `tensorrt_llm_bls` has
  the tensors of `ensemble`. Both are decoupled if their clients stream, and so is `ensemble`, as upstream's template
  has it with `decoupled_mode`.
- NVIDIA's `llmapi`: `tensorrt_llm` with tensors of its own, and without a batch dimension. It is decoupled or not, as
  with upstream's `triton_config`.
- Triton's vLLM backend: `vllm_model`, the name of its sample, always decoupled.
"""

from __future__ import annotations

import re
import shutil
from enum import StrEnum
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import (
    TYPE_BOOL,
    TYPE_FP16,
    TYPE_FP32,
    TYPE_INT32,
    TYPE_INT64,
    TYPE_STRING,
    TYPE_UINT8,
    TYPE_UINT32,
    TYPE_UINT64,
    ModelConfig,
    ModelInput,
    ModelInstanceGroup,
    ModelOutput,
)

from multilora_engine.errors import ConfigError
from multilora_engine.tritonserver.repository import CONFIG_NAME, ENGINE_MODEL, read_config, write_config


class UpstreamModels(StrEnum):
    """The backend whose clients find their models: a model has one protocol, and streams or not.

    DECOUPLED, UNARY: TensorRT-LLM's `inflight_batcher_llm`.
    """

    NONE = "none"
    DECOUPLED = "decoupled"
    UNARY = "unary"
    LLMAPI = "llmapi"
    LLMAPI_DECOUPLED = "llmapi-decoupled"
    VLLM = "vllm"


_DOOR = "generation_unary"
_TEXT_DOOR = "ensemble"


def _model_code(name: str) -> str:
    return f"from multilora_engine.serving.triton_model import {name} as TritonPythonModel\n"


# Images, videos and draft models: refused by the names they have at this door only.
_TEXT_INPUTS = (
    ModelInput(name="image_input", data_type=TYPE_FP16, dims=[-1, 3, -1, -1], optional=True),
    ModelInput(name="image_bytes_input", data_type=TYPE_UINT8, dims=[-1, -1, -1, -1], optional=True),
    ModelInput(name="image_url_input", data_type=TYPE_STRING, dims=[1], optional=True),
    ModelInput(name="video_bytes_input", data_type=TYPE_UINT8, dims=[-1, -1, -1, -1], optional=True),
    ModelInput(name="num_draft_tokens", data_type=TYPE_INT32, dims=[1], optional=True),
    ModelInput(name="use_draft_logits", data_type=TYPE_BOOL, dims=[1], optional=True),
)


def _inputs(**tensors: tuple[int, int]) -> list[ModelInput]:
    """Each with its type and its one dimension. All but the prompt are optional."""
    return [
        ModelInput(name=name, data_type=data_type, dims=[size], optional=name != "text_input")
        for name, (data_type, size) in tensors.items()
    ]


def _outputs(**tensors: tuple[int, int]) -> list[ModelOutput]:
    return [ModelOutput(name=name, data_type=kind, dims=[size]) for name, (kind, size) in tensors.items()]


_LLMAPI = ModelConfig(
    name="tensorrt_llm",
    input=_inputs(
        text_input=(TYPE_STRING, -1),
        streaming=(TYPE_BOOL, 1),
        sampling_param_max_tokens=(TYPE_INT32, 1),
        sampling_param_temperature=(TYPE_FP32, 1),
        sampling_param_top_k=(TYPE_INT32, 1),
        sampling_param_top_p=(TYPE_FP32, 1),
        sampling_param_frequency_penalty=(TYPE_FP32, 1),
        sampling_param_presence_penalty=(TYPE_FP32, 1),
        sampling_param_stop=(TYPE_STRING, -1),
        sampling_param_seed=(TYPE_UINT64, 1),
        sampling_param_exclude_input_from_output=(TYPE_BOOL, 1),
        sampling_param_return_perf_metrics=(TYPE_BOOL, 1),
        return_finish_reason=(TYPE_BOOL, 1),
        return_stop_reason=(TYPE_BOOL, 1),
        return_cumulative_logprob=(TYPE_BOOL, 1),
        stop=(TYPE_BOOL, 1),
        lora_id=(TYPE_UINT64, 1),
        lora_name=(TYPE_STRING, 1),
        lora_path=(TYPE_STRING, 1),
        lora_ckpt_source=(TYPE_STRING, 1),
        # Refused if they ask for something.
        sampling_param_best_of=(TYPE_INT32, 1),
        sampling_param_logits_post_processor_name=(TYPE_STRING, 1),
        image_url=(TYPE_STRING, -1),
    ),
    # As upstream declares them; it sends all of them as strings, and so do we.
    output=_outputs(
        text_output=(TYPE_STRING, -1),
        finish_reason=(TYPE_STRING, -1),
        stop_reason=(TYPE_STRING, -1),
        cumulative_logprob=(TYPE_FP32, -1),
        kv_cache_reused_block=(TYPE_INT32, -1),
        kv_cache_missed_block=(TYPE_INT32, -1),
        kv_cache_alloc_new_blocks=(TYPE_INT32, -1),
        kv_cache_alloc_total_blocks=(TYPE_INT32, -1),
        kv_cache_hit_rate=(TYPE_FP32, -1),
        arrival_time_ns=(TYPE_INT64, 1),
        first_scheduled_time_ns=(TYPE_INT64, 1),
        first_token_time_ns=(TYPE_INT64, 1),
        last_token_time_ns=(TYPE_INT64, 1),
        acceptance_rate=(TYPE_FP32, 1),
        total_accepted_draft_tokens=(TYPE_INT32, 1),
        total_draft_tokens=(TYPE_INT32, 1),
    ),
)

_VLLM = ModelConfig(
    name="vllm_model",
    input=_inputs(
        text_input=(TYPE_STRING, 1),
        stream=(TYPE_BOOL, 1),
        sampling_parameters=(TYPE_STRING, 1),
        exclude_input_in_output=(TYPE_BOOL, 1),
        return_finish_reason=(TYPE_BOOL, 1),
        return_cumulative_logprob=(TYPE_BOOL, 1),
        return_logprobs=(TYPE_BOOL, 1),
        return_num_input_tokens=(TYPE_BOOL, 1),
        return_num_output_tokens=(TYPE_BOOL, 1),
        # Refused if they ask for something.
        image=(TYPE_STRING, -1),
        embedding_request=(TYPE_STRING, 1),
    ),
    output=_outputs(
        text_output=(TYPE_STRING, -1),
        finish_reason=(TYPE_STRING, -1),
        cumulative_logprob=(TYPE_FP32, -1),
        logprobs=(TYPE_STRING, -1),
        num_input_tokens=(TYPE_UINT32, 1),
        num_output_tokens=(TYPE_UINT32, -1),
    ),
)


def _foreign_model(config: ModelConfig, is_decoupled: bool) -> ModelConfig:
    """A model of the Python backend whose tensors have no batch dimension."""
    model = ModelConfig(backend="python", max_batch_size=0)
    model.MergeFrom(config)
    model.model_transaction_policy.decoupled = is_decoupled
    model.instance_group.add(count=1, kind=ModelInstanceGroup.KIND_CPU)
    return model


def add_upstream_models(repository: Path, models: UpstreamModels) -> None:
    """Write the models of a backend's names into a repository that has our models. For `inflight_batcher_llm` the step
    of `ensemble` becomes the one that makes it decoupled or not.

    Raises ConfigError when the repository has a model of such a name already.
    """
    if models is UpstreamModels.NONE:
        return
    name = "vllm_model" if models is UpstreamModels.VLLM else "tensorrt_llm"
    if (repository / name).exists():
        raise ConfigError(f"the model repository has a model {name} already; leave out --upstream-models")
    if models is UpstreamModels.VLLM:
        _write_model(repository / name, _foreign_model(_VLLM, is_decoupled=True), _model_code("VllmModel"))
        return
    if models in (UpstreamModels.LLMAPI, UpstreamModels.LLMAPI_DECOUPLED):
        config = _foreign_model(_LLMAPI, models is UpstreamModels.LLMAPI_DECOUPLED)
        _write_model(repository / name, config, _model_code("LlmapiModel"))
        return
    is_decoupled = models is UpstreamModels.DECOUPLED
    model_code = (repository / _DOOR / "1" / "model.py").read_text()
    _write_model(repository / "tensorrt_llm", door_config(repository, is_decoupled), model_code)
    text_config = text_door_config(repository, is_decoupled)
    _write_model(repository / "tensorrt_llm_bls", text_config, _model_code("TextDoorModel"))
    _set_ensemble_step(repository / _TEXT_DOOR, ENGINE_MODEL if is_decoupled else _DOOR)


def door_config(repository: Path, is_decoupled: bool) -> ModelConfig:
    """The configuration of `tensorrt_llm`: that of `generation_unary`, decoupled or not."""
    config = read_config(repository / _DOOR / CONFIG_NAME)
    config.name = "tensorrt_llm"
    config.model_transaction_policy.decoupled = is_decoupled
    return config


def text_door_config(repository: Path, is_decoupled: bool) -> ModelConfig:
    """The configuration of `tensorrt_llm_bls`: that of `tensorrt_llm`, and tensors of `ensemble` and of its own."""
    config, ensemble = door_config(repository, is_decoupled), read_config(repository / _TEXT_DOOR / CONFIG_NAME)
    config.name = "tensorrt_llm_bls"
    del config.input[:], config.output[:]
    config.input.extend([*ensemble.input, *_TEXT_INPUTS])
    config.output.extend(ensemble.output)
    return config


def _set_ensemble_step(folder: Path, model: str) -> None:
    """An ensemble is decoupled if one of its steps is. A folder that is a link is replaced, and not written to."""
    text, count = re.subn(r'(?<=model_name: ")generation\w*(?=")', model, (folder / CONFIG_NAME).read_text())
    assert count == 1, f"one step of {folder} generates"
    if folder.is_symlink():
        source = folder.resolve()
        folder.unlink()
        shutil.copytree(source, folder)
    (folder / CONFIG_NAME).write_text(text)


def _write_model(folder: Path, config: ModelConfig, code: str) -> None:
    (folder / "1").mkdir(parents=True)
    write_config(config, folder / CONFIG_NAME)
    (folder / "1" / "model.py").write_text(code)
