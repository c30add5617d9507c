"""Streams of text against a naive definition on the whole text."""

from __future__ import annotations

import codecs
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.text_streams import joined, stream, tokens

from multilora_engine.errors import InvalidRequest
from multilora_engine.text.text_stream import TextDelta, TextStream
from multilora_engine.text.tokenizer import Tokenizer


class ByteTokens(Tokenizer):
    """Tokens made of any bytes at all: the token id is the place in the list."""

    def __init__(self, pieces: list[bytes]) -> None:
        self._bytes = pieces
        self.special_ids = frozenset()


def naive_cut(text: str, stop_words: tuple[str, ...]) -> tuple[str, str] | None:
    """Text up to the start and up to the end of the stop word that ends first, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        if hits := [word for word in stop_words if text[:end].endswith(word)]:
            return text[: end - max(map(len, hits))], text[:end]
    return None


def naive_text(text: str, stop_words: tuple[str, ...]) -> tuple[str, bool]:
    """Text up to the first stop word; whether there is one."""
    cut = naive_cut(text, stop_words)
    return (text, False) if cut is None else (cut[0], True)


def naive_stop_word(text: str, stop_words: tuple[str, ...]) -> str:
    """The stop word at which the text is cut, empty without one."""
    before, through = naive_cut(text, stop_words) or ("", "")
    return through[len(before) :]


def naive_stop(
    pieces: list[bytes], token_ids: list[int], stop_words: tuple[str, ...], sequences: tuple[tuple[int, ...], ...]
) -> tuple[str, str, int]:
    """The text up to the start and up to the end of the first stop of either kind, and how many tokens that takes."""

    def text_of(num_tokens: int) -> str:
        return codecs.getincrementaldecoder("utf-8")("replace").decode(
            b"".join(pieces[i] for i in token_ids[:num_tokens])
        )

    for end in range(1, len(token_ids) + 1):
        cuts = [cut] if (cut := naive_cut(text_of(end), stop_words)) else []
        lengths = [len(s) for s in sequences if end >= len(s) and tuple(token_ids[end - len(s) : end]) == s]
        if lengths:
            cuts.append((text_of(end - max(lengths)), text_of(end)))
        if cuts:
            return *min(cuts, key=lambda cut: len(cut[0])), end
    text = ByteTokens(pieces).decode(token_ids)
    return *(naive_cut(text, stop_words) or (text, text)), len(token_ids)


PIECES = st.one_of(
    st.text("ab", max_size=3).map(str.encode),
    st.binary(max_size=3),
    st.sampled_from([b"\xe2\x82", b"\xac", b"\xf0\x9f", b"\x98\x80", "é€😀".encode(), b"\xc3", b"\xa9ab"]),
)
STOP_WORDS = st.lists(st.text("abé€😀\ufffd", min_size=1, max_size=4), max_size=3).map(tuple)


class TestStream:
    @settings(max_examples=1500, deadline=None)
    @given(pieces=st.lists(PIECES, max_size=12), stop_words=STOP_WORDS)
    def test_a_stream_is_the_whole_text_cut_at_the_first_stop_word(
        self, pieces: list[bytes], stop_words: tuple[str, ...]
    ) -> None:
        tokenizer, token_ids = ByteTokens(pieces), range(len(pieces))
        deltas = stream(tokenizer, token_ids, stop_words)
        text, is_stopped = naive_text(tokenizer.decode(token_ids), stop_words)
        assert joined(deltas) == text
        assert deltas[-1].stopped == is_stopped
        assert deltas[-1].stop_word == naive_stop_word(tokenizer.decode(token_ids), stop_words)
        assert tokens(deltas) == list(token_ids)[: len(deltas)]

    @settings(max_examples=500, deadline=None)
    @given(pieces=st.lists(PIECES, max_size=12), stop_words=STOP_WORDS, num_held=st.integers(0, 12))
    def test_a_stop_word_that_ends_in_the_first_tokens_is_text(
        self, pieces: list[bytes], stop_words: tuple[str, ...], num_held: int
    ) -> None:
        tokenizer, token_ids = ByteTokens(pieces), range(len(pieces))
        deltas = stream(tokenizer, token_ids, stop_words, num_tokens_without_stops=num_held)
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        num_chars = len("".join(map(decoder.decode, pieces[:num_held])))
        whole = tokenizer.decode(token_ids)
        ends = [
            (end, end - len(word))
            for end in range(num_chars + 1, len(whole) + 1)
            for word in stop_words
            if whole[:end].endswith(word)
        ]
        is_stopped = bool(ends) and len(pieces) > num_held
        assert joined(deltas) == (whole[: min(ends)[1]] if is_stopped else whole)
        assert deltas[-1].stopped == is_stopped

    @settings(max_examples=1500, deadline=None)
    @given(pieces=st.lists(PIECES, max_size=12), stop_words=STOP_WORDS)
    def test_the_tokens_of_each_delta_decode_on_their_own_to_the_same_text(
        self, pieces: list[bytes], stop_words: tuple[str, ...]
    ) -> None:
        tokenizer = ByteTokens(pieces)
        deltas = stream(tokenizer, range(len(pieces)), stop_words)
        assert "".join(tokenizer.decode(d.token_ids) for d in deltas) == tokenizer.decode(tokens(deltas))

    @settings(max_examples=500, deadline=None)
    @given(pieces=st.lists(PIECES, max_size=12))
    @example(pieces=[b"\xed", b"\xa0"])
    def test_nothing_is_held_back_without_stop_words_but_an_incomplete_character(self, pieces: list[bytes]) -> None:
        tokenizer, text_stream, seen = ByteTokens(pieces), TextStream(ByteTokens(pieces)), ""
        for i in range(len(pieces)):
            seen += text_stream.push(i).text
            whole = tokenizer.decode(range(i + 1))
            assert whole.startswith(seen)
            # An incomplete character is one U+FFFD; the first two bytes of a surrogate, which nothing completes, two.
            assert whole[len(seen) :] in ("", "\ufffd", "\ufffd\ufffd")

    @settings(max_examples=1000, deadline=None)
    @given(
        pieces=st.lists(PIECES, min_size=1, max_size=3),
        data=st.data(),
        stop_words=STOP_WORDS,
    )
    def test_stop_token_sequences_cut_the_text_where_their_first_token_began_or_after_their_last(
        self, pieces: list[bytes], data: st.DataObject, stop_words: tuple[str, ...]
    ) -> None:
        ids = st.integers(0, len(pieces) - 1)
        token_ids = data.draw(st.lists(ids, max_size=10))
        sequences = tuple(data.draw(st.lists(st.lists(ids, min_size=1, max_size=4).map(tuple), max_size=2)))
        before, through, num_tokens = naive_stop(pieces, token_ids, stop_words, sequences)
        for includes_stop, text in ((False, before), (True, through)):
            deltas = stream(ByteTokens(pieces), token_ids, stop_words, sequences, includes_stop)
            assert joined(deltas) == text
            assert tokens(deltas) == token_ids[:num_tokens]

    @settings(max_examples=300, deadline=None)
    @given(pieces=st.lists(PIECES, min_size=2, max_size=8), cut=st.integers(0, 7), stop_words=STOP_WORDS)
    def test_a_fork_goes_on_as_if_it_were_alone_and_leaves_the_other_as_it_is(
        self, pieces: list[bytes], cut: int, stop_words: tuple[str, ...]
    ) -> None:
        sequences = ((len(pieces) - 2, len(pieces) - 1),)
        expected = stream(ByteTokens(pieces), range(len(pieces)), stop_words, sequences)
        text_stream = TextStream(ByteTokens(pieces), stop_words, sequences)
        deltas = [text_stream.push(token_id) for token_id in range(min(cut, len(expected) - 1))]
        for other in (text_stream.fork(), text_stream.fork(), text_stream):
            rest: list[TextDelta] = []
            for token_id in range(len(deltas), len(pieces)):
                if not rest or not rest[-1].stopped:
                    rest.append(other.push(token_id))
            if not rest or not rest[-1].stopped:
                rest.append(other.finish())
            assert deltas + rest == expected

    def test_the_text_of_a_token_sequence_is_held_back_until_it_is_decided(self) -> None:
        text_stream = TextStream(ByteTokens([b"a", b"b", b"c"]), (), ((0, 1, 2),))
        assert text_stream.push(0) == TextDelta([], "")
        assert text_stream.push(1) == TextDelta([], "")
        assert text_stream.push(0) == TextDelta([0, 1], "ab")
        assert text_stream.push(1) == TextDelta([], "")
        assert text_stream.push(2) == TextDelta([0, 1, 2], "", stopped=True)

    def test_text_that_could_become_a_stop_word_is_held_back_until_it_is_decided(self) -> None:
        text_stream = TextStream(ByteTokens([b"one E", b"N", b"D", b"ED", b" EN"]), ("END!",))
        assert text_stream.push(0) == TextDelta([], "one ")
        assert text_stream.push(1) == TextDelta([], "")
        assert text_stream.push(2) == TextDelta([], "")
        assert text_stream.push(3) == TextDelta([0, 1, 2, 3], "ENDED")
        assert text_stream.push(4) == TextDelta([], " ")
        assert text_stream.finish() == TextDelta([4], "EN")

    def test_a_stop_word_that_is_part_of_the_answer_holds_nothing_back(self) -> None:
        text_stream = TextStream(ByteTokens([b"one E", b"N", b"D and"]), ("END",), ((7, 8),), True)
        assert text_stream.push(0) == TextDelta([0], "one E")
        assert text_stream.push(1) == TextDelta([1], "N")
        assert text_stream.push(2) == TextDelta([2], "D", stopped=True, stop_word="END")

    def test_a_stop_word_releases_every_token_up_to_the_one_that_completed_it(self) -> None:
        deltas = stream(ByteTokens([b"text E", b"N", b"D and more"]), [0, 1, 2], ("END",))
        assert deltas[-1] == TextDelta([0, 1, 2], "", stopped=True, stop_word="END")
        assert joined(deltas) == "text "

    def test_of_stop_words_that_end_together_the_longest_wins(self) -> None:
        assert joined(stream(ByteTokens([b"xabc"]), [0], ("c", "abc", "bc"))) == "x"

    def test_of_overlapping_stop_words_the_one_that_ends_first_wins(self) -> None:
        assert joined(stream(ByteTokens([b"xabcd"]), [0], ("abcd", "bc"))) == "xa"

    def test_tokens_without_text_are_released_at_once(self) -> None:
        text_stream = TextStream(ByteTokens([b"", b"a"]), ("b",))
        assert text_stream.push(0) == TextDelta([0], "")
        assert text_stream.push(1) == TextDelta([1], "a")

    def test_a_token_between_two_characters_waits_for_the_second(self) -> None:
        text_stream = TextStream(ByteTokens([b"a\xe2", b"\x82\xacb\xc3", b"\xa9"]))
        assert text_stream.push(0) == TextDelta([], "a")
        assert text_stream.push(1) == TextDelta([], "€b")
        assert text_stream.push(2) == TextDelta([0, 1, 2], "é")

    def test_an_incomplete_character_at_the_end_is_replaced_once(self) -> None:
        text_stream = TextStream(ByteTokens([b"a\xf0\x9f\x98"]))
        assert text_stream.push(0) == TextDelta([], "a")
        assert text_stream.finish() == TextDelta([0], "\ufffd")

    def test_an_empty_stop_word_is_refused(self) -> None:
        with pytest.raises(InvalidRequest, match="stop word 1 is empty"):
            TextStream(ByteTokens([]), ("a", ""))
        with pytest.raises(InvalidRequest, match="stop_words_list: word 1 has no tokens"):
            TextStream(ByteTokens([]), (), ((1,), ()))

    def test_the_work_for_a_long_repetitive_stop_word_is_linear(self) -> None:
        """Compares per character, counted: a rescan of the held text would need millions of them."""
        compared = 0

        class CountingWord(str):
            def __getitem__(self, index: Any) -> str:
                nonlocal compared
                compared += 1
                return super().__getitem__(index)

        pieces = [b"a" * 50] * 40 + [b"c"]
        deltas = stream(ByteTokens(pieces), range(len(pieces)), (CountingWord("a" * 1999 + "b"),))
        assert len(joined(deltas)) == 2001
        assert compared < 6 * 4000
