"""`Automaton`: finds which of many words a sequence of symbols ends with. The cost does not grow with the words."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any, Generic, NamedTuple, TypeVar

ROOT = 0
"""The state before the first symbol."""

_Symbol = TypeVar("_Symbol", str, int)


class _State(NamedTuple):
    """The last `depth` symbols. Of the sorted words, the ones from `first` to `last` - 1 begin with these symbols.

    fallback: the state of the next shorter end of these symbols that begins a word.
    word: the state of the longest word that the symbols end with: this state, or a fallback of it; ROOT for none.
    """

    first: int
    last: int
    depth: int
    fallback: int
    word: int


class Automaton(Generic[_Symbol]):
    """The automaton of Aho and Corasick over strings or over tuples of token ids.

    A state is an integer, ROOT at the start, so any number of sequences can share one automaton. The constructor only
    sorts the words; a state is made when a sequence first reaches it. From then on a symbol costs constant time on
    average, whatever the words are. There are never more states than the words have symbols.

    >>> words = Automaton(["he", "she", "hers"])
    >>> state = ROOT
    >>> for symbol in "ushe":
    ...     state = words.step(state, symbol)
    >>> words.num_matched(state), words.longest_word(state), list(words.words(state))
    (3, 3, ['she', 'he'])
    """

    def __init__(self, words: Iterable[Sequence[_Symbol]]) -> None:
        """words: may include an empty word only if nobody asks for the words of ROOT."""
        self._words: list[Any] = sorted(set(words))
        self._states = [_State(0, len(self._words), 0, ROOT, ROOT)]
        self._children: dict[tuple[int, _Symbol], int] = {}
        self._first_symbols = frozenset(word[0] for word in self._words if word)

    def __len__(self) -> int:
        """The number of different words."""
        return len(self._words)

    def step(self, state: int, symbol: _Symbol) -> int:
        """The state after one more symbol."""
        if state == ROOT and symbol not in self._first_symbols:
            return ROOT  # as most symbols of most texts
        unseen: list[tuple[int, range]] = []
        while (target := self._children.get((state, symbol))) is None:
            if words := self._words_with(state, symbol):
                unseen.append((state, words))
            if state == ROOT:
                target = ROOT
                break
            state = self._states[state].fallback
        # The shortest first: each new state is the fallback of the next longer one.
        for parent, words in reversed(unseen):
            target = self._add(parent, symbol, words, fallback=target)
        return target

    def num_matched(self, state: int) -> int:
        """The length of the longest end of the sequence that begins a word."""
        return self._states[state].depth

    def longest_word(self, state: int) -> int:
        """The length of the longest word that the sequence ends with, 0 for none."""
        return self._states[self._states[state].word].depth

    def words(self, state: int) -> Iterator[Sequence[_Symbol]]:
        """All words that the sequence ends with, the longest first."""
        while state := self._states[state].word:
            yield self._words[self._states[state].first]
            state = self._states[state].fallback

    def suffixes(self, state: int) -> Iterator[int]:
        """The states of all ends of the sequence that begin a word, the longest first: this one to ROOT."""
        while state != ROOT:
            yield state
            state = self._states[state].fallback
        yield ROOT

    def words_one_longer(self, state: int) -> Iterator[Sequence[_Symbol]]:
        """The words that consist of all symbols of a state and one more symbol."""
        first, last, depth, _, _ = self._states[state]
        return (word for word in self._words[first:last] if len(word) == depth + 1)

    def _words_with(self, state: int, symbol: _Symbol) -> range:
        """The places of the state's words in which this symbol comes next."""
        first, last, depth, _, _ = self._states[state]
        first += first < last and len(self._words[first]) == depth
        first = bisect_left(self._words, symbol, first, last, key=itemgetter(depth))
        if first == last or self._words[first][depth] != symbol:
            return range(0)
        return range(first, bisect_right(self._words, symbol, first, last, key=itemgetter(depth)))

    def _add(self, parent: int, symbol: _Symbol, words: range, fallback: int) -> int:
        state, depth = len(self._states), self._states[parent].depth + 1
        is_word = len(self._words[words.start]) == depth
        word = state if is_word else self._states[fallback].word
        self._states.append(_State(words.start, words.stop, depth, fallback, word))
        self._children[parent, symbol] = state
        return state
