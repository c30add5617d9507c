"""Chats with all options of the template, against transformers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.fake_engine import INFO
from transformers import AutoTokenizer

from multilora_engine.errors import InvalidRequest
from multilora_engine.serving.token_lists import encode_messages
from multilora_engine.text.tokenizer import Tokenizer

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
        ({"chat_template_kwargs": {"messages": []}}, "the model's chat template refused the messages"),
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
