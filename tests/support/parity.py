"""An engine and transformers + PEFT over the same checkpoint and the same adapters: the same greedy tokens."""

from __future__ import annotations

from itertools import cycle, islice
from pathlib import Path

import pytest
import torch

from multilora_engine.batch.forward_batch import ForwardBatch, KVCache
from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.execution.cuda_graphs import DecodeGraphs, DecodeInputs, graph_sizes
from multilora_engine.execution.model_runner import ModelRunner
from multilora_engine.lora_config import LoRAConfig
from multilora_engine.request import GenerationRequest, SamplingParams
from multilora_engine.sampling.sampler import Best
from support.engines import Answer, poison_claimed_blocks, run_all
from support.oracle import Oracle, packed

TINY = {
    "vocab_size": 311,
    "hidden_size": 48,
    "intermediate_size": 88,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
}
"""The shape of a tiny model, as transformers' configurations take it."""

TINY_KV_CACHE_BYTES = 8 << 20
"""For tiny models: no more blocks than needed, since every one is looked at after every step."""


BFLOAT16_TOLERANCE = 0.5
"""How much smaller than the largest logit, of 8, that of a chosen token may be. The oracle's weights are rounded as
ours are, but not its keys, values, adapters and activations. The most that was seen is 0.16, and 0.2 where linears
round activations."""


def add_random_adapters(oracle: Oracle) -> None:
    """On linears as the checkpoint has them: q, k and v, or one for all; gate and up, one for both, or one alone."""
    (*inputs, o), (*inner, down) = attention, mlp = oracle.linears("self_attn"), oracle.linears("mlp")
    oracle.add_random("rank 1 all", 1, attention + mlp, seed=1)
    oracle.add_random("rank 7 down and k", 7, [down, inputs[len(inputs) // 2]], seed=2)
    oracle.add_random("rank 8 gate and up", 8, inner, seed=3)
    oracle.add_random("rank 16 attention", 16, attention, seed=4, use_rslora=True)
    pattern = {inputs[0]: 3, f"layers.1.mlp.{inner[-1]}": 17, o: 1}
    oracle.add_random(
        "rank 64 and others", 64, attention + mlp, seed=5, rank_pattern=pattern, alpha_pattern={inputs[-1]: 9}
    )
    oracle.add_random("rank 4 DoRA", 4, [*inputs[:2], o, inner[-1], down], seed=6, use_dora=True)


def build_engine(
    model_path: Path,
    oracle: Oracle,
    tokenizer_path: Path,
    kv_cache_bytes: int = TINY_KV_CACHE_BYTES,
    num_threads: int = 2,
    **options: object,
) -> Engine:
    """An engine whose steps do not depend on the machine's speed, unless the options say otherwise."""
    config = EngineConfig(
        model_path=model_path,
        tokenizer_path=tokenizer_path,
        num_threads=num_threads,
        kv_cache_memory_bytes=kv_cache_bytes,  # type: ignore[arg-type]
        lora=LoRAConfig(lora_cache_host_memory_bytes=512 << 20),
        **{"inter_token_latency_target_ms": 0.0, **options},  # type: ignore[arg-type]
    )
    engine = Engine(config)
    for task_id, directory in enumerate(oracle.adapters.values()):
        engine.put_adapter(task_id, packed(directory, engine.info.adapter_layout, model_path))
    return engine


def requests_for(oracle: Oracle, prompts: list[list[int]], max_tokens: int) -> list[GenerationRequest]:
    """One request a prompt: the base model, then each adapter, and round again. end_id -1: nothing ends early."""
    tasks = islice(cycle([None, *range(len(oracle.adapters))]), len(prompts))
    sampling = SamplingParams(max_tokens=max_tokens, end_id=-1)
    return [
        GenerationRequest(f"r{i}", prompt, sampling, lora_task_id=task)
        for i, (prompt, task) in enumerate(zip(prompts, tasks, strict=True))
    ]


def assert_greedy(oracle: Oracle, requests: list[GenerationRequest], answers: dict[str, Answer]) -> None:
    """Each answer is what greedy decoding gives: every token is the argmax of the oracle's logits before it."""
    names = [*oracle.adapters]
    for request in requests:
        name = None if request.lora_task_id is None else names[request.lora_task_id]
        answer = answers[request.request_id].token_ids
        assert len(answer) == request.sampling.max_tokens
        expected = oracle.logits(name, request.prompt_token_ids, answer).argmax(dim=-1).tolist()
        assert answer == expected, f"{request.request_id} with {name}"


def assert_nearly_greedy_in_bfloat16(
    oracle: Oracle, requests: list[GenerationRequest], answers: dict[str, Answer]
) -> None:
    """Every token is nearly the best of the oracle's logits before it."""
    names = [*oracle.adapters]
    for request in requests:
        token_ids = answers[request.request_id].token_ids
        name = None if request.lora_task_id is None else names[request.lora_task_id]
        logits = oracle.logits(name, request.prompt_token_ids, token_ids)
        chosen = logits.gather(1, torch.tensor(token_ids)[:, None])
        assert (logits.amax(dim=1, keepdim=True) - chosen).max() < BFLOAT16_TOLERANCE


def assert_same_alone(engine: Engine, requests: list[GenerationRequest], answers: dict[str, Answer]) -> None:
    """Each request gets the tokens that it got among others."""
    for request in requests:
        assert run_all(engine, [request])[request.request_id].token_ids == answers[request.request_id].token_ids


def assert_adapters_matter(
    requests: list[GenerationRequest], answers: dict[str, Answer], base: dict[str, Answer]
) -> None:
    """Equality would prove nothing if the adapters changed nothing."""
    with_adapter = [r.request_id for r in requests if r.lora_task_id is not None]
    changed = [i for i in with_adapter if answers[i].token_ids != base[i].token_ids]
    assert len(changed) >= 0.8 * len(with_adapter)


def tiny_prompts(count: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 2, 15, 16, 17, 33, 70]
    return [torch.randint(0, 311, (lengths[i % 7],), generator=generator).tolist() for i in range(count)]


def build_small_engine(
    oracle: Oracle,
    path: Path,
    tokenizer_path: Path,
    enable_async_scheduling: bool,
    kv_cache_dtype: str = "auto",
    **options: object,
) -> Engine:
    """An engine that must preempt, with poisoned blocks."""
    roomy = build_engine(path, oracle, tokenizer_path, kv_cache_dtype=kv_cache_dtype, **options)
    config = engine_config_with_tiny_cache(path, tokenizer_path, roomy, max_num_batched_tokens=24)
    changes = {
        "enable_async_scheduling": enable_async_scheduling,
        "kv_cache_dtype": kv_cache_dtype,
        "inter_token_latency_target_ms": 0.0,  # Which prompts reuse a prefix would depend on the machine's speed.
        **options,
    }
    small = Engine(config.model_copy(update=changes))
    for task_id, directory in enumerate(oracle.adapters.values()):
        small.put_adapter(task_id, packed(directory, small.info.adapter_layout, path))
    poison_claimed_blocks(small)
    return small


def answer_as_peft_does_in_little_memory(
    oracle: Oracle, small: Engine
) -> tuple[list[GenerationRequest], dict[str, Answer]]:
    """The requests, which share a prefix, and their answers."""
    prefix = tiny_prompts(7)[-1][:30]
    requests = requests_for(oracle, [prefix + tail for tail in tiny_prompts(4) * 3], max_tokens=24)
    requests.sort(key=lambda request: request.lora_task_id or 0)
    answers = run_all(small, requests)
    assert_greedy(oracle, requests, answers)
    assert small.stats.num_preemptions > 0
    # Which blocks are left for others in so little memory depends on how long steps took. The last one finds its own.
    for some in (requests[:3], requests[:1], requests[:1]):
        again = run_all(small, some)
        assert all(again[i].token_ids == answers[i].token_ids for i in again)
    assert small.stats.prefix_cache.hit_tokens > 0
    return requests, answers


def engine_config_with_tiny_cache(
    path: Path, tokenizer_path: Path, engine: Engine, max_num_batched_tokens: int = 64
) -> EngineConfig:
    """A cache of 160 tokens: one sequence of 118 fits, twelve do not."""
    bytes_per_token = TINY_KV_CACHE_BYTES // engine.info.kv_cache_tokens
    return EngineConfig(
        model_path=path,
        tokenizer_path=tokenizer_path,
        num_threads=1,
        block_size=8,
        max_num_batched_tokens=max_num_batched_tokens,
        max_num_seqs=24,
        kv_cache_memory_bytes=160 * bytes_per_token + 160,
        lora=LoRAConfig(max_loras=3, lora_cache_host_memory_bytes=512 << 20),
    )


def use_padded_steps(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Compute decode steps through `DecodeGraphs` whose graphs are plain functions; the sequences of each such step.

    The cache starts as NaN, that of the padding too.
    """
    runner, block_size = engine._runner, engine._blocks.block_size
    num_blocks = engine._blocks.num_blocks
    keys = runner._kv_cache.keys
    cache = KVCache(*(torch.full((len(keys), (num_blocks + 1) * block_size, *keys.shape[2:]), torch.nan) for _ in "kv"))
    sizes = graph_sizes(11)
    tables, model = engine.loras.device.tables, runner._model
    inputs = DecodeInputs(sizes[-1], 512 // block_size, block_size, num_blocks, tables)
    graphs = DecodeGraphs(
        lambda batch, logits: logits.copy_(model.forward(batch, cache)),
        inputs,
        sizes,
        model.config.vocab_size,
        torch.device("cpu"),
        lambda run: run,
    )
    replays: list[int] = []

    def run(batch: ForwardBatch) -> tuple[torch.Tensor, Best]:
        replays.append(len(batch.query_lens))
        return DecodeGraphs.run(graphs, batch)

    monkeypatch.setattr(graphs, "run", run)
    engine._runner = ModelRunner(model, cache, block_size, runner._loras, graphs)
    return replays
