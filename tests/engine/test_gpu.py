"""What the engine promises of a GPU; collected where there is one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import wire_adapter
from support.engines import run_all

from checkpoints.tiny_llama import VOCAB_SIZE, save_tiny_llama
from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.execution.transfer import FromDevice
from multilora_engine.lora.format import pack_adapter
from multilora_engine.request import GenerationRequest, SamplingParams

pytestmark = pytest.mark.gpu


def make_engine(folder: Path, tokenizer: Path, **options: Any) -> Engine:
    """With adapters 0 and 1."""
    config = EngineConfig(
        model_path=save_tiny_llama(folder),
        tokenizer_path=tokenizer,
        kv_cache_memory_bytes=8 << 20,  # type: ignore[arg-type]
        **options,
    )
    engine = Engine(config)
    layout = engine.info.adapter_layout
    for task in range(2):
        wire = wire_adapter(layout, [(1, 0, 4), (6, 1, 2 + task)], seed=task, scale=0.5)
        engine.put_adapter(task, pack_adapter(wire.weights, wire.config, layout))
    return engine


def requests(tasks: Sequence[int | None] = (None, 0, 1), **sampling: Any) -> list[GenerationRequest]:
    """One for each of `tasks`, with prompts of different lengths."""
    parameters = SamplingParams(max_tokens=12, end_id=-1, **sampling)
    return [
        GenerationRequest(f"r{n}", [(7 * n + i) % VOCAB_SIZE for i in range(13 * n + 1)], parameters, lora_task_id=task)
        for n, task in enumerate(tasks)
    ]


def tokens(engine: Engine, requests: list[GenerationRequest]) -> dict[str, list[int]]:
    return {name: answer.token_ids for name, answer in run_all(engine, requests).items()}


@contextmanager
def counted_reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Whatever waits for the device is an error, but for `FromDevice.wait`; the rows of what that read are told."""
    wait, rows = FromDevice.wait, []

    def counted_wait(values: FromDevice) -> list[torch.Tensor]:
        torch.cuda.set_sync_debug_mode("default")
        try:
            read = wait(values)
        finally:
            torch.cuda.set_sync_debug_mode("error")
        rows.append(len(read[0]))
        return read

    with monkeypatch.context() as patch:
        patch.setattr(FromDevice, "wait", counted_wait)
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield rows
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("enable_async_scheduling", [False, True])
@pytest.mark.parametrize("enable_cuda_graphs", [False, True])
@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.8, "seed": 1}, {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 1}]
)
def test_a_decode_step_waits_for_the_device_only_to_read_its_tokens(
    tmp_path: Path,
    default_model_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    sampling: dict[str, Any],
    enable_cuda_graphs: bool,
    enable_async_scheduling: bool,
) -> None:
    engine = make_engine(
        tmp_path,
        default_model_dir,
        enable_cuda_graphs=enable_cuda_graphs,
        enable_async_scheduling=enable_async_scheduling,
    )
    for request in requests(**sampling):
        engine.add_request(request)
    while engine.stats.num_running < 3:
        engine.step()
    engine.step()
    with counted_reads(monkeypatch) as rows:
        engine.step()
        engine.step()
    assert rows == [3, 3]


@pytest.mark.parametrize("enable_async_scheduling", [False, True])
@pytest.mark.parametrize("enable_cuda_graphs", [False, True])
@pytest.mark.parametrize("tasks", [(None, 0, 1), (None, None), (1, 0, None, 0, 1)])
def test_a_gpu_answers_as_a_cpu_does_in_float32(
    tmp_path: Path,
    default_model_dir: Path,
    tasks: tuple[int | None, ...],
    enable_cuda_graphs: bool,
    enable_async_scheduling: bool,
) -> None:
    on_gpu = make_engine(
        tmp_path,
        default_model_dir,
        dtype="float32",
        enable_cuda_graphs=enable_cuda_graphs,
        enable_async_scheduling=enable_async_scheduling,
    )
    on_cpu = make_engine(tmp_path, default_model_dir, device="cpu")
    assert tokens(on_gpu, requests(tasks)) == tokens(on_cpu, requests(tasks))
