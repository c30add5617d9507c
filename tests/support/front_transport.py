"""Our client's transport into fronts of this process: what goes between them as tensors, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from tritonclient.utils import triton_to_np_dtype

from multilora_client import InferRequest, Response
from multilora_client.errors import parse_error
from multilora_client.tensors import Tensor, flat_values
from support.fake_triton import FakeRequest, FakeResponse

Accept = Callable[[FakeRequest], Any]
"""Of a front: takes a request and answers later."""


def handler(fronts: dict[str, Accept]) -> Callable[[InferRequest], Iterator[Response]]:
    """What a MockTransport answers by. fronts: by the names of their models."""

    def answer(request: InferRequest) -> Iterator[Response]:
        fake = FakeRequest(
            {name: _array(tensor) for name, tensor in request.inputs.items()},
            id=request.request_id,
            headers={name.lower(): value for name, value in request.headers.items()},
            **({"output_names": ("response",)} if request.model == "adapters" else {}),
        )
        fronts[request.model](fake)
        responses = fake.sender.wait()
        for i, response in enumerate(responses):
            yield _response(response, is_final=i == len(responses) - 1)

    return answer


def _array(tensor: Tensor) -> Any:
    if tensor.datatype == "BYTES":
        values = [value.encode() for value in flat_values(tensor.datatype, tensor.data)]
        return np.array(values, object).reshape(tensor.shape)
    return np.frombuffer(tensor.data, triton_to_np_dtype(tensor.datatype)).reshape(tensor.shape)


def _response(response: FakeResponse, is_final: bool) -> Response:
    if response.error is not None:
        raise parse_error(response.error.message)
    return Response({name: _values(array) for name, array in response.arrays.items()}, is_final)


def _values(array: Any) -> list[Any]:
    return [value.decode() if isinstance(value, bytes) else value for value in array.reshape(-1).tolist()]
