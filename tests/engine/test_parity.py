"""The whole engine against transformers + PEFT in float32: the same greedy tokens, the same logits, in any batch."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from support.engines import LogitsRecorder, run_all
from support.oracle import Oracle, packed
from support.parity import (
    TINY,
    TINY_KV_CACHE_BYTES,
    add_random_adapters,
    answer_as_peft_does_in_little_memory,
    assert_adapters_matter,
    assert_greedy,
    assert_nearly_greedy_in_bfloat16,
    assert_same_alone,
    build_engine,
    build_small_engine,
    engine_config_with_tiny_cache,
    requests_for,
    tiny_prompts,
    use_padded_steps,
)
from transformers import (
    AutoModelForCausalLM,
    Cache,
    Cohere2Config,
    Cohere2ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Glm4Config,
    Glm4ForCausalLM,
    GlmConfig,
    GlmForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from checkpoints.tiny_llama import save_tiny_llama
from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.lora.format import TORCH_DTYPES
from multilora_engine.request import GenerationRequest, SamplingParams
from multilora_kernels import cpu

LOGITS_TOLERANCE = 3e-3
"""Of logits of 30. Both sides are float32: after the strongest of the random adapters ours are 9e-4 from float64, and
PEFT's 1.2e-3."""
SAMPLES = Path(__file__).parents[2] / "adapters"
SOFT = TINY | {"pad_token_id": 0, "query_pre_attn_scalar": 10, "tie_word_embeddings": False}
"""Untied: with random tied embeddings, which Gemma scales, every token is followed by itself."""
LOCAL_AND_GLOBAL = ["sliding_attention", "full_attention", "sliding_attention"]
PHI3 = {"hidden_size": 48, "head_dim": 8, "pad_token_id": 0, "sliding_window": 40}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 1.1, 1.2],
    "long_factor": [1.0, 2.0, 4.0],
    "partial_rotary_factor": 0.75,
    "rope_theta": 10000.0,
}
"""For sequences of which all are longer than the original context."""
GRANITE = {
    "hidden_size": 72,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.7,
}
COHERE2 = {"head_dim": 8, "pad_token_id": 0, "sliding_window": 24, "logit_scale": 0.5}
FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**TINY, attention_bias=True, mlp_bias=True)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**TINY, sliding_window=24)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**TINY | {"hidden_size": 72})),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**TINY, tie_word_embeddings=True)),
}
OTHER_FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(**SOFT, sliding_window=24)),
    "gemma3": lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SOFT, sliding_window=24, layer_types=LOCAL_AND_GLOBAL)),
    "phi3": lambda: Phi3ForCausalLM(
        Phi3Config(**TINY | PHI3, original_max_position_embeddings=8, rope_parameters=LONGROPE)
    ),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**TINY | GRANITE)),
    "olmo2": lambda: Olmo2ForCausalLM(Olmo2Config(**TINY | {"hidden_size": 72})),
    "glm": lambda: GlmForCausalLM(GlmConfig(**TINY, pad_token_id=0)),
    "glm4": lambda: Glm4ForCausalLM(Glm4Config(**TINY, pad_token_id=0)),
    "smollm3": lambda: SmolLM3ForCausalLM(SmolLM3Config(**TINY, no_rope_layer_interval=2, pad_token_id=0)),
    "cohere2": lambda: Cohere2ForCausalLM(Cohere2Config(**TINY | COHERE2, layer_types=LOCAL_AND_GLOBAL)),
    "starcoder2": lambda: Starcoder2ForCausalLM(Starcoder2Config(**TINY | {"hidden_size": 72}, sliding_window=24)),
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Oracle, Path]:
    return save_with_adapters(FAMILIES[request.param], tmp_path_factory.mktemp("tiny"))


def save_with_adapters(make_model: Callable[[], PreTrainedModel], directory: Path) -> tuple[Oracle, Path]:
    """A model with random weights and adapters, and its checkpoint."""
    torch.manual_seed(7)
    model = make_model()
    model.save_pretrained(directory / "checkpoint")
    oracle = Oracle(model, directory)
    add_random_adapters(oracle)
    return oracle, directory / "checkpoint"


def test_steps_padded_as_for_cuda_graphs_answer_as_peft_does(
    tiny: tuple[Oracle, Path], default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle, path = tiny
    engine = build_engine(path, oracle, default_model_dir, max_num_batched_tokens=40, max_num_seqs=11)
    replays = use_padded_steps(engine, monkeypatch)
    requests = requests_for(oracle, tiny_prompts(9), max_tokens=14)
    answers = run_all(engine, requests)
    assert_greedy(oracle, requests, answers)
    base = [GenerationRequest(r.request_id, r.prompt_token_ids, r.sampling) for r in requests[:3]]
    assert_greedy(oracle, base, run_all(engine, base))
    assert {9, 3} <= set(replays)


def test_tiny_models_answer_as_peft_does_in_a_mixed_batch(tiny: tuple[Oracle, Path], default_model_dir: Path) -> None:
    oracle, path = tiny
    engine = build_engine(path, oracle, default_model_dir, max_num_batched_tokens=40, max_num_seqs=24)
    requests = requests_for(oracle, tiny_prompts(24), max_tokens=64)
    answers = run_all(engine, requests)
    assert_greedy(oracle, requests, answers)
    base = [GenerationRequest(r.request_id, r.prompt_token_ids, r.sampling) for r in requests]
    assert_adapters_matter(requests, answers, run_all(engine, base))


@pytest.mark.parametrize(
    ("stored", "weight_dtype"),
    [(torch.bfloat16, "auto"), (torch.float16, "auto"), (torch.float32, "bfloat16")],
)
def test_weights_of_16_bits_answer_as_the_same_numbers_in_float32_do(
    stored: torch.dtype, weight_dtype: str, tmp_path: Path, default_model_dir: Path
) -> None:
    torch.manual_seed(7)
    FAMILIES["qwen3"]().to(stored).save_pretrained(tmp_path / "checkpoint")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32)
    oracle = Oracle(rounded(model, TORCH_DTYPES.get(weight_dtype, torch.float32)), tmp_path)
    add_random_adapters(oracle)
    engine = build_engine(tmp_path / "checkpoint", oracle, default_model_dir, weight_dtype=weight_dtype)
    requests = requests_for(oracle, tiny_prompts(12), max_tokens=24)
    assert_greedy(oracle, requests, run_all(engine, requests))


@pytest.mark.parametrize(
    "family", ["llama", *(pytest.param(name, marks=pytest.mark.long(reason="7 s")) for name in ("qwen3", "gemma2"))]
)
def test_bfloat16_chooses_what_is_nearly_the_best_token_and_the_same_alone_as_in_a_batch(
    family: str, tmp_path: Path, default_model_dir: Path
) -> None:
    torch.manual_seed(7)
    (FAMILIES | OTHER_FAMILIES)[family]().to(torch.bfloat16).save_pretrained(tmp_path / "checkpoint")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint", dtype=torch.float32)
    oracle = Oracle(model, tmp_path)
    add_random_adapters(oracle)
    engine = build_engine(tmp_path / "checkpoint", oracle, default_model_dir, dtype="bfloat16")
    requests = requests_for(oracle, tiny_prompts(14), max_tokens=16)
    answers = run_all(engine, requests)
    assert_nearly_greedy_in_bfloat16(oracle, requests, answers)
    assert_same_alone(engine, requests[:: len(oracle.adapters) - 1], answers)


def rounded(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """The float32 model with its matrices rounded to a type."""
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.data = parameter.data.to(dtype).float()
    return model


def test_a_cache_so_small_that_sequences_are_preempted_changes_no_token(
    tiny: tuple[Oracle, Path], default_model_dir: Path
) -> None:
    oracle, path = tiny
    engine = build_engine(path, oracle, default_model_dir, max_num_batched_tokens=64, max_num_seqs=24, block_size=8)
    requests = requests_for(oracle, tiny_prompts(12), max_tokens=48)
    expected = run_all(engine, requests)
    small = Engine(engine_config_with_tiny_cache(path, default_model_dir, engine))
    for task_id, directory in enumerate(oracle.adapters.values()):
        small.put_adapter(task_id, packed(directory, small.info.adapter_layout, path))
    answers = run_all(small, requests)
    assert small.stats.num_preemptions > 0
    assert {i: a.token_ids for i, a in answers.items()} == {i: a.token_ids for i, a in expected.items()}


@pytest.mark.parametrize("enable_async_scheduling", [False, True])
def test_reused_prefixes_chunks_preemption_and_poisoned_blocks_change_no_token(
    tiny: tuple[Oracle, Path], default_model_dir: Path, enable_async_scheduling: bool
) -> None:
    oracle, path = tiny
    small = build_small_engine(oracle, path, default_model_dir, enable_async_scheduling)
    answer_as_peft_does_in_little_memory(oracle, small)


@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_other_families_answer_as_peft_does_through_chunks_preemption_and_reused_prefixes(
    family: str, tmp_path: Path, default_model_dir: Path
) -> None:
    oracle, path = save_with_adapters(OTHER_FAMILIES[family], tmp_path)
    small = build_small_engine(oracle, path, default_model_dir, enable_async_scheduling=True)
    requests, answers = answer_as_peft_does_in_little_memory(oracle, small)
    base = [GenerationRequest(r.request_id, r.prompt_token_ids, r.sampling) for r in requests]
    assert_adapters_matter(requests, answers, run_all(small, base))


def rounded_heads(x: torch.Tensor, kv_cache_dtype: str) -> torch.Tensor:
    """Keys or values as a cache has them."""
    if kv_cache_dtype == "bfloat16":
        return x.bfloat16().float()
    scale = x.abs().amax(-1, keepdim=True) / 127
    # Gemma's padding token has an embedding of zeros.
    return torch.where(scale > 0, (x / scale).round() * scale, 0.0)


def attend_to_rounded_heads(monkeypatch: pytest.MonkeyPatch, kv_cache_dtype: str) -> list[int]:
    """Let transformers round keys and values as a cache does; the layers that did."""
    layers: list[int] = []
    update = Cache.update

    def update_rounded(
        cache: Cache, keys: torch.Tensor, values: torch.Tensor, layer: int, *more: Any, **named: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        layers.append(layer)
        heads = (rounded_heads(x, kv_cache_dtype) for x in (keys, values))
        return update(cache, *heads, layer, *more, **named)

    monkeypatch.setattr(Cache, "update", update_rounded)
    return layers


_IS_LONG = pytest.mark.long(reason="a short one has windows; kernels' tests have soft caps")


@pytest.mark.parametrize(
    ("family", "kv_cache_dtype"),
    [
        ("mistral", "int8"),
        pytest.param("qwen3", "bfloat16", marks=_IS_LONG),
        *(pytest.param(family, "int8", marks=_IS_LONG) for family in OTHER_FAMILIES),
    ],
)
def test_a_cache_of_fewer_bits_answers_as_peft_does_over_rounded_keys_and_values(
    family: str, kv_cache_dtype: str, tmp_path: Path, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle, path = save_with_adapters((FAMILIES | OTHER_FAMILIES)[family], tmp_path)
    rounding_layers = attend_to_rounded_heads(monkeypatch, kv_cache_dtype)
    small = build_small_engine(oracle, path, default_model_dir, True, kv_cache_dtype)
    answer_as_peft_does_in_little_memory(oracle, small)
    assert set(rounding_layers) == {0, 1, 2}


@pytest.mark.parametrize("kv_cache_dtype", [pytest.param("bfloat16", marks=_IS_LONG), "int8"])
def test_a_cache_of_fewer_bits_answers_so_without_compiled_operators(
    kv_cache_dtype: str, tmp_path: Path, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle, path = save_with_adapters(FAMILIES["mistral"], tmp_path)
    attend_to_rounded_heads(monkeypatch, kv_cache_dtype)
    monkeypatch.setattr(cpu, "_library", functools.cache(lambda: None))
    small = build_small_engine(oracle, path, default_model_dir, False, kv_cache_dtype)
    answer_as_peft_does_in_little_memory(oracle, small)


PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n    ",
    "Les enfants jouent dans le jardin, et",
    "東京は日本の",
    "Q: What is 17 + 25?\nA:",
    "🙂🙃 Emoji are",
    "x",
]


@pytest.mark.parametrize(
    ("num_prompts", "max_tokens"),
    [(4, 16), pytest.param(len(PROMPTS), 64, marks=pytest.mark.long(reason="24 answers of 64 tokens"))],
)
def test_the_default_model_answers_as_peft_does_in_one_mixed_batch(
    default_model_dir: Path, tmp_path: Path, num_prompts: int, max_tokens: int
) -> None:
    oracle = Oracle(AutoModelForCausalLM.from_pretrained(default_model_dir, dtype=torch.float32), tmp_path)
    for directory in sorted(p.parent for p in SAMPLES.glob("*/adapter_config.json")):
        oracle.load(directory.name, directory)
    assert len(oracle.adapters) == 3
    add_random_adapters(oracle)
    engine = build_engine(default_model_dir, oracle, default_model_dir, kv_cache_bytes=256 << 20)
    recorder = LogitsRecorder(engine)
    tokenizer = engine._tokenizer
    chats = [tokenizer.apply_chat_template([{"role": "user", "content": text}]) for text in PROMPTS[-num_prompts:]]
    raw = [tokenizer.encode(text, add_special_tokens=True) for text in PROMPTS[:num_prompts] * 2]
    requests = requests_for(oracle, chats + raw, max_tokens=max_tokens)
    answers = run_all(engine, requests)
    assert_greedy(oracle, requests, answers)
    names = [None, *oracle.adapters]
    for request in requests[: len(names)]:
        name = None if request.lora_task_id is None else names[request.lora_task_id + 1]
        expected = oracle.logits(name, request.prompt_token_ids, answers[request.request_id].token_ids)
        actual = torch.stack(recorder.rows[request.request_id])
        torch.testing.assert_close(actual, expected, rtol=0, atol=LOGITS_TOLERANCE)
    for request in requests[:: len(names) - 2][:3]:
        alone = run_all(engine, [request])[request.request_id]
        assert alone.token_ids == answers[request.request_id].token_ids


def save_peft(directory: Path, matrices: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> Path:
    """A PEFT directory of rank 4 and alpha 12 that adapts these modules of layer 1, in bfloat16, by A and B."""
    directory.mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 12, "target_modules": list(matrices)}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for module, pair in matrices.items():
        for side, matrix in zip("AB", pair, strict=True):
            key = f"base_model.model.model.layers.1.{module}.lora_{side}.weight"
            tensors[key] = matrix.to(torch.bfloat16).contiguous()
    save_file(tensors, directory / "adapter_model.safetensors")
    return directory


def test_an_adapter_of_fused_projections_answers_as_one_of_their_parts(default_model_dir: Path, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(5)
    config = EngineConfig(
        model_path=save_tiny_llama(tmp_path / "tiny"),
        tokenizer_path=default_model_dir,
        num_threads=1,
        kv_cache_memory_bytes=TINY_KV_CACHE_BYTES,  # type: ignore[arg-type]
    )
    engine = Engine(config)
    a_qkv, a_mlp = torch.randn(2, 4, 32, generator=generator)
    q, k, v, gate, up = (torch.randn(size, 4, generator=generator) for size in (32, 16, 16, 56, 56))
    fused = {"self_attn.qkv_proj": (a_qkv, torch.cat([q, k, v])), "mlp.gate_up_proj": (a_mlp, torch.cat([gate, up]))}
    parts = {f"self_attn.{name}_proj": (a_qkv, b) for name, b in (("q", q), ("k", k), ("v", v))}
    parts |= {"mlp.gate_proj": (a_mlp, gate), "mlp.up_proj": (a_mlp, up)}
    exchanged = parts | {"mlp.gate_proj": (a_mlp, up), "mlp.up_proj": (a_mlp, gate)}
    for task_id, matrices in enumerate((fused, parts, exchanged)):
        directory = save_peft(tmp_path / f"adapter {task_id}", matrices)
        engine.put_adapter(task_id, packed(directory, engine.info.adapter_layout))
    sampling = SamplingParams(max_tokens=16, end_id=-1)
    requests = [GenerationRequest(f"r{task}", [1, 2, 3], sampling, lora_task_id=task) for task in range(3)]
    answers = run_all(engine, requests)
    assert answers["r0"].token_ids == answers["r1"].token_ids != answers["r2"].token_ids
