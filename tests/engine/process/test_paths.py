from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from multilora_engine.errors import ConfigError
from multilora_engine.process.paths import owned_socket_path, socket_path


@pytest.fixture(autouse=True)
def temporary_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_the_socket_lies_in_a_directory_of_this_user_alone(temporary_directory: Path) -> None:
    path = socket_path(4711)
    assert path == temporary_directory / f"multilora-{os.getuid()}" / "4711" / "engine.sock"
    assert not path.parent.exists()
    with owned_socket_path(4711) as owned:
        assert owned == path
        assert [directory.stat().st_mode & 0o777 for directory in path.parents[:2]] == [0o700, 0o700]


def test_a_directory_that_others_can_enter_is_refused(temporary_directory: Path) -> None:
    directory = temporary_directory / f"multilora-{os.getuid()}"
    directory.mkdir()
    directory.chmod(0o755)
    with pytest.raises(ConfigError, match="not a directory of this user alone"):
        socket_path(4711)


def test_a_link_in_place_of_the_directory_is_refused(temporary_directory: Path) -> None:
    elsewhere = temporary_directory / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (temporary_directory / f"multilora-{os.getuid()}").symlink_to(elsewhere)
    with pytest.raises(ConfigError, match="not a directory of this user alone"):
        socket_path(4711)


def test_a_path_too_long_for_a_socket_is_refused_with_the_way_out(
    temporary_directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    deep = temporary_directory / ("d" * 100)
    deep.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(deep))
    with pytest.raises(ConfigError, match="set TMPDIR"):
        socket_path(4711)


def test_a_server_has_one_engine_and_its_directory_goes_with_it() -> None:
    with owned_socket_path(4711) as path:
        assert path == socket_path(4711)
        with pytest.raises(ConfigError, match="has an engine already"), owned_socket_path(4711):
            pytest.fail("two owners")
        with owned_socket_path(4712) as other:
            assert other != path
    assert not path.parent.exists()
    with owned_socket_path(4711) as again:
        assert again.parent.is_dir()
