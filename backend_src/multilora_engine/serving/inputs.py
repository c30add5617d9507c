"""`InputTensors`: the tensors of a request by name, with their common checks.

All have a leading batch dimension: n rows are n independent prompts. A tensor that is absent is None.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from multilora_engine.errors import InvalidRequest
from multilora_engine.serving.triton_api import TritonRequest

if TYPE_CHECKING:
    import torch

ENSEMBLE_NAMES: Mapping[str, str] = MappingProxyType(
    {
        "stream": "streaming",
        "length_penalty": "len_penalty",
        "top_k": "runtime_top_k",
        "top_p": "runtime_top_p",
        "top_p_decay": "runtime_top_p_decay",
        "top_p_min": "runtime_top_p_min",
        "top_p_reset_ids": "runtime_top_p_reset_ids",
    }
)
"""Inputs of `generation` that TensorRT-LLM's ensemble has under other names."""


_MAX_VALUES = 1 << 20
"""The most values of a row that become Python's numbers: longer than any prompt, larger than any vocabulary."""


_WEIGHTS = ("lora_weights", "lora_peft_weights")
"""The beginnings of the names of weights."""


_OF_ADAPTERS = (*_WEIGHTS, "lora_config", "lora_peft_config", "lora_use")
"""The beginnings of the names of all parts of an adapter."""


class InputTensors:
    """Raises InvalidRequest, naming the tensor, for a wrong shape or text that is not UTF-8.

    renamed: the names here for the request's tensors of these names.
    """

    def __init__(self, request: TritonRequest, renamed: Mapping[str, str] = MappingProxyType({})) -> None:
        self._tensors = {renamed.get(tensor.name(), tensor.name()): tensor for tensor in request.inputs()}
        self._arrays: dict[str, NDArray[Any]] = {}

    @classmethod
    def of(cls, arrays: Mapping[str, NDArray[Any]]) -> InputTensors:
        """The inputs that a door of another protocol made of a request, by the names and in the shapes of `generation`.

        No weights are among them.
        """
        inputs = cls.__new__(cls)
        inputs._tensors, inputs._arrays = {}, dict(arrays)
        return inputs

    def without_weights(self) -> InputTensors:
        """A copy of all tensors but weights, which keeps nothing of the request's memory."""
        names = {*self._tensors, *self._arrays}
        kept = (name for name in names if not name.startswith(_OF_ADAPTERS))
        return InputTensors.of({name: self.array(name).copy() for name in kept})

    def __contains__(self, name: str) -> bool:
        return name in self._tensors or name in self._arrays

    def present(self, *names: str) -> list[str]:
        """The tensors in `names` that the request has."""
        return [name for name in names if name in self]

    @property
    def num_bytes(self) -> int:
        """The bytes of all tensors but weights, which nobody reads as values."""
        names = {*self._tensors, *self._arrays}
        return sum(_num_bytes(self.array(name)) for name in names if not name.startswith(_WEIGHTS))

    def num_rows(self, name: str) -> int:
        """The batch size, by a tensor that is present."""
        return self.array(name).shape[0]

    def array(self, name: str) -> NDArray[Any]:
        """A tensor that is present. Not for BF16, which NumPy does not know."""
        if name not in self._arrays:
            self._arrays[name] = self._tensors[name].as_numpy()
        return self._arrays[name]

    def scalar(self, name: str, row: int) -> Any:
        """The one value a row has of a tensor [batch, 1], as a plain Python value or bytes."""
        if name not in self:
            return None
        values = self.array(name)
        if values.ndim != 2 or values.shape[1] != 1 or row >= values.shape[0]:
            raise InvalidRequest(f"{name} has shape {list(values.shape)}, expected one value a row: [batch, 1]")
        value = values[row, 0]
        return value.item() if isinstance(value, np.generic) else value

    def vector(self, name: str, row: int) -> list[Any] | None:
        """The values a row has of a tensor [batch, n]."""
        if name not in self:
            return None
        values = self.array(name)
        if values.ndim != 2 or row >= values.shape[0]:
            raise InvalidRequest(f"{name} has shape {list(values.shape)}, expected a list a row: [batch, n]")
        if values.shape[1] > _MAX_VALUES:
            raise InvalidRequest(f"{name} has {values.shape[1]} values a row, at most {_MAX_VALUES} are accepted")
        row_values: list[Any] = values[row].tolist()
        return row_values

    def text(self, name: str, row: int) -> str | None:
        """The one string a row has of a tensor [batch, 1]."""
        value = self.scalar(name, row)
        return None if value is None else _decode(name, value)

    def texts(self, name: str, row: int) -> list[str]:
        """The strings a row has of a tensor [batch, n]; none if the tensor is absent."""
        return [_decode(name, value) for value in self.vector(name, row) or ()]

    def common(self, name: str, default: bool) -> bool:
        """The value of a tensor [batch, 1] in which all rows must agree."""
        if name not in self:
            return default
        values = {self.scalar(name, row) for row in range(self.num_rows(name))}
        if len(values) != 1:
            raise InvalidRequest(f"{name} is true and false; it must be the same in every row of a request")
        return bool(values.pop())

    def matrix(self, name: str) -> torch.Tensor:
        """The matrix of a tensor [1, rows, width] that is present, of any dtype; it shares the request's memory."""
        tensor = self._shared(name)
        if tensor.dim() != 3 or tensor.shape[0] != 1:
            raise InvalidRequest(
                f"Invalid shape for {name} tensor: {list(tensor.shape)}. Expected batch dimension to be 1: [1, rows, n]"
            )
        return tensor[0]

    def row_of_bytes(self, name: str) -> memoryview:
        """The bytes of a UINT8 tensor [1, n] that is present; they share the request's memory."""
        tensor = self._shared(name)
        if tensor.dim() != 2 or tensor.shape[0] != 1:
            raise InvalidRequest(
                f"Invalid shape for {name} tensor: {list(tensor.shape)}. Expected batch dimension to be 1: [1, bytes]"
            )
        return tensor[0].numpy().data

    def _shared(self, name: str) -> torch.Tensor:
        from torch.utils.dlpack import from_dlpack  # imported by the doors that take weights; the others do without

        tensor: torch.Tensor = from_dlpack(self._tensors[name].to_dlpack())
        return tensor


def _num_bytes(values: NDArray[Any]) -> int:
    return sum(map(len, values.flat)) if values.dtype == np.object_ else values.nbytes


def _decode(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{name} is not valid UTF-8: {error.reason} at byte {error.start}") from None
