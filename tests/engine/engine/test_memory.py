"""The planned sizes of the tiers, and the report of them."""

from __future__ import annotations

import dataclasses
import logging
import re
from pathlib import Path

import pytest
import torch
from pydantic import ByteSize

from checkpoints.tiny_llama import save_tiny_llama
from multilora_engine.config import EngineConfig, on_device
from multilora_engine.engine import memory
from multilora_engine.engine.memory import MemoryPlan, StepBytes, divide_gpu, plan_memory, wait_for_freed_memory
from multilora_engine.errors import ConfigError
from multilora_engine.lora.checkpoint_layout import checkpoint_layout
from multilora_engine.lora_config import LoRAConfig
from multilora_engine.models.registry import read_model_config
from multilora_wire.layout import AdapterLayout, adapter_layout, adapter_pages
from multilora_wire.sites import attention_shapes, expert_shapes, model_sites

PAGE = 256 << 10


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("tiny"))


def layout(checkpoint: Path, max_rank: int) -> AdapterLayout:
    return checkpoint_layout(checkpoint, max_rank, "float32")


def plan(checkpoint: Path, max_rank: int, **options: object) -> MemoryPlan:
    lora = LoRAConfig(max_lora_rank=max_rank, **options)  # type: ignore[arg-type]
    config = EngineConfig(model_path=checkpoint, lora=lora)
    model = read_model_config(checkpoint)
    resolved, device = on_device(config, "cpu"), torch.device("cpu")
    return plan_memory(resolved, model, layout(checkpoint, max_rank), torch.float32, device)


def test_the_log_tells_how_many_adapters_fit_each_tier(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    planned = plan(
        checkpoint,
        64,
        lora_cache_host_memory_bytes=10 * PAGE,
        lora_cache_dir=tmp_path,
        lora_cache_disk_bytes=101 * PAGE,
    )
    assert planned.num_host_pages == planned.num_device_pages == 10
    pages = [adapter_pages(layout(checkpoint, 64), rank) for rank in (8, 16, 64)]
    for tier, num_pages in (("host and device", 10), ("disk", 100)):
        fits = ", ".join(f"{num_pages // n} of rank {rank}" for n, rank in zip(pages, (8, 16, 64), strict=True))
        assert f"{tier} tier: " in caplog.text
        assert f"adapters on all linear layers that fit: {fits}" in caplog.text


@pytest.mark.parametrize(("tier", "num_pages"), [("host", -1), ("disk", 0)])
def test_a_tier_too_small_for_one_largest_adapter_refuses_to_load_with_the_numbers(
    checkpoint: Path, tmp_path: Path, tier: str, num_pages: int
) -> None:
    needed = adapter_pages(layout(checkpoint, 256), 256, is_dora=True)
    parameter = {"host": "lora_cache_host_memory_bytes", "disk": "lora_cache_disk_bytes"}[tier]
    with pytest.raises(ConfigError, match=f"{tier} LoRA cache .* {needed - 1} pages < {needed} .* raise {parameter}"):
        plan(checkpoint, 256, lora_cache_dir=tmp_path, **{parameter: (needed + num_pages) * PAGE})


def test_memory_that_the_machine_does_not_have_refuses_to_load_with_the_numbers(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is taken as it is used, and Linux would end the process in the middle of requests."""
    monkeypatch.setattr(memory, "available_memory", lambda: 3 << 29)
    with pytest.raises(
        ConfigError, match=r"leave 1\.50 GiB .* KV cache of 1\.00 GiB and a host tier of 1\.00 GiB; write"
    ):
        plan(checkpoint, 8)
    fitting = plan(checkpoint, 8, lora_cache_host_memory_bytes=1 << 28)
    assert fitting.num_blocks
    assert fitting.spare_bytes == 1 << 28


ADAPTERS = r"64 adapters of rank 16, which may share a step, take 8\.00 GiB"


def gpu_plan(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, gpu_gib: int, host_gib: int, **options: object
) -> MemoryPlan:
    """Of an empty GPU for 64 sequences. options: of adapters, each of which takes 128 pages of 1 MiB."""
    config = EngineConfig.model_validate({"model_path": checkpoint, "lora": options, "gpu_memory_utilization": 1})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (gpu_gib << 30, gpu_gib << 30))
    monkeypatch.setattr(memory, "available_memory", lambda: host_gib << 30)
    monkeypatch.setattr(memory, "adapter_pages", lambda layout, rank, is_dora=False: 128)
    pages = dataclasses.replace(layout(checkpoint, 64), page_bytes=1 << 20)
    model = read_model_config(checkpoint)
    return plan_memory(on_device(config, "cuda"), model, pages, torch.float32, torch.device("cuda"))


def test_a_gpu_has_room_for_all_adapters_of_a_step_and_the_host_for_twice_as_many(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = gpu_plan(checkpoint, monkeypatch, 20, 16)
    assert (planned.num_device_pages, planned.num_host_pages) == (64 * 128, 2 * 64 * 128)
    planned = gpu_plan(checkpoint, monkeypatch, 20, 4, max_loras=5)
    assert (planned.num_device_pages, planned.num_host_pages) == (1024, 2 * 5 * 128)
    written = {"lora_cache_gpu_memory_fraction": 0.25, "lora_cache_host_memory_bytes": 3 << 30}
    planned = gpu_plan(checkpoint, monkeypatch, 20, 4, **written)
    assert (planned.num_device_pages, planned.num_host_pages) == (5 << 10, 3 << 10)


def test_a_gpu_or_machine_that_is_too_small_for_them_has_room_for_fewer(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    planned = gpu_plan(checkpoint, monkeypatch, 15, 16)
    assert (planned.num_device_pages, planned.num_host_pages) == (15 << 9, 16 << 10)
    told = ADAPTERS + r", more than half of the 15\.00 GiB .*: the device tier has 7\.50 GiB, and adapters that do not"
    assert re.search(told, caplog.text)
    planned = gpu_plan(checkpoint, monkeypatch, 20, 15)
    assert (planned.num_device_pages, planned.num_host_pages) == (8 << 10, 15 << 9)
    with pytest.raises(ConfigError, match=r"has 15\.00 GiB .* host tier of 16\.00 GiB; " + ADAPTERS + ": write"):
        gpu_plan(checkpoint, monkeypatch, 20, 15, lora_cache_host_memory_bytes=16 << 30)


_EXPERTS = model_sites([[*attention_shapes(2048, 4096, 512), *expert_shapes(2048, 768, 128)]] * 48, hidden_size=2048)
"""Qwen3-30B-A3B: an adapter of rank 16 on all modules takes 1.6 GiB as bfloat16, one of rank 64 6.3 GiB."""


@pytest.mark.parametrize(("free_gib", "smallest", "most"), [(8, 16, 16), (1.2, 11, 12), (0.1, 9, 10)])
def test_an_adapter_that_nobody_sent_stops_no_start_of_default_sizes(
    checkpoint: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    free_gib: float,
    smallest: int,
    most: int,
) -> None:
    """free_gib: beside the KV cache. The host tier has room for rank 16, or for less, but never less than a GiB."""
    kv_bytes = 1 << 20
    config = EngineConfig(
        model_path=checkpoint, kv_cache_memory_bytes=ByteSize(kv_bytes), lora=LoRAConfig(lora_cache_dir=tmp_path)
    )
    available = max(int(free_gib * (1 << 30)), 1 << 30) + kv_bytes
    monkeypatch.setattr(memory, "available_memory", lambda: available)
    model, pages = read_model_config(checkpoint), adapter_layout(_EXPERTS, 64, "bfloat16")
    planned = plan_memory(on_device(config, "cpu"), model, pages, torch.float32, torch.device("cpu"))
    refused = r"host and device tier: an adapter of max_lora_rank 64 .* takes 6\.\d+ GiB and is refused; the largest "
    (told,) = re.findall(refused + r"that fits has rank (\d+)", caplog.text)
    assert smallest <= int(told) <= most
    assert adapter_pages(pages, int(told)) <= planned.num_host_pages < adapter_pages(pages, int(told) + 1)
    assert "disk tier: an adapter" not in caplog.text
    written = config.model_copy(update={"lora": LoRAConfig(lora_cache_host_memory_bytes=ByteSize(1 << 30))})
    with pytest.raises(ConfigError, match="Not enough space allocated to host LoRA cache to hold 1 max sized LoRA"):
        plan_memory(on_device(written, "cpu"), model, pages, torch.float32, torch.device("cpu"))


def test_a_gpu_keeps_free_what_steps_need_and_tells_what_is_left(checkpoint: Path) -> None:
    config = EngineConfig(model_path=checkpoint, gpu_memory_utilization=0.75)
    pages = layout(checkpoint, 8)
    steps = StepBytes(step=5 << 30, graphs=3 << 30, sampling=1 << 30, tables=1 << 30)
    kv_bytes, num_pages, spare_bytes = divide_gpu(config, pages, free=60 << 30, total=80 << 30, steps=steps)
    assert num_pages == int((30 << 30) * 0.05) // pages.page_bytes
    assert kv_bytes == (30 << 30) - int((30 << 30) * 0.05)
    assert spare_bytes == 0
    needed = r"40\.00 GiB \(the largest step 5\.00 GiB, CUDA graphs 33\.00 GiB, sampling 1\.00 GiB, tables 1\.00 GiB\)"
    with pytest.raises(ConfigError, match=rf"leave 60\.00 GiB of 80\.00 GiB, of which steps need {needed}: nothing"):
        divide_gpu(config, pages, free=60 << 30, total=80 << 30, steps=dataclasses.replace(steps, graphs=33 << 30))
    smaller = config.model_copy(update={"kv_cache_memory_bytes": ByteSize(kv_bytes - (1 << 30))})
    divided = divide_gpu(smaller, pages, free=60 << 30, total=80 << 30, steps=steps)
    assert divided == (kv_bytes - (1 << 30), num_pages, 1 << 30)


@pytest.mark.parametrize(
    ("free_gib", "num_looks", "told"),
    [
        ([79.5], 0, None),
        ([12, 12], 4, "0.00 GiB became free, 12.00 of 80.00 GiB are free"),
        ([3, 3, 3, 3, 20, 20.01, 79.7], 6, "waited 3.0 s for .*: 76.70 GiB became free, 79.70 of 80.00 GiB are free"),
        ([3, 41, 30, 40, 39], 7, "36.00 GiB became free, 39.00 of 80.00 GiB are free"),
        ([0.5 + look for look in range(70)], 60, "waited 30.0 s .* 60.50 of 80.00 GiB are free, and more may follow"),
    ],
)
def test_a_start_waits_until_the_memory_of_an_ended_process_is_free(
    free_gib: list[float], num_looks: int, told: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    seen = [int(gib * (1 << 30)) for gib in free_gib]
    pauses: list[float] = []
    wait_for_freed_memory(lambda: (seen[min(len(pauses), len(seen) - 1)], 80 << 30), pauses.append)
    assert pauses == [0.5] * num_looks
    assert len(caplog.records) == (told is not None)
    if told is not None:
        assert re.search(told, caplog.text)
        assert (caplog.records[0].levelname == "WARNING") == (num_looks == 60)


@pytest.mark.parametrize("utilization", [0.313, 0.9, 0.97])
@pytest.mark.parametrize(
    "steps",
    [
        StepBytes(step=3, graphs=1, sampling=0, tables=7),
        StepBytes(step=(2 << 30) - 1, graphs=1_234_567_891, sampling=786_432_001, tables=131_071),
    ],
)
def test_a_gpu_is_divided_to_the_last_page_within_what_the_operator_allows(
    checkpoint: Path, utilization: float, steps: StepBytes
) -> None:
    total, free = 151_388_815_361, 134_567_890_123
    config = EngineConfig(model_path=checkpoint, gpu_memory_utilization=utilization)
    pages = layout(checkpoint, 8)
    kv_bytes, num_pages, spare_bytes = divide_gpu(config, pages, free, total, steps)
    left = free - kv_bytes - num_pages * pages.page_bytes - spare_bytes - steps.total
    assert 0 <= left - int(total * (1 - utilization)) < pages.page_bytes


def kv_plan(checkpoint: Path, num_tokens: int, max_model_len: int = 0) -> int:
    """The longest sequence beside a KV cache of so many tokens; the checkpoint's own limit is 512."""
    model = read_model_config(checkpoint)
    config = EngineConfig(
        model_path=checkpoint,
        max_model_len=max_model_len,
        kv_cache_memory_bytes=ByteSize(num_tokens * memory.kv_bytes_per_token(model, torch.float32)),
        lora=LoRAConfig(lora_cache_host_memory_bytes=ByteSize(1 << 30)),
    )
    resolved, device = on_device(config, "cpu"), torch.device("cpu")
    return plan_memory(resolved, model, layout(checkpoint, 8), torch.float32, device).max_model_len


def test_a_kv_cache_shorter_than_the_models_limit_is_told_with_both_numbers(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert kv_plan(checkpoint, 512) == 512
    assert "sequences end there" not in caplog.text
    assert kv_plan(checkpoint, 256) == 256
    assert "the KV cache holds 256 tokens, so that sequences end there and not at the checkpoint's 512" in caplog.text
    assert "raise kv_cache_memory_bytes" in caplog.text


@pytest.mark.parametrize("num_tokens", [16, 112])
def test_a_kv_cache_without_room_for_a_chat_stops_the_load_unless_it_was_asked_for(
    checkpoint: Path, num_tokens: int
) -> None:
    message = f"holds {num_tokens} tokens, too few for a prompt and its answer; raise kv_cache_memory_bytes"
    with pytest.raises(ConfigError, match=message):
        kv_plan(checkpoint, num_tokens)
    assert kv_plan(checkpoint, num_tokens, max_model_len=16) == 16


def test_a_length_beyond_the_checkpoints_own_is_told(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert kv_plan(checkpoint, 1024, max_model_len=600) == 600
    assert "max_model_len is 600, beyond the checkpoint's own limit of 512 tokens" in caplog.text
