"""What the engine promises of a GPU; collected where there is one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import wire_adapter
from support.engines import run_all
from support.tiny_mixture import save_tiny_mixture
from support.tiny_tokenizer import save_tiny_tokenizer

from checkpoints.tiny_llama import VOCAB_SIZE, save_tiny_llama
from multilora_engine.batch.transfer import FromDevice
from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.lora.format import pack_adapter
from multilora_engine.request import GenerationRequest, SamplingParams

pytestmark = pytest.mark.gpu


BAD = tuple((first, second) for first in range(VOCAB_SIZE) for second in range(0, VOCAB_SIZE, 9))
"""So many that answers meet some."""


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    """A machine with a GPU may have no network."""
    return save_tiny_tokenizer(tmp_path / "tokenizer")


def make_engine(
    folder: Path, tokenizer: Path, save: Callable[[Path], Path] = save_tiny_llama, **options: Any
) -> Engine:
    """With adapters 0 and 1. save: writes the checkpoint."""
    config = EngineConfig(
        model_path=save(folder),
        tokenizer_path=tokenizer,
        kv_cache_memory_bytes=8 << 20,  # type: ignore[arg-type]
        **options,
    )
    engine = Engine(config)
    layout = engine.info.adapter_layout
    for task in range(2):
        rows = [(1, 0, 4), *((m.module_id, m.layer, 2 + task) for m in layout.sites.plain_modules if m.layer == 1)]
        wire = wire_adapter(layout, rows, seed=task, scale=0.5)
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
    "sampling",
    [
        {},
        {"temperature": 0.8, "seed": 1},
        {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 1},
        {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "min_tokens": 9, "bad_token_sequences": BAD},
    ],
)
def test_a_decode_step_waits_for_the_device_only_to_read_its_tokens(
    tmp_path: Path,
    tokenizer: Path,
    monkeypatch: pytest.MonkeyPatch,
    sampling: dict[str, Any],
    enable_cuda_graphs: bool,
    enable_async_scheduling: bool,
) -> None:
    engine = make_engine(
        tmp_path,
        tokenizer,
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
@pytest.mark.parametrize("save", [save_tiny_llama, save_tiny_mixture])
def test_a_gpu_answers_as_a_cpu_does_in_float32(
    tmp_path: Path,
    tokenizer: Path,
    save: Callable[[Path], Path],
    tasks: tuple[int | None, ...],
    enable_cuda_graphs: bool,
    enable_async_scheduling: bool,
) -> None:
    on_gpu = make_engine(
        tmp_path,
        tokenizer,
        save,
        dtype="float32",
        enable_cuda_graphs=enable_cuda_graphs,
        enable_async_scheduling=enable_async_scheduling,
    )
    on_cpu = make_engine(tmp_path, tokenizer, save, device="cpu")
    assert tokens(on_gpu, requests(tasks)) == tokens(on_cpu, requests(tasks))


@pytest.mark.parametrize("enable_async_scheduling", [False, True])
def test_penalties_and_bans_choose_the_tokens_of_a_cpu(
    tmp_path: Path, tokenizer: Path, enable_async_scheduling: bool
) -> None:
    options = {"repetition_penalty": 1.2, "frequency_penalty": 0.3, "min_tokens": 9, "bad_token_sequences": BAD}
    on_gpu = make_engine(tmp_path, tokenizer, dtype="float32", enable_async_scheduling=enable_async_scheduling)
    on_cpu = make_engine(tmp_path, tokenizer, device="cpu")
    expected = tokens(on_cpu, requests(**options))
    assert tokens(on_gpu, requests(**options)) == expected
    assert expected != tokens(on_cpu, requests())


def test_auto_takes_graphs_and_asynchronous_steps(tmp_path: Path, tokenizer: Path) -> None:
    engine = make_engine(tmp_path, tokenizer)
    runner = engine._runner
    assert runner._graphs is not None
    assert runner._pieces is not None
    assert engine.stats.num_cuda_graphs == len(runner._graphs.sizes) + len(runner._pieces.sizes)
    for request in requests():
        engine.add_request(request)
    assert engine.step() == [], "the first step is in flight"


@pytest.mark.parametrize("max_num_batched_tokens", [64, 100, 700])
def test_steps_with_prompts_are_replayed_in_pieces_and_choose_the_same_tokens(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, max_num_batched_tokens: int
) -> None:
    """Prompts of one token to 144, whole and cut, beside decodes; in float32, where no two tokens are close."""
    options = {"dtype": "float32", "max_num_batched_tokens": max_num_batched_tokens}
    tasks = [(None, 0, 1)[n % 3] for n in range(12)]
    expected = tokens(make_engine(tmp_path, tokenizer, enable_cuda_graphs=False, **options), requests(tasks))
    engine = make_engine(tmp_path, tokenizer, enable_cuda_graphs=True, **options)
    pieces, num_replays = engine._runner._pieces, 0
    assert pieces is not None
    run = pieces.run

    def counted(*arguments: Any) -> Any:
        nonlocal num_replays
        num_replays += 1
        return run(*arguments)

    monkeypatch.setattr(pieces, "run", counted)
    assert tokens(engine, requests(tasks)) == expected
    assert num_replays
