"""`kv_cache_dtype`: the size of a cache in fewer bits, its cost in exactness, and that it depends on nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from support.engines import LogitsRecorder, poison_claimed_blocks, run_all

from checkpoints.tiny_llama import save_tiny_llama
from multilora_engine.batch.forward_batch import KVCache
from multilora_engine.config import EngineConfig
from multilora_engine.engine.build import choose_kv_cache_dtype
from multilora_engine.engine.engine import Engine
from multilora_engine.errors import ConfigError
from multilora_engine.models.model import kv_groups, only_group
from multilora_engine.models.registry import read_model_config
from multilora_engine.request import GenerationRequest, SamplingParams
from multilora_kernels import KVCodes, interpreter

TWO_LAYERS_OF_TWO_HEADS = 2 * 2 * 2
"""Rows of keys and of values that the tiny model keeps for each token."""

HEAD_DIM = 8
_CACHE_BYTES = 64 << 10
"""Of no more blocks than needed: every one is looked at after every step."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


def make_engine(checkpoint: Path, tokenizer: Path, **options: object) -> Engine:
    options = {"kv_cache_memory_bytes": _CACHE_BYTES, "kv_cache_dtype": "int8"} | options
    config = EngineConfig(model_path=checkpoint, tokenizer_path=tokenizer, num_threads=1, **options)  # type: ignore[arg-type]
    engine = Engine(config)
    poison_claimed_blocks(engine)
    return engine


def requests() -> list[GenerationRequest]:
    """None of the prompts leaves a single token after its reused blocks, which would be computed as a decode is."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 311, (length,), generator=generator).tolist() for length in (1, 5, 16, 34, 70)]
    sampling = SamplingParams(max_tokens=16, end_id=-1)
    return [GenerationRequest(f"r{i}", prompt, sampling) for i, prompt in enumerate(prompts)]


def recorded(engine: Engine, asked: list[GenerationRequest]) -> tuple[dict[str, list[int]], dict[str, torch.Tensor]]:
    """Tokens and logits of each request."""
    recorder = LogitsRecorder(engine)
    answers = run_all(engine, asked)
    rows = {name: torch.stack(logits) for name, logits in recorder.rows.items()}
    return {name: answer.token_ids for name, answer in answers.items()}, rows


@pytest.mark.parametrize(
    ("kv_cache_dtype", "told", "row_bytes"),
    [
        ("auto", "float32", 4 * HEAD_DIM),
        ("float32", "float32", 4 * HEAD_DIM),
        ("bfloat16", "bfloat16", 2 * HEAD_DIM),
        ("int8", "int8", HEAD_DIM + 4),
        ("fp8", "float8_e4m3fn", HEAD_DIM + 4),
    ],
)
def test_fewer_bits_hold_more_tokens_in_the_same_memory(
    kv_cache_dtype: str, told: str, row_bytes: int, checkpoint: Path, default_model_dir: Path
) -> None:
    engine = make_engine(checkpoint, default_model_dir, kv_cache_dtype=kv_cache_dtype)
    block_bytes = 16 * TWO_LAYERS_OF_TWO_HEADS * row_bytes
    assert engine.info.kv_cache_dtype == told
    assert engine.info.kv_cache_tokens == _CACHE_BYTES // block_bytes * 16
    assert engine.stats.kv_cache_bytes == engine.stats.num_blocks * block_bytes


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_the_cache_of_a_model_in_16_bits_may_be_in_codes(
    kv_cache_dtype: str, checkpoint: Path, default_model_dir: Path
) -> None:
    engine = make_engine(checkpoint, default_model_dir, dtype="bfloat16", kv_cache_dtype=kv_cache_dtype)
    tokens, logits = recorded(engine, requests())
    assert {len(answer) for answer in tokens.values()} == {16}
    assert all(rows.isfinite().all() for rows in logits.values())


def test_heads_whose_scales_would_not_be_aligned_stop_the_load(tmp_path: Path, default_model_dir: Path) -> None:
    checkpoint = save_tiny_llama(tmp_path, hidden_size=24)
    with pytest.raises(ConfigError, match="heads of a multiple of 4 elements, and the model's have 6"):
        make_engine(checkpoint, default_model_dir)


def test_a_type_that_no_cache_has_is_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype='int4'"):
        EngineConfig.from_parameters({"model_path": str(checkpoint), "kv_cache_dtype": "int4"})


@pytest.mark.parametrize(("name", "dtype"), [("int8", torch.int8), ("fp8", torch.float8_e4m3fn)])
def test_a_gpu_has_its_scales_apart_in_as_many_bytes(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, name: str, dtype: torch.dtype
) -> None:
    config = EngineConfig.model_validate({"model_path": checkpoint, "kv_cache_dtype": name})
    model = read_model_config(checkpoint)
    assert choose_kv_cache_dtype(config, model, torch.bfloat16, torch.device("cuda")) == dtype
    group = only_group(kv_groups(model))
    rows = KVCache(*(group.cache(12, dtype, torch.device("cpu")) for _ in range(2)))
    monkeypatch.setattr(interpreter, "IS_INTERPRETED", True)
    apart = KVCache(*(group.cache(12, dtype, torch.device("cpu")) for _ in range(2)))
    assert isinstance(apart.keys, KVCodes)
    assert apart.num_bytes == rows.num_bytes == 12 * group.bytes_per_token(dtype)
    assert [layer[0].scales.shape for layer in apart.layers] == [(model.num_kv_heads, 12)] * model.num_layers


@pytest.mark.parametrize(("kv_cache_dtype", "most"), [("int8", 0.06), ("bfloat16", 0.06), ("fp8", 0.3)])
def test_logits_are_off_by_a_small_part_of_what_they_differ_by(
    kv_cache_dtype: str, most: float, checkpoint: Path, default_model_dir: Path
) -> None:
    # Of the first tokens, lest another choice of one changes all after it.
    asked = [
        GenerationRequest(request.request_id, request.prompt_token_ids, SamplingParams(max_tokens=1))
        for request in requests()
    ]
    _, exact = recorded(make_engine(checkpoint, default_model_dir, kv_cache_dtype="float32"), asked)
    _, rounded = recorded(make_engine(checkpoint, default_model_dir, kv_cache_dtype=kv_cache_dtype), asked)
    errors = [((rounded[name] - exact[name]).norm() / exact[name].std() / 311**0.5).item() for name in exact]
    assert 0 < max(errors) < most, "0.037 were seen with int8, 0.014 with bfloat16"


@pytest.mark.parametrize("kv_cache_dtype", ["int8", "fp8"])
def test_a_request_has_the_same_bits_alone_in_a_batch_and_after_a_prefix_in_the_cache(
    kv_cache_dtype: str, checkpoint: Path, default_model_dir: Path
) -> None:
    options = {"kv_cache_dtype": kv_cache_dtype}
    engine = make_engine(checkpoint, default_model_dir, enable_prefix_caching=False, **options)
    together = recorded(engine, requests())
    for request in requests():
        tokens, logits = recorded(engine, [request])
        assert tokens[request.request_id] == together[0][request.request_id]
        assert torch.equal(logits[request.request_id], together[1][request.request_id])
    keeping = make_engine(checkpoint, default_model_dir, **options)
    for _ in range(2):
        tokens, logits = recorded(keeping, requests())
        assert tokens == together[0]
        assert all(torch.equal(logits[name], together[1][name]) for name in logits)
    assert keeping.stats.prefix_cache.hit_tokens > 0


def test_chunks_of_prompts_and_preemption_change_no_token(checkpoint: Path, default_model_dir: Path) -> None:
    roomy, _ = recorded(make_engine(checkpoint, default_model_dir), requests())
    options = {"max_num_batched_tokens": 24, "max_num_seqs": 7}
    chunks, _ = recorded(make_engine(checkpoint, default_model_dir, **options), requests())
    assert chunks == roomy
    tight = make_engine(checkpoint, default_model_dir, max_model_len=88, kv_cache_memory_bytes=11 << 10, block_size=8)
    again, _ = recorded(tight, requests())
    assert tight.stats.num_preemptions > 0
    assert again == roomy
