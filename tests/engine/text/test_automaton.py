"""The automaton against `endswith` over all words."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from multilora_engine.text.automaton import ROOT, Automaton

WORDS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=8)


@settings(max_examples=1500, deadline=None)
@given(words=WORDS, text=st.text("abc", max_size=25))
def test_a_state_knows_all_words_that_end_there_and_how_much_could_become_one(words: list[str], text: str) -> None:
    automaton, state = Automaton(words), ROOT
    for end in range(1, len(text) + 1):
        state = automaton.step(state, text[end - 1])
        ending = sorted({word for word in words if text[:end].endswith(word)}, key=len, reverse=True)
        prefixes = [word[:length] for word in words for length in range(len(word) + 1)]
        assert list(automaton.words(state)) == ending
        assert automaton.longest_word(state) == max(map(len, ending), default=0)
        assert automaton.num_matched(state) == max((len(p) for p in prefixes if text[:end].endswith(p)), default=0)


@settings(max_examples=300, deadline=None)
@given(words=WORDS, texts=st.lists(st.text("ab", max_size=12), min_size=2, max_size=4))
def test_sequences_that_share_an_automaton_do_not_meet(words: list[str], texts: list[str]) -> None:
    shared, states = Automaton(words), [ROOT] * len(texts)
    for place in range(max(map(len, texts))):
        for i, text in enumerate(texts):
            if place < len(text):
                states[i] = shared.step(states[i], text[place])
    for state, text in zip(states, texts, strict=True):
        alone, expected = Automaton(words), ROOT
        for char in text:
            expected = alone.step(expected, char)
        assert list(shared.words(state)) == list(alone.words(expected))
        assert shared.num_matched(state) == alone.num_matched(expected)


def test_the_work_for_a_symbol_does_not_depend_on_how_many_words_there_are() -> None:
    """Symbols that are looked at, counted: one look a word would be 65,536 for each symbol of the text."""
    looks = 0

    class CountingWord(str):
        def __getitem__(self, index: Any) -> str:
            nonlocal looks
            looks += 1
            return super().__getitem__(index)

    automaton, state = Automaton([CountingWord(chr(0x10000 + i) * 2) for i in range(65_536)]), ROOT
    looks = 0
    for i in range(1000):
        state = automaton.step(state, chr(0x10000 + 61 * i))
    assert looks < 1000 * 80


@pytest.fixture
def shallow_stack() -> Iterator[None]:
    """Room for a hundred calls more."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 100)
    yield
    sys.setrecursionlimit(limit)


@pytest.mark.usefixtures("shallow_stack")
def test_nested_words_do_not_exhaust_the_stack() -> None:
    """Each end of the text begins a word of its own, and all of them go on with the same symbol."""
    nested = Automaton(["".join(map(chr, range(i, 300))) for i in range(300)])
    state = ROOT
    for symbol in map(chr, range(300)):
        state = nested.step(state, symbol)
    assert len(list(nested.words(state))) == 300
