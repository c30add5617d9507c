from __future__ import annotations

import numpy as np
import pytest
from support.contract import INPUTS
from support.fake_triton import FakeRequest

from multilora_engine.errors import InvalidRequest, Unsupported
from multilora_engine.serving.inputs import ENSEMBLE_NAMES, InputTensors
from multilora_engine.serving.unsupported import (
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


def test_other_parameters_are_the_client_s_own() -> None:
    refuse_lost_inputs({"priority": ["1"], "x-multilora-client": ["lora"], "authorization": ["Bearer lora"]})
    # Upstream's inflight_batcher_llm_client sends `Streaming` so, beside the input.
    refuse_lost_inputs({"streaming": ["True"], "stream": ["True"]})
