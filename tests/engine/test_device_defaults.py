"""Numbers in the place of 0, by device."""

from __future__ import annotations

from pathlib import Path

import pytest

from multilora_engine.config import EngineConfig
from multilora_engine.device_defaults import on_device


@pytest.mark.parametrize(
    ("device", "options", "expected"),
    [
        ("cpu", {}, (256, 32)),
        ("cuda", {}, (2048, 64)),
        ("cuda:1", {"max_num_seqs": 5}, (2048, 5)),
        ("cpu", {"max_num_seqs": 300}, (300, 32)),
        ("cuda", {"max_num_seqs": 4000}, (4000, 4000)),
        ("cuda", {"max_num_batched_tokens": 100, "lora": {"max_loras": 3}}, (100, 3)),
        ("cpu", {"max_num_batched_tokens": 100, "lora": {"max_loras": 3, "max_lora_rank": 8}}, (100, 3)),
    ],
)
def test_what_is_written_stays_and_what_is_not_depends_on_the_device(
    tmp_path: Path, device: str, options: dict[str, object], expected: tuple[int, int]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = EngineConfig.model_validate({"model_path": tmp_path, "max_num_seqs": 64, **options})
    resolved = on_device(config, device)
    assert (resolved.max_num_batched_tokens, resolved.lora.max_loras) == expected
    numbers = {
        "max_num_batched_tokens": True,
        "lora": {"max_loras"},
        "enable_async_scheduling": True,
        "enable_cuda_graphs": True,
    }
    assert resolved.model_dump(exclude=numbers) == config.model_dump(exclude=numbers)


@pytest.mark.parametrize(
    ("device", "written", "expected"),
    [
        ("cpu", {}, (False, False)),
        ("cuda", {}, ("auto", True)),
        ("cuda", {"enable_cuda_graphs": False, "enable_async_scheduling": False}, (False, False)),
        ("cuda:1", {"enable_cuda_graphs": True, "enable_async_scheduling": True}, (True, True)),
        ("cpu", {"enable_async_scheduling": True}, (False, True)),
    ],
)
def test_graphs_and_asynchronous_steps_are_a_gpus_unless_they_are_written(
    tmp_path: Path, device: str, written: dict[str, bool], expected: tuple[object, bool]
) -> None:
    (tmp_path / "config.json").write_text("{}")
    config = EngineConfig.model_validate({"model_path": tmp_path, **written})
    resolved = on_device(config, device)
    assert (resolved.enable_cuda_graphs, resolved.enable_async_scheduling) == expected
