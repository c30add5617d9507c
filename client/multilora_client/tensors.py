"""Tensors on their way to and from Triton, as the raw bytes that gRPC and binary HTTP carry alike.

tritonclient's InferInput is passed by on purpose: it takes bfloat16 only as float32, element by element in Python
(0.3 s per million).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tritonclient.utils import deserialize_bytes_tensor, np_to_triton_dtype, serialize_byte_tensor, triton_to_np_dtype

from multilora_client.adapter import AdapterFiles, AdapterTensors

_WEIGHTS_INPUTS = {"FP16": "lora_weights", "BF16": "lora_weights_bf16", "FP32": "lora_weights_fp32"}


@dataclass(frozen=True)
class Tensor:
    """A tensor with Triton's name of its type (`INT32`, `BYTES`, ...) and its bytes as Triton lays them out."""

    datatype: str
    shape: tuple[int, ...]
    data: bytes


def numeric_tensor(values: Any, dtype: type[np.generic], shape: tuple[int, ...] = (1, -1)) -> Tensor:
    """A scalar as `[1, 1]`, a list as `[1, n]`: every model has a leading batch dimension. Or in another `shape`.

    Raises OverflowError, ValueError or TypeError for values that `dtype` does not hold; NumPy itself would wrap them.
    """
    given = np.asarray(values)
    if given.dtype == object and all(isinstance(value, int) for value in given.flat):  # none of NumPy's holds it
        raise OverflowError(f"{values} is not in the range of {np.dtype(dtype)}")
    array = given.astype(dtype).reshape(shape)
    if np.issubdtype(dtype, np.integer) and not np.array_equal(array, given.reshape(shape)):
        raise OverflowError(f"{values} is not in the range of {array.dtype}")
    return Tensor(np_to_triton_dtype(array.dtype), array.shape, array.tobytes())


def string_tensor(values: Sequence[str]) -> Tensor:
    """Strings as `[1, n]`, in UTF-8."""
    array = np.array([value.encode() for value in values], np.object_).reshape(1, -1)
    return Tensor("BYTES", array.shape, serialize_byte_tensor(array).item())


def adapter_tensors(content: AdapterFiles | AdapterTensors) -> dict[str, Tensor]:
    """The inputs that carry an adapter. Triton fixes one type per input, so each type of weights has its own."""
    use = {"lora_use": _bytes_tensor(content.use)} if content.use else {}
    if isinstance(content, AdapterFiles):
        weights = Tensor("UINT8", (1, len(content.weights)), content.weights)
        return {"lora_peft_config": _bytes_tensor(content.config), "lora_peft_weights": weights} | use
    weights = Tensor(content.dtype, (1, *content.weights.shape), content.weights.tobytes())
    rows = Tensor("INT32", (1, *content.config.shape), content.config.tobytes())
    return {_WEIGHTS_INPUTS[content.dtype]: weights, "lora_config": rows} | use


def _bytes_tensor(content: bytes) -> Tensor:
    """One string of any bytes, as `[1, 1]`."""
    array = np.array([[content]], np.object_)
    return Tensor("BYTES", array.shape, serialize_byte_tensor(array).item())


def flat_values(datatype: str, data: bytes) -> Sequence[Any]:
    """The elements of a tensor in row-major order, strings decoded; float32 stays an array, for logits are large."""
    if datatype == "BYTES":
        return [value.decode("utf-8", "replace") for value in deserialize_bytes_tensor(data)]
    values = np.frombuffer(data, triton_to_np_dtype(datatype))
    return values if datatype == "FP32" else values.tolist()  # type: ignore[return-value]
