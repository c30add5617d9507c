"""Mixtures of experts in the whole engine against transformers in float32, with adapters on every part of a layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from support.engines import poison_claimed_blocks, run_all
from support.oracle import ATTENTION, Oracle, Oracles, packed
from support.parity import (
    TINY,
    TINY_KV_CACHE_BYTES,
    assert_adapters_matter,
    assert_greedy,
    assert_nearly_greedy_in_bfloat16,
    assert_same_alone,
    requests_for,
    tiny_prompts,
    use_padded_steps,
)
from transformers import (
    AutoModelForCausalLM,
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
from multilora_engine.lora.format import pack_adapter
from multilora_engine.lora.layout import PackedAdapter
from multilora_engine.lora_config import LoRAConfig
from multilora_engine.request import GenerationRequest, SamplingParams
from multilora_wire.config_sites import config_sites
from multilora_wire.layout import AdapterLayout, num_values
from multilora_wire.module_names import (
    ATTN_DENSE,
    MLP_4H_TO_H,
    MLP_GATE,
    MLP_H_TO_4H,
    MOE_4H_TO_H,
    MOE_GATE,
    MOE_H_TO_4H,
    MOE_ROUTER,
    SHARED_4H_TO_H,
    SHARED_EXPERT_GATE,
    SHARED_H_TO_4H,
    SHARED_UP,
)
from multilora_wire.sites import ModelSites, WireModule

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
}

EXPERT_IDS = (MOE_H_TO_4H, MOE_GATE, MOE_4H_TO_H)
SHARED_IDS = (SHARED_H_TO_4H, SHARED_UP, SHARED_4H_TO_H, SHARED_EXPERT_GATE)


class MixtureOracle(Oracle):
    """As `Oracle`, also with adapters in upstream's rows, which are added to the weights of a copy of the model.

    PEFT has no adapters on single experts, and takes the linears of a mixture's dense layers for experts.
    """

    def __init__(self, model: PreTrainedModel, directory: Path) -> None:
        self._pristine = copy.deepcopy(model)
        self._merged: dict[str, torch.nn.Module] = {}
        self._rows: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._sites = config_sites(model.config.to_dict())
        super().__init__(model, directory)

    def add_rows(
        self, name: str, rank: int, module_ids: Iterable[int], seed: int, experts: Iterable[int] | None = None
    ) -> None:
        """Random rows on all layers that have the modules. experts: the others' B is zero; None: all have one."""
        generator = torch.Generator().manual_seed(seed)
        merged = self._merged[name] = copy.deepcopy(self._pristine).eval()
        modules = [module for module in self._sites.plain_modules if module.module_id in module_ids]
        weights = torch.zeros(len(modules), max(num_values(module, rank) for module in modules))
        for row, module in zip(weights, modules, strict=True):
            a = torch.randn(module.experts, rank, module.in_size, generator=generator) * 0.16
            b = torch.randn(module.experts, module.out_size, rank, generator=generator) * 0.12
            if module.experts > 1 and experts is not None:
                b[[expert for expert in range(module.experts) if expert not in experts]] = 0
            row[: num_values(module, rank)] = torch.cat([a.flatten(), b.flatten()])
            add_to_weights(merged, self._sites, module, b @ a)
        config = torch.tensor([[module.module_id, module.layer, rank, 0] for module in modules], dtype=torch.int32)
        self._rows[name] = (weights, config)
        self.adapters[name] = Path("/nowhere")

    def packed(self, name: str, layout: AdapterLayout, base_model: Path) -> PackedAdapter:
        if name in self._rows:
            return pack_adapter(*self._rows[name], layout)
        return packed(self.adapters[name], layout, base_model)

    @torch.no_grad()
    def logits(
        self, adapter: str | None, prompt: list[int], answer: list[int], start: int | None = None
    ) -> torch.Tensor:
        if adapter not in self._merged:
            return super().logits(adapter, prompt, answer, start)
        token_ids = torch.tensor([prompt + answer[:-1]])
        logits: torch.Tensor = self._merged[adapter](input_ids=token_ids).logits[0, len(prompt) - 1 :]
        return logits


@torch.no_grad()
def add_to_weights(model: torch.nn.Module, sites: ModelSites, module: WireModule, update: torch.Tensor) -> None:
    """update: [experts, out, in]."""
    name = "model." + sites.site_at[module.parts[0].column].name
    path, _, linear = name.rpartition(".")
    if not path.endswith(".experts"):
        model.get_parameter(f"{name}.weight").add_(update[0])
    elif linear == "down_proj":
        model.get_parameter(name).add_(update)
    else:
        half = slice(None, module.out_size) if linear == "gate_proj" else slice(module.out_size, None)
        model.get_parameter(f"{path}.gate_up_proj")[:, half] += update


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


def add_expert_adapters(oracle: MixtureOracle) -> None:
    all_ids = {module.module_id for module in oracle._sites.plain_modules}
    oracle.add_rows("experts", 4, EXPERT_IDS, seed=5)
    oracle.add_rows("two experts", 7, EXPERT_IDS, seed=6, experts=[0, 3])
    oracle.add_rows("down alone", 2, [MOE_4H_TO_H], seed=7, experts=[1, 2])
    oracle.add_rows("everything", 3, all_ids, seed=8)


def make_engine(oracle: MixtureOracle, checkpoint: Path, tokenizer: Path, **options: Any) -> Engine:
    settings: dict[str, Any] = {
        "kv_cache_memory_bytes": TINY_KV_CACHE_BYTES,
        "num_threads": 2,
        "inter_token_latency_target_ms": 0.0,
        "lora": LoRAConfig(lora_cache_host_memory_bytes=512 << 20),
    }
    engine = Engine(EngineConfig(model_path=checkpoint, tokenizer_path=tokenizer, **settings | options))
    for task_id, name in enumerate(oracle.adapters):
        engine.put_adapter(task_id, oracle.packed(name, engine.info.adapter_layout, checkpoint))
    return engine


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
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_request_has_the_same_tokens_alone_and_among_others(
    family: str, dtype: str, tmp_path: Path, default_model_dir: Path
) -> None:
    oracle, checkpoint = make_oracle(family, tmp_path, getattr(torch, dtype))
    add_expert_adapters(oracle)
    engine = make_engine(oracle, checkpoint, default_model_dir, dtype=dtype, enable_prefix_caching=False)
    requests = requests_for(oracle, tiny_prompts(len(oracle.adapters) + 1), max_tokens=6)
    answers = run_all(engine, requests)
    if dtype == "bfloat16":
        assert_nearly_greedy_in_bfloat16(oracle, requests, answers)
    assert_same_alone(engine, requests, answers)


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


@pytest.mark.parametrize("family", ["qwen3", "mixtral"])
def test_adapters_that_peft_trains_on_parameters_answer_as_peft_does(
    family: str, tmp_path: Path, default_model_dir: Path
) -> None:
    torch.manual_seed(7)
    MODELS[family]().save_pretrained(tmp_path / "checkpoint")
    oracles = Oracles(AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32), tmp_path)
    gate_up, down = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
    kinds: dict[str, dict[str, Any]] = {
        "experts and router": {"target_parameters": [gate_up, down, "mlp.gate.weight"], "target_modules": ["q_proj"]},
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
