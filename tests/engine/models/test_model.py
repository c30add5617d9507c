"""Groups of layers in the KV cache."""

from __future__ import annotations

import pytest
import torch

from multilora_engine.models.model import KVGroup, only_group

GROUP = KVGroup(num_layers=3, num_kv_heads=2, head_dim=8)


def test_a_token_takes_its_row_of_keys_and_of_values_in_every_layer() -> None:
    assert GROUP.cache_shape(5, torch.float32) == (3, 5, 2, 8)
    assert GROUP.bytes_per_token(torch.float32) == 2 * 3 * 2 * 8 * 4


def test_a_model_of_several_groups_is_not_served() -> None:
    assert only_group([GROUP]) == GROUP
    with pytest.raises(AssertionError, match="one group of layers, and the model has 2"):
        only_group([GROUP, GROUP])
