"""Token rows, embeddings and heads of adapters against transformers + PEFT in float32: tokens and log-probs."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftConfig, TrainableTokensConfig
from safetensors.torch import load_file, save_file
from support.compressed_checkpoints import save_compressed
from support.engines import LogitsRecorder, poison_claimed_blocks, run_all
from support.oracle import Oracle, Oracles
from support.outer_adapters import packed_files
from support.parity import (
    TINY,
    TINY_KV_CACHE_BYTES,
    assert_adapters_matter,
    assert_greedy,
    requests_for,
    tiny_prompts,
    use_padded_steps,
)
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.lora_config import LoRAConfig
from multilora_engine.request import GenerationRequest, SamplingParams
from multilora_engine.sequences.prompt_log_probs import row_type

LOGITS_TOLERANCE = 3e-3
"""As in test_parity.py."""
LOCAL_AND_GLOBAL = ["sliding_attention", "full_attention", "sliding_attention"]
SOFT = {"pad_token_id": 0, "query_pre_attn_scalar": 10, "sliding_window": 24, "layer_types": LOCAL_AND_GLOBAL}
GRANITE = {
    "hidden_size": 72,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.6,
    "logits_scaling": 0.7,
}
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "untied": lambda: LlamaForCausalLM(LlamaConfig(**TINY)),
    "tied": lambda: Qwen3ForCausalLM(Qwen3Config(**TINY, tie_word_embeddings=True)),
    "gemma": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**TINY, **SOFT, tie_word_embeddings=False, final_logit_softcapping=30.0)
    ),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(**TINY | GRANITE, tie_word_embeddings=True)),
}
TOKENS = [5, 301, 17, 0, 250, 18, 111]


def lora(*targets: str, rank: int = 8, **options: Any) -> LoraConfig:
    return LoraConfig(r=rank, lora_alpha=rank, target_modules=[*targets], **options)


def kinds(is_tied: bool) -> dict[str, PeftConfig]:
    """An adapter of each kind, and a plain one."""
    both = {"embed_tokens": TOKENS[:4], "lm_head": TOKENS[2:]}
    return {
        "plain": lora("q_proj", "down_proj"),
        "rows": lora("q_proj", trainable_token_indices=TOKENS),
        "many rows": lora("v_proj", trainable_token_indices=list(range(300, 100, -1))),
        "two lists of rows": lora("q_proj", trainable_token_indices=both),
        "rows alone": TrainableTokensConfig(token_indices=TOKENS[::-1]),
        "embeddings": lora("embed_tokens", "k_proj", rank=16),
        "head": lora("lm_head", "q_proj", rank=5),
        "DoRA head": lora("lm_head", "gate_proj", use_dora=True),
        "DoRA embeddings": lora("embed_tokens", "v_proj", use_dora=True),
        "both": lora("embed_tokens", "lm_head", "o_proj"),
        "saved head": lora("q_proj", modules_to_save=["lm_head"]),
        "saved embeddings": lora("q_proj", modules_to_save=["embed_tokens"]),
    }


_IS_LONG = pytest.mark.long(reason="the kinds are tested in every family by the first test")
EVERY_FAMILY = pytest.mark.parametrize("model", MODELS, indirect=True)
TWO_FAMILIES = pytest.mark.parametrize(
    "model",
    [name if name in ("tied", "gemma") else pytest.param(name, marks=_IS_LONG) for name in MODELS],
    indirect=True,
)


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Oracles, Path]:
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(7)
    model = MODELS[request.param]()
    model.save_pretrained(folder / "checkpoint")
    oracles = Oracles(model, folder)
    for seed, (name, config) in enumerate(kinds(bool(model.config.tie_word_embeddings)).items()):
        oracles.add(name, config, seed)
    return oracles, folder / "checkpoint"


def build(
    oracles: Oracles,
    path: Path,
    tokenizer_path: Path,
    max_loras: int = 16,
    lora_dtype: str = "auto",
    **options: Any,
) -> Engine:
    lora_config = {"lora_cache_host_memory_bytes": 512 << 20, "max_loras": max_loras, "lora_dtype": lora_dtype}
    config = EngineConfig(
        model_path=path,
        tokenizer_path=tokenizer_path,
        num_threads=2,
        lora=LoRAConfig(**lora_config),  # type: ignore[arg-type]
        **{"inter_token_latency_target_ms": 0.0, "kv_cache_memory_bytes": TINY_KV_CACHE_BYTES, **options},
    )
    engine = Engine(config)
    for task_id, directory in enumerate(oracles.adapters.values()):
        engine.put_adapter(task_id, packed_files(directory, engine.info.adapter_layout, path))
    return engine


def prompts_with_rows(count: int) -> list[list[int]]:
    """Prompts with some of the tokens that have rows of their own."""
    return [prompt + TOKENS[i % 5 :] for i, prompt in enumerate(tiny_prompts(count))]


@EVERY_FAMILY
def test_every_kind_answers_as_peft_does_beside_the_others_and_the_base(
    model: tuple[Oracles, Path], default_model_dir: Path
) -> None:
    oracles, path = model
    engine = build(oracles, path, default_model_dir, max_num_batched_tokens=40, max_num_seqs=24)
    requests = requests_for(oracles, prompts_with_rows(24), max_tokens=12)
    answers = run_all(engine, requests)
    assert_greedy(oracles, requests, answers)
    base = [GenerationRequest(r.request_id, r.prompt_token_ids, r.sampling) for r in requests]
    assert_adapters_matter(requests, answers, run_all(engine, base))


@TWO_FAMILIES
def test_reused_prefixes_chunks_preemption_and_poisoned_blocks_change_no_token(
    model: tuple[Oracles, Path], default_model_dir: Path
) -> None:
    oracles, path = model
    roomy = build(oracles, path, default_model_dir)
    bytes_per_token = TINY_KV_CACHE_BYTES // roomy.info.kv_cache_tokens
    small = build(
        oracles,
        path,
        default_model_dir,
        block_size=8,
        max_num_batched_tokens=24,
        max_num_seqs=24,
        enable_async_scheduling=True,
        kv_cache_memory_bytes=200 * bytes_per_token + 160,
        max_loras=3,
    )
    poison_claimed_blocks(small)
    prefix = tiny_prompts(7)[-1][:30] + TOKENS
    requests = requests_for(oracles, [prefix + tail for tail in tiny_prompts(4) * 6], max_tokens=8)
    requests.sort(key=lambda request: request.lora_task_id or 0)
    answers = run_all(small, requests)
    assert_greedy(oracles, requests, answers)
    assert small.stats.num_preemptions > 0
    again = run_all(small, requests[-2:]) | run_all(small, requests[-2:])
    assert all(again[i].token_ids == answers[i].token_ids for i in again)
    assert small.stats.prefix_cache.hit_tokens > 0


@TWO_FAMILIES
def test_log_probs_of_prompts_and_answers_are_those_of_peft(
    model: tuple[Oracles, Path], default_model_dir: Path
) -> None:
    oracles, path = model
    engine = build(oracles, path, default_model_dir, max_num_batched_tokens=40, max_num_seqs=24)
    wanted = {"return_prompt_log_probs": True, "num_prompt_top_log_probs": 2, "return_log_probs": True}
    sampling = SamplingParams(max_tokens=3, end_id=-1, **wanted)  # type: ignore[arg-type]
    names = [None, *oracles.adapters]
    requests = [
        GenerationRequest(f"r{i}", prompt, sampling, lora_task_id=None if i == 0 else i - 1)
        for i, prompt in enumerate(prompts_with_rows(7)[5:6] * len(names))
    ]
    answers = run_all(engine, requests)
    for name, request in zip(names, requests, strict=True):
        prompt, answer = request.prompt_token_ids, answers[request.request_id]
        rows = np.frombuffer(answer.prompt_log_probs, row_type(2))
        tokens = prompt[1:] + answer.token_ids
        expected = oracles.logits(name, prompt[:1], tokens).log_softmax(dim=-1)
        chosen = expected.gather(1, torch.tensor(tokens)[:, None]).squeeze(1)
        np.testing.assert_allclose(rows["log_prob"][1:], chosen[: len(prompt) - 1], rtol=0, atol=LOGITS_TOLERANCE)
        top = expected.topk(2).values[: len(prompt) - 1]
        np.testing.assert_allclose(rows["top_log_probs"][1:], top, rtol=0, atol=LOGITS_TOLERANCE)
        told = [token.log_prob for token in answer.log_probs]
        np.testing.assert_allclose(told, chosen[len(prompt) - 1 :], rtol=0, atol=LOGITS_TOLERANCE)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("module", ["lm_head", "embed_tokens"])
def test_updates_over_a_copy_with_changed_rows_are_those_of_peft(
    module: str, is_tied: bool, tmp_path: Path, default_model_dir: Path
) -> None:
    """DoRA's lengths are of the rows that the copy has, not of the base's."""
    torch.manual_seed(7)
    model = MODELS["tied" if is_tied else "untied"]()
    model.save_pretrained(tmp_path / "checkpoint")
    trained = Oracles(model, tmp_path)
    loaded = Oracle(copy.deepcopy(model), tmp_path)
    trained.add("DoRA", lora(module, "q_proj", use_dora=True), 1, save_embedding_layers=True)
    file = trained.adapters["DoRA"] / "adapter_model.safetensors"
    tensors = load_file(file)
    (key,) = (key for key in tensors if key.endswith(f"{module}.base_layer.weight"))
    tensors[key][TOKENS] = torch.randn(len(TOKENS), tensors[key].shape[1])
    save_file(tensors, file)
    loaded.load("DoRA", file.parent)
    engine = build(trained, tmp_path / "checkpoint", default_model_dir)
    recorder = LogitsRecorder(engine)
    request = GenerationRequest("r", [40, *TOKENS], SamplingParams(max_tokens=1, end_id=-1), 0)
    run_all(engine, [request])
    expected = loaded.logits("DoRA", request.prompt_token_ids, [0])[0]
    torch.testing.assert_close(recorder.rows["r"][0], expected, rtol=0, atol=LOGITS_TOLERANCE)


@TWO_FAMILIES
def test_beams_are_those_of_transformers(model: tuple[Oracles, Path], default_model_dir: Path) -> None:
    oracles, path = model
    engine = build(oracles, path, default_model_dir, max_num_batched_tokens=40, max_num_seqs=30)
    sampling = SamplingParams(max_tokens=6, end_id=-1, beam_width=2, length_penalty=1.0)
    names = [*oracles.adapters]
    requests = [GenerationRequest(f"r{i}", [5, 17, 40 + i], sampling, lora_task_id=i) for i in range(len(names))]
    answers = run_all(engine, requests)
    for name, request in zip(names, requests, strict=True):
        final = answers[request.request_id].final
        assert final is not None
        found = oracles.generate(
            name,
            request.prompt_token_ids,
            do_sample=False,
            num_beams=2,
            num_return_sequences=2,
            max_new_tokens=6,
            length_penalty=1.0,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert [beam.token_ids for beam in final.beams] == found[:, 3:].tolist(), name


@pytest.mark.parametrize("lora_dtype", ["bfloat16", "int8", "fp8", "int4"])
def test_adapters_stored_in_fewer_bits_change_logits_little(
    lora_dtype: str, tmp_path: Path, default_model_dir: Path
) -> None:
    torch.manual_seed(7)
    model = MODELS["tied"]()
    model.save_pretrained(tmp_path / "checkpoint")
    oracles = Oracles(model, tmp_path)
    for seed, name in enumerate(("rows", "both")):
        oracles.add(name, kinds(is_tied=True)[name], seed)
    engine = build(oracles, tmp_path / "checkpoint", default_model_dir, lora_dtype=lora_dtype)
    recorder = LogitsRecorder(engine)
    requests = requests_for(oracles, prompts_with_rows(6), max_tokens=1)
    run_all(engine, requests)
    for request in requests:
        name = None if request.lora_task_id is None else [*oracles.adapters][request.lora_task_id]
        (actual,) = recorder.rows[request.request_id]
        expected = oracles.logits(name, request.prompt_token_ids, [0])[0]
        error = (actual - expected).norm() / expected.norm()
        assert error < {"bfloat16": 0.02, "int8": 0.04, "fp8": 0.2, "int4": 0.45}[lora_dtype], name
        # Rows of tokens stay floats.
        assert name != "rows" or error < 0.1


def test_quantised_embeddings_and_heads_serve_every_kind(tmp_path: Path, default_model_dir: Path) -> None:
    torch.manual_seed(7)
    model = LlamaForCausalLM(LlamaConfig(**TINY))
    weights = {"num_bits": 8, "type": "int", "symmetric": False, "strategy": "group", "group_size": 4}
    scheme = {"targets": ["Linear", "Embedding"], "weights": weights}
    path = tmp_path / "checkpoint"
    save_compressed(model, path, {"group_0": scheme}, ignore=[])
    oracles = Oracles(model, tmp_path)
    configs = kinds(is_tied=False)
    for seed, name in enumerate(("rows", "embeddings", "head", "two lists of rows", "both")):
        oracles.add(name, configs[name], seed, save_embedding_layers=False)
    engine = build(oracles, path, default_model_dir)
    requests = requests_for(oracles, prompts_with_rows(12), max_tokens=10)
    assert_greedy(oracles, requests, run_all(engine, requests))


def test_steps_padded_as_for_cuda_graphs_leave_such_adapters_to_other_steps(
    default_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(7)
    model = MODELS["tied"]()
    model.save_pretrained(tmp_path / "checkpoint")
    oracles = Oracles(model, tmp_path)
    for seed, name in enumerate(("plain", "rows", "head")):
        oracles.add(name, kinds(is_tied=True)[name], seed)
    engine = build(oracles, tmp_path / "checkpoint", default_model_dir, max_num_seqs=11)
    replays = use_padded_steps(engine, monkeypatch)
    requests = requests_for(oracles, prompts_with_rows(8), max_tokens=10)
    assert_greedy(oracles, requests, run_all(engine, requests))
    assert not replays
    assert_greedy(oracles, requests[:2], run_all(engine, requests[:2]))
    assert replays
