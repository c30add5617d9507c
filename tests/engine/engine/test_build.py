"""The device of an engine, by its parameters and the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from multilora_engine.config import EngineConfig
from multilora_engine.engine.build import choose_device
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
