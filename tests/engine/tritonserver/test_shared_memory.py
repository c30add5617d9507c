import subprocess
import sys
from pathlib import Path

import pytest

from multilora_engine.tritonserver import shared_memory


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shared_memory, "SHARED_MEMORY", tmp_path)
    return tmp_path


def make_region(folder: Path, claim: shared_memory.RegionClaim) -> Path:
    region = folder / f"{claim.region_prefix}6d2c"
    region.write_bytes(b"x" * 100)
    return region


def test_a_claims_regions_are_removed_when_it_ends(folder: Path) -> None:
    with shared_memory.claim_regions() as claim:
        make_region(folder, claim)
    assert list(folder.iterdir()) == []


def test_regions_of_a_running_server_and_files_of_others_are_no_leftovers(folder: Path) -> None:
    (folder / "triton_python_backend_shm_region_6d2c").touch()
    with shared_memory.claim_regions() as claim:
        make_region(folder, claim)
        before = sorted(folder.iterdir())
        assert shared_memory.remove_leftovers() == []
        assert sorted(folder.iterdir()) == before


def test_a_lock_held_only_by_a_child_protects_the_regions_until_the_child_ends(folder: Path) -> None:
    # As when multilora-serve is killed and the server, which inherited the lock, lives on.
    with shared_memory.claim_regions() as claim:
        region = make_region(folder, claim)
        lock = next(folder.glob("*.lock"))
        child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(claim.lock_fd,))
        hidden = lock.rename(folder / "hidden")
        hidden_region = region.rename(folder / "hidden_region")
    hidden.rename(lock)
    hidden_region.rename(region)
    assert shared_memory.remove_leftovers() == []
    child.communicate(b"\n")
    assert shared_memory.remove_leftovers() == [region.name]
    assert list(folder.iterdir()) == []
