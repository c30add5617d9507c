"""Answers of a tiny engine on CPU tensors, by whatever operators serve them in this process.

`python -m support.interpreted_engine MODEL TOKENIZER OPTIONS` prints them as JSON, of asynchronous steps.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import save

from checkpoints.tiny_llama import VOCAB_SIZE
from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.lora.format import pack_adapter, pack_peft
from multilora_engine.request import GenerationRequest, SamplingParams
from multilora_wire.layout import AdapterLayout
from multilora_wire.module_names import (
    ATTN_DENSE,
    ATTN_Q,
    CROSS_Q,
    CROSS_V,
    MLP_4H_TO_H,
    MLP_H_TO_4H,
    MOE_4H_TO_H,
    MOE_H_TO_4H,
    MOE_ROUTER,
    SHARED_EXPERT_GATE,
    SHARED_UP,
)
from multilora_wire.peft_files import read_peft
from multilora_wire.tensor_file import MemoryBytes
from support.adapters import wire_adapter
from support.engines import run_all

_RANKS = (3, 8)
_OF_LAYERS = (ATTN_Q, ATTN_DENSE, CROSS_Q, CROSS_V, MLP_H_TO_4H, MLP_4H_TO_H)
_OF_EXPERTS = (MOE_H_TO_4H, MOE_4H_TO_H, MOE_ROUTER, SHARED_EXPERT_GATE, SHARED_UP)
_ADAPTED = _OF_LAYERS + _OF_EXPERTS
"""Modules that adapters change, where layers have them."""

_EMBED = "model.embed_tokens"
_TASKS = (None, 0, 1, 2, 3, 0)
_BAD = tuple((first, second) for first in range(VOCAB_SIZE) for second in range(0, VOCAB_SIZE, 9))
_SAMPLING = (
    SamplingParams(max_tokens=4, end_id=-1),
    SamplingParams(max_tokens=5, end_id=-1),
    SamplingParams(max_tokens=4, end_id=-1, temperature=0.9, seed=5),
    SamplingParams(max_tokens=3, end_id=-1, temperature=1.2, top_k=40, top_p=0.9, seed=6),
    SamplingParams(max_tokens=4, end_id=-1, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=0.1),
    SamplingParams(max_tokens=4, min_tokens=3, bad_token_sequences=_BAD, temperature=1.2, top_k=9, seed=7),
)


def make_engine(model: Path, tokenizer: Path, **options: Any) -> Engine:
    """With adapters 0 and 1 on linears and, unless the model has an encoder, 2 on embeddings and head, and 3 of rows of
    tokens.
    """
    config = EngineConfig(
        model_path=model,
        tokenizer_path=tokenizer,
        device="cpu",
        kv_cache_memory_bytes=8 << 20,  # type: ignore[arg-type]
        max_num_batched_tokens=24,
        max_num_encoder_tokens=90,
        max_num_seqs=4,
        **options,
    )
    engine = Engine(config)
    layout = engine.info.adapter_layout
    for task, rank in enumerate(_RANKS):
        rows = [(m.module_id, m.layer, rank) for m in layout.sites.plain_modules if m.module_id in _ADAPTED]
        wire = wire_adapter(layout, rows, seed=task, scale=0.5)
        engine.put_adapter(task, pack_adapter(wire.weights, wire.config, layout))
    outer = _outer_files(layout) if engine.info.source is None else iter(())
    for task, (config_text, weights) in enumerate(outer, start=len(_RANKS)):
        adapter = read_peft(json.dumps(config_text).encode(), MemoryBytes(weights), layout.sites)
        engine.put_adapter(task, pack_peft(adapter, layout, model))
    return engine


def _outer_files(layout: AdapterLayout) -> Iterator[tuple[dict[str, Any], bytes]]:
    """PEFT's files of adapters on embeddings and head."""
    assert layout.sites.outer is not None
    vocab, hidden = layout.sites.outer.vocab_size, layout.sites.outer.embeddings.out_size
    generator = torch.Generator().manual_seed(3)

    def rand(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    tensors = {"lm_head.lora_A.weight": rand(3, hidden), "lm_head.lora_B.weight": rand(vocab, 3)}
    tensors |= {f"{_EMBED}.lora_embedding_A": rand(3, vocab), f"{_EMBED}.lora_embedding_B": rand(hidden, 3)}
    yield {"peft_type": "LORA", "r": 3, "lora_alpha": 6}, save(tensors)
    rows = {f"{_EMBED}.trainable_tokens_delta": rand(9, hidden) * 3}
    yield {"peft_type": "TRAINABLE_TOKENS", "token_indices": list(range(0, 63, 7))}, save(rows)


def answer(engine: Engine) -> dict[str, list[int]]:
    """Tokens by request: of the base model and of two adapters, greedy and drawn, with penalties and bans; some prompts
    take several chunks. Closes the engine.
    """
    texts = [[(7 * n + i) % engine.info.vocab_size for i in range(17 * n + 1)] for n in range(len(_TASKS))]
    prompts, sources, tasks, samplings = texts, [[]] * len(texts), _TASKS, [*_SAMPLING]
    if engine.info.source is not None:
        # Of one token and of several.
        prompts, sources = [text[: 1 + n % 3] for n, text in enumerate(texts)], [text[:60] for text in texts]
        tasks = tuple(task if task in (0, 1) else None for task in _TASKS)
    for place, sampling in enumerate(samplings):
        bad = tuple(pair for pair in sampling.bad_token_sequences if max(pair) < engine.info.vocab_size)
        samplings[place] = msgspec.structs.replace(sampling, bad_token_sequences=bad)
    requests = [
        GenerationRequest(f"r{n}", prompt, sampling, lora_task_id=task, source_token_ids=source)
        for n, (prompt, source, task, sampling) in enumerate(zip(prompts, sources, tasks, samplings, strict=True))
    ]
    answers = run_all(engine, requests)
    engine.close()
    return {name: answer.token_ids for name, answer in answers.items()}


def main(model: str, tokenizer: str, options: str) -> None:
    engine = make_engine(Path(model), Path(tokenizer), enable_async_scheduling=True, **json.loads(options))
    sys.stdout.write(json.dumps(answer(engine)))


if __name__ == "__main__":
    main(*sys.argv[1:])
