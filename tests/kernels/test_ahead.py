"""A kernel that was compiled ahead, in another process, is the one that its launch finds. Without a GPU."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from support.fake_driver import TARGET, set_driver

from multilora_kernels.cuda import ahead
from multilora_kernels.cuda.ahead import PROCESS_BYTES, Ahead, compile_ahead, noted_kernels
from multilora_kernels.cuda.dependent_launch import dependent_constants
from multilora_kernels.cuda.elementwise import activation_constants, activation_kernel
from multilora_kernels.cuda.step_inputs import fill_constants, fill_kernel


def launch(*, warmup: bool) -> None:
    """Two kernels, one of which has pointers to nothing. warmup: compile only."""
    x, y = torch.zeros(8, 64, dtype=torch.bfloat16), torch.zeros(8, 32, dtype=torch.bfloat16)
    numbers = torch.zeros(16, dtype=torch.int64)
    constants = activation_constants("silu", is_gated=True) | dependent_constants(True)
    activation_kernel.run(x, y, 32, grid=(8, 1), warmup=warmup, **constants)
    vectors = [*[numbers] * 6, *[None] * 8]
    fill_kernel.run(*vectors, 3, 0, 0, 0, 0, 0, 0, grid=(4,), warmup=warmup, **fill_constants())


def test_a_launch_finds_what_was_compiled_ahead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    set_driver(monkeypatch)
    with noted_kernels() as kernels:
        launch(warmup=False)
        launch(warmup=False)
    assert [json.loads(kernel)["name"].rpartition(".")[2] for kernel in kernels] == ["activation_kernel", "fill_kernel"]
    assert not list(tmp_path.iterdir()), "a kernel was compiled in this process"

    unknown = json.dumps(json.loads(kernels[0]) | {"name": "multilora_kernels.cuda.elementwise.no_kernel"})
    begun: list[str] = []
    with caplog.at_level(logging.WARNING):
        result = compile_ahead(
            [*kernels, unknown], TARGET, PROCESS_BYTES, lambda done, total, name: begun.append(f"{done}/{total}")
        )
    assert result == Ahead(num_compiled=2, num_found=0, num_failed=1, num_processes=1)
    assert begun == ["0/3", "1/3", "2/3"]
    assert "no_kernel was not compiled ahead: AttributeError" in caplog.text

    hits: list[bool] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, cache_hit, **_: hits.append(cache_hit))
    launch(warmup=True)
    assert hits == [True, True]


def test_nothing_to_compile_starts_no_process() -> None:
    assert compile_ahead([], TARGET, PROCESS_BYTES) == Ahead(0, 0, 0, 0)


def test_a_process_that_ends_leaves_its_kernels_to_their_launch(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    children: list[subprocess.Popen[str]] = []

    def popen(*args: Any, **options: Any) -> subprocess.Popen[str]:
        # It answers once, however many kernels it is given.
        args = ([sys.executable, "-c", "input(); print('compiled', flush=True); input()"], *args[1:])
        children.append(Popen(*args, **options))
        return children[0]

    def on_kernel(done: int, total: int, name: str) -> None:
        if done == 1:
            children[0].kill()
            children[0].wait()

    Popen = subprocess.Popen
    monkeypatch.setattr(ahead.subprocess, "Popen", popen)
    kernels = [json.dumps({"name": f"module.kernel_{n}"}) for n in range(3)]
    assert compile_ahead(kernels, TARGET, PROCESS_BYTES, on_kernel) == Ahead(1, 0, 2, 1)
    assert "kernel_1 was not compiled ahead: the process has ended" in caplog.text


@pytest.mark.parametrize(("memory", "num_processes"), [(0, 1), (3 * PROCESS_BYTES - 1, 2), (1 << 40, 5)])
def test_there_are_as_many_processes_as_cores_and_memory_allow(
    monkeypatch: pytest.MonkeyPatch, memory: int, num_processes: int
) -> None:
    popen, answer = subprocess.Popen, "for _ in open(0): print('found', flush=True)"
    monkeypatch.setattr(
        ahead.subprocess, "Popen", lambda command, **options: popen([sys.executable, "-c", answer], **options)
    )
    monkeypatch.setattr(ahead, "usable_processors", lambda: 5)
    kernels = [json.dumps({"name": f"module.kernel_{n}"}) for n in range(7)]
    assert compile_ahead(kernels, TARGET, memory) == Ahead(0, 7, 0, num_processes)


def test_a_process_that_cannot_be_started_stops_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    popen, answer = subprocess.Popen, "for _ in open(0): print('found', flush=True)"

    def start(command: list[str], **options: Any) -> subprocess.Popen[str]:
        if next(starts) < num_failing:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return popen([sys.executable, "-c", answer], **options)

    monkeypatch.setattr(ahead.subprocess, "Popen", start)
    monkeypatch.setattr(ahead, "usable_processors", lambda: 2)
    kernels = [json.dumps({"name": f"module.kernel_{n}"}) for n in range(3)]
    for num_failing, expected in ((1, Ahead(0, 3, 0, 2)), (2, Ahead(0, 0, 3, 2))):  # noqa: B007
        starts = itertools.count()
        assert compile_ahead(kernels, TARGET, 2 * PROCESS_BYTES) == expected
    assert "a process that compiles kernels cannot be started: [Errno 11] Resource temporarily" in caplog.text
