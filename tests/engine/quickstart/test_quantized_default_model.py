"""When the default model is quantised, and when again. What is written is tested with the command itself."""

import json
import subprocess
from pathlib import Path

import pytest

from multilora_engine.quickstart import quantized_default_model
from multilora_engine.quickstart.default_model import MARKER_NAME
from multilora_engine.quickstart.quantized_default_model import ensure_quantized_checkpoint


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """What was run; each run leaves a directory, as the command does."""
    found: list[list[str]] = []

    def run(command: list[str], **_: object) -> None:
        found.append(command)
        Path(command[command.index("--output") + 1]).mkdir()

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(quantized_default_model, "ensure_default_checkpoint", lambda: tmp_path / "model")
    return found


def test_each_scheme_is_made_once_beside_the_float_model(commands: list[list[str]], tmp_path: Path) -> None:
    made = [ensure_quantized_checkpoint(scheme) for scheme in ("w8a16", "w4a16", "w8a16")]

    assert made == [tmp_path / "model-w8a16", tmp_path / "model-w4a16", tmp_path / "model-w8a16"]
    assert quantized_default_model.CALIBRATION_TEXT.is_file()
    assert [command[1:3] for command in commands] == [["quantize", str(tmp_path / "model")]] * 2


@pytest.mark.parametrize(
    "changes",
    [{"format_version": 0}, {"quantizer_version": 1}, {"scheme": "w4a16"}, None],
    ids=["of an older model", "by an older quantizer", "other", "torn"],
)
def test_one_that_was_made_of_another_model_or_not_to_its_end_is_made_again(
    commands: list[list[str]], tmp_path: Path, changes: dict[str, object] | None
) -> None:
    (tmp_path / "model-w8a16").mkdir()
    (tmp_path / "model-w8a16/old").touch()
    if changes is not None:
        ensure_quantized_checkpoint("w8a16")
        commands.clear()
        (tmp_path / "model-w8a16/old").touch()
        marker = json.loads((tmp_path / "model-w8a16" / MARKER_NAME).read_text()) | changes
        (tmp_path / "model-w8a16" / MARKER_NAME).write_text(json.dumps(marker))

    ensure_quantized_checkpoint("w8a16")

    assert len(commands) == 1
    assert not (tmp_path / "model-w8a16/old").exists()
