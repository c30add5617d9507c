"""The Python model `postprocessing`: from tokens to text, for those who ask it directly.

It must have one instance only: several would overtake each other and put the pieces of a stream out of order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from multilora_engine.errors import InvalidRequest
from multilora_engine.serving.engine_link import EngineLink
from multilora_engine.serving.immediate_model import ImmediateModel
from multilora_engine.serving.inputs import InputTensors
from multilora_engine.text.tokenizer import Tokenizer


class PostprocessingModel(ImmediateModel):
    """Stateless: nothing is remembered between the pieces of a stream."""

    def answer(self, inputs: InputTensors, link: EngineLink) -> dict[str, NDArray[Any]]:
        # Without a batch dimension, as upstream has it: its clients decode the elements of the first one.
        return {"OUTPUT": decode(inputs, link.describe()[1]).reshape(-1)}


def decode(inputs: InputTensors, tokenizer: Tokenizer) -> NDArray[np.object_]:
    """The text of TOKENS_BATCH [rows, beams, n], each beam cut to its SEQUENCE_LENGTH [rows, beams]: [rows, beams].

    Raises InvalidRequest.
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
        texts[index] = tokenizer.decode(tokens[index][: lengths[index]].tolist()).encode()
    return texts
