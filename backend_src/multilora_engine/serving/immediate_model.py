"""Python models that answer each request by themselves, from the request and the tokenizer alone.

`preprocessing` is the first step of the ensembles: from a text or a chat to token ids. `postprocessing` makes text of
tokens for those who ask it directly. It must have one instance: several would overtake each other and put the pieces of
a stream out of order.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import partial
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from multilora_engine.engine_info import EngineInfo
from multilora_engine.errors import InternalError, InvalidRequest, RequestError
from multilora_engine.process.paths import socket_path
from multilora_engine.serving.front import EngineLink, give_back_free_memory
from multilora_engine.serving.inputs import InputTensors
from multilora_engine.serving.ordered_jobs import (
    LONG_JOB_THREADS,
    LONG_JOBS_OF_AN_OWNER,
    LONG_REQUEST_BYTES,
    MANY_BYTES,
    OrderedJobs,
)
from multilora_engine.serving.token_lists import (
    encode_beginning,
    encode_messages,
    encode_text,
    read_word_biases,
    tokenize_words,
    write_sequences,
)
from multilora_engine.serving.triton_api import (
    ResponseSender,
    TritonRequest,
    backend_utils,
    error_response,
    prepare_stub,
    request_id_of,
)
from multilora_engine.serving.unsupported import refuse_unsupported
from multilora_engine.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class ImmediateModel(ABC):
    """Base of `preprocessing` and `postprocessing`. One response a request; none waits for a long one of another."""

    def initialize(self, args: Mapping[str, str]) -> None:
        prepare_stub(args["model_name"])
        self._link = EngineLink(socket_path(os.getppid()))
        self._jobs = OrderedJobs(LONG_JOB_THREADS, "long-requests", LONG_JOBS_OF_AN_OWNER)

    def execute(self, requests: list[TritonRequest]) -> None:
        for request in requests:
            sender = request.get_response_sender()
            try:
                owner = self._link.rights(request).sender.name
                inputs = InputTensors(request)
                answer = partial(self._send_answer, request, inputs, sender)
                self._jobs.submit((), answer, inputs.num_bytes > LONG_REQUEST_BYTES, owner)
            except Exception as error:
                self._send(sender, _failure(error, request))

    def finalize(self) -> None:
        self._jobs.close()
        self._link.close()

    def _send_answer(self, request: TritonRequest, inputs: InputTensors, sender: ResponseSender) -> None:
        """An error of one request is its own answer: an exception would fail the batch, without a code."""
        self._answer(request, inputs, sender)
        if inputs.num_bytes > MANY_BYTES:
            give_back_free_memory()

    def _answer(self, request: TritonRequest, inputs: InputTensors, sender: ResponseSender) -> None:
        try:
            arrays = self.answer(inputs, self._link)
            pb, wanted = backend_utils(), request.requested_output_names()
            tensors = [pb.Tensor(name, array) for name, array in arrays.items() if name in wanted]
            self._send(sender, pb.InferenceResponse(tensors))
        except Exception as error:
            self._send(sender, _failure(error, request))

    def _send(self, sender: ResponseSender, response: Any) -> None:
        """Only one thread of a stub may send: the client's."""
        final = backend_utils().TRITONSERVER_RESPONSE_COMPLETE_FINAL
        self._link.client.call_soon(partial(sender.send, response, final))

    @abstractmethod
    def answer(self, inputs: InputTensors, link: EngineLink) -> dict[str, NDArray[Any]]:
        """The output tensors by name. Raises RequestError."""


def _failure(error: Exception, request: TritonRequest) -> Any:
    """The response to a request that went wrong."""
    if isinstance(error, RequestError):
        return error_response(error, request_id_of(request))
    logger.exception("request %s failed", request_id_of(request), exc_info=error)
    return error_response(InternalError(f"{type(error).__name__}: {error}"), request_id_of(request))


_Value = TypeVar("_Value")


class PreprocessingModel(ImmediateModel):
    """`preprocess` over the engine's tokenizer."""

    def answer(self, inputs: InputTensors, link: EngineLink) -> dict[str, NDArray[Any]]:
        return preprocess(inputs, *link.describe())


def preprocess(inputs: InputTensors, info: EngineInfo, tokenizer: Tokenizer) -> dict[str, NDArray[Any]]:
    """The outputs by name. INPUT_ID is [rows, longest prompt], REQUEST_INPUT_LEN tells each row's own length.

    REQUEST_OUTPUT_LEN passes through; OUT_END_ID and OUT_PAD_ID
    default to the tokenizer's. BAD_WORDS_IDS and STOP_WORDS_IDS are [rows, 2, n] and EMBEDDING_BIAS is [rows, n], all
    with n 0 where there are no words. DECODER_INPUT_ID is the beginning of the answer that a request to a model with an
    encoder gives, and otherwise one pad token a row, as upstream's: an empty tensor that goes through an HTTP client
    comes back as FP64. Of chats that an adapter answers, REQUEST_INPUT_LEN is 0: the generation model writes them, by
    the use of the version that answers. Raises InvalidRequest, and Unsupported for inputs that this server has no use
    for.
    """
    refuse_unsupported(inputs, info.source is not None)
    prompts = _read_prompts(inputs, info, tokenizer)
    end_id = next(iter(info.end_token_ids), -1) if tokenizer.eos_id is None else tokenizer.eos_id
    pad_id = end_id if tokenizer.pad_id is None else tokenizer.pad_id
    rows = range(len(prompts))
    pad_ids = [_default(inputs.scalar("PAD_ID", row), pad_id) for row in rows]
    beginnings = _read_beginnings(inputs, pad_ids, info, tokenizer)
    arrays: dict[str, NDArray[Any]] = {
        "INPUT_ID": _rows(prompts, max(pad_id, 0)),
        "REQUEST_INPUT_LEN": _column([len(prompt) for prompt in prompts]),
        "BAD_WORDS_IDS": _tokenize_words(inputs, "BAD_WORDS_DICT", len(prompts), info, tokenizer),
        "STOP_WORDS_IDS": _tokenize_words(inputs, "STOP_WORDS_DICT", len(prompts), info, tokenizer),
        "EMBEDDING_BIAS": _embedding_bias(inputs, len(prompts), info, tokenizer),
        "OUT_END_ID": _column([_default(inputs.scalar("END_ID", row), end_id) for row in rows]),
        "OUT_PAD_ID": _column(pad_ids),
        "DECODER_INPUT_ID": _rows(beginnings, max(pad_id, 0)),
        "REQUEST_DECODER_INPUT_LEN": _column([len(beginning) for beginning in beginnings]),
        "OUT_PROMPT_TABLE_EXTRA_IDS": np.empty((len(prompts), 0), np.uint64),
    }
    if "REQUEST_OUTPUT_LEN" in inputs:
        arrays["REQUEST_OUTPUT_LEN"] = inputs.array("REQUEST_OUTPUT_LEN")
    return arrays


def _read_prompts(inputs: InputTensors, info: EngineInfo, tokenizer: Tokenizer) -> list[list[int]]:
    present = inputs.present("QUERY", "MESSAGES")
    if len(present) != 1:
        raise InvalidRequest(
            f"a request needs either text_input or messages; it has {'both' if present else 'neither'}"
        )
    rows = range(inputs.num_rows(present[0]))
    if present == ["MESSAGES"] and inputs.present("LORA_TASK_ID", "LORA_NAME"):
        return [[] for _ in rows]
    default = info.add_special_tokens if present == ["QUERY"] else False
    adds_special = [_default(inputs.scalar("ADD_SPECIAL_TOKENS", row), default) for row in rows]
    if present == ["QUERY"]:
        return [encode_text(inputs.text("QUERY", row) or "", tokenizer, info, adds_special[row]) for row in rows]
    return [encode_messages(inputs.text("MESSAGES", row) or "", tokenizer, info, adds_special[row]) for row in rows]


def _read_beginnings(
    inputs: InputTensors, pad_ids: list[int], info: EngineInfo, tokenizer: Tokenizer
) -> list[list[int]]:
    """The tokens of DECODER_QUERY, of each row; one pad token where there is no text, which means that."""
    if info.source is not None:
        pad_ids = [info.source.pad_token_id] * len(pad_ids)
    texts = [inputs.text("DECODER_QUERY", row) or "" for row in range(len(pad_ids))]
    return [
        (encode_beginning("DECODER_QUERY", text, tokenizer, info) if text else []) or [pad_id]
        for text, pad_id in zip(texts, pad_ids, strict=True)
    ]


def _rows(rows: list[list[int]], fill: int) -> NDArray[np.int32]:
    """[rows, longest row], filled up."""
    array = np.full((len(rows), max(1, *map(len, rows))), fill, np.int32)
    for target, row in zip(array, rows, strict=True):
        target[: len(row)] = row
    return array


def _tokenize_words(
    inputs: InputTensors, name: str, num_rows: int, info: EngineInfo, tokenizer: Tokenizer
) -> NDArray[np.int32]:
    return write_sequences([tokenize_words(inputs, name, row, tokenizer, info.limits) for row in range(num_rows)])


def _embedding_bias(inputs: InputTensors, num_rows: int, info: EngineInfo, tokenizer: Tokenizer) -> NDArray[np.float32]:
    names = ("EMBEDDING_BIAS_WORDS", "EMBEDDING_BIAS_WEIGHTS")
    biases = [read_word_biases(inputs, *names, row, tokenizer, info.limits) for row in range(num_rows)]
    values = np.zeros((num_rows, tokenizer.vocab_size if inputs.present(*names) else 0), np.float32)
    for target, bias in zip(values, biases, strict=True):
        for token_id, weight in bias.items():
            target[token_id] = weight
    return values


def _default(value: _Value | None, default: _Value) -> _Value:
    return default if value is None else value


def _column(values: list[int]) -> NDArray[np.int32]:
    return np.array(values, np.int32)[:, None]


class PostprocessingModel(ImmediateModel):
    """Stateless: nothing is remembered between the pieces of a stream."""

    def answer(self, inputs: InputTensors, link: EngineLink) -> dict[str, NDArray[Any]]:
        # Without a batch dimension, as upstream has it: its clients decode the elements of the first one.
        return {"OUTPUT": decode(inputs, *link.describe()).reshape(-1)}


def decode(inputs: InputTensors, info: EngineInfo, tokenizer: Tokenizer) -> NDArray[np.object_]:
    """The text of TOKENS_BATCH [rows, beams, n], each beam cut to its SEQUENCE_LENGTH [rows, beams]: [rows, beams].

    Tokens from a decoder's start token on are a text that continues no other. Raises InvalidRequest.
    """
    tokens, lengths = inputs.array("TOKENS_BATCH"), inputs.array("SEQUENCE_LENGTH")
    if (
        tokens.ndim != 3
        or lengths.shape != tokens.shape[:2]
        or not ((lengths >= 0) & (lengths <= tokens.shape[2])).all()
    ):
        raise InvalidRequest(
            f"SEQUENCE_LENGTH {lengths.tolist()} does not fit TOKENS_BATCH of shape {list(tokens.shape)}; expected a "
            "length for each beam"
        )
    texts = np.empty(lengths.shape, np.object_)
    for index in np.ndindex(*lengths.shape):
        token_ids = tokens[index][: lengths[index]].tolist()
        is_start = info.source is not None and token_ids[:1] == [info.source.decoder_start_token_id]
        texts[index] = tokenizer.decode(token_ids, is_start).encode()
    return texts
