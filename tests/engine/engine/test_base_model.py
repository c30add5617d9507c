"""The layout that follows from a model and from the parameters of adapters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.adapters import wire_adapter
from support.engines import run_all

from checkpoints.telling_adapters import (
    EXPERT_INTERMEDIATE_SIZE,
    MAX_RANK,
    PROMPT_TOKENS,
    answer,
    packed_adapter,
    save_checkpoint,
)
from multilora_engine.config import EngineConfig
from multilora_engine.engine.base_model import restricted_sites
from multilora_engine.engine.engine import Engine
from multilora_engine.errors import ConfigError, InvalidRequest
from multilora_engine.lora.checkpoint_layout import checkpoint_layout
from multilora_engine.lora.format import pack_adapter
from multilora_engine.request import GenerationRequest, SamplingParams

NUM_EXPERTS = 6


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_checkpoint(tmp_path_factory.mktemp("telling"), EXPERT_INTERMEDIATE_SIZE, NUM_EXPERTS)


def make_engine(checkpoint: Path, **parameters: str) -> Engine:
    given = {"model_path": str(checkpoint), "num_threads": "1", "kv_cache_memory_bytes": "4MiB", "max_lora_rank": "8"}
    return Engine(EngineConfig.from_parameters(given | parameters, environ={}))


def test_an_engine_serves_the_modules_that_it_is_restricted_to_and_refuses_others(checkpoint: Path) -> None:
    """The telling adapters change v, o, up and down of experts."""
    whole = checkpoint_layout(checkpoint, MAX_RANK, "float32")
    engine = make_engine(checkpoint, lora_target_modules="attn_v,attn_dense,moe_gate,moe_4h_to_h")
    layout = engine.info.adapter_layout
    assert layout.sites.num_columns == whole.sites.num_columns
    assert len(layout.sites.plain_modules) == 2 * 4
    assert layout.max_pages * layout.page_bytes == 1 << 30
    engine.put_adapter(7, packed_adapter(0x123, 0x45, layout))
    sampling = SamplingParams(max_tokens=6, end_id=-1)
    prompts = {"r": GenerationRequest("r", list(PROMPT_TOKENS[:9]), sampling, lora_task_id=7)}
    assert run_all(engine, prompts.values())["r"].token_ids == answer(0x123, 0x45)
    for row in ((1, 0, 2), (13, 1, 2), (16, 0, 1)):
        wire = wire_adapter(whole, [row])
        with pytest.raises(InvalidRequest, match=r"not enabled for this model .*lora_target_modules of the server has"):
            pack_adapter(wire.weights, wire.config, layout)
    engine.close()


@pytest.mark.parametrize("lora_dtype", ["bfloat16", "int8", "fp8", "int4"])
def test_adapters_on_experts_answer_as_they_do_in_float32_however_they_are_stored(
    checkpoint: Path, lora_dtype: str
) -> None:
    dtype = {"bfloat16": {"dtype": "bfloat16"}}.get(lora_dtype, {"lora_dtype": lora_dtype})
    engine = make_engine(checkpoint, **dtype)
    assert engine.info.adapter_layout.lora_dtype == lora_dtype
    requests, expected = [], {}
    for task in range(6):
        engine.put_adapter(task, packed_adapter(0x100 + task, 0x3A, engine.info.adapter_layout))
        sampling = SamplingParams(max_tokens=6, end_id=-1)
        requests.append(GenerationRequest(str(task), list(PROMPT_TOKENS[: 5 + task]), sampling, lora_task_id=task))
        expected[str(task)] = answer(0x100 + task, 0x3A)
    assert {name: one.token_ids for name, one in run_all(engine, requests).items()} == expected
    engine.close()


def test_an_adapter_that_no_tier_can_hold_is_refused_by_the_engine_too(checkpoint: Path) -> None:
    engine = make_engine(checkpoint)
    layout, whole = engine.info.adapter_layout, checkpoint_layout(checkpoint, MAX_RANK, "float32")
    packed = packed_adapter(1, 0, whole)
    pages = torch.zeros(layout.max_pages + 1, 0, dtype=torch.uint8).expand(-1, 0)
    too_large = type(packed)("0" * 32, packed.rows, pages)
    with pytest.raises(InvalidRequest, match=f"and this server has room for adapters of {1 << 30}"):
        engine.put_adapter(7, too_large)
    engine.close()


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["attn_q", "mlp_gate"], "attn_q,mlp_gate: the model has no mlp_gate; write some of attn_qkv, .*, moe_gate"),
        (
            ["lm_head"],
            "lora_target_modules=lm_head leaves no module of a layer; write some of attn_qkv, attn_q, .*, too",
        ),
    ],
)
def test_modules_that_the_model_has_not_stop_the_start(checkpoint: Path, names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        restricted_sites(checkpoint_layout(checkpoint, MAX_RANK, "float32").sites, names)
