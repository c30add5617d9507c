"""`TextStream`: the text of a sequence, token by token, up to its stop words."""

from __future__ import annotations

import codecs
import copy
from collections import deque

import msgspec

from multilora_engine.errors import InvalidRequest
from multilora_engine.text.automaton import ROOT, Automaton
from multilora_engine.text.spelled_text import SpelledText
from multilora_engine.text.tokenizer import Tokenizer


class TextDelta(msgspec.Struct, frozen=True):
    """The text that one more token decided.

    stopped: a stop word, a stop token sequence or the end token is complete, and nothing may follow. stop_word: the
    stop word, empty for any other end.
    """

    token_ids: list[int]
    text: str
    stopped: bool = False
    stop_word: str = ""

    def after(self, earlier: TextDelta, stopped: bool) -> TextDelta:
        """One delta of two, with the text and the stop of both."""
        text, word = earlier.text + self.text, earlier.stop_word or self.stop_word
        return TextDelta(earlier.token_ids + self.token_ids, text, stopped, word)


_NOTHING = TextDelta([], "")


class TextStream:
    """The text of one sequence, token by token. The stream never takes back a character.

    The stream holds back what is not decided: the bytes of an incomplete UTF-8 character, the longest end of the text
    that could still become a stop word, and the text of tokens that could still become a stop token sequence. A token
    is released when all its text is released and a character ends there. So decoding each delta's tokens alone gives
    the same text as decoding all tokens together.

    The stop word that ends first wins. If several end at the same character, the longest wins. A stop token sequence
    that the same token completes wins if it begins earlier. The stream emits the text up to the start of the stop, and
    all tokens up to the one that completed it. With `include_stop_str_in_output` it emits the text up to the end of the
    stop. No text needs to be held back for stops then.

    A stop word may spell special tokens, which have no text. So the stream also looks for the words in the text with
    all special tokens written out (`SpelledText`). The stream emits only the ordinary text of such a word.

    The texts of the whole stream add up to `Tokenizer.decode` of all tokens, with the same `is_start`, cut at the stop.

    Raises InvalidRequest for an empty stop word or stop token sequence.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_words: tuple[str, ...] = (),
        stop_token_sequences: tuple[tuple[int, ...], ...] = (),
        include_stop_str_in_output: bool = False,
        is_start: bool = False,
        num_tokens_without_stops: int = 0,
    ) -> None:
        """is_start: whether the text continues no other, and loses the space that the tokenizer puts before it.

        num_tokens_without_stops: a stop that one of the first so many tokens completes is text like any other.
        """
        if not all(stop_words):
            raise InvalidRequest(f"stop word {stop_words.index('')} is empty")
        if not all(stop_token_sequences):
            raise InvalidRequest(f"stop_words_list: word {stop_token_sequences.index(())} has no tokens")
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._words = Automaton(stop_words)
        self._word_state = ROOT
        self._spelled: SpelledText | None = None
        self._sequences = Automaton(stop_token_sequences)
        self._sequence_state = ROOT
        self._can_stop = bool(stop_words or stop_token_sequences)
        self._num_tokens_without_stops = num_tokens_without_stops
        self._num_followed = 0
        self._includes_stop = include_stop_str_in_output
        self._is_start = is_start
        self._token_starts: deque[int] = deque(maxlen=max(map(len, stop_token_sequences), default=0))
        self._held_text = ""
        self._num_emitted = 0
        self._held_tokens: deque[tuple[int, list[int]]] = deque()
        self._open_tokens: list[int] = []
        self._is_stopped = False

    def fork(self) -> TextStream:
        """A copy that goes on by itself from here. The cost does not depend on the number of stops."""
        fork = copy.copy(self)
        fork._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        fork._utf8.setstate(self._utf8.getstate())
        fork._spelled = None if self._spelled is None else self._spelled.fork()
        fork._token_starts = self._token_starts.copy()
        fork._held_tokens = self._held_tokens.copy()
        fork._open_tokens = self._open_tokens.copy()
        return fork

    def push(self, token_id: int) -> TextDelta:
        """Add the next token. Returns the text that the token decides. Not allowed after a delta with `stopped`."""
        assert not self._is_stopped, "a token after the stop word"
        if not self._can_stop and not self._open_tokens:
            return self._push_alone(token_id)
        return self._follow(token_id, self._bytes(token_id))

    def end(self, token_id: int) -> TextDelta:
        """Add the token that ends the answer: it has no text, but may complete a stop. Returns all text held back."""
        assert not self._is_stopped, "a token after the stop word"
        delta = self._follow(token_id, b"")
        rest = _NOTHING if delta.stopped else self.finish()
        return rest.after(delta, stopped=True)

    def _bytes(self, token_id: int) -> bytes:
        data = self._tokenizer.token_bytes(token_id)
        if not self._is_start or not data:
            return data
        self._is_start = False
        return self._tokenizer.first_bytes(token_id)

    def _follow(self, token_id: int, data: bytes) -> TextDelta:
        """The text that one more token of these bytes decides."""
        start = self._num_chars
        self._num_followed += 1
        self._open_tokens.append(token_id)
        self._token_starts.append(start)
        spelled_stop = self._spell(token_id, data) if self._words and self._may_stop else None
        text = self._utf8.decode(data)
        self._sequence_state = self._sequences.step(self._sequence_state, token_id)
        length = self._sequences.longest_word(self._sequence_state)
        may_stop = length and self._may_stop
        sequence_stop = range(self._token_starts[-length], start + len(text)) if may_stop else None
        return self._add(text, spelled_stop, sequence_stop)

    def _push_alone(self, token_id: int) -> TextDelta:
        """`push` if nothing is held back and nothing can stop. This is the usual case, and it runs for every token."""
        text = self._utf8.decode(self._bytes(token_id))
        self._num_emitted += len(text)
        if self._utf8.getstate()[0]:
            self._open_tokens.append(token_id)
            return TextDelta([], text)
        return TextDelta([token_id], text)

    def finish(self) -> TextDelta:
        """All text held back, when no token follows. An incomplete character becomes U+FFFD."""
        assert not self._is_stopped, "finish after the stop word"
        spelled_stop = None if self._spelled is None else self._spelled.finish()
        delta = self._add(self._utf8.decode(b"", final=True), spelled_stop)
        if delta.stopped:
            return delta
        return TextDelta(delta.token_ids + self._all_tokens(), delta.text + self._emit(self._num_chars))

    @property
    def _may_stop(self) -> bool:
        """Whether a stop that the last token completes ends the answer."""
        return self._num_followed > self._num_tokens_without_stops

    @property
    def _num_chars(self) -> int:
        """The characters of the whole text so far."""
        return self._num_emitted + len(self._held_text)

    def _add(self, text: str, spelled_stop: range | None, sequence_stop: range | None = None) -> TextDelta:
        """spelled_stop, sequence_stop: the places in the whole text of a stop word with special tokens, and of a stop
        token sequence, that the last token completed.
        """
        stop = self._stop_in(text) if self._words else None
        word = "" if stop is None else str(next(self._words.words(self._word_state)))
        self._held_text += text
        if spelled_stop is not None and (
            stop is None or (spelled_stop.stop, spelled_stop.start) < (stop.stop, stop.start)
        ):
            assert self._spelled is not None, "it found the stop"
            stop, word = spelled_stop, self._spelled.stop_word
        if sequence_stop is not None and (stop is None or sequence_stop.start < stop.start):
            stop, word = sequence_stop, ""
        if stop is not None:
            return self._stop(stop, word)
        self._close_tokens()
        text = self._emit(self._num_decided())
        return TextDelta(self._complete_tokens(), text)

    def _num_decided(self) -> int:
        """The number of characters of the whole text that no stop can cut off any more."""
        if self._includes_stop:
            return self._num_chars
        num_decided = self._num_chars - self._words.num_matched(self._word_state)
        if num_tokens := self._sequences.num_matched(self._sequence_state):
            num_decided = min(num_decided, self._token_starts[-num_tokens])
        if self._spelled is not None and (start := self._spelled.start_of_match) is not None:
            num_decided = min(num_decided, start)
        return num_decided

    def _spell(self, token_id: int, data: bytes) -> range | None:
        """The place of the stop word with special tokens that a token completes."""
        if token_id in self._tokenizer.special_ids:
            if self._spelled is None:
                self._spelled = SpelledText(self._words, self._word_state, self._num_chars, self._utf8.getstate())
            return self._spelled.push_special(self._tokenizer.token_name(token_id), self._num_chars)
        return None if self._spelled is None else self._spelled.push(data)

    def _stop_in(self, text: str) -> range | None:
        """The place in the whole text of the stop word that more `text` completes; None without one."""
        for end, char in enumerate(text, start=self._num_chars + 1):
            self._word_state = self._words.step(self._word_state, char)
            length = self._words.longest_word(self._word_state)
            if length and self._may_stop:
                return range(end - length, end)
        return None

    def _stop(self, stop: range, word: str) -> TextDelta:
        self._is_stopped = True
        num_chars = stop.stop if self._includes_stop else stop.start
        if num_chars > self._num_chars:
            # A special token cut a character in two.
            self._held_text += self._utf8.decode(b"", final=True)
        return TextDelta(self._all_tokens(), self._emit(num_chars), stopped=True, stop_word=word)

    def _close_tokens(self) -> None:
        """At a character boundary, note after how many characters of the whole text the open tokens are complete."""
        if self._open_tokens and not self._utf8.getstate()[0]:
            self._held_tokens.append((self._num_chars, self._open_tokens))
            self._open_tokens = []

    def _emit(self, end: int) -> str:
        """Release the held text up to a place in the whole text."""
        num_chars = max(0, end - self._num_emitted)
        text, self._held_text = self._held_text[:num_chars], self._held_text[num_chars:]
        self._num_emitted += len(text)
        return text

    def _complete_tokens(self) -> list[int]:
        token_ids: list[int] = []
        while self._held_tokens and self._held_tokens[0][0] <= self._num_emitted:
            token_ids += self._held_tokens.popleft()[1]
        return token_ids

    def _all_tokens(self) -> list[int]:
        token_ids = [i for _, ids in self._held_tokens for i in ids] + self._open_tokens
        self._held_tokens.clear()
        self._open_tokens = []
        return token_ids
