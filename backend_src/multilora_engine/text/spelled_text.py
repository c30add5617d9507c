"""`SpelledText`: a sequence's text in which special tokens are written out, as stop words write them."""

from __future__ import annotations

import codecs
import copy
from bisect import bisect_left
from typing import NamedTuple

from multilora_engine.text.automaton import Automaton


class _Special(NamedTuple):
    """A special token in the spelled text, from character `start` to `end` - 1.

    place: the number of characters before it in the visible text, which has no special tokens.
    """

    start: int
    end: int
    place: int


class SpelledText:
    """Looks for stop words that contain a special token. It starts at the sequence's first special token.

    A word contains a special token as a whole or not at all: `im_end` is not in `<|im_end|>`. A place is a number of
    characters of the visible text.
    """

    def __init__(self, words: Automaton[str], state: int, num_chars: int, utf8_state: tuple[bytes, int]) -> None:
        """state: the automaton's state after the text before the first special token.

        num_chars: the characters of that text. utf8_state: the decoder's state after it, with the bytes of an
        incomplete character.
        """
        self._words = words
        self._state = state
        self._num_chars = num_chars
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._utf8.setstate(utf8_state)
        self.stop_word = ""
        """The last word that was found."""
        # The start of the text counts as one, so that every place has one before it.
        self._specials = [_Special(-1, 0, 0)]

    def fork(self) -> SpelledText:
        """A text of its own that goes on from here."""
        fork = copy.copy(self)
        fork._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        fork._utf8.setstate(self._utf8.getstate())
        fork._specials = self._specials.copy()
        return fork

    def push(self, data: bytes) -> range | None:
        """Add the bytes of an ordinary token. Returns the place of the word that they complete."""
        return self._push_text(self._utf8.decode(data))

    def push_special(self, name: str, place: int) -> range | None:
        """Add a special token after `place` whole characters of the visible text.

        Returns the place of the word that the token completes.
        """
        cut = self._utf8.decode(b"", final=True)  # of a character that the token cuts in two
        if (stop := self._push_text(cut)) is not None:
            return stop
        start = self._num_chars
        for char in name:
            self._state = self._words.step(self._state, char)
        self._num_chars += len(name)
        self._drop_passed()
        self._specials.append(_Special(start, self._num_chars, place + len(cut)))
        return self._stop()

    def finish(self) -> range | None:
        """The place of the word that is complete when no token follows."""
        return self._push_text(self._utf8.decode(b"", final=True))

    @property
    def start_of_match(self) -> int | None:
        """The place of the first character that may belong to an incomplete word with a special token; None for none.

        A match that begins inside a special token counts, although it is no word: to find out whether another match
        begins after it takes time.
        """
        start = self._num_chars - self._words.num_matched(self._state)
        return None if start >= self._specials[-1].end else self._place(start)

    def _push_text(self, text: str) -> range | None:
        for char in text:
            self._state = self._words.step(self._state, char)
            self._num_chars += 1
            if (stop := self._stop()) is not None:
                return stop
        return None

    def _stop(self) -> range | None:
        """The place of the longest word that ends here and has a special token."""
        for word in self._words.words(self._state):
            start = self._num_chars - len(word)
            if start >= self._specials[-1].end:
                break
            if not self._is_in_special(start):
                self.stop_word = str(word)
                return range(self._place(start), self._place(self._num_chars))
        return None

    def _is_in_special(self, char: int) -> bool:
        return char < self._special_before(char)[0].end

    def _place(self, char: int) -> int:
        """The place of a character of the spelled text. All characters of a special token have the token's place."""
        special, following = self._special_before(char)
        place = special.place + max(0, char - special.end)
        return place if following is None else min(place, following.place)

    def _special_before(self, char: int) -> tuple[_Special, _Special | None]:
        """The last special token that begins before a character, and the one after it."""
        i = bisect_left(self._specials, char, key=lambda special: special.start)
        return self._specials[i - 1], self._specials[i] if i < len(self._specials) else None

    def _drop_passed(self) -> None:
        """Forget the special tokens that no word can contain any more, except the last one of them."""
        start = self._num_chars - self._words.num_matched(self._state)
        num_passed = bisect_left(self._specials, start, key=lambda special: special.start) - 1
        del self._specials[: max(0, num_passed)]
