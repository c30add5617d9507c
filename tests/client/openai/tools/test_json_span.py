"""Where JSON values end, judged by their writer."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from multilora_client.openai.tools.json_span import JsonSpan

LEAVES = st.none() | st.booleans() | st.integers() | st.text()
VALUES = st.recursive(LEAVES, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=10)
BRACKETED = st.lists(VALUES) | st.dictionaries(st.text(), VALUES) | st.text()


@given(BRACKETED, st.text(), st.booleans())
def test_a_value_ends_where_it_was_written_to_end(value: Any, after: str, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii)
    assert JsonSpan().end(text + after) == len(text)


@given(BRACKETED)
def test_pieces_end_where_the_whole_ends(value: Any) -> None:
    text = json.dumps(value)
    span = JsonSpan()
    assert [span.end(character) for character in text] == [None] * (len(text) - 1) + [1]


@given(st.dictionaries(st.text(), VALUES), st.text())
def test_the_rest_of_an_object_ends_with_it(value: Any, after: str) -> None:
    text = json.dumps(value)
    assert JsonSpan(depth=1).end(text[1:] + after) == len(text) - 1
