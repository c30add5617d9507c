"""Sizes computed without torch, against what the engine packs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multilora_client import InvalidRequest
from multilora_client.sizing import LINEARS, AdapterLayout, LinearName, StoredDtype, adapter_pages, read_layout
from multilora_engine.lora import layout as engine_layout
from multilora_engine.lora.format import pack_adapter
from multilora_engine.models.registry import read_model_config

MODULE_IDS = {"q": 1, "k": 2, "v": 3, "o": 4, "gate": 5, "down": 6, "up": 7}


def write_config(directory: Path, **changes: int) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 3,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 300,
        "vocab_size": 100,
    }
    (directory / "config.json").write_text(json.dumps(config | changes))
    return directory


@pytest.mark.parametrize(
    "changes", [{}, {"head_dim": 48}, {"intermediate_size": 4001}, {"hidden_size": 4096}, {"num_key_value_heads": 4}]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_layout_of_a_checkpoint_is_the_engines(tmp_path: Path, changes: dict[str, int], dtype: StoredDtype) -> None:
    write_config(tmp_path, **changes)
    expected = engine_layout.adapter_layout(read_model_config(tmp_path), 64, dtype)
    assert read_layout(tmp_path, 64, dtype) == AdapterLayout(**vars(expected))


@settings(max_examples=30, deadline=None)
@given(
    rank=st.integers(1, 64),
    linears=st.sets(st.sampled_from(LINEARS), min_size=1),
    sizes=st.tuples(*[st.integers(1, 40)] * 4),
    num_layers=st.integers(1, 5),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    dora=st.booleans(),
)
def test_an_adapter_takes_as_many_pages_as_the_engine_packs_it_into(
    rank: int, linears: set[LinearName], sizes: tuple[int, ...], num_layers: int, dtype: str, dora: bool
) -> None:
    hidden, q, kv, ffn = (size * 13 for size in sizes)
    # Pages of little more than the largest piece, so that how pieces are placed shows.
    page_bytes = -(-64 * max(hidden, q, kv, ffn) * 4 // 4096) * 4096
    layout = engine_layout.AdapterLayout(num_layers, hidden, q, kv, ffn, 64, dtype, page_bytes)
    modules = engine_layout.lora_modules(layout)
    config = [[MODULE_IDS[name], layer, rank, int(dora)] for layer in range(num_layers) for name in linears]
    width = max(modules[row[0]].num_values(rank, dora) for row in config)
    packed = pack_adapter(torch.zeros(len(config), width), torch.tensor(config, dtype=torch.int32), layout)
    assert adapter_pages(AdapterLayout(**vars(layout)), rank, sorted(linears), dora) == len(packed.pages)


@pytest.mark.parametrize("content", [None, "no JSON", "[]", "{}"])
def test_a_checkpoint_that_cannot_be_read_is_named(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(InvalidRequest, match=r"config\.json"):
        read_layout(tmp_path, 64, "float32")
