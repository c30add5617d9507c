"""The models `tensorrt_llm` and `tensorrt_llm_bls`, by which clients of TensorRT-LLM's recipe know the engine.

They are further doors to the engine of `generation`, and no ensembles, so that cancelling works. Nothing about them is
written down twice: `tensorrt_llm` is `generation_unary` under another name, `tensorrt_llm_bls` has the tensors of
`ensemble`. Both are decoupled if their clients stream, and so is `ensemble`, as upstream's template has it with
`decoupled_mode`.
"""

from __future__ import annotations

import re
import shutil
from enum import StrEnum
from pathlib import Path

from tritonclient.grpc.model_config_pb2 import (
    TYPE_BOOL,
    TYPE_FP16,
    TYPE_INT32,
    TYPE_STRING,
    TYPE_UINT8,
    ModelConfig,
    ModelInput,
)

from multilora_engine.errors import ConfigError
from multilora_engine.tritonserver.repository import CONFIG_NAME, ENGINE_MODEL, read_config, write_config


class UpstreamModels(StrEnum):
    """Whether there are models of all of upstream's names, and for which clients: a model cannot serve both."""

    NONE = "none"
    DECOUPLED = "decoupled"
    UNARY = "unary"


_DOOR = "generation_unary"
_TEXT_DOOR = "ensemble"

_TEXT_MODEL = "from multilora_engine.serving.triton_model import TextDoorModel as TritonPythonModel\n"

# Images, videos and draft models: refused by the names they have at this door only.
_TEXT_INPUTS = (
    ModelInput(name="image_input", data_type=TYPE_FP16, dims=[-1, 3, -1, -1], optional=True),
    ModelInput(name="image_bytes_input", data_type=TYPE_UINT8, dims=[-1, -1, -1, -1], optional=True),
    ModelInput(name="image_url_input", data_type=TYPE_STRING, dims=[1], optional=True),
    ModelInput(name="video_bytes_input", data_type=TYPE_UINT8, dims=[-1, -1, -1, -1], optional=True),
    ModelInput(name="num_draft_tokens", data_type=TYPE_INT32, dims=[1], optional=True),
    ModelInput(name="use_draft_logits", data_type=TYPE_BOOL, dims=[1], optional=True),
)


def add_upstream_models(repository: Path, models: UpstreamModels) -> None:
    """Write `tensorrt_llm` and `tensorrt_llm_bls` into a repository that has our models, and put the step into its
    `ensemble` that makes it decoupled or not.

    Raises ConfigError when it has the two already.
    """
    if models is UpstreamModels.NONE:
        return
    if (repository / "tensorrt_llm").exists():
        raise ConfigError("the model repository has a model tensorrt_llm already; leave out --upstream-models")
    is_decoupled = models is UpstreamModels.DECOUPLED
    model_code = (repository / _DOOR / "1" / "model.py").read_text()
    _write_model(repository / "tensorrt_llm", door_config(repository, is_decoupled), model_code)
    _write_model(repository / "tensorrt_llm_bls", text_door_config(repository, is_decoupled), _TEXT_MODEL)
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
