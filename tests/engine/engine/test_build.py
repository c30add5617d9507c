"""The device of an engine, by its parameters and the machine."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from multilora_engine.config import EngineConfig
from multilora_engine.engine.build import choose_device, tell_of_no_gpu
from multilora_engine.errors import ConfigError


def config(path: Path, **parameters: Any) -> EngineConfig:
    (path / "config.json").write_text("{}")
    return EngineConfig.model_validate({"model_path": path, **parameters})


@pytest.mark.parametrize("has_gpu", [True, False])
def test_auto_is_the_gpu_where_there_is_one(has_gpu: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert choose_device(config(tmp_path)).type == ("cuda" if has_gpu else "cpu")
    assert choose_device(config(tmp_path, device="cpu")).type == "cpu"


def test_a_gpu_that_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="parameter device=cuda: torch finds no GPU; write device=auto or device=cpu"):
        choose_device(config(tmp_path, device="cuda"))


_DRIVER = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  470.256.02  Thu May  2 14:37:44 UTC 2024\nGCC version: 12.2.0\n"
)


def test_a_gpu_that_auto_passes_over_is_told_with_the_reason_and_both_versions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040)")

    monkeypatch.setattr(torch.cuda, "init", refuse)
    monkeypatch.setattr(torch, "__version__", "2.11.0")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    driver, cpu = tmp_path / "version", torch.device("cpu")
    with caplog.at_level(logging.INFO):
        tell_of_no_gpu(config(tmp_path), cpu, driver)
        driver.write_text(_DRIVER)
        tell_of_no_gpu(config(tmp_path), cpu, driver)
        # The CPU was asked for, and the GPU serves.
        tell_of_no_gpu(config(tmp_path, device="cpu"), cpu, driver)
        tell_of_no_gpu(config(tmp_path), torch.device("cuda"), driver)
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "device=auto: no NVIDIA driver is here, the CPU serves (torch 2.11.0 for CUDA 13.0)"),
        (
            "WARNING",
            "device=auto: the CPU serves, though this machine has the NVIDIA driver 470.256.02, since torch 2.11.0 for "
            "CUDA 13.0 says: The NVIDIA driver on your system is too old (found version 11040)",
        ),
    ]
