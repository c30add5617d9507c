"""The Python model `preprocessing`: the first step of the ensembles, from a text or a chat to token ids."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from multilora_engine.engine_info import EngineInfo
from multilora_engine.errors import InvalidRequest
from multilora_engine.serving.engine_link import EngineLink
from multilora_engine.serving.immediate_model import ImmediateModel
from multilora_engine.serving.inputs import InputTensors
from multilora_engine.serving.prompts import encode_messages, encode_text
from multilora_engine.text import Tokenizer


class PreprocessingModel(ImmediateModel):
    """`preprocess` over the engine's tokenizer."""

    def answer(self, inputs: InputTensors, link: EngineLink) -> dict[str, NDArray[Any]]:
        return preprocess(inputs, *link.describe())


def preprocess(inputs: InputTensors, info: EngineInfo, tokenizer: Tokenizer) -> dict[str, NDArray[Any]]:
    """The outputs by name. INPUT_ID is [rows, longest prompt], REQUEST_INPUT_LEN tells each row's own length.

    IS_ENSEMBLE_STEP tells the next step that it is one. REQUEST_OUTPUT_LEN passes through; OUT_END_ID and OUT_PAD_ID
    default to the tokenizer's. Raises InvalidRequest.
    """
    prompts = _read_prompts(inputs, info, tokenizer)
    end_id = next(iter(info.end_token_ids), -1) if tokenizer.eos_id is None else tokenizer.eos_id
    pad_id = end_id if tokenizer.pad_id is None else tokenizer.pad_id
    lengths = [len(prompt) for prompt in prompts]
    input_ids = np.full((len(prompts), max(lengths)), max(pad_id, 0), np.int32)
    for row, prompt in zip(input_ids, prompts, strict=True):
        row[: len(prompt)] = prompt
    arrays: dict[str, NDArray[Any]] = {
        "INPUT_ID": input_ids,
        "REQUEST_INPUT_LEN": _column(lengths),
        "IS_ENSEMBLE_STEP": np.ones((len(prompts), 1), bool),
        "OUT_END_ID": _column([_default(inputs.scalar("END_ID", row), end_id) for row in range(len(prompts))]),
        "OUT_PAD_ID": _column([_default(inputs.scalar("PAD_ID", row), pad_id) for row in range(len(prompts))]),
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
    if present == ["QUERY"]:
        return [encode_text(inputs.text("QUERY", row) or "", tokenizer, info.add_special_tokens) for row in rows]
    return [encode_messages(inputs.text("MESSAGES", row) or "", tokenizer) for row in rows]


def _default(value: int | None, default: int) -> int:
    return default if value is None else value


def _column(values: list[int]) -> NDArray[np.int32]:
    return np.array(values, np.int32)[:, None]
