"""Adapters with rotary embeddings of their own against transformers: beside others, cold and from the cache."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from support.engines import run_all
from support.oracle import ATTENTION, MLP, Oracle
from support.parity import TINY, TINY_KV_CACHE_BYTES
from support.sources import NO_BASE
from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.errors import InvalidRequest
from multilora_engine.lora.format import pack_peft
from multilora_engine.lora.layout import PackedAdapter
from multilora_engine.lora_config import LoRAConfig
from multilora_engine.request import GenerationRequest, SamplingParams
from multilora_wire.layout import AdapterLayout
from multilora_wire.peft_files import open_peft_directory

LENGTH = 64
SHAPE = {**TINY, "max_position_embeddings": LENGTH}
THETA = 10_000.0
ROPES: dict[str, dict[str, Any]] = {
    "context_length": {"context_length": 3 * LENGTH - 5},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 3.0}},
    "yarn": {"rope_parameters": {"type": "yarn", "factor": 4.0, "beta_fast": 16}},
    "theta": {"rope_parameters": {"rope_theta": 500.0}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        }
    },
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
}
ORACLES: dict[str, dict[str, Any]] = {
    name: {"rope_type": "default", "rope_theta": THETA, **rope.get("rope_parameters", {})}
    for name, rope in {**ROPES, "plain": {}}.items()
}
ORACLES["context_length"] |= {"rope_type": "linear", "factor": 3.0}
ORACLES["yarn"] |= {"rope_type": "yarn", "original_max_position_embeddings": LENGTH}
"""The same, as transformers' configuration of the model takes it."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a tiny Llama, and one adapter under several configurations."""
    folder = tmp_path_factory.mktemp("rope")
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    model.save_pretrained(folder / "checkpoint")
    oracle = Oracle(model, folder)
    oracle.add_random("plain", 6, ATTENTION + MLP, seed=3)
    for name, rope in ROPES.items():
        copy_with(folder, name, rope)
    return folder


def copy_with(folder: Path, name: str, fields: dict[str, Any]) -> Path:
    """The adapter with more fields in its configuration."""
    target = shutil.copytree(folder / "plain", folder / name, dirs_exist_ok=True)
    config = json.loads((target / "adapter_config.json").read_text())
    (target / "adapter_config.json").write_text(json.dumps(config | fields))
    return target


def packed(directory: Path, layout: AdapterLayout) -> PackedAdapter:
    with open_peft_directory(directory, layout.sites, "") as adapter:
        return pack_peft(adapter, layout, NO_BASE)


def make_engine(folder: Path, tokenizer: Path, **options: Any) -> Engine:
    return Engine(
        EngineConfig(
            model_path=folder / "checkpoint",
            tokenizer_path=tokenizer,
            num_threads=1,
            kv_cache_memory_bytes=TINY_KV_CACHE_BYTES,
            block_size=8,
            max_num_seqs=10,
            lora=LoRAConfig.model_validate({"lora_cache_host_memory_bytes": 32 << 20, "max_loras": 8}),
            **options,
        )
    )


def answer_of(folder: Path, name: str | None, prompt: list[int], count: int) -> list[int]:
    """The greedy answer of transformers with PEFT."""
    model = LlamaForCausalLM.from_pretrained(
        folder / "checkpoint", dtype=torch.float32, rope_parameters=ORACLES[name or "plain"]
    ).eval()
    if name is not None:
        oracle = Oracle(model, folder)
        oracle.load(name, folder / name)
        generated = oracle.generate(name, prompt, max_new_tokens=count, do_sample=False, eos_token_id=None)
    else:
        token_ids = torch.tensor([prompt])
        generated = model.generate(token_ids, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    return generated[0, len(prompt) :].tolist()


def request(name: str, prompt: list[int], lora_task_id: int | None, max_tokens: int = 10, **more: Any) -> Any:
    sampling = SamplingParams(max_tokens=max_tokens, end_id=-1, **more)
    return GenerationRequest(name, prompt, sampling, lora_task_id)


PROMPT = [(7 * i * i + 3 * i) % 300 + 5 for i in range(45)]


@pytest.mark.parametrize("budget", [512, 16])
def test_each_adapter_answers_by_its_own_angles_beside_others_and_the_base(
    folder: Path, default_model_dir: Path, budget: int
) -> None:
    """Prompts whole and in pieces, then all again from the prefix cache."""
    engine = make_engine(folder, default_model_dir, max_num_batched_tokens=budget)
    names = [None, "plain", *ROPES]
    for task_id, name in enumerate(names):
        if name is not None:
            engine.put_adapter(task_id, packed(folder / name, engine.loras.device.layout))
    digests = {engine.loras.inventory.info(task_id).digest for task_id in range(1, len(names))}
    assert len(digests) == len(names) - 1
    expected = {str(name): answer_of(folder, name, PROMPT, 10) for name in names}
    assert len(set(map(tuple, expected.values()))) >= len(names) - 2, "the angles make no difference"
    for num_cached in (0, 40):
        asked = [request(str(name), PROMPT, task_id or None) for task_id, name in enumerate(names)]
        answers = run_all(engine, asked)
        assert {name: answer.token_ids for name, answer in answers.items()} == expected
        finals = [answer.final for answer in answers.values() if answer.final is not None]
        assert [final.num_cached_tokens for final in finals] == [num_cached] * len(names)
    engine.close()


def test_steps_without_such_adapters_turn_by_the_bases_angles_alone(
    folder: Path, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(folder, default_model_dir)
    engine.put_adapter(1, packed(folder / "plain", engine.loras.device.layout))
    engine.put_adapter(2, packed(folder / "yarn", engine.loras.device.layout))
    seen = []
    forward = engine._runner._model.forward
    monkeypatch.setattr(
        engine._runner._model, "forward", lambda batch, *more: seen.append(batch.own_ropes) or forward(batch, *more)
    )
    run_all(engine, [request("base", PROMPT, None), request("plain", PROMPT, 1)])
    assert seen
    assert not any(seen)
    run_all(engine, [request("yarn", PROMPT, 2)])
    assert [len(ropes) for ropes in seen if ropes] == [1] * 10
    engine.close()


def test_an_adapter_has_its_own_longest_sequence(folder: Path, default_model_dir: Path) -> None:
    engine = make_engine(folder, default_model_dir, max_model_len=4 * LENGTH)
    layout = engine.loras.device.layout
    short = {"rope_parameters": {"rope_type": "linear", "factor": 1.5, "original_max_position_embeddings": 32}}
    engine.put_adapter(1, packed(copy_with(folder, "short", short), layout))
    (answer,) = run_all(engine, [request("room for three", PROMPT, 1)]).values()
    assert answer.final is not None
    assert (len(answer.token_ids), answer.final.finish_reason) == (3, "length")
    for prompt, more in ((PROMPT + PROMPT[:3], {}), (PROMPT, {"beam_width": 2})):
        with pytest.raises(InvalidRequest, match=rf"{len(prompt)} tokens .* LoRA task 1 are made for 48 tokens"):
            engine.add_request(request("too long", prompt, 1, **more))
    assert engine.stats.num_pins == 0
    engine.close()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"rope_type": "wavy"}, "rope_type 'wavy' is not supported; supported are: default, linear"),
        ({"rope_type": "linear"}, "rope_type 'linear' needs a positive factor, got None"),
        ({"rope_type": "linear", "factor": -1}, "needs a positive factor, got -1"),
        ({"rope_type": "linear", "factor": 2, "wobble": 3}, "rope_type 'linear' of an adapter has no wobble"),
        ({"rope_type": "linear", "factor": 2, "partial_rotary_factor": 0.5}, "has no partial_rotary_factor"),
        (
            {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]},
            "needs a short_factor of 6 positive numbers",
        ),
        (
            {"rope_type": "longrope", "short_factor": [10**400] * 6, "long_factor": [1.0] * 6},
            "needs a short_factor of 6 positive numbers",
        ),
        (
            {
                "rope_type": "longrope",
                "short_factor": [2.0] * 6,
                "long_factor": [2.0] * 6,
                "original_max_position_embeddings": 1,
            },
            "needs original_max_position_embeddings above 1",
        ),
        ({"rope_type": ["linear"], "factor": 2}, "rope_type ['linear'] is not supported"),
        ({"rope_type": "yarn", "factor": 2, "rope_theta": 1}, "needs rope_theta above 1 and up to 1e+30, got 1"),
        ({"rope_type": "yarn", "factor": 2, "attention_factor": 10**400}, "attention_factor must be a number from 0"),
        ({"rope_type": "linear", "factor": 10**400}, "needs factor from 1e-09 and up to 1e+30"),
        ({"rope_type": "linear", "factor": 1e-300}, "needs factor from 1e-09 and up to 1e+30"),
        ({"rope_theta": 10**400}, "needs rope_theta above 1 and up to 1e+30"),
        (
            {"rope_type": "linear", "factor": 2, "original_max_position_embeddings": "x"},
            "needs a positive original_max_position_embeddings, got 'x'",
        ),
    ],
)
def test_rotary_embeddings_that_there_are_not_are_refused_and_nothing_is_kept(
    folder: Path, default_model_dir: Path, fields: dict[str, Any], reason: str
) -> None:
    engine = make_engine(folder, default_model_dir)
    adapter = packed(copy_with(folder, "wrong", {"rope_parameters": fields}), engine.loras.device.layout)
    with pytest.raises(InvalidRequest, match="the adapter's own rotary embeddings cannot be used here") as caught:
        engine.put_adapter(7, adapter)
    assert reason in str(caught.value)
    assert not engine.loras.inventory.is_known(7)
    engine.close()


def test_a_model_with_two_kinds_of_rotary_embeddings_takes_no_third(tmp_path: Path, default_model_dir: Path) -> None:
    torch.manual_seed(7)
    shape = {**TINY, "head_dim": 12, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 2}
    shape["num_hidden_layers"] = 4
    model = Gemma3ForCausalLM(Gemma3TextConfig(**shape))
    model.save_pretrained(tmp_path / "checkpoint")
    Oracle(model, tmp_path).add_random("plain", 6, ATTENTION, seed=3)
    engine = make_engine(tmp_path, default_model_dir)
    adapter = packed(copy_with(tmp_path, "linear", ROPES["linear"]), engine.loras.device.layout)
    with pytest.raises(InvalidRequest, match="the model has 2 kinds of rotary embeddings"):
        engine.put_adapter(7, adapter)
    engine.close()
