"""`TextStream`: the text of a sequence, token by token, up to its stop words."""

from __future__ import annotations

import codecs
import copy
from collections import deque

import msgspec

from multilora_engine.errors import InvalidRequest
from multilora_engine.text.automaton import ROOT, Automaton
from multilora_engine.text.tokenizer import Tokenizer


class TextDelta(msgspec.Struct, frozen=True):
    """The text that one more token decided. `stopped`: a stop word was completed, and nothing may follow."""

    token_ids: list[int]
    text: str
    stopped: bool = False


class TextStream:
    """The text of one sequence, token by token, without ever taking back a character.

    Held back until decided: the bytes of an incomplete UTF-8 character, and the longest end of the text that could
    still become a stop word, or is that of tokens that could still become a stop token sequence. Tokens are released
    when all their text is, and only up to one that ends at a character boundary, so decoding each delta's tokens on
    their own gives the same text as decoding all of them together.

    The stop word that ends first wins; where several end at the same character, the longest. A stop token sequence that
    the same token completes wins if it begins earlier. Text up to its start is emitted, and with it all tokens up to
    and including the one that completed it. With `include_stop_str_in_output` text up to its end is emitted, and since
    that holds for every stop, none has text held back.

    Over the whole stream the texts add up to `Tokenizer.decode` of all tokens, cut at that stop word.
    Raises InvalidRequest for an empty stop word or stop token sequence.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        stop_words: tuple[str, ...] = (),
        stop_token_sequences: tuple[tuple[int, ...], ...] = (),
        include_stop_str_in_output: bool = False,
    ) -> None:
        if not all(stop_words):
            raise InvalidRequest(f"stop word {stop_words.index('')} is empty")
        if not all(stop_token_sequences):
            raise InvalidRequest(f"stop_words_list: word {stop_token_sequences.index(())} has no tokens")
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._words = Automaton(stop_words)
        self._word_state = ROOT
        self._sequences = Automaton(stop_token_sequences)
        self._sequence_state = ROOT
        self._can_stop = bool(stop_words or stop_token_sequences)
        self._includes_stop = include_stop_str_in_output
        self._token_starts: deque[int] = deque(maxlen=max(map(len, stop_token_sequences), default=0))
        self._held_text = ""
        self._num_emitted = 0
        self._held_tokens: deque[tuple[int, list[int]]] = deque()
        self._open_tokens: list[int] = []
        self._is_stopped = False

    def fork(self) -> TextStream:
        """A stream of its own that goes on from here, at a price that does not depend on how many stops there are."""
        fork = copy.copy(self)
        fork._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        fork._utf8.setstate(self._utf8.getstate())
        fork._token_starts = self._token_starts.copy()
        fork._held_tokens = self._held_tokens.copy()
        fork._open_tokens = self._open_tokens.copy()
        return fork

    def push(self, token_id: int) -> TextDelta:
        """Add the next token; the text that it decides. Not after a delta with `stopped`."""
        assert not self._is_stopped, "a token after the stop word"
        if not self._can_stop and not self._open_tokens:
            return self._push_alone(token_id)
        self._open_tokens.append(token_id)
        # How many characters of the whole text precede this token.
        self._token_starts.append(self._num_emitted + len(self._held_text))
        self._sequence_state = self._sequences.step(self._sequence_state, token_id)
        length = self._sequences.longest_word(self._sequence_state)
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        return self._add(text, self._stop_of_tokens(length, text) if length else None)

    def _push_alone(self, token_id: int) -> TextDelta:
        """`push` where nothing is held back and nothing can stop: the usual case, and it is asked for every token."""
        text = self._utf8.decode(self._tokenizer.token_bytes(token_id))
        self._num_emitted += len(text)
        if self._utf8.getstate()[0]:
            self._open_tokens.append(token_id)
            return TextDelta([], text)
        return TextDelta([token_id], text)

    def finish(self) -> TextDelta:
        """Everything still held back, when no token follows; an incomplete character becomes U+FFFD."""
        assert not self._is_stopped, "finish after the stop word"
        delta = self._add(self._utf8.decode(b"", final=True))
        if delta.stopped:
            return delta
        return TextDelta(delta.token_ids + self._all_tokens(), delta.text + self._emit(len(self._held_text)))

    def _add(self, text: str, stop_of_tokens: range | None = None) -> TextDelta:
        """stop_of_tokens: where in the held text plus `text` the stop token sequence is that was just completed."""
        stops = [self._stop_in(text), stop_of_tokens]
        self._held_text += text
        if found := [stop for stop in stops if stop is not None]:
            return self._stop(min(found, key=lambda stop: stop.start))
        self._close_tokens()
        text = self._emit(self._num_decided())
        return TextDelta(self._complete_tokens(), text)

    def _num_decided(self) -> int:
        """How many characters of the held text no stop can cut off any more."""
        if self._includes_stop:
            return len(self._held_text)
        num_decided = len(self._held_text) - self._words.num_matched(self._word_state)
        if num_tokens := self._sequences.num_matched(self._sequence_state):
            num_decided = min(num_decided, self._token_starts[-num_tokens] - self._num_emitted)
        return num_decided

    def _stop_of_tokens(self, num_tokens: int, text: str) -> range:
        """The place of the last tokens in the held text plus `text`, which is the last one's."""
        return range(self._token_starts[-num_tokens] - self._num_emitted, len(self._held_text) + len(text))

    def _stop_in(self, text: str) -> range | None:
        """The place of the stop word that `text` completes, in the held text plus `text`; None without one."""
        if not self._words:
            return None
        for end, char in enumerate(text, start=len(self._held_text) + 1):
            self._word_state = self._words.step(self._word_state, char)
            if length := self._words.longest_word(self._word_state):
                return range(end - length, end)
        return None

    def _stop(self, stop: range) -> TextDelta:
        self._is_stopped = True
        return TextDelta(self._all_tokens(), self._emit(stop.stop if self._includes_stop else stop.start), stopped=True)

    def _close_tokens(self) -> None:
        """At a character boundary, note after how many characters of the whole text the open tokens are complete."""
        if self._open_tokens and not self._utf8.getstate()[0]:
            self._held_tokens.append((self._num_emitted + len(self._held_text), self._open_tokens))
            self._open_tokens = []

    def _emit(self, num_chars: int) -> str:
        text, self._held_text = self._held_text[:num_chars], self._held_text[num_chars:]
        self._num_emitted += num_chars
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
