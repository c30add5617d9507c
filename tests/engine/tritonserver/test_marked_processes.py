"""The processes of one server are found among processes that come and go."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from multilora_engine.tritonserver.server_process import TOKEN_VARIABLE, marked_processes


def test_a_process_that_ends_while_it_is_looked_at_is_passed_over(tmp_path: Path) -> None:
    mine = subprocess.Popen(["sleep", "60"], env={TOKEN_VARIABLE: "mine"})
    others = subprocess.Popen(["sleep", "60"], env={TOKEN_VARIABLE: "others"})
    ended = subprocess.Popen(["true"])
    # A directory that is already open when its process is gone fails as in the middle of a look at it.
    directory = os.open(f"/proc/{ended.pid}", os.O_PATH)
    try:
        ended.wait()
        (tmp_path / str(ended.pid)).symlink_to(f"/proc/self/fd/{directory}")
        for process in (mine, others):
            (tmp_path / str(process.pid)).symlink_to(f"/proc/{process.pid}")
        (tmp_path / "self").symlink_to("/proc/self")
        with pytest.raises(ProcessLookupError):
            (tmp_path / str(ended.pid) / "environ").exists()
        assert list(marked_processes("mine", tmp_path)) == [mine.pid]
    finally:
        os.close(directory)
        for process in (mine, others):
            process.kill()
            process.wait()
