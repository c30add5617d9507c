from __future__ import annotations

import numpy as np
import pytest
import torch
from support.fake_triton import FakeRequest

from multilora_engine.errors import InvalidRequest
from multilora_engine.serving.inputs import InputTensors


def inputs(**tensors: object) -> InputTensors:
    return InputTensors(FakeRequest(dict(tensors)))


def test_what_is_absent_is_none_or_empty() -> None:
    tensors = inputs()
    assert tensors.scalar("seed", 0) is None
    assert tensors.vector("input_ids", 0) is None
    assert tensors.text("text_input", 0) is None
    assert tensors.texts("stop_words", 0) == []
    assert tensors.common("streaming", default=True) is True


def test_rows_have_their_own_values_in_plain_python_types() -> None:
    tensors = inputs(
        seed=[[2**64 - 1], [0]], input_ids=[[1, 2], [3, 4]], text_input=[["é"], [""]], stop=[[True], [False]]
    )
    assert [tensors.scalar("seed", row) for row in (0, 1)] == [2**64 - 1, 0]
    assert type(tensors.scalar("seed", 0)) is int
    assert tensors.scalar("stop", 1) is False
    assert tensors.vector("input_ids", 1) == [3, 4]
    assert tensors.text("text_input", 0) == "é"


@pytest.mark.parametrize(
    "value", [np.array([1]), np.array([[1, 2]]), np.array([[[1]]]), np.zeros((1, 0)), np.zeros((0, 1))]
)
def test_a_scalar_of_another_shape_is_refused_by_name(value: np.ndarray) -> None:
    with pytest.raises(InvalidRequest, match=r"^max_tokens has shape \[.*\], expected one value a row"):
        inputs(max_tokens=value).scalar("max_tokens", 0)


def test_a_list_with_too_few_rows_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match=r"^input_ids has shape \[1, 2\]"):
        inputs(input_ids=[[1, 2]]).vector("input_ids", 1)


def test_text_that_is_not_utf8_is_refused_with_the_place() -> None:
    with pytest.raises(InvalidRequest, match=r"^text_input is not valid UTF-8: invalid start byte at byte 2$"):
        inputs(text_input=np.array([[b"ab\xff"]], object)).text("text_input", 0)
    with pytest.raises(InvalidRequest, match=r"^stop_words is not valid UTF-8"):
        inputs(stop_words=np.array([[b"ok", b"\xc3"]], object)).texts("stop_words", 0)


def test_a_switch_must_be_the_same_in_all_rows() -> None:
    assert inputs(streaming=[[True], [True]]).common("streaming", default=False) is True
    with pytest.raises(InvalidRequest, match=r"^streaming is true and false; it must be the same in every row"):
        inputs(streaming=[[True], [False]]).common("streaming", default=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_matrix_keeps_dtype_and_values(dtype: torch.dtype) -> None:
    values = torch.randn(3, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    value = values[None] if dtype == torch.bfloat16 else values[None].numpy()
    matrix = inputs(lora_weights=value).matrix("lora_weights")
    assert matrix.dtype == dtype
    assert torch.equal(matrix, values)


@pytest.mark.parametrize("shape", [(2, 3), (2, 3, 4), (1, 1, 3, 4), (3,)])
def test_a_matrix_of_another_shape_is_refused_by_name(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        InvalidRequest, match=r"^Invalid shape for lora_weights tensor: .*Expected batch dimension to be 1"
    ):
        inputs(lora_weights=np.zeros(shape, np.float16)).matrix("lora_weights")
