from __future__ import annotations

import pytest

from multilora_engine.errors import ConfigError
from multilora_engine.tritonserver import installation


@pytest.fixture
def ten_mebibytes_free(monkeypatch: pytest.MonkeyPatch) -> None:
    usage = installation.shutil.disk_usage("/")
    monkeypatch.setattr(installation.shutil, "disk_usage", lambda _: usage._replace(free=10 << 20))


@pytest.mark.usefixtures("ten_mebibytes_free")
def test_too_little_shared_memory_is_refused_with_the_numbers() -> None:
    with pytest.raises(ConfigError, match=r"10 MiB free .* 32 MiB at least; in a container"):
        installation.check_free_space()


@pytest.mark.usefixtures("ten_mebibytes_free")
def test_the_largest_adapter_needs_its_size_on_top() -> None:
    with pytest.raises(ConfigError, match=r"112 MiB at least, 80 MiB of it for the largest adapter"):
        installation.check_free_space(80 << 20)


def test_enough_is_enough() -> None:
    installation.check_free_space()
