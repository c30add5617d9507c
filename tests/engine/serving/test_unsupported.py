from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.contract import INPUTS
from support.fake_triton import FakeRequest

from multilora_engine.errors import InvalidRequest, Unsupported
from multilora_engine.serving.inputs import ENSEMBLE_NAMES, InputTensors
from multilora_engine.serving.unsupported import (
    HARMLESS_PARAMETERS,
    ONLY_AT_GENERATION,
    UNSUPPORTED_OPTIONS,
    UNSUPPORTED_TENSORS,
    refuse_lost_inputs,
    refuse_unsupported,
)

DTYPES = {"BOOL": np.bool_, "STRING": np.object_, "UINT8": np.uint8, "INT32": np.int32, "INT64": np.int64}
DTYPES |= {"UINT64": np.uint64, "FP16": np.float16, "FP32": np.float32}

DECLARED = {name: tensor for model in INPUTS.values() for name, tensor in model.items()}


def values(name: str, fill: int, size: int = 1) -> np.ndarray:
    """A tensor of one row as a client would send it, filled with `fill` (text: empty for 0)."""
    dtype, dims = DECLARED[name]
    shape = (1, *(size if dim == -1 else dim for dim in dims))
    if dtype == "STRING":
        return np.full(shape, b"x" * fill, np.object_)
    return np.full(shape, fill, DTYPES[dtype])


def inputs(name: str, array: np.ndarray) -> InputTensors:
    return InputTensors(FakeRequest({name: array}))


@pytest.mark.parametrize("name", [*UNSUPPORTED_OPTIONS, *UNSUPPORTED_TENSORS])
def test_it_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(Unsupported, match=f"^{name}: this server has no "):
        refuse_unsupported(inputs(name, values(name, 2, size=2)))


@pytest.mark.parametrize("name", UNSUPPORTED_OPTIONS)
def test_an_option_that_is_zero_false_or_empty_asks_for_nothing(name: str) -> None:
    refuse_unsupported(inputs(name, values(name, 0)))


@pytest.mark.parametrize("name", sorted(name for name in UNSUPPORTED_TENSORS if -1 in DECLARED[name][1]))
def test_a_tensor_without_elements_asks_for_nothing_but_zeros_are_values(name: str) -> None:
    refuse_unsupported(inputs(name, values(name, 1, size=0)))
    with pytest.raises(Unsupported):
        refuse_unsupported(inputs(name, values(name, 0, size=2)))


@pytest.mark.parametrize("num_rows", [1, 3])
def test_one_decoder_token_a_row_asks_for_nothing_since_upstreams_preprocessing_gives_it(num_rows: int) -> None:
    tensors = {
        "decoder_input_ids": np.full((num_rows, 1), 2, np.int32),
        "decoder_input_lengths": np.ones((num_rows, 1), np.int32),
    }
    refuse_unsupported(InputTensors(FakeRequest(tensors)))


@pytest.mark.parametrize("name", ["lora_task_id", "lora_taskid", "loraid", "adapter", "adapter_id"])
@pytest.mark.parametrize("value", ["7", "0", ""])
def test_no_parameter_of_a_request_chooses_an_adapter(name: str, value: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} is a parameter of the request.* send the input lora_task_id"):
        refuse_lost_inputs({"x-multilora-client": ["a"], name: [value]})


@pytest.mark.parametrize(("theirs", "ours"), [item for item in ENSEMBLE_NAMES.items() if "stream" not in item])
def test_an_input_of_other_models_is_refused_among_the_parameters_unless_it_asks_for_nothing(
    theirs: str, ours: str
) -> None:
    for name, right in ((theirs, ours), (ours, theirs)):
        with pytest.raises(InvalidRequest, match=f"^{name} is a parameter .* which has it as {right}$"):
            refuse_lost_inputs({name: ["0", "2"]})
        refuse_lost_inputs({name: ["0", "0.0", "False", "false", ""]})


@pytest.mark.parametrize("name", sorted(ONLY_AT_GENERATION))
def test_an_input_of_generation_is_refused_among_the_parameters_of_an_ensembles_request(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} is a parameter .* generation and generation_unary have it$"):
        refuse_lost_inputs({name: ["1"]})
    refuse_lost_inputs({name: ["0"]})


@pytest.mark.parametrize("name", sorted(HARMLESS_PARAMETERS))
def test_parameters_that_change_no_answer_are_the_client_s_own(name: str) -> None:
    # Upstream's inflight_batcher_llm_client sends `Streaming` so, beside the input.
    refuse_lost_inputs({name: ["True", "lora"], "triton_enable_empty_final_response": ["True"]})


FOREIGN_NAMES = (
    # the LLM API of TensorRT-LLM
    *("sampling_param_max_tokens", "sampling_param_temperature", "sampling_param_top_k", "sampling_param_stop"),
    # OpenAI, vLLM and SGLang
    *(
        "max_completion_tokens",
        "max_new_tokens",
        "n",
        "best_of",
        "stop_token_ids",
        "ignore_eos",
        "logit_bias",
        "prompt",
    ),
    *("sampling_params", "sampling_parameters", "guided_json", "response_format", "regex", "structured_outputs"),
    # TGI, Ollama, llama.cpp
    *("parameters", "options", "num_predict", "n_predict", "repeat_penalty", "typical_p", "grammar", "details"),
)


@pytest.mark.parametrize("name", FOREIGN_NAMES)
def test_options_under_other_servers_names_are_refused_by_name_unless_they_ask_for_nothing(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} is a parameter of the request and no input of this model"):
        refuse_lost_inputs({"x-multilora-client": ["a"], name: ["0.7"]})
    refuse_lost_inputs({name: ["0"]})


@given(st.dictionaries(st.text(min_size=1, max_size=20), st.lists(st.text(min_size=1), min_size=1, max_size=2)))
def test_what_passes_is_known_or_asks_for_nothing(parameters: dict[str, list[str]]) -> None:
    try:
        refuse_lost_inputs(parameters)
    except InvalidRequest:
        return
    for name, values in parameters.items():
        asks_for_nothing = all(value.lower() in ("0", "0.0", "false", "none", "null") for value in values)
        assert asks_for_nothing or name in HARMLESS_PARAMETERS or name.startswith("triton_")


@pytest.mark.parametrize("name", ["lora_id", "lora_path", "lora_ckpt_source", "adapter_source", "LoRA_Name".lower()])
def test_adapters_under_other_servers_names_are_refused_whatever_their_value(name: str) -> None:
    with pytest.raises(InvalidRequest, match=f"^{name} is a parameter"):
        refuse_lost_inputs({name: ["0"]})
