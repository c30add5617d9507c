"""Stop words that spell special tokens, against transformers' decoding of every prefix with these tokens kept."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.text_streams import joined, stream, tokens
from tokenizers import Tokenizer as TokenizerBackend
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from multilora_engine.text.text_stream import TextDelta, TextStream
from multilora_engine.text.tokenizer import Tokenizer

SPECIALS = ["<s>", "</s>", "<|end|>", "<"]
LETTERS = ["a", "b", "<", "s", ">", "/", "\n", "ab", "s>a", "\xe2", "\x82", "\xac"]


class Oracle:
    """transformers' tokenizer of the same files."""

    def __init__(self, path: Path) -> None:
        self._tokenizer = PreTrainedTokenizerFast.from_pretrained(path)
        self.special_ids = frozenset(self._tokenizer.all_special_ids)

    def text(self, token_ids: list[int], skips_special: bool = False) -> str:
        """Without the character that no token has completed yet."""
        text = str(self._tokenizer.decode(token_ids, skip_special_tokens=skips_special))
        return text.rstrip("\ufffd")

    def spans(self, token_ids: list[int]) -> list[range]:
        """Where in the whole text each special token is."""
        ends = [
            len(str(self._tokenizer.decode(token_ids[: i + 1])))
            for i, token_id in enumerate(token_ids)
            if token_id in self.special_ids
        ]
        names = [str(self._tokenizer.convert_ids_to_tokens(i)) for i in token_ids if i in self.special_ids]
        return [range(end - len(name), end) for end, name in zip(ends, names, strict=True)]


class Stop(NamedTuple):
    """end, start: of the word in the text without special tokens."""

    end: int
    start: int
    num_tokens: int


def naive_stop(oracle: Oracle, token_ids: list[int], words: tuple[str, ...]) -> Stop | None:
    """Of the first prefix that has a word: the word that ends first, the longest of these."""
    for num_tokens in range(1, len(token_ids) + 1):
        prefix = token_ids[:num_tokens]
        seen, spelled, spans = oracle.text(prefix, skips_special=True), oracle.text(prefix), oracle.spans(prefix)

        def place(char: int, spans: list[range] = spans) -> int:
            return char - sum(len(span) for span in spans if span.stop <= char)

        stops = [(end, end - len(word)) for word in words for end in ends_of(word, seen)]
        stops += [
            (place(end), place(end - len(word)))
            for word in words
            for end in ends_of(word, spelled)
            if not any(span.start < edge < span.stop for span in spans for edge in (end - len(word), end))
        ]
        if stops:
            return Stop(*min(stops), num_tokens)
    return None


def ends_of(word: str, text: str) -> list[int]:
    return [end for end in range(len(word), len(text) + 1) if text[:end].endswith(word)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("specials")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: i for i, token in enumerate([*alphabet, "ab", "s>a"])}
    backend = TokenizerBackend(models.BPE(vocab, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.add_special_tokens(SPECIALS[:3])
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="</s>", additional_special_tokens=SPECIALS[:3]
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(path: Path) -> Tokenizer:
    return Tokenizer(path)


@pytest.fixture(scope="module")
def oracle(path: Path) -> Oracle:
    return Oracle(path)


def ids_of(tokenizer: Tokenizer, *pieces: str) -> list[int]:
    """A token for each piece: a special one, or one of these bytes."""
    by_bytes = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    by_name = {tokenizer.token_name(i): i for i in tokenizer.special_ids}
    return [by_name[p] if p in by_name else by_bytes[p.encode("latin-1")] for p in pieces]


PIECES = st.lists(st.sampled_from([*SPECIALS[:3], *LETTERS]), max_size=14)
WORDS = st.lists(
    st.lists(st.sampled_from([*SPECIALS, "a", "b", "s>", "/", "\n", "€", "end"]), min_size=1, max_size=4).map("".join),
    min_size=1,
    max_size=4,
).map(tuple)


@settings(max_examples=600, deadline=None)
@given(pieces=PIECES, words=WORDS)
@example(pieces=["a", "</s>", "\n", "b"], words=("</s>\n",))
@example(pieces=["a", "<s>", "<|end|>"], words=("a<s><|end|>", "<s><|end|>"))
@example(pieces=["a", "<s>", "b"], words=("ab",))
@example(pieces=["<", "s", ">", "</s>"], words=("<s></s>",))
@example(pieces=["<s>", "a"], words=("<", "s>", "s>a"))
@example(pieces=["\xe2", "<s>", "\x82", "\xac"], words=("€",))
def test_an_answer_ends_where_transformers_decoding_of_its_prefixes_has_a_word_first(
    tokenizer: Tokenizer, oracle: Oracle, pieces: list[str], words: tuple[str, ...]
) -> None:
    token_ids = ids_of(tokenizer, *pieces)
    expected = naive_stop(oracle, token_ids, words)
    for includes_stop in (False, True):
        deltas = stream(tokenizer, token_ids, words, (), includes_stop)
        assert deltas[-1].stopped == (expected is not None)
        if expected is None:
            assert joined(deltas) == tokenizer.decode(token_ids)
            assert tokens(deltas) == token_ids
            continue
        assert tokens(deltas) == token_ids[: expected.num_tokens]
        if not is_cut(pieces):
            whole = oracle.text(token_ids[: expected.num_tokens], skips_special=True)
            assert joined(deltas) == whole[: expected.end if includes_stop else expected.start]


def is_cut(pieces: list[str]) -> bool:
    """Whether a special token comes between the bytes of a character: transformers puts the character together where
    special tokens are skipped, and has U+FFFD where they are kept."""
    rest = "".join(" " if piece in SPECIALS[:3] else piece for piece in pieces).replace("\xe2\x82\xac", "")
    return any(byte in rest for byte in "\xe2\x82\xac")


@settings(max_examples=150, deadline=None)
@given(pieces=PIECES, words=WORDS, cut=st.integers(0, 13))
def test_a_fork_goes_on_as_if_it_were_alone(
    tokenizer: Tokenizer, pieces: list[str], words: tuple[str, ...], cut: int
) -> None:
    token_ids = ids_of(tokenizer, *pieces)
    expected = stream(tokenizer, token_ids, words)
    text_stream, before = TextStream(tokenizer, words), min(cut, len(expected) - 1)
    deltas = [text_stream.push(token_id) for token_id in token_ids[:before]]
    for other in (text_stream.fork(), text_stream.fork(), text_stream):
        assert deltas + rest_of(other, token_ids[before:]) == expected


def rest_of(text_stream: TextStream, token_ids: list[int]) -> list[TextDelta]:
    deltas: list[TextDelta] = []
    for token_id in token_ids:
        deltas.append(text_stream.push(token_id))
        if deltas[-1].stopped:
            return deltas
    return [*deltas, text_stream.finish()]


@settings(max_examples=150, deadline=None)
@given(pieces=PIECES, words=WORDS)
def test_a_token_that_ends_the_answer_completes_a_word_as_any_other(
    tokenizer: Tokenizer, pieces: list[str], words: tuple[str, ...]
) -> None:
    """Its own text is no part of the answer, which is what a special token is anyway."""
    token_ids = ids_of(tokenizer, *pieces, "</s>")
    expected = stream(tokenizer, token_ids, words)
    text_stream, deltas = TextStream(tokenizer, words), []
    for token_id in token_ids[:-1]:
        deltas.append(text_stream.push(token_id))
        if deltas[-1].stopped:
            break
    else:
        deltas.append(text_stream.end(token_ids[-1]))
    assert deltas[-1].stopped
    assert (joined(deltas), tokens(deltas)) == (joined(expected), tokens(expected))


def test_what_may_become_a_word_with_a_special_token_is_held_back_until_it_is_decided(tokenizer: Tokenizer) -> None:
    a, b, end, newline = ids_of(tokenizer, "a", "b", "</s>", "\n")
    text_stream = TextStream(tokenizer, ("b</s>\n",))
    assert text_stream.push(a) == TextDelta([a], "a")
    assert text_stream.push(b) == TextDelta([], "")
    assert text_stream.push(end) == TextDelta([], "")
    assert text_stream.push(b) == TextDelta([b, end], "b")
    assert text_stream.push(end) == TextDelta([], "")
    assert text_stream.push(newline) == TextDelta([b, end, newline], "", stopped=True, stop_word="b</s>\n")


def test_a_word_that_begins_inside_a_special_token_costs_no_more_than_another(tokenizer: Tokenizer) -> None:
    """Counted in steps of the automaton: to walk from match to match in every special token would take a million."""
    (special,) = ids_of(tokenizer, "<|end|>")
    word, steps = "|end|>" + "<|end|>" * 2000 + "x", 0
    text_stream = TextStream(tokenizer, (word,))
    fallbacks = text_stream._words.suffixes

    def counted(state: int) -> Iterator[int]:
        nonlocal steps
        for suffix in fallbacks(state):
            steps += 1
            yield suffix

    text_stream._words.suffixes = counted  # type: ignore[method-assign]
    assert [text_stream.push(special).stopped for _ in range(1500)] == [False] * 1500
    assert steps < 3000


def test_the_work_for_many_special_tokens_and_long_words_stays_small(tokenizer: Tokenizer) -> None:
    """Counted in what is kept: the special tokens that no word can reach back to are forgotten."""
    (special,) = ids_of(tokenizer, "<s>")
    others = ids_of(tokenizer, *random.Random(0).choices("ab", k=2000))
    text_stream = TextStream(tokenizer, ("<s>" * 5 + "/", "ab<s>/"))
    for token_id in others:
        text_stream.push(special)
        text_stream.push(token_id)
    assert text_stream._spelled is not None
    assert len(text_stream._spelled._specials) < 8
