from __future__ import annotations

from pathlib import Path

import pytest
from support.contract import INPUTS, OUTPUTS, REQUIRED, misfits

from multilora_engine.errors import ConfigError
from multilora_engine.serving.triton_model import DoorModel, LlmapiModel, TextDoorModel, VllmModel
from multilora_engine.tritonserver.repository import find_model_repository, model_names, read_config, write_overridden
from multilora_engine.tritonserver.upstream_models import UpstreamModels, add_upstream_models


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return write_overridden(find_model_repository(), {}, tmp_path / "model_repository")


@pytest.mark.parametrize(("models", "is_decoupled"), [(UpstreamModels.DECOUPLED, True), (UpstreamModels.UNARY, False)])
def test_two_models_join_the_others(repository: Path, models: UpstreamModels, is_decoupled: bool) -> None:
    before = model_names(repository)
    add_upstream_models(repository, models)
    assert model_names(repository) == sorted([*before, "tensorrt_llm", "tensorrt_llm_bls"])
    for name in ("tensorrt_llm", "tensorrt_llm_bls"):
        config = read_config(repository / name / "config.pbtxt")
        assert (config.name, config.backend, config.max_batch_size) == (name, "python", 64)
        assert config.model_transaction_policy.decoupled == is_decoupled
        assert not config.parameters


@pytest.mark.parametrize(("name", "model"), [("tensorrt_llm", DoorModel), ("tensorrt_llm_bls", TextDoorModel)])
def test_their_code_is_that_of_the_doors(repository: Path, name: str, model: type) -> None:
    add_upstream_models(repository, UpstreamModels.DECOUPLED)
    scope: dict[str, object] = {}
    exec((repository / name / "1" / "model.py").read_text(), scope)
    assert scope["TritonPythonModel"] is model


@pytest.mark.parametrize(
    ("models", "steps"),
    [
        (UpstreamModels.NONE, ["preprocessing", "generation"]),
        (UpstreamModels.DECOUPLED, ["preprocessing", "generation"]),
        (UpstreamModels.UNARY, ["preprocessing", "generation_unary"]),
    ],
)
def test_the_ensemble_is_decoupled_by_its_step_exactly_when_the_models_are(
    repository: Path, models: UpstreamModels, steps: list[str]
) -> None:
    add_upstream_models(repository, models)
    assert steps_of(repository, "ensemble") == steps
    assert steps_of(repository, "ensemble_unary") == ["preprocessing", "generation_unary"]


def steps_of(repository: Path, model: str) -> list[str]:
    config = read_config(repository / model / "config.pbtxt")
    return [step.model_name for step in config.ensemble_scheduling.step]


def test_a_repository_that_is_linked_to_is_not_written_to(repository: Path) -> None:
    before = (find_model_repository() / "ensemble" / "config.pbtxt").read_text()
    add_upstream_models(repository, UpstreamModels.UNARY)
    assert (find_model_repository() / "ensemble" / "config.pbtxt").read_text() == before


@pytest.mark.parametrize(
    ("models", "contract", "name", "is_decoupled", "code"),
    [
        (UpstreamModels.LLMAPI, "llmapi", "tensorrt_llm", False, LlmapiModel),
        (UpstreamModels.LLMAPI_DECOUPLED, "llmapi", "tensorrt_llm", True, LlmapiModel),
        (UpstreamModels.VLLM, "vllm_model", "vllm_model", True, VllmModel),
    ],
)
def test_a_model_of_another_protocol_has_its_tensors_and_no_batch_dimension(
    repository: Path, models: UpstreamModels, contract: str, name: str, is_decoupled: bool, code: type
) -> None:
    before = model_names(repository)
    add_upstream_models(repository, models)
    assert model_names(repository) == sorted([*before, name])
    config = read_config(repository / name / "config.pbtxt")
    assert (config.name, config.backend, config.max_batch_size) == (name, "python", 0)
    assert config.model_transaction_policy.decoupled == is_decoupled
    assert misfits(config.input, INPUTS[contract]) == misfits(config.output, OUTPUTS[contract]) == []
    assert {tensor.name for tensor in config.input} == set(INPUTS[contract])
    assert {tensor.name for tensor in config.output} == set(OUTPUTS[contract])
    assert {tensor.name for tensor in config.input if not tensor.optional} == REQUIRED[contract]
    scope: dict[str, object] = {}
    exec((repository / name / "1" / "model.py").read_text(), scope)
    assert scope["TritonPythonModel"] is code
    assert steps_of(repository, "ensemble") == ["preprocessing", "generation"], "the other models stay as they are"


@pytest.mark.parametrize("models", list(UpstreamModels)[1:])
def test_a_repository_that_has_such_a_model_gets_no_second_one(repository: Path, models: UpstreamModels) -> None:
    add_upstream_models(repository, models)
    with pytest.raises(ConfigError, match="already; leave out --upstream-models"):
        add_upstream_models(repository, models)


def test_none_are_added_unless_asked_for(repository: Path) -> None:
    before = model_names(repository)
    add_upstream_models(repository, UpstreamModels.NONE)
    assert model_names(repository) == before
