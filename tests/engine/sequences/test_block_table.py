"""A block table against a list, and that no step walks through it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checkpoints.tiny_llama import save_tiny_llama
from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.request import GenerationRequest, SamplingParams
from multilora_engine.sequences.sequence import BlockTable


@given(st.lists(st.lists(st.integers(0, 1 << 40), max_size=40), max_size=12), st.integers(0, 11))
def test_it_is_a_list_of_blocks(pieces: list[list[int]], cleared_at: int) -> None:
    table, blocks = BlockTable(), list[int]()
    for i, piece in enumerate(pieces):
        if i == cleared_at:
            table.clear()
            blocks.clear()
        table.extend(piece)
        blocks += piece
        assert list(table) == table.ids.tolist() == blocks
        assert (len(table), table.length) == (len(blocks), len(blocks))
        assert [table[place] for place in range(len(table))] == blocks
    table.replace(blocks[::-1], [b"key"])
    assert (list(table), table.keys) == (blocks[::-1], [b"key"])


def test_no_decode_step_walks_through_the_blocks_of_a_long_context(
    tmp_path: Path, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = EngineConfig(
        model_path=save_tiny_llama(tmp_path), tokenizer_path=default_model_dir, num_threads=1, block_size=1
    )
    engine = Engine(config)
    engine.add_request(GenerationRequest("r", [1] * 300, SamplingParams(20, end_id=-1)))
    while not engine.step():
        pass
    visited: list[BlockTable] = []
    monkeypatch.setattr(BlockTable, "__iter__", lambda table: iter(visited.append(table) or table.ids))
    outputs = [output for _ in range(19) for output in engine.step()]
    assert outputs[-1].num_output_tokens == 20
    # Once, when its blocks were given back.
    assert len(visited) == 1
