"""Paths that are no checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest

from multilora_client.base_weights import BaseWeights
from multilora_client.errors import AdapterError
from multilora_engine.errors import ConfigError
from multilora_engine.models.registry import read_model_config
from multilora_engine.tritonserver.checkpoint import check_checkpoint
from multilora_wire.checkpoint_directory import why_no_checkpoint


@pytest.mark.parametrize("door", [check_checkpoint, read_model_config, BaseWeights], ids=["serve", "engine", "client"])
@pytest.mark.parametrize("as_directory", [False, True])
def test_every_door_names_the_gguf_file(tmp_path: Path, door: type, as_directory: bool) -> None:
    (tmp_path / "Q4.gguf").touch()
    with pytest.raises((ConfigError, AdapterError), match=r"Q4\.gguf is GGUF, which multilora-serve --model serves"):
        door(tmp_path if as_directory else tmp_path / "Q4.gguf")


def test_what_is_not_a_checkpoint_is_told_by_what_it_is(tmp_path: Path) -> None:
    assert why_no_checkpoint(tmp_path / "nothing") == (
        f"{tmp_path / 'nothing'} is not there; give the directory of a Hugging Face checkpoint"
    )
    assert str(why_no_checkpoint(tmp_path)).startswith(f"{tmp_path} has no config.json; give")
    (tmp_path / "adapter_config.json").touch()
    assert "is an adapter (adapter_config.json); name its base model" in str(why_no_checkpoint(tmp_path))
    assert str(why_no_checkpoint(tmp_path / "adapter_config.json")).startswith(
        f"{tmp_path}/adapter_config.json is a file"
    )
    (tmp_path / "config.json").touch()
    (tmp_path / "Q4.gguf").touch()
    assert why_no_checkpoint(tmp_path) is None
