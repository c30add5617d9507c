"""After the warm-up no request waits for a compiler, whatever steps it takes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from support.compressed_checkpoints import save_tiny_w4a16
from support.fake_driver import set_driver
from support.gpu_path import FakeDevice, make_device, make_engine
from support.tiny_mixture import save_tiny_mixture
from triton.runtime.jit import JITFunction

from checkpoints.tiny_llama import VOCAB_SIZE, save_tiny_llama
from multilora_engine.engine import base_model
from multilora_engine.engine.engine import Engine
from multilora_engine.execution.warm_up import compute_steps, warm_up_steps
from multilora_engine.request import GenerationRequest, SamplingParams
from multilora_kernels import cuda, order_codes
from multilora_kernels.cuda import experts
from multilora_kernels.cuda.ahead import noted_kernels
from multilora_kernels.self_test import OperatorFault

MAX_NUM_TOKENS, MAX_NUM_SEQS, MAX_LEN, BLOCK_SIZE = 1100, 24, 300, 8


def test_steps_are_of_every_size_that_counts() -> None:
    steps = warm_up_steps(700, 3, 600)
    assert [sum(step) for step in steps] == [1, 128, 256, 512, 700]
    assert steps[1] == [1, 1, 126]
    assert warm_up_steps(1, 1, 5) == [[1]]
    assert [sum(step) for step in warm_up_steps(300, 3, 600, [8, 128, 300])] == [1, 8, 9, 128, 129, 256, 300]
    assert [len(step) for step in warm_up_steps(16384, 4, 16384)] == [1, *[4] * 8]


def test_sizes_that_may_be_all_decodes_have_steps_with_and_without_a_prompt() -> None:
    assert warm_up_steps(5, 128, 600, [2]) == [[1], [1, 1], [2], [1, 1, 1], [3], [1] * 5, [1, 4]]
    # Sequences of a single token have no prompt that could be longer.
    assert warm_up_steps(2, 2, 1) == [[1], [1, 1]]


def _save_quantized(path: Path, **options: Any) -> Path:
    """With inputs enough to be cut into splits."""
    return save_tiny_w4a16(path, intermediate_size=1024, **options)


@pytest.mark.parametrize(
    ("save", "max_lora_rank", "lora_dtype"),
    [
        (save_tiny_llama, 8, "auto"),
        (save_tiny_llama, 64, "auto"),
        (save_tiny_llama, 8, "int8"),
        (_save_quantized, 8, "auto"),
    ],
)
def test_no_kernel_is_compiled_after_it(
    tmp_path: Path,
    default_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    save: Callable[..., Path],
    max_lora_rank: int,
    lora_dtype: str,
) -> None:
    device = make_device(monkeypatch)
    # Before the engine is there, so that codes of adapters have the order of a device.
    device.serve(monkeypatch)
    monkeypatch.setattr(base_model, "check_operators", lambda *_: None)
    engine = make_engine(
        tmp_path,
        default_model_dir,
        save,
        max_num_batched_tokens=MAX_NUM_TOKENS,
        max_num_seqs=MAX_NUM_SEQS,
        max_model_len=MAX_LEN,
        block_size=BLOCK_SIZE,
        lora={"max_lora_rank": max_lora_rank, "lora_dtype": lora_dtype},
        enable_async_scheduling=True,
    )
    device.variants.clear()
    with device:
        runner = engine._runner
        tables = engine._loras.device.tables
        compute_steps(runner._model, runner._kv_cache, tables, MAX_NUM_TOKENS, MAX_NUM_SEQS, MAX_LEN, BLOCK_SIZE)
        compiled = set(device.variants)
        device.variants.clear()
        _serve(engine, device)
    assert device.variants
    assert not device.variants - compiled


def test_codes_of_any_number_of_matrices_are_ordered_by_one_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    device, arena = make_device(monkeypatch), torch.zeros(64, dtype=torch.int8)
    device.serve(monkeypatch)
    for num_matrices in range(1, 5):
        order_codes(arena, *torch.zeros(3, num_matrices, dtype=torch.int64), max_rank=8)
    assert device.launches["order_codes_kernel"] == 4
    assert len(device.variants) == 1


@pytest.mark.parametrize(
    ("save", "max_pairs"), [(save_tiny_llama, None), (save_tiny_mixture, None), (save_tiny_mixture, 60)]
)
def test_the_kernels_that_are_compiled_ahead_are_those_that_the_steps_launch(
    tmp_path: Path,
    default_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    save: Callable[..., Path],
    max_pairs: int | None,
) -> None:
    """max_pairs: of a mixture, that a kernel sorts; torch sorts more."""
    device = make_device(monkeypatch)
    if max_pairs is not None:
        monkeypatch.setattr(experts, "MAX_TOKENS", max_pairs)
    engine = make_engine(tmp_path, default_model_dir, save)
    run = JITFunction.run
    device.serve(monkeypatch)
    runner, tables = engine._runner, engine._loras.device.tables
    steps = (runner._model, runner._kv_cache, tables, 200, 3, MAX_LEN, BLOCK_SIZE)
    with device:
        compute_steps(*steps)
    monkeypatch.setattr(JITFunction, "run", run)
    set_driver(monkeypatch)
    # Fills memory that no kernel writes with the largest numbers: they must index nothing.
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with device, noted_kernels() as kernels:
            compute_steps(*steps)
    finally:
        torch.use_deterministic_algorithms(False)
    names = Counter(json.loads(kernel)["name"].rpartition(".")[2] for kernel in kernels)
    assert names == Counter(name for name, *_ in device.variants)


def test_a_kernel_that_fails_for_some_steps_only_stops_the_load_and_is_named(
    tmp_path: Path, default_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = cuda.silu_mul

    def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
        if len(gate_up) > 100:
            raise ValueError("out of resource: shared memory")
        return right(gate_up)

    device = make_device(monkeypatch)
    engine = make_engine(tmp_path, default_model_dir)
    device.serve(monkeypatch)
    monkeypatch.setattr(cuda, "silu_mul", silu_mul)
    runner, tables = engine._runner, engine._loras.device.tables
    error = (
        "a step of 128 tokens in 24 sequences failed on cpu, in silu_mul: ValueError: out of resource: shared memory"
    )
    with device, pytest.raises(OperatorFault, match=error):
        compute_steps(runner._model, runner._kv_cache, tables, MAX_NUM_TOKENS, MAX_NUM_SEQS, MAX_LEN, BLOCK_SIZE)


def _serve(engine: Engine, device: FakeDevice) -> None:
    """Steps of one token and of many, decodes beside prompts, greedy and drawn, with penalties, bans and adapters and
    without.
    """
    random = Random(1)
    for n in range(60):
        penalties = random.choice([{}, {"repetition_penalty": 1.1}, {"bad_token_sequences": ((4,), (7, 8))}])
        sampling = SamplingParams(
            max_tokens=random.randint(1, 6), end_id=-1, temperature=random.choice([0.0, 0.8]), seed=n, **penalties
        )
        prompt = [random.randrange(VOCAB_SIZE) for _ in range(random.choice([1, 2, 7, 90, 250]))]
        engine.add_request(GenerationRequest(f"r{n}", prompt, sampling, lora_task_id=random.choice([None, 0, 1])))
        if random.random() < 0.3:
            engine.step()
    while engine.has_work:
        engine.step()
