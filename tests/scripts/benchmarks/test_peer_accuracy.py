"""Engines' log-probabilities are compared token by token, over pieces of real text."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from benchmarks.peer_accuracy import PAGE, TABLE, TEXTS, token_pieces
from benchmarks.peers.accuracy import OURS, THEIRS, Nearness, accuracy_table
from benchmarks.peers.contestants import FLOATS
from marked_tables import read_table


def test_nearness_is_over_all_tokens_of_all_texts() -> None:
    exact = [[-1.0, -2.0], [-3.0]]
    near = Nearness.of("ours", [[-1.0, -2.5], [-2.0]], exact)
    assert near == Nearness("ours", math.sqrt((0.25 + 1) / 3), 1.0, 3)
    with pytest.raises(ValueError, match="zip"):
        Nearness.of("ours", [[-1.0], [-2.0]], exact)


def test_the_table_says_where_ours_is_not_nearer() -> None:
    ours, theirs = Nearness(OURS, 0.0123, 0.1, 3_060), Nearness(THEIRS, 0.0123, 0.2, 3_060)
    assert f"| {OURS} | 0.0123, missed | 0.1 | 3,060 |\n" in accuracy_table([ours, theirs])
    assert f"| {OURS} | 0.0122 | 0.1 | 3,060 |\n" in accuracy_table([replace(ours, rms=0.0122), theirs])
    assert f"| {OURS} | 0.0123 | 0.1 | 3,060 |\n" in accuracy_table([ours])


def test_the_goal_is_of_contestants_and_the_page_has_its_table() -> None:
    assert {OURS, THEIRS} < {contestant.name for contestant in FLOATS}
    assert read_table(PAGE, TABLE) is not None


def test_texts_have_pieces_enough_of_one_length_that_follow_each_other(default_model_dir: Path) -> None:
    for text in TEXTS:
        pieces = token_pieces(default_model_dir, text)
        assert [len(piece) for piece in pieces] == [256] * 3
        tokens = AutoTokenizer.from_pretrained(default_model_dir)(text.read_text(), verbose=False)["input_ids"]
        assert list(itertools.chain.from_iterable(pieces)) == tokens[: 3 * 256]
