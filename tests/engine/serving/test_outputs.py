"""The values of the outputs about a prompt."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray
from support.fake_triton import LOG_PROB_NAMES, OUTPUT_NAMES, PERF_NAMES

from multilora_engine.request import PerfMetrics, TokenLogProb, TokenOutput
from multilora_engine.sequences.prompt_log_probs import PromptLogProbs
from multilora_engine.serving.outputs import OutputColumns, PromptAnswer, PromptTokens, ReplyRow, RowAnswer
from multilora_engine.text.tokenizer import Tokenizer

LOGITS_NAMES = {"top_log_prob_ids", "top_log_probs", "output_tokens", "context_logits", "generation_logits"}
FIRST = RowAnswer(
    0, 0, [1, 2, 3], "aé", "stop", 1, 2, 2**64 - 1, "d1", "v7", num_output_tokens_so_far=7, stop_id="ab12"
)
SECOND = RowAnswer(1, 0, [4], "", "", 5, 0, 0, "")


def output_arrays(
    answers: Sequence[RowAnswer], names: Collection[str], pad_id: int, num_sequences: int = 1
) -> dict[str, NDArray[Any]]:
    columns = OutputColumns(names)
    plain = columns.plain_values(answers)
    return {name: columns.plain_array(name, values, num_sequences) for name, values in plain.items()} | (
        columns.other_arrays(answers, pad_id, num_sequences)
    )


def test_every_output_has_the_shape_and_dtype_of_the_configuration() -> None:
    arrays = output_arrays([FIRST, SECOND], OUTPUT_NAMES, pad_id=9)
    assert arrays["output_ids"].tolist() == [[[1, 2, 3]], [[4, 9, 9]]]
    assert {name: array.tolist() for name, array in arrays.items() if name != "output_ids"} == {
        "sequence_length": [[3], [1]],
        "text_output": [["aé".encode()], [b""]],
        "finish_reason": [[b"stop"], [b""]],
        "num_input_tokens": [[1], [5]],
        "num_output_tokens": [[2], [0]],
        "num_cached_tokens": [[0], [0]],
        "num_output_tokens_so_far": [[7], [0]],
        "stop_id": [[b"ab12"], [b""]],
        "sequence_index": [[0], [0]],
        "batch_index": [[0], [1]],
        "lora_task_id_out": [[2**64 - 1], [0]],
        "lora_digest": [[b"d1"], [b""]],
        "lora_name_out": [[b"v7"], [b""]],
    }
    strings = {"text_output", "finish_reason", "lora_digest", "lora_name_out", "stop_id"}
    for name, array in arrays.items():
        assert array.dtype == (object if name in strings else np.uint64 if name == "lora_task_id_out" else np.int32)


def test_the_sequences_of_a_row_are_its_beams() -> None:
    told = {"log_probs": [], "perf": PerfMetrics()}
    rows = [msgspec.structs.replace(answer, sequence_index=i, **told) for answer in (FIRST, SECOND) for i in range(3)]
    arrays = output_arrays(rows, OUTPUT_NAMES, pad_id=9, num_sequences=3)
    assert arrays["output_log_probs"].shape == (2, 3, 0)
    assert arrays["output_ids"].tolist() == [[[1, 2, 3]] * 3, [[4, 9, 9]] * 3]
    assert arrays["sequence_index"].tolist() == [[0], [0]]
    assert arrays["num_output_tokens"].tolist() == [[6], [0]]
    per_row = {"num_input_tokens", "num_cached_tokens", "num_output_tokens", "sequence_index"}
    per_row |= {"batch_index", "lora_task_id_out", "lora_digest", "lora_name_out"}
    for name in {*OUTPUT_NAMES} - {"output_ids", "output_log_probs", "flat_text_output"}:
        assert arrays[name].shape == ((2, 1) if name in per_row else (2, 3))
    assert arrays["lora_digest"].tolist() == [[b"d1"], [b""]]


def test_a_row_tells_whether_its_prompt_opens_the_thinking_where_any_does() -> None:
    rows = [msgspec.structs.replace(answer, thinking_is_open=answer is SECOND) for answer in (FIRST, SECOND)]
    (array,) = output_arrays([row for row in rows for _ in range(2)], {"thinking_is_open"}, 0, 2).values()
    assert (array.tolist(), array.dtype) == ([[False], [True]], bool)
    assert not output_arrays([FIRST, SECOND], {"thinking_is_open"}, 0)


@pytest.mark.parametrize(("name", "has_flat_text"), [("flat_text_output", False), ("text_output", True)])
def test_flat_text_has_a_text_for_each_row_and_sequence_and_no_batch_dimension(name: str, has_flat_text: bool) -> None:
    columns = OutputColumns({name, "finish_reason"}, has_flat_text)
    assert columns.has_text
    values = columns.plain_values([FIRST, SECOND, SECOND, FIRST])
    arrays = {each: columns.plain_array(each, values[each], num_sequences=2) for each in values}
    assert arrays[name].tolist() == ["aé".encode(), b"", b"", "aé".encode()]
    assert arrays["finish_reason"].tolist() == [[b"stop", b""], [b"", b"stop"]]


@pytest.mark.parametrize("has_flat_text", [False, True])
def test_a_response_has_its_text_once(has_flat_text: bool) -> None:
    columns = OutputColumns({"text_output", "flat_text_output"}, has_flat_text)
    assert columns.has_text
    assert set(columns.plain_values([FIRST])) == {"text_output"}
    assert not OutputColumns({"output_ids"}, has_flat_text).has_text


def test_only_what_is_wanted_is_built() -> None:
    assert set(output_arrays([FIRST], {"text_output", "output_ids"}, 0)) == {"text_output", "output_ids"}
    assert output_arrays([FIRST], (), 0) == {}


def test_an_answer_without_tokens_is_an_empty_tensor() -> None:
    empty = ReplyRow().answer(TokenOutput("r", [], "", finish_reason="stop", num_prompt_tokens=1))
    assert output_arrays([empty], OUTPUT_NAMES, 0)["output_ids"].shape == (1, 1, 0)


def test_log_probs_and_times_are_there_when_the_rows_have_them() -> None:
    perf = PerfMetrics(2**60, 2**60 + 1, 2**60 + 2, 2**60 + 3, 9, 8, 1)
    rows = [
        RowAnswer(0, 0, [1, 2], "a", "stop", 1, 2, 0, "", cum_log_prob=-0.75, log_probs=[-0.5, -0.25], perf=perf),
        RowAnswer(1, 0, [3], "b", "stop", 1, 1, 0, "", cum_log_prob=-2.0, log_probs=[-2.0], perf=PerfMetrics()),
    ]
    arrays = output_arrays(rows, {*LOG_PROB_NAMES, *PERF_NAMES}, pad_id=9)
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "cum_log_probs": [[-0.75], [-2.0]],
        "output_log_probs": [[[-0.5, -0.25]], [[-2.0, 0.0]]],
        "arrival_time_ns": [[2**60], [0]],
        "first_scheduled_time_ns": [[2**60 + 1], [0]],
        "first_token_time_ns": [[2**60 + 2], [0]],
        "last_token_time_ns": [[2**60 + 3], [0]],
        "kv_cache_alloc_total_blocks": [[9], [0]],
        "kv_cache_alloc_new_blocks": [[8], [0]],
        "kv_cache_reused_blocks": [[1], [0]],
        "acceptance_rate": [[0], [0]],
        "total_accepted_draft_tokens": [[0], [0]],
        "total_draft_tokens": [[0], [0]],
    }
    dtypes = {name: str(array.dtype) for name, array in arrays.items()}
    assert dtypes.pop("acceptance_rate") == "float32"
    assert dtypes == {
        name: "float32" if "log" in name else "int64" if name.endswith("_ns") else "int32" for name in dtypes
    }


def test_logits_and_top_log_probs_are_filled_up_to_the_longest() -> None:
    row = ReplyRow(
        returns_log_probs=True,
        returns_top_log_probs=True,
        returns_generation_logits=True,
        vocab_size=3,
        token_bytes=lambda token_id: bytes([0xF0 + token_id]),
    )
    logits = np.arange(12, dtype=np.float32).reshape(4, 3)
    top = [TokenLogProb(-1.0, ((7, -1.0), (8, -2.0))), TokenLogProb(-3.0, ((9, -0.5), (7, -3.0)))]
    outputs = [
        TokenOutput("a", [1, 2], "x", log_probs=top, generation_logits=logits[:2].tobytes()),
        TokenOutput("b", [3], "y", log_probs=top[:1], generation_logits=logits[2:3].tobytes()),
    ]
    answers = [row.answer(output, context_logits=logits[: i + 2]) for i, output in enumerate(outputs)]
    arrays = output_arrays(answers, LOGITS_NAMES, 0)
    zeros = [0.0] * 3
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "top_log_prob_ids": [[[[7, 8], [9, 7]]], [[[7, 8], [0, 0]]]],
        "top_log_probs": [[[[-1.0, -2.0], [-0.5, -3.0]]], [[[-1.0, -2.0], [0.0, 0.0]]]],
        "output_tokens": [
            [[["ñ".encode(), "÷".encode(), "ø".encode()], ["ò".encode(), "ù".encode(), "÷".encode()]]],
            [[["ó".encode(), "÷".encode(), "ø".encode()], [b""] * 3]],
        ],
        "context_logits": [[*logits[:2].tolist(), zeros], logits[:3].tolist()],
        "generation_logits": [[logits[:2].tolist()], [[logits[2].tolist(), zeros]]],
    }
    assert {name: str(array.dtype) for name, array in arrays.items()} == {
        name: {"top_log_prob_ids": "int32", "output_tokens": "object"}.get(name, "float32") for name in LOGITS_NAMES
    }
    assert output_arrays([FIRST], LOGITS_NAMES, 0) == {}


def prompt_answer(prompt: list[int], num_top: int) -> PromptAnswer:
    log_probs = PromptLogProbs(len(prompt), num_top)
    rest = np.array(prompt[1:])
    tops = np.repeat(rest[:, None], num_top, axis=1)
    log_probs.append(-rest, -tops, tops)
    return PromptTokens(prompt, num_top, lambda token_id: bytes([token_id])).answer(log_probs.to_bytes())


def test_what_is_told_of_prompts_is_of_each_row_filled_up_to_the_longest() -> None:
    rows = [
        msgspec.structs.replace(answer, sequence_index=i, num_cached_tokens=cached, prompt=prompt_answer(prompt, 1))
        for answer, prompt, cached in ((FIRST, [7], 0), (SECOND, [8, 9, 233], 2))
        for i in range(2)
    ]
    names = {"prompt_ids", "prompt_log_probs", "prompt_top_log_prob_ids", "prompt_top_log_probs", "prompt_tokens"}
    arrays = output_arrays(rows, {*names, "num_cached_tokens"}, pad_id=5, num_sequences=2)
    assert {name: array.tolist() for name, array in arrays.items()} == {
        "num_cached_tokens": [[0], [2]],
        "prompt_ids": [[7, 0, 0], [8, 9, 233]],
        "prompt_log_probs": [[0, 0, 0], [0, -9, -233]],
        "prompt_top_log_prob_ids": [[[-1], [0], [0]], [[-1], [9], [233]]],
        "prompt_top_log_probs": [[[0], [0], [0]], [[0], [-9], [-233]]],
        "prompt_tokens": [
            [[b"\x07", b""], [b"", b""], [b"", b""]],
            [[b"\x08", b""], [b"\t", b"\t"], ["é".encode(), "é".encode()]],
        ],
    }
    assert output_arrays([FIRST], names, 0) == {}


def test_outputs_that_were_not_asked_for_are_left_out() -> None:
    told_of_one = msgspec.structs.replace(SECOND, log_probs=[], perf=PerfMetrics())
    for answers in ([FIRST], [FIRST, told_of_one]):
        built = output_arrays(answers, {*OUTPUT_NAMES, *LOGITS_NAMES}, 0)
        assert set(built) == {*OUTPUT_NAMES} - {*LOG_PROB_NAMES, *PERF_NAMES, "flat_text_output"}


def told(token_ids: list[int], num_top: int, tokenizer: Tokenizer) -> PromptAnswer:
    """Token i has the log-prob -i; the likeliest ones in its place are itself and the token of the next id."""
    log_probs = PromptLogProbs(len(token_ids), num_top)
    values = -np.arange(1, len(token_ids), dtype=np.float32)
    tops = np.array([[i, i + 1] for i in token_ids[1:]])[:, :num_top]
    log_probs.append(values, np.stack([values, values - 1], axis=1)[:, :num_top], tops)
    return PromptTokens(token_ids, num_top, tokenizer.spell).answer(log_probs.to_bytes())


def test_every_token_has_its_id_its_bytes_and_the_likeliest_in_its_place(tokenizer: Tokenizer) -> None:
    text = tokenizer.encode("é!", add_special_tokens=False)
    assert tokenizer.eos_id is not None
    prompt = [tokenizer.eos_id, *text]
    answer = told(prompt, 2, tokenizer)
    assert answer.prompt_ids.tolist() == prompt
    assert answer.prompt_log_probs.tolist() == [-float(i) for i in range(len(prompt))]
    assert answer.prompt_top_log_prob_ids is not None
    assert answer.prompt_top_log_prob_ids.tolist() == [[-1, -1], *([i, i + 1] for i in text)]
    assert answer.prompt_top_log_probs is not None
    assert answer.prompt_top_log_probs[1].tolist() == [-1.0, -2.0]
    assert answer.prompt_tokens[0].tolist() == [b"<|im_end|>", b"", b""]
    spelled = [token.decode().encode("latin-1") for token in answer.prompt_tokens[1:, 0]]
    assert b"".join(spelled) == "é!".encode()
    for row, token_id in zip(answer.prompt_tokens[1:], text, strict=True):
        assert row[2].decode().encode("latin-1") == tokenizer.token_bytes(token_id + 1)
    dtypes = [answer.prompt_ids, answer.prompt_log_probs, answer.prompt_top_log_prob_ids, answer.prompt_top_log_probs]
    assert [str(array.dtype) for array in dtypes] == ["int32", "float32", "int32", "float32"]
    assert all(array.flags.c_contiguous for array in dtypes)


def test_without_likeliest_tokens_their_outputs_are_left_out(tokenizer: Tokenizer) -> None:
    answer = told([5, 6, 7], 0, tokenizer)
    assert (answer.prompt_top_log_prob_ids, answer.prompt_top_log_probs) == (None, None)
    assert answer.prompt_tokens.shape == (3, 1)


def test_no_special_token_is_spelled_by_nothing(tokenizer: Tokenizer) -> None:
    names = {tokenizer.spell(i) for i in tokenizer.special_ids}
    assert b"" not in names
    assert len(names) == len(tokenizer.special_ids)
