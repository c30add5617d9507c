"""transformers as the oracle of mixtures of experts, with adapters on every part of a layer."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.lora.format import pack_adapter
from multilora_engine.lora.layout import PackedAdapter
from multilora_engine.lora_config import LoRAConfig
from multilora_wire.config_sites import config_sites
from multilora_wire.layout import AdapterLayout, num_values
from multilora_wire.module_names import MOE_4H_TO_H, MOE_GATE, MOE_H_TO_4H
from multilora_wire.sites import ModelSites, WireModule
from support.oracle import Oracle, packed
from support.parity import TINY_KV_CACHE_BYTES

EXPERT_IDS = (MOE_H_TO_4H, MOE_GATE, MOE_4H_TO_H)


class MixtureOracle(Oracle):
    """As `Oracle`, also with adapters in upstream's rows, which are added to the weights of a copy of the model.

    PEFT has no adapters on single experts, and takes the linears of a mixture's dense layers for experts.
    """

    def __init__(self, model: PreTrainedModel, directory: Path, sites: ModelSites | None = None) -> None:
        """sites: of the model; None for a family of ours."""
        self._pristine = copy.deepcopy(model)
        self._merged: dict[str, PreTrainedModel] = {}
        self._rows: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._sites = sites or config_sites(model.config.to_dict())
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
def add_to_weights(model: PreTrainedModel, sites: ModelSites, module: WireModule, update: torch.Tensor) -> None:
    """update: [experts, out, in]."""
    name = "model." + sites.site_at[module.parts[0].column].name
    path, _, linear = name.rpartition(".")
    is_gpt_oss = model.config.model_type == "gpt_oss"
    if not path.endswith(".experts"):
        name = name.replace("mlp.gate", "mlp.router") if is_gpt_oss else name
        model.get_parameter(f"{name}.weight").add_(update[0])
        return
    parameter = model.get_parameter(name if linear == "down_proj" else f"{path}.gate_up_proj")
    rows = parameter.mT if is_gpt_oss else parameter
    if linear == "down_proj":
        rows += update
        return
    place = ("gate_proj", "up_proj").index(linear)
    own = slice(place, None, 2) if is_gpt_oss else slice(place * module.out_size, (place + 1) * module.out_size)
    rows[:, own] += update


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
