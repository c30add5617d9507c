"""Clean roots are tried whole by scripts/run try_images; here: what it says where they cannot be made."""

from pathlib import Path

import pytest

from deployment.clean_root import ImageError, require_tools


def test_missing_programs_are_named_by_their_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for program in ("unshare", "setpriv"):
        (tmp_path / program).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ImageError, match=r"apt-get install iproute2$"):
        require_tools()
    (tmp_path / "ip").touch(mode=0o755)
    require_tools()
