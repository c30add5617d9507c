"""The table of a server's memory tells each process, and of the engine what it has beside weights and KV cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from benchmarks import server_memory
from benchmarks.server_memory import PAGE, TABLE, ServerMemory
from marked_tables import read_table
from process_memory import anonymous_bytes, proportional_bytes

MB = 1_000_000


def served(engine_mb: int) -> ServerMemory:
    own = {"tritonserver": 20 * MB, "engine": engine_mb * MB}
    return ServerMemory(500 * MB, 150 * MB, own, {"tritonserver": 30 * MB, "engine": (engine_mb + 40) * MB})


def test_the_command_writes_its_table_and_fails_beyond_the_goal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page, servers = tmp_path / "page.md", {"float32": served(900), "w4a16": served(951)}
    page.write_text(f"<!-- {TABLE}: begin -->\nold\n<!-- {TABLE}: end -->\n")
    monkeypatch.setattr(server_memory, "PAGE", page)
    monkeypatch.setattr(server_memory, "measured_source", lambda: "By hand.")
    monkeypatch.setattr(server_memory, "checkpoints", lambda: {name: Path(name) for name in servers})
    monkeypatch.setattr(server_memory, "measure_server", lambda checkpoint, _: servers[str(checkpoint)])

    with pytest.raises(server_memory.typer.Exit):
        server_memory.main(update_docs=True)

    assert read_table(page, TABLE).splitlines()[2:] == [
        "| engine | 900 MB | 250 MB | 940 MB | 951 MB | 301 MB | 991 MB |",
        "| tritonserver | 20 MB | 20 MB | 30 MB | 20 MB | 20 MB | 30 MB |",
        "| all | 920 MB | 270 MB | 970 MB | 971 MB | 321 MB | 1,021 MB |",
        "",
        "By hand.",
    ]
    servers["w4a16"] = served(950)
    server_memory.main()


def test_the_page_has_its_place_for_the_table() -> None:
    assert read_table(PAGE, TABLE).startswith("| process | float32, own |")


def test_a_process_has_its_own_memory_and_its_part_of_files() -> None:
    """128 MiB that are written are its own."""
    program = "block = bytearray(b'x') * (128 << 20); print(len(block), flush=True); input()"
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        process = psutil.Process(child.pid)
        own, resident = anonymous_bytes(process), proportional_bytes(process)
        child.communicate(b"\n")
    assert 128 << 20 <= own <= resident
    with pytest.raises(psutil.NoSuchProcess):
        anonymous_bytes(process)
