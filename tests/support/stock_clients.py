"""The requests of TensorRT-LLM's own clients, and how they read the answers, written anew from their behaviour.

`inflight_batcher_llm_client.py` talks token ids to `tensorrt_llm`, `end_to_end_grpc_client.py` text to the ensemble,
and Triton's OpenAI front end text with a few options more.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import tritonclient.grpc as triton
from numpy.typing import NDArray
from tritonclient.utils import np_to_triton_dtype

from support.contract import response_misfits

TIMEOUT_S = 300.0
STREAMING_PARAMETER = "Streaming"
"""A request parameter that the token client sends along and that means nothing."""

Tensors = dict[str, NDArray[Any]]


def flag(value: bool = True) -> NDArray[np.bool_]:
    return np.array([[value]], np.bool_)


def integer(value: int) -> NDArray[np.int32]:
    return np.array([[value]], np.int32)


def real(value: float) -> NDArray[np.float32]:
    return np.array([[value]], np.float32)


def seed_of(value: int) -> NDArray[np.uint64]:
    return np.array([[value]], np.uint64)


def words(*items: str) -> NDArray[np.object_]:
    return np.array([[item.encode() for item in items]], np.object_)


def tensor(name: str, array: NDArray[Any]) -> triton.InferInput:
    made = triton.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
    made.set_data_from_numpy(array)
    return made


def inputs_of(tensors: Tensors) -> list[triton.InferInput]:
    """In the order of `tensors`."""
    return [tensor(name, array) for name, array in tensors.items()]


def token_request(
    input_ids: Sequence[int],
    output_len: int,
    streaming: bool,
    end_id: int = 2,
    pad_id: int = 2,
    **options: NDArray[Any],
) -> Tensors:
    """The ten tensors that the token client always sends, with its defaults, then those of its options."""
    return {
        "input_ids": np.array([input_ids], np.int32),
        "input_lengths": integer(len(input_ids)),
        "request_output_len": integer(output_len),
        "beam_width": integer(1),
        "temperature": real(1.0),
        "streaming": flag(streaming),
        "end_id": integer(end_id),
        "pad_id": integer(end_id),
        "runtime_top_k": integer(1),
        "runtime_top_p": real(0.0),
        **options,
    }


def stop_request() -> Tensors:
    """What the token client sends, under the request's own id, to end it: `stop`, and what the model requires."""
    return {
        "input_ids": np.empty([1, 0], np.int32),
        "input_lengths": np.zeros([1, 1], np.int32),
        "request_output_len": integer(0),
        "stop": flag(),
    }


def text_request(text: str, output_len: int, streaming: bool, **options: NDArray[Any]) -> Tensors:
    """The five tensors that the text client always sends, then those of its options."""
    return {
        "text_input": words(text),
        "max_tokens": integer(output_len),
        "stream": flag(streaming),
        "beam_width": integer(1),
        "temperature": real(1.0),
        **options,
    }


def openai_request(prompt: str, max_tokens: int, streaming: bool, **options: NDArray[Any]) -> Tensors:
    """What Triton's OpenAI front end makes of a chat or a completion."""
    return {
        "text_input": words(prompt),
        "stream": flag(streaming),
        "max_tokens": integer(max_tokens),
        "return_num_input_tokens": flag(),
        "return_num_output_tokens": flag(),
        **options,
    }


class Session:
    """One client of one server, as long as its stream is open. Errors are raised when they are read, and so are
    outputs of another type or shape than upstream's.
    """

    def __init__(self, client: triton.InferenceServerClient, model: str) -> None:
        self.client = client
        self._model = model
        self._is_streaming = False
        self._responses: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()

    def send(self, tensors: Tensors, request_id: str = "", outputs: Sequence[str] = ()) -> None:
        """One more request on the stream, which is opened before the first."""
        if not self._is_streaming:
            self.client.start_stream(self._on_response)
            self._is_streaming = True
        self.client.async_stream_infer(
            self._model,
            inputs_of(tensors),
            outputs=[triton.InferRequestedOutput(name) for name in outputs] or None,
            request_id=request_id,
            parameters={STREAMING_PARAMETER: True},
        )

    def next(self) -> Any:
        return _checked(self._model, *self._responses.get(timeout=TIMEOUT_S))

    def finish(self) -> list[Any]:
        """Let the server finish, as the clients do, and return all responses that have not been read."""
        self.client.stop_stream()
        results = []
        while not self._responses.empty():
            results.append(self.next())
        return results

    def _on_response(self, result: Any, error: Exception | None) -> None:
        self._responses.put((result, error))


@contextmanager
def session(url: str, model: str) -> Iterator[Session]:
    with triton.InferenceServerClient(url) as client:
        yield Session(client, model)


def stream(url: str, model: str, tensors: Tensors, outputs: Sequence[str] = ()) -> list[Any]:
    """All responses to one request."""
    with session(url, model) as opened:
        opened.send(tensors, outputs=outputs)
        return opened.finish()


def unary(url: str, model: str, tensors: Tensors, request_id: str = "", outputs: Sequence[str] = ()) -> Any:
    """The one response, by the call the token client uses without streaming."""
    responses: queue.SimpleQueue[tuple[Any, Exception | None]] = queue.SimpleQueue()
    with triton.InferenceServerClient(url) as client:
        client.async_infer(
            model,
            inputs_of(tensors),
            lambda result, error: responses.put((result, error)),
            outputs=[triton.InferRequestedOutput(name) for name in outputs] or None,
            request_id=request_id,
            parameters={STREAMING_PARAMETER: False},
        )
        return _checked(model, *responses.get(timeout=TIMEOUT_S))


def _checked(model: str, result: Any, error: Exception | None) -> Any:
    if error is not None:
        raise error
    assert not (misfits := response_misfits(result.get_response(), model)), misfits
    return result


def streamed_tokens(results: Sequence[Any]) -> list[int]:
    """As the token client joins a stream; a response of sequence length 0 says nothing."""
    tokens: list[int] = []
    for result in results:
        output_ids = result.as_numpy("output_ids")
        if output_ids is not None and result.as_numpy("sequence_length")[0][0] > 0:
            tokens += output_ids[0][0].tolist()
    return tokens


def whole_tokens(result: Any, num_input: int) -> list[int]:
    """As the token client reads one response: cut to its length, then without the prompt."""
    length = result.as_numpy("sequence_length")[0][0]
    tokens: list[int] = result.as_numpy("output_ids")[0][0][:length].tolist()
    return tokens[num_input:]


def text_of(results: Sequence[Any]) -> str:
    """As the text client joins what it gets: each element of the first dimension is a text of a beam."""
    texts = [result.as_numpy("text_output") for result in results]
    assert all(text.shape == (1,) for text in texts), [text.shape for text in texts]
    return "".join(text[0].decode() for text in texts)


def names_of(result: Any) -> set[str]:
    """Names of the outputs that a response carries."""
    return {output.name for output in result.get_response().outputs}
