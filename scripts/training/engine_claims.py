"""Counts with the engine itself, in this process, the sample adapters' answers that do what they claim."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import torch

from multilora_client.convert import convert_peft
from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.lora.format import pack_adapter
from multilora_engine.request import GenerationRequest, SamplingParams
from multilora_engine.text.tokenizer import Tokenizer
from training.sample_adapters import SAMPLE_ADAPTERS, held_out_prompts

KV_CACHE_BYTES = 192 << 20


def engine_claims(checkpoint: Path, dtype: str, lora_dtype: str, max_tokens: int) -> dict[str, int]:
    """By sample adapter the held-out prompts whose greedy answer shows its effect; all adapters answer in one batch."""
    parameters = {
        "model_path": str(checkpoint),
        "device": "cpu",
        "dtype": dtype,
        "kv_cache_memory_bytes": str(KV_CACHE_BYTES),
        "lora_dtype": lora_dtype,
        "max_lora_rank": str(max(adapter.rank for adapter in SAMPLE_ADAPTERS.values())),
    }
    with closing(Engine(EngineConfig.from_parameters(parameters))) as engine:
        answers = _answers(engine, Tokenizer(checkpoint), max_tokens)
    return {name: sum(map(adapter.judge, answers[name])) for name, adapter in SAMPLE_ADAPTERS.items()}


def _answers(engine: Engine, tokenizer: Tokenizer, max_tokens: int) -> dict[str, list[str]]:
    sampling = SamplingParams(max_tokens=max_tokens)
    texts: dict[str, str] = {}
    for task_id, (name, adapter) in enumerate(SAMPLE_ADAPTERS.items()):
        tensors = convert_peft(adapter.directory, "float32")
        weights, config = torch.from_numpy(tensors.weights), torch.from_numpy(tensors.config)
        engine.put_adapter(task_id, pack_adapter(weights, config, engine.info.adapter_layout))
        for place, prompt in enumerate(held_out_prompts()):
            token_ids = tokenizer.apply_chat_template([{"role": "user", "content": prompt}])
            texts[f"{name} {place}"] = ""
            engine.add_request(GenerationRequest(f"{name} {place}", token_ids, sampling, task_id))
    while engine.has_work:
        for output in engine.step():
            texts[output.request_id] += output.text
    return {name: [texts[f"{name} {place}"] for place in range(len(held_out_prompts()))] for name in SAMPLE_ADAPTERS}
