"""Chats with all options of the template, against transformers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.fake_engine import INFO
from support.fake_triton import FakeRequest
from transformers import AutoTokenizer

from multilora_engine.errors import InvalidRequest
from multilora_engine.serving.inputs import InputTensors
from multilora_engine.serving.token_lists import (
    encode_messages,
    read_bad_sequences,
    read_bias,
    read_sequences,
    read_words,
    write_sequences,
)
from multilora_engine.text.tokenizer import Tokenizer


def inputs(**tensors: Any) -> InputTensors:
    return InputTensors(FakeRequest(tensors))


def word_list(token_ids: list[int], ends: list[int]) -> np.ndarray:
    return np.array([[token_ids, ends]], np.int32)


@pytest.mark.parametrize(
    ("token_ids", "ends", "expected"),
    [
        ([5, 6, 7], [1, 3, -1], ((5,), (6, 7))),
        ([5, 6, 7], [3, -1, -1], ((5, 6, 7),)),
        ([5, 6, 0, 0], [2, -1, -1, -1], ((5, 6),)),
        ([5], [1], ((5,),)),
        ([0], [-1], ()),
        ([], [], ()),
    ],
)
def test_a_word_list_is_ids_and_where_each_word_ends(
    token_ids: list[int], ends: list[int], expected: tuple[tuple[int, ...], ...]
) -> None:
    assert (
        read_sequences(inputs(stop_words_list=word_list(token_ids, ends)), "stop_words_list", 0, INFO.limits)
        == expected
    )


def test_what_is_written_reads_back_row_by_row() -> None:
    rows = [((5,), (6, 7)), (), ((8, 9, 10, 11),)]
    written = write_sequences(rows)
    assert written.shape == (3, 2, 4)
    assert [
        read_sequences(inputs(bad_words_list=written), "bad_words_list", row, INFO.limits) for row in range(3)
    ] == rows


@pytest.mark.parametrize("ends", [[2, 1, -1], [1, 4, -1], [0, -1, -1], [2, 2, -1], [-5, 1, -1]])
def test_ends_out_of_order_or_range_are_refused(ends: list[int]) -> None:
    with pytest.raises(InvalidRequest, match=r"stop_words_list has the ends .*, expected increasing numbers in 1 .. 3"):
        read_sequences(inputs(stop_words_list=word_list([5, 6, 7], ends)), "stop_words_list", 0, INFO.limits)


@pytest.mark.parametrize("shape", [(2, 3), (1, 3, 3), (1, 2, 3, 1)])
def test_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidRequest, match=r"stop_words_list has shape .* \[batch, 2, n\]"):
        read_sequences(inputs(stop_words_list=np.zeros(shape, np.int32)), "stop_words_list", 0, INFO.limits)


def test_bad_words_are_tokenized_as_they_stand_and_added_to_the_list(tokenizer: Tokenizer) -> None:
    words = inputs(bad_words=[[" cat", "cat", ""]], bad_words_list=word_list([5, 6], [2, -1]))
    expected = [tuple(tokenizer.encode(word, add_special_tokens=False)) for word in (" cat", "cat")]
    assert len(set(expected)) == 2
    assert read_bad_sequences(words, 0, tokenizer, INFO.limits) == (*expected, (5, 6))


def test_words_that_spell_special_tokens_are_these_tokens(tokenizer: Tokenizer) -> None:
    start, end = "<|im_start|>", "<|im_end|>"
    words = inputs(bad_words=[[end, f"{end}{start}", f"a{end}"]])
    (a,) = tokenizer.encode("a", add_special_tokens=False)
    assert read_bad_sequences(words, 0, tokenizer, INFO.limits) == ((2,), (2, 1), (a, 2))
    biased = inputs(embedding_bias_words=[[end, f"a{start}"]], embedding_bias_weights=[[3.0, -1.0]])
    assert dict(read_bias(biased, 0, INFO, tokenizer)) == {2: 3.0, a: -1.0, 1: -1.0}


@pytest.mark.parametrize("words", [["a" * 65], ["é" * 16] * 3])
def test_words_too_long_together_are_refused(words: list[str]) -> None:
    assert read_words(inputs(bad_words=[["a" * 64]]), "bad_words", 0, INFO.limits) == ["a" * 64]
    with pytest.raises(InvalidRequest, match=r"bad_words has [0-9]+ bytes; the words of a request may have 64"):
        read_words(inputs(bad_words=[words]), "bad_words", 0, INFO.limits)


def test_words_too_many_in_all_rows_are_refused() -> None:
    rows = [["a"] * 4] * 3
    assert read_words(inputs(bad_words=rows), "bad_words", 2, INFO.limits) == ["a"] * 4
    with pytest.raises(InvalidRequest, match="bad_words has 16 words; a request may have 12"):
        read_words(inputs(bad_words=[*rows, ["a"] * 4]), "bad_words", 0, INFO.limits)


def test_a_word_list_too_wide_is_refused_before_it_is_taken_apart() -> None:
    token_ids = list(range(16))
    words = inputs(bad_words_list=word_list(token_ids, [16] + [-1] * 15))
    assert read_sequences(words, "bad_words_list", 0, INFO.limits) == (tuple(token_ids),)
    with pytest.raises(InvalidRequest, match="bad_words_list has 68 bytes; the words of a request may have 64"):
        read_sequences(inputs(bad_words_list=word_list([1] * 17, [17] * 17)), "bad_words_list", 0, INFO.limits)


def test_biases_of_words_and_of_the_vector_add_up(tokenizer: Tokenizer) -> None:
    vector = np.zeros((1, INFO.vocab_size), np.float32)
    (one,), two = (tokenizer.encode(word, add_special_tokens=False) for word in ("a", "a long word"))
    vector[0, [one, 7]] = [0.5, -2.0]
    tensors = inputs(
        embedding_bias=vector, embedding_bias_words=[["a", "a long word", ""]], embedding_bias_weights=[[1.0, 4.0, 9.0]]
    )
    expected = {7: -2.0, one: 1.5}
    for token_id in two:
        expected[token_id] = expected.get(token_id, 0.0) + 4.0
    assert len(two) > 1
    assert dict(read_bias(tensors, 0, INFO, tokenizer)) == expected
    assert read_bias(inputs(), 0, INFO, tokenizer) == ()


def test_biases_of_ids_add_up_with_the_vector(tokenizer: Tokenizer) -> None:
    vector = np.zeros((1, INFO.vocab_size), np.float32)
    vector[0, 7] = 0.5
    tensors = inputs(
        embedding_bias=vector,
        embedding_bias_ids=np.array([[7, 9, 9]], np.int32),
        embedding_bias_weights=[[1.0, 2.0, -0.5]],
    )
    assert dict(read_bias(tensors, 0, INFO, tokenizer)) == {7: 1.5, 9: 1.5}


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"embedding_bias_ids": [[1, 2]], "embedding_bias_weights": [[1.0]]}, "has 2 ids and .* 1 weights"),
        ({"embedding_bias_ids": [[1]], "embedding_bias_words": [["a"]]}, "to embedding_bias_ids; send one"),
        ({"embedding_bias": np.zeros((1, 5), np.float32)}, "embedding_bias has 5 values, expected one a token: 2048"),
        ({"embedding_bias_words": [["a"]]}, "embedding_bias_words has 1 words and embedding_bias_weights 0 weights"),
        ({"embedding_bias_weights": [[1.0]]}, "embedding_bias_words has 0 words and embedding_bias_weights 1 weights"),
        ({"embedding_bias_words": [["a"]], "embedding_bias_weights": [[np.nan]]}, "embedding bias of token .* is nan"),
        ({"embedding_bias": np.full((1, 2048), -np.inf, np.float32)}, "embedding bias of token 0 is -inf"),
    ],
)
def test_biases_that_do_not_fit_are_refused(tensors: dict[str, Any], message: str, tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match=message):
        read_bias(inputs(**tensors), 0, INFO, tokenizer)


CHAT = [{"role": "user", "content": "Weather?"}, {"role": "assistant", "content": "It rains"}]
TEMPLATE = (
    "{% if enable_thinking is defined %}think={{ enable_thinking }}|{% endif %}"
    "{% for d in documents or [] %}{{ d.text }}|{% endfor %}"
    "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@pytest.fixture(scope="module")
def templated(default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default model's tokenizer with a template that shows what it is given."""
    folder = tmp_path_factory.mktemp("tokenizer")
    AutoTokenizer.from_pretrained(default_model_dir).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def encode(folder: Path, **chat: Any) -> str:
    tokenizer = Tokenizer(folder)
    return tokenizer.decode(encode_messages(json.dumps({"messages": CHAT, **chat}), tokenizer, INFO))


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "user:Weather?;assistant:It rains;assistant:"),
        ({"add_generation_prompt": True}, "user:Weather?;assistant:It rains;assistant:"),
        ({"add_generation_prompt": False}, "user:Weather?;assistant:It rains;"),
        ({"continue_final_message": True}, "user:Weather?;assistant:It rains"),
        ({"continue_final_message": True, "add_generation_prompt": False}, "user:Weather?;assistant:It rains"),
        (
            {"chat_template_kwargs": {"enable_thinking": False, "documents": [{"text": "sky"}]}},
            "think=False|sky|user:Weather?;assistant:It rains;assistant:",
        ),
    ],
)
def test_a_template_is_filled_in_as_the_chat_says(templated: Path, options: dict[str, Any], text: str) -> None:
    assert encode(templated, **options) == text


@pytest.mark.parametrize(
    "options",
    [{}, {"add_generation_prompt": False}, {"continue_final_message": True, "add_generation_prompt": False}],
)
def test_a_chat_is_the_same_tokens_as_in_transformers(default_model_dir: Path, options: dict[str, bool]) -> None:
    oracle = AutoTokenizer.from_pretrained(default_model_dir)
    expected = oracle.apply_chat_template(CHAT, return_dict=False, **{"add_generation_prompt": True, **options})
    text = json.dumps({"messages": CHAT, **options})
    assert encode_messages(text, Tokenizer(default_model_dir), INFO) == expected


@pytest.mark.parametrize("messages", [[{"role": "user", "content": [{"type": "text", "text": "Wea"}]}], None])
def test_contents_take_the_form_that_the_template_knows(
    default_model_dir: Path, templated: Path, messages: list[Any] | None
) -> None:
    """In a list and in an object; left open, too."""
    part = {"type": "text", "text": "ther?"}
    if messages is None:
        messages = [{"role": "user", "content": "Wea"}]
    messages = [*messages, {"role": "assistant", "content": [part, part]}]
    tokenizer = Tokenizer(templated)
    assert tokenizer.decode(encode_messages(json.dumps(messages), tokenizer, INFO)) == (
        "user:Wea;assistant:ther?ther?;assistant:"
    )
    assert encode(templated, messages=messages, continue_final_message=True) == "user:Wea;assistant:ther?ther?"
    AutoTokenizer.from_pretrained(default_model_dir).save_pretrained(templated.parent / "parts")
    parts = TEMPLATE.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text }}{% endfor %}")
    (templated.parent / "parts" / "chat_template.jinja").write_text(parts)
    assert encode(templated.parent / "parts", messages=messages) == "user:Wea;assistant:ther?ther?;assistant:"
    assert encode(templated.parent / "parts", messages=messages, continue_final_message=True) == (
        "user:Wea;assistant:ther?ther?"
    )


def test_earlier_calls_without_a_place_are_refused(templated: Path) -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "sky", "arguments": {}}}]}
    with pytest.raises(InvalidRequest, match="no place for tools: it leaves out call 0 of message 2"):
        encode(templated, messages=[*CHAT, call])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"chat_template_kwargs": {"chat_template": "x", "tools": []}}, "may not set chat_template, tools"),
        ({"chat_template_kwargs": {"tokenize": True}}, "may not set tokenize"),
        ({"chat_template_kwargs": {"add_generation_prompt": False}}, "may not set add_generation_prompt"),
        ({"chat_template_kwargs": {"messages": []}}, "the chat template refused the messages"),
        ({"chat_template_kwargs": [1]}, "Expected `object`, got `array` - at `[$].chat_template_kwargs`"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "the answer cannot begin twice"),
        ({"add_generation_prompt": 1}, "Expected `bool | null`, got `int`"),
    ],
)
def test_what_a_chat_may_not_say_is_refused_by_name(templated: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        encode(templated, **options)


def test_a_chat_that_the_template_makes_too_long_is_refused_with_the_numbers(templated: Path) -> None:
    most = INFO.limits.max_prompt_bytes
    many = [{"role": "user", "content": "a"}] * (most // 40)
    info = dataclasses.replace(INFO, limits=dataclasses.replace(INFO.limits, max_prompt_bytes=len(json.dumps(many))))
    (templated / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content * 99 }}{% endfor %}")
    with pytest.raises(InvalidRequest, match=rf"makes {99 * len(many)} bytes of the messages; a prompt may have"):
        encode_messages(json.dumps(many), Tokenizer(templated), info)
    (templated / "chat_template.jinja").write_text(TEMPLATE)


@pytest.mark.parametrize("depth", [400, 5_000, 100_000])
def test_messages_nested_deep_are_refused_or_read(templated: Path, depth: int) -> None:
    info = dataclasses.replace(INFO, limits=dataclasses.replace(INFO.limits, max_prompt_bytes=1 << 20))
    content = "[" * depth + "]" * depth
    with contextlib.suppress(InvalidRequest):
        encode_messages(f'[{{"role": "user", "content": {content}}}]', Tokenizer(templated), info)


def test_an_error_quotes_a_line_of_the_messages_at_most(templated: Path) -> None:
    info = dataclasses.replace(INFO, limits=dataclasses.replace(INFO.limits, max_prompt_bytes=1 << 23))
    text = json.dumps([{"role": 7, "content": "x" * 4_000_000}])
    with pytest.raises(InvalidRequest, match=r"^message 0 must look like") as error:
        encode_messages(text, Tokenizer(templated), info)
    assert len(str(error.value)) < 700


FIRST_CHATS = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from multilora_engine.serving.token_lists import _reserved
from multilora_engine.text.tokenizer_files import fast_tokenizer_class
together = threading.Barrier(4)
def load(number):
    together.wait()
    return _reserved() if number % 2 else fast_tokenizer_class()
with ThreadPoolExecutor(4) as pool:
    assert len(list(pool.map(load, range(4)))) == 4
"""


def test_threads_may_load_what_renders_chats_at_the_same_time() -> None:
    """In a process that has not imported transformers, whose names fail while another thread imports it."""
    done = subprocess.run([sys.executable, "-c", FIRST_CHATS], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
