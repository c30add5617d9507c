"""Copies of a step, without a device: what a copy sends is taken for what arrives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from multilora_engine.batch import transfer
from multilora_engine.batch.transfer import arrays_to_device

SHAPES = st.lists(st.one_of(st.tuples(st.integers(0, 40)), st.tuples(st.integers(0, 5), st.integers(0, 9))))


@given(shapes=SHAPES)
def test_arrays_arrive_whole_by_one_copy_each_where_a_kernel_may_read_sixteen_bytes(
    shapes: list[tuple[int, ...]],
) -> None:
    arrays = [numbered(shape, 1000 * place) for place, shape in enumerate(shapes)]
    sent: list[torch.Tensor] = []

    def send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        sent.append(tensor)
        return tensor

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transfer, "_sent", send)
        arrived = arrays_to_device(arrays, torch.device("cuda"))
    assert len(sent) == 1
    for tensor, array in zip(arrived, arrays, strict=True):
        assert np.array_equal(tensor.numpy(), array)
        assert tensor.shape == array.shape
        assert tensor.is_contiguous()
        assert (tensor.data_ptr() - sent[0].data_ptr()) % 64 == 0 or tensor.numel() == 0


def test_on_a_cpu_arrays_stay_where_they_are() -> None:
    arrays = [numbered((3,), 0), numbered((2, 4), 5)]
    tensors = arrays_to_device(arrays, torch.device("cpu"))
    assert [tensor.data_ptr() for tensor in tensors] == [array.ctypes.data for array in arrays]


def numbered(shape: tuple[int, ...], first: int) -> NDArray[np.int64]:
    """first, first + 1 and so on."""
    size = int(np.prod(shape))
    return np.arange(first, first + size, dtype=np.int64).reshape(shape)
