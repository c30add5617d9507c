"""A guide that begins after the model's thinking."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.engines import run_all

from checkpoints.tiny_llama import save_tiny_llama
from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.guides.guided import GuideCompiler, GuideMatcher
from multilora_engine.guides.thinking import Thinking, thinking_of
from multilora_engine.request import GenerationRequest, Guide, SamplingParams
from multilora_engine.text.tokenizer import Tokenizer

END = 2
"""<|im_end|> of the tokenizer."""
BEGIN_ID, END_ID = 9, 10
"""Tokens that stand for the marks in a tokenizer that has none."""
DIGITS = Guide("regex", "[0-9]{2}")


class MarkedTokenizer(Tokenizer):
    """Has a token for each mark."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        marks = {"<think>": [BEGIN_ID], "</think>": [END_ID]}
        return marks.get(text) or super().encode(text, add_special_tokens)

    def spell(self, token_id: int) -> bytes:
        return {BEGIN_ID: b"<think>", END_ID: b"</think>"}.get(token_id) or super().spell(token_id)


@pytest.fixture(scope="module")
def tokenizer(default_model_dir: Path) -> Tokenizer:
    return Tokenizer(default_model_dir)


@pytest.fixture(scope="module")
def marked(default_model_dir: Path) -> Tokenizer:
    return MarkedTokenizer(default_model_dir)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GuideCompiler]:
    compiler = GuideCompiler(tokenizer, tokenizer.vocab_size)
    yield compiler
    compiler.close()


def allowed(matcher: GuideMatcher) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(matcher.allowed.view(np.uint8), bitorder="little")).tolist())


def test_a_model_may_think_first_and_then_follows_the_guide(compiler: GuideCompiler, marked: Tokenizer) -> None:
    digit, letter, end = marked.encode("7", False)[0], marked.encode("x", False)[0], END
    plain, thinks = (compiler.matcher(DIGITS, (END,)) for _ in range(2))
    thinking = thinking_of([50, 60], marked)
    assert thinking is not None
    thinks.let_think(thinking)
    assert allowed(thinks) == allowed(plain) | {BEGIN_ID}
    assert not thinks.advance(BEGIN_ID)
    assert {digit, letter, END_ID} <= allowed(thinks)
    assert end not in allowed(thinks), "an answer does not end inside its thinking"
    for token_id in (letter, digit, letter):
        assert not thinks.advance(token_id)
    assert not thinks.advance(END_ID)
    assert allowed(thinks) == allowed(plain)
    assert not thinks.advance(digit)
    thinks.advance(digit)
    assert allowed(thinks) == {end}


def test_a_model_that_does_not_think_follows_the_guide_at_once(compiler: GuideCompiler, marked: Tokenizer) -> None:
    digit = marked.encode("7", False)[0]
    plain, thinks = (compiler.matcher(DIGITS, (END,)) for _ in range(2))
    thinking = thinking_of([50, 60], marked)
    assert thinking is not None
    thinks.let_think(thinking)
    assert plain.advance(digit) == thinks.advance(digit)
    assert allowed(thinks) == allowed(plain)


def test_the_mark_may_be_spelled_by_several_tokens(compiler: GuideCompiler, tokenizer: Tokenizer) -> None:
    plain, thinks = (compiler.matcher(DIGITS, (END,)) for _ in range(2))
    thinking = thinking_of(tokenizer.encode("Why?<think>\n", False), tokenizer)
    assert thinking is not None
    assert thinking.has_begun
    thinks.let_think(thinking)
    *first, last = tokenizer.encode("Well</think>", False)
    for token_id in first:
        assert not thinks.advance(token_id)
        assert allowed(thinks) != allowed(plain)
    assert not thinks.advance(last)
    assert allowed(thinks) == allowed(plain)


@pytest.mark.parametrize(
    ("prompt", "has_begun"),
    [("Why?", None), ("Why?<think>", True), ("Why? <think>\n\n", True), ("<think>\n\n</think>\n\n", None)],
)
def test_a_prompt_tells_whether_the_thinking_has_begun(
    tokenizer: Tokenizer, prompt: str, has_begun: bool | None
) -> None:
    thinking = thinking_of(tokenizer.encode(prompt, False), tokenizer)
    assert (thinking and thinking.has_begun) == has_begun


def test_a_prompt_that_has_ended_the_thinking_leaves_none(marked: Tokenizer) -> None:
    assert thinking_of([50, BEGIN_ID, END_ID], marked) is None
    begun = thinking_of([50, BEGIN_ID], marked)
    assert begun is not None
    assert begun.has_begun


def test_ends_are_found_across_tokens() -> None:
    pieces = [b"a</th", b"ink", b">x"]
    thinking = Thinking(None, None, True, pieces.__getitem__)
    assert [thinking.is_ended_by(token_id) for token_id in (0, 1, 0, 1, 2)] == [False, False, False, False, True]


def test_an_answer_whose_prompt_opens_the_thinking_is_not_guided_before_its_end(
    tokenizer: Tokenizer, default_model_dir: Path, tmp_path: Path
) -> None:
    checkpoint = save_tiny_llama(tmp_path, vocab_size=tokenizer.vocab_size)
    engine = Engine(
        EngineConfig(
            model_path=checkpoint, tokenizer_path=default_model_dir, num_threads=1, kv_cache_memory_bytes=8 << 20
        )
    )
    prompt = tokenizer.encode("Why?<think>\n", False)

    def request(name: str, after_thinking: bool) -> GenerationRequest:
        sampling = SamplingParams(20, end_id=END, guide=DIGITS, guide_after_thinking=after_thinking)
        return GenerationRequest(name, prompt, sampling)

    answers = run_all(engine, [request("thinks", True), request("plain", False)])
    engine.close()
    assert answers["plain"].text.isdecimal()
    assert answers["plain"].final is not None
    assert answers["plain"].final.finish_reason == "stop"
    thinks = answers["thinks"]
    assert thinks.final is not None
    assert (len(thinks.token_ids), thinks.final.finish_reason) == (20, "length")
    assert not thinks.text.isdecimal()
