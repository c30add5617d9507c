"""The files of model_repository against the code they stand for."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from support.contract import INPUTS, OUTPUTS, REQUIRED, misfits
from support.fake_triton import OUTPUT_NAMES
from tritonclient.grpc import model_config_pb2

from multilora_engine.config import EngineConfig, parameter_descriptions
from multilora_engine.serving.inputs import ENSEMBLE_NAMES
from multilora_engine.serving.outputs import (
    _COLUMNS,
    _KV_CACHE_COLUMNS,
    _LOG_PROB_COLUMNS,
    _OPTIONAL_COLUMNS,
    _PERF_COLUMNS,
)
from multilora_engine.serving.unsupported import ONLY_AT_GENERATION, UNSUPPORTED_OPTIONS, UNSUPPORTED_TENSORS
from multilora_engine.tritonserver.upstream_models import door_config, text_door_config

REPOSITORY = Path(__file__).parents[3] / "model_repository"
MODELS = ("generation", "generation_unary", "preprocessing", "postprocessing", "ensemble", "ensemble_unary")


def config(model: str) -> Any:
    return text_format.Parse((REPOSITORY / model / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())


def tensors(declared: Any) -> dict[str, tuple[int, tuple[int, ...]]]:
    return {tensor.name: (tensor.data_type, tuple(tensor.dims)) for tensor in declared}


@pytest.mark.parametrize("model", MODELS)
def test_every_model_is_named_like_its_folder_and_keeps_the_batch_dimension(model: str) -> None:
    assert config(model).name == model
    assert config(model).max_batch_size == 64
    assert (REPOSITORY / model / "1").is_dir()


def test_the_parameters_are_those_of_the_engine_with_their_defaults_and_descriptions(tmp_path: Path) -> None:
    text = (REPOSITORY / "generation" / "config.pbtxt").read_text()
    documented = re.findall(r'^# (.*)\nparameters \{ key: "(\w+)"', text, re.MULTILINE)
    assert documented == [(text, name) for name, (_, text) in parameter_descriptions().items()]
    (tmp_path / "config.json").write_text("{}")
    values = {name: parameter.string_value for name, parameter in config("generation").parameters.items()}
    assert values["model_path"] == "${MULTILORA_MODEL}"
    parsed = EngineConfig.from_parameters(values, {"MULTILORA_MODEL": str(tmp_path)})
    assert parsed == EngineConfig(model_path=tmp_path)


def test_what_only_generation_has_is_known_where_parameters_are_refused() -> None:
    """But for ids in the place of texts, which an ensemble's preprocessing makes, and chats that it leaves."""
    generation = set(tensors(config("generation").input)) - {"input_ids", "input_lengths", "left_messages"}
    for model in ("ensemble", "ensemble_unary"):
        names = {ENSEMBLE_NAMES.get(name, name) for name in tensors(config(model).input)}
        missing = generation - names - {*UNSUPPORTED_OPTIONS, *UNSUPPORTED_TENSORS}
        assert missing == ONLY_AT_GENERATION


def test_both_generation_models_take_and_give_the_same() -> None:
    streaming, unary = config("generation"), config("generation_unary")
    assert tensors(streaming.input) == tensors(unary.input)
    assert tensors(streaming.output) == tensors(unary.output)
    assert (streaming.model_transaction_policy.decoupled, unary.model_transaction_policy.decoupled) == (True, False)
    assert all(tensor.optional for tensor in streaming.input)


def test_the_declared_outputs_are_those_the_code_can_build() -> None:
    built = {*_COLUMNS, *_LOG_PROB_COLUMNS, *_OPTIONAL_COLUMNS, *_PERF_COLUMNS, *_KV_CACHE_COLUMNS, "output_ids"}
    declared = set(tensors(config("generation").output)) - {"context_phase_params", "thinking_is_open"}
    assert declared == {*OUTPUT_NAMES, *_OPTIONAL_COLUMNS} == built


@pytest.mark.parametrize("model", ["ensemble", "ensemble_unary"])
def test_the_steps_of_an_ensemble_fit_its_models(model: str) -> None:
    ensemble = config(model)
    known = {**tensors(ensemble.input), **tensors(ensemble.output)}
    produced = set(tensors(ensemble.input))
    for step in ensemble.ensemble_scheduling.step:
        inputs, outputs = tensors(config(step.model_name).input), tensors(config(step.model_name).output)
        for name, source in step.input_map.items():
            assert source in produced
            assert inputs[name] == known[source]
        for name, target in step.output_map.items():
            assert known.setdefault(target, outputs[name]) == outputs[name]
            produced.add(target)
    assert set(tensors(ensemble.output)) <= produced
    assert all(tensor.optional for tensor in ensemble.input)


@pytest.mark.parametrize("model", ["ensemble", "ensemble_unary"])
def test_an_ensemble_offers_every_option_of_generation_under_upstreams_names(model: str) -> None:
    ensemble_names = {ours: theirs for theirs, ours in ENSEMBLE_NAMES.items()}
    direct_only = {"input_ids", "input_lengths", "left_messages", "request_output_len", "stop"}
    direct_only |= {"embedding_bias", "embedding_bias_ids", "bad_words_list", "stop_words_list"}
    direct_only |= {
        "early_stopping",
        "beam_search_diversity_rate",
        "guided_decoding_after_thinking",
        "min_tokens_holds_stops",
    }
    direct_only |= {"return_prompt_log_probs", "num_prompt_top_log_probs"}
    direct_only |= {*UNSUPPORTED_OPTIONS, *UNSUPPORTED_TENSORS} - set(INPUTS["ensemble"])
    taken = set(tensors(config("generation").input)) - direct_only
    expected = {ensemble_names.get(name, name) for name in taken}
    assert set(tensors(config(model).input)) == expected | {"decoder_text_input", "prompt_table_extra_id"}
    (step,) = (s for s in config(model).ensemble_scheduling.step if s.model_name.startswith("generation"))
    assert {theirs: ours for ours, theirs in step.input_map.items() if theirs in ENSEMBLE_NAMES} == ENSEMBLE_NAMES


@pytest.mark.parametrize("model", ["preprocessing", "postprocessing", "ensemble"])
def test_upstreams_tensors_are_declared_and_no_others_are_asked_for(model: str) -> None:
    assert misfits(config(model).input, INPUTS[model]) == []
    assert misfits(config(model).output, OUTPUTS[model]) == []
    assert {tensor.name for tensor in config(model).input if not tensor.optional} <= REQUIRED[model]


@pytest.mark.parametrize("is_decoupled", [True, False])
def test_the_models_of_upstreams_names_have_upstreams_tensors(is_decoupled: bool) -> None:
    door, text_door = door_config(REPOSITORY, is_decoupled), text_door_config(REPOSITORY, is_decoupled)
    for made in (door, text_door):
        assert misfits(made.input, INPUTS[made.name]) == []
        assert misfits(made.output, OUTPUTS[made.name]) == []
        assert all(tensor.optional for tensor in made.input)
        assert made.model_transaction_policy.decoupled == is_decoupled
    only_here = set(tensors(text_door.input)) - set(tensors(config("ensemble").input))
    assert only_here <= {*UNSUPPORTED_OPTIONS, *UNSUPPORTED_TENSORS}
    door.name = "generation_unary"
    door.ClearField("model_transaction_policy")
    assert door == config("generation_unary")


def test_what_is_refused_is_declared_where_upstream_declares_it() -> None:
    refused = {*UNSUPPORTED_OPTIONS, *UNSUPPORTED_TENSORS}
    assert refused <= {name for declared in INPUTS.values() for name in declared}


def test_the_operators_model_takes_one_text_and_gives_one() -> None:
    adapters = config("adapters")
    assert (adapters.name, adapters.max_batch_size) == ("adapters", 1)
    text = (model_config_pb2.TYPE_STRING, (1,))
    assert (tensors(adapters.input), tensors(adapters.output)) == ({"request": text}, {"response": text})


def test_postprocessing_keeps_streams_in_order_by_one_instance_and_one_thread_that_answers() -> None:
    (group,) = config("postprocessing").instance_group
    assert group.count == 1
    assert config("postprocessing").dynamic_batching.preserve_ordering
