from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from support.fake_triton import FakeRequest, answer_of

from multilora_engine.errors import InvalidRequest
from multilora_engine.request import Sender
from multilora_engine.serving.immediate_model import PostprocessingModel, decode
from multilora_engine.serving.inputs import InputTensors
from multilora_engine.serving.senders import Rights
from multilora_engine.text.tokenizer import Tokenizer


@dataclass
class DescribedLink:
    """An engine's link that knows its tokenizer."""

    tokenizer: Tokenizer

    def rights(self, request: FakeRequest) -> Rights:
        return Rights(Sender(), min_priority=0)

    def describe(self) -> tuple[None, Tokenizer]:
        return None, self.tokenizer


def tokens_batch(tokenizer: Tokenizer, texts: list[list[str]]) -> tuple[np.ndarray, np.ndarray]:
    rows = [[tokenizer.encode(text, add_special_tokens=False) for text in beams] for beams in texts]
    lengths = np.array([[len(beam) for beam in beams] for beams in rows], np.int32)
    tokens = np.full((*lengths.shape, lengths.max() + 2), 7, np.int32)
    for index in np.ndindex(*lengths.shape):
        tokens[index][: lengths[index]] = rows[index[0]][index[1]]
    return tokens, lengths


def test_each_beam_of_each_row_is_decoded_to_its_own_length(tokenizer: Tokenizer) -> None:
    texts = [["Grüße", "", "a b  c"], ["\n\n", "日本語", "x"]]
    tokens, lengths = tokens_batch(tokenizer, texts)
    tensors = InputTensors(FakeRequest({"TOKENS_BATCH": tokens, "SEQUENCE_LENGTH": lengths}))
    assert [[text.decode() for text in row] for row in decode(tensors, tokenizer)] == texts


@pytest.mark.parametrize(
    ("shape", "lengths"), [((1, 1, 3), [[4]]), ((1, 1, 3), [[-1]]), ((1, 2, 3), [[1]]), ((1, 3), [[1]])]
)
def test_lengths_that_do_not_fit_are_refused(tokenizer: Tokenizer, shape: tuple[int, ...], lengths: Any) -> None:
    tensors = {"TOKENS_BATCH": np.zeros(shape, np.int32), "SEQUENCE_LENGTH": np.array(lengths, np.int32)}
    with pytest.raises(InvalidRequest, match="does not fit TOKENS_BATCH"):
        decode(InputTensors(FakeRequest(tensors)), tokenizer)


def test_the_texts_of_all_rows_and_beams_have_one_dimension(tokenizer: Tokenizer) -> None:
    tokens, lengths = tokens_batch(tokenizer, [["a", "b"], ["c", "d"]])
    request = FakeRequest({"TOKENS_BATCH": tokens, "SEQUENCE_LENGTH": lengths}, output_names=("OUTPUT",))
    response = answer_of(PostprocessingModel(), DescribedLink(tokenizer), request)
    assert response.arrays["OUTPUT"].tolist() == [b"a", b"b", b"c", b"d"]
