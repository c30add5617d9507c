from __future__ import annotations

import dataclasses

import numpy as np
from support.fake_triton import OUTPUT_NAMES

from multilora_engine.request import TokenOutput
from multilora_engine.serving.outputs import ReplyRow, RowAnswer, output_arrays

FIRST = RowAnswer(0, 0, [1, 2, 3], "aé", "stop", 1, 2, 2**64 - 1, "d1")
SECOND = RowAnswer(1, 0, [4], "", "", 5, 0, 0, "")


def test_every_output_has_the_shape_and_dtype_of_the_configuration() -> None:
    arrays = output_arrays([FIRST, SECOND], OUTPUT_NAMES, pad_id=9)
    assert arrays["output_ids"].tolist() == [[[1, 2, 3]], [[4, 9, 9]]]
    assert {name: array.tolist() for name, array in arrays.items() if name != "output_ids"} == {
        "sequence_length": [[3], [1]],
        "text_output": [["aé".encode()], [b""]],
        "finish_reason": [[b"stop"], [b""]],
        "num_input_tokens": [[1], [5]],
        "num_output_tokens": [[2], [0]],
        "sequence_index": [[0], [0]],
        "batch_index": [[0], [1]],
        "lora_task_id_out": [[2**64 - 1], [0]],
        "lora_digest": [[b"d1"], [b""]],
    }
    strings = {"text_output", "finish_reason", "lora_digest"}
    for name, array in arrays.items():
        assert array.dtype == (object if name in strings else np.uint64 if name == "lora_task_id_out" else np.int32)


def test_the_sequences_of_a_row_are_its_beams() -> None:
    rows = [dataclasses.replace(answer, sequence_index=i) for answer in (FIRST, SECOND) for i in range(3)]
    arrays = output_arrays(rows, OUTPUT_NAMES, pad_id=9, num_sequences=3)
    assert arrays["output_ids"].tolist() == [[[1, 2, 3]] * 3, [[4, 9, 9]] * 3]
    assert arrays["sequence_index"].tolist() == [[0, 1, 2]] * 2
    per_row = {"num_input_tokens", "batch_index", "lora_task_id_out", "lora_digest"}
    for name in OUTPUT_NAMES[1:]:
        assert arrays[name].shape == ((2, 1) if name in per_row else (2, 3))
    assert arrays["lora_digest"].tolist() == [[b"d1"], [b""]]


def test_only_what_is_wanted_is_built() -> None:
    assert set(output_arrays([FIRST], {"text_output", "output_ids"}, 0)) == {"text_output", "output_ids"}
    assert output_arrays([FIRST], (), 0) == {}


def test_an_answer_without_tokens_is_an_empty_tensor() -> None:
    empty = ReplyRow().answer([], "", TokenOutput("r", [], "", finish_reason="stop"))
    assert output_arrays([empty], OUTPUT_NAMES, 0)["output_ids"].shape == (1, 1, 0)
