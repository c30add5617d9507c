"""The window that a mask means."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.masking_utils import (
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_bidirectional_mask_function,
    sliding_window_causal_mask_function,
)

from multilora_engine.models.general.trace import OTHER_MASK, Unserved, window_of
from multilora_engine.models.general.tree import MaskPattern


@given(window=st.integers(1, 300), length=st.integers(1, 300))
def test_a_window_is_that_of_transformers_mask(window: int, length: int) -> None:
    found = window_of(sliding_window_causal_mask_function(window), length)
    assert found == (window if window < length else None)


def test_a_causal_mask_has_no_window() -> None:
    assert window_of(causal_mask_function, 100) is None


@pytest.mark.parametrize(
    "pattern",
    [
        bidirectional_mask_function,
        sliding_window_bidirectional_mask_function(8),
        chunked_causal_mask_function(32, torch.zeros(1, dtype=torch.int64)),
        or_masks(causal_mask_function, lambda batch, head, query, key: key < 4),
        lambda batch, head, query, key: key < query,
        lambda batch, head, query, key: (key <= query) & (key % 2 == 0),
    ],
    ids=["all", "both sides", "chunks", "a prefix", "no own key", "every second key"],
)
def test_other_masks_are_refused(pattern: MaskPattern) -> None:
    with pytest.raises(Unserved, match=OTHER_MASK):
        window_of(pattern, 100)
