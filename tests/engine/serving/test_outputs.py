from __future__ import annotations

import numpy as np
from support.fake_triton import OUTPUT_NAMES

from multilora_engine.request import TokenOutput
from multilora_engine.serving.outputs import ReplyRow, RowAnswer, output_arrays

FIRST = RowAnswer(0, [1, 2, 3], "aé", "stop", 1, 2, 2**64 - 1, "d1")
SECOND = RowAnswer(1, [4], "", "", 5, 0, 0, "")


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


def test_only_what_is_wanted_is_built() -> None:
    assert set(output_arrays([FIRST], {"text_output", "output_ids"}, 0)) == {"text_output", "output_ids"}
    assert output_arrays([FIRST], (), 0) == {}


def test_an_answer_without_tokens_is_an_empty_tensor() -> None:
    empty = ReplyRow().answer([], "", TokenOutput("r", [], "", finish_reason="stop"))
    assert output_arrays([empty], OUTPUT_NAMES, 0)["output_ids"].shape == (1, 1, 0)
