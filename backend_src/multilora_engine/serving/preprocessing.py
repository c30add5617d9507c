"""The Python model `preprocessing`: the first step of the ensembles, from a text or a chat to token ids."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from multilora_engine.engine_info import EngineInfo
from multilora_engine.errors import InvalidRequest
from multilora_engine.serving.engine_link import EngineLink
from multilora_engine.serving.immediate_model import ImmediateModel
from multilora_engine.serving.inputs import InputTensors
from multilora_engine.serving.prompts import encode_messages, encode_text
from multilora_engine.serving.token_lists import read_word_biases, tokenize_words, write_sequences
from multilora_engine.serving.unsupported import refuse_unsupported
from multilora_engine.text.tokenizer import Tokenizer

_Value = TypeVar("_Value")


class PreprocessingModel(ImmediateModel):
    """`preprocess` over the engine's tokenizer."""

    def answer(self, inputs: InputTensors, link: EngineLink) -> dict[str, NDArray[Any]]:
        return preprocess(inputs, *link.describe())


def preprocess(inputs: InputTensors, info: EngineInfo, tokenizer: Tokenizer) -> dict[str, NDArray[Any]]:
    """The outputs by name. INPUT_ID is [rows, longest prompt], REQUEST_INPUT_LEN tells each row's own length.

    REQUEST_OUTPUT_LEN passes through; OUT_END_ID and OUT_PAD_ID
    default to the tokenizer's. BAD_WORDS_IDS and STOP_WORDS_IDS are [rows, 2, n] and EMBEDDING_BIAS is [rows, n], all
    with n 0 where there are no words. DECODER_INPUT_ID is one pad token a row, as upstream's for models without an
    encoder: an empty tensor that goes through an HTTP client comes back as FP64. Raises InvalidRequest, and Unsupported
    for inputs that this server has no use for.
    """
    refuse_unsupported(inputs)
    prompts = _read_prompts(inputs, info, tokenizer)
    end_id = next(iter(info.end_token_ids), -1) if tokenizer.eos_id is None else tokenizer.eos_id
    pad_id = end_id if tokenizer.pad_id is None else tokenizer.pad_id
    lengths = [len(prompt) for prompt in prompts]
    input_ids = np.full((len(prompts), max(lengths)), max(pad_id, 0), np.int32)
    for row, prompt in zip(input_ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    rows = range(len(prompts))
    pad_ids = _column([_default(inputs.scalar("PAD_ID", row), pad_id) for row in rows])
    arrays: dict[str, NDArray[Any]] = {
        "INPUT_ID": input_ids,
        "REQUEST_INPUT_LEN": _column(lengths),
        "BAD_WORDS_IDS": _tokenize_words(inputs, "BAD_WORDS_DICT", len(prompts), info, tokenizer),
        "STOP_WORDS_IDS": _tokenize_words(inputs, "STOP_WORDS_DICT", len(prompts), info, tokenizer),
        "EMBEDDING_BIAS": _embedding_bias(inputs, len(prompts), info, tokenizer),
        "OUT_END_ID": _column([_default(inputs.scalar("END_ID", row), end_id) for row in rows]),
        "OUT_PAD_ID": pad_ids,
        "DECODER_INPUT_ID": pad_ids,
        "REQUEST_DECODER_INPUT_LEN": _column([1] * len(prompts)),
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
    default = info.add_special_tokens if present == ["QUERY"] else False
    adds_special = [_default(inputs.scalar("ADD_SPECIAL_TOKENS", row), default) for row in rows]
    if present == ["QUERY"]:
        return [encode_text(inputs.text("QUERY", row) or "", tokenizer, info, adds_special[row]) for row in rows]
    return [encode_messages(inputs.text("MESSAGES", row) or "", tokenizer, info, adds_special[row]) for row in rows]


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
