"""Mixtures of experts in the whole engine against transformers in float32, with adapters on every part of a layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from support.engines import LogitsRecorder, poison_claimed_blocks, run_all
from support.mixture_oracle import MixtureOracle, add_expert_adapters, make_engine
from support.oracle import ATTENTION, Oracles, packed
from support.parity import (
    TINY,
    TINY_KV_CACHE_BYTES,
    assert_adapters_matter,
    assert_greedy,
    assert_nearly_greedy_in_bfloat16,
    requests_for,
    tiny_prompts,
    use_padded_steps,
)
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    OlmoeConfig,
    OlmoeForCausalLM,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.lora_config import LoRAConfig
from multilora_engine.request import GenerationRequest, SamplingParams
from multilora_wire.module_names import (
    ATTN_DENSE,
    MLP_4H_TO_H,
    MLP_GATE,
    MLP_H_TO_4H,
    MOE_ROUTER,
    SHARED_4H_TO_H,
    SHARED_EXPERT_GATE,
    SHARED_H_TO_4H,
    SHARED_UP,
)

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
WIDE = TINY | {"hidden_size": 72}
"""Families whose heads have the hidden size together."""

MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen3": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(**TINY, **EXPERTS, norm_topk_prob=True, mlp_only_layers=[1])),
    "qwen2": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**WIDE, **EXPERTS, shared_expert_intermediate_size=56, mlp_only_layers=[0])
    ),
    "olmoe": lambda: OlmoeForCausalLM(
        OlmoeConfig(**WIDE, num_experts=6, num_experts_per_tok=2, pad_token_id=0, eos_token_id=None)
    ),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**TINY, num_local_experts=4, sliding_window=24)),
    "gpt-oss": lambda: GptOssForCausalLM(
        GptOssConfig(**TINY, num_local_experts=5, num_experts_per_tok=2, sliding_window=24, swiglu_limit=2.0)
    ),
}

SHARED_IDS = (SHARED_H_TO_4H, SHARED_UP, SHARED_4H_TO_H, SHARED_EXPERT_GATE)


def make_oracle(family: str, directory: Path, dtype: torch.dtype = torch.float32) -> tuple[MixtureOracle, Path]:
    """A model with random weights and adapters, and its checkpoint."""
    torch.manual_seed(7)
    MODELS[family]().to(dtype).save_pretrained(directory / "checkpoint")
    model = AutoModelForCausalLM.from_pretrained(directory / "checkpoint", dtype=torch.float32)
    oracle = MixtureOracle(model, directory)
    oracle.add_random("attention", 8, ATTENTION, seed=1)
    oracle.add_rows("router", 3, [MOE_ROUTER], seed=2)
    if family == "qwen2":
        oracle.add_rows("shared expert", 5, SHARED_IDS, seed=3)
        oracle.add_random("DoRA", 4, [*ATTENTION[1:], "shared_expert_gate"], seed=4, use_dora=True)
    if family == "qwen3":
        oracle.add_rows("dense layers", 6, [ATTN_DENSE, MLP_H_TO_4H, MLP_GATE, MLP_4H_TO_H], seed=4)
    return oracle, directory / "checkpoint"


def little_memory(engine: Engine) -> dict[str, Any]:
    """A cache of 160 tokens, in which one sequence fits and twelve do not."""
    bytes_per_token = TINY_KV_CACHE_BYTES // engine.info.kv_cache_tokens
    lora = LoRAConfig(max_loras=3, lora_cache_host_memory_bytes=512 << 20)
    return {
        "block_size": 8,
        "max_num_batched_tokens": 24,
        "max_num_seqs": 24,
        "kv_cache_memory_bytes": 160 * bytes_per_token + 160,
        "lora": lora,
    }


@pytest.mark.parametrize("family", MODELS)
def test_adapters_on_any_part_answer_as_merged_weights_do(
    family: str, tmp_path: Path, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through chunks of prompts, preemption, and prefixes that are computed once."""
    oracle, checkpoint = make_oracle(family, tmp_path)
    add_expert_adapters(oracle)
    roomy = make_engine(oracle, checkpoint, default_model_dir)
    small = make_engine(oracle, checkpoint, default_model_dir, **little_memory(roomy))
    poison_claimed_blocks(small)
    prefix = tiny_prompts(7)[-1][:30]
    prompts = [prefix + tail for tail in tiny_prompts(2 * len(oracle.adapters) + 2)]
    requests = requests_for(oracle, [prompt[:44] for prompt in prompts], max_tokens=11)
    requests.sort(key=lambda request: request.lora_task_id or 0)
    answers = run_all(small, requests)
    assert_greedy(oracle, requests, answers)
    assert small.stats.num_preemptions > 0
    assert small.stats.prefix_cache.hit_tokens > 0
    base = [GenerationRequest(r.request_id, r.prompt_token_ids, r.sampling) for r in requests]
    assert_adapters_matter(requests, answers, run_all(small, base))
    replays = use_padded_steps(roomy, monkeypatch)
    assert {i: a.token_ids for i, a in run_all(roomy, requests[:9]).items()} == {
        r.request_id: answers[r.request_id].token_ids for r in requests[:9]
    }
    assert max(replays) > 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gpt-oss"])
def test_a_request_has_the_same_bits_alone_and_among_others(
    family: str, dtype: str, tmp_path: Path, default_model_dir: Path
) -> None:
    oracle, checkpoint = make_oracle(family, tmp_path, getattr(torch, dtype))
    add_expert_adapters(oracle)
    engine = make_engine(oracle, checkpoint, default_model_dir, dtype=dtype, enable_prefix_caching=False)
    recorder = LogitsRecorder(engine)
    requests = requests_for(oracle, tiny_prompts(len(oracle.adapters) + 1), max_tokens=6)
    answers = run_all(engine, requests)
    if dtype == "bfloat16":
        assert_nearly_greedy_in_bfloat16(oracle, requests, answers)
    among_others, recorder.rows = recorder.rows, {}
    for request in requests:
        run_all(engine, [request])
        rows = (torch.stack(found[request.request_id]) for found in (recorder.rows, among_others))
        assert torch.equal(*rows), request.request_id


def test_beams_of_a_mixture_are_those_of_transformers(tmp_path: Path, default_model_dir: Path) -> None:
    oracle, checkpoint = make_oracle("qwen3", tmp_path)
    engine = make_engine(oracle, checkpoint, default_model_dir)
    sampling = SamplingParams(max_tokens=8, end_id=-1, beam_width=3, length_penalty=1.0)
    for task_id, name in ((None, None), (0, "attention")):
        prompt = tiny_prompts(3)[2]
        request = GenerationRequest("beams", prompt, sampling, lora_task_id=task_id)
        final = run_all(engine, [request])["beams"].final
        assert final is not None
        expected = oracle.generate(
            name,
            prompt,
            do_sample=False,
            num_beams=3,
            num_return_sequences=3,
            max_new_tokens=8,
            length_penalty=1.0,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert [beam.token_ids for beam in final.beams] == expected[:, len(prompt) :].tolist()


@pytest.mark.parametrize("family", ["qwen3", "mixtral", "gpt-oss"])
def test_adapters_that_peft_trains_on_parameters_answer_as_peft_does(
    family: str, tmp_path: Path, default_model_dir: Path
) -> None:
    torch.manual_seed(7)
    MODELS[family]().save_pretrained(tmp_path / "checkpoint")
    oracles = Oracles(AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32), tmp_path)
    gate_up, down = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
    router = "mlp.router.weight" if family == "gpt-oss" else "mlp.gate.weight"
    kinds: dict[str, dict[str, Any]] = {
        "experts and router": {"target_parameters": [gate_up, down, router], "target_modules": ["q_proj"]},
        "down alone": {"target_parameters": [f"0.{down}"], "use_rslora": True},
        "ranks": {"target_parameters": [gate_up, down], "rank_pattern": {down: 5}, "alpha_pattern": {gate_up: 70}},
    }
    for seed, (name, options) in enumerate(kinds.items()):
        oracles.add(name, LoraConfig(**{"r": 3, "lora_alpha": 90, "target_modules": []} | options), seed)
    engine = Engine(
        EngineConfig(
            model_path=tmp_path / "checkpoint",
            tokenizer_path=default_model_dir,
            kv_cache_memory_bytes=TINY_KV_CACHE_BYTES,
            num_threads=2,
            lora=LoRAConfig(lora_cache_host_memory_bytes=512 << 20),
        )
    )
    for task_id, folder in enumerate(oracles.adapters.values()):
        engine.put_adapter(task_id, packed(folder, engine.info.adapter_layout))

    requests = requests_for(oracles, tiny_prompts(8), max_tokens=8)
    answers = run_all(engine, requests)

    assert_greedy(oracles, requests, answers)
    base = [GenerationRequest(r.request_id, r.prompt_token_ids, r.sampling) for r in requests]
    assert_adapters_matter(requests, answers, run_all(engine, base))
