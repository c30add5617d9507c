"""A kernel that was compiled ahead, in another process, is the one that its launch finds. Without a GPU."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
import triton
from support.fake_driver import TARGET, set_driver

from multilora_kernels.cuda.ahead import Ahead, compile_ahead, noted_kernels
from multilora_kernels.cuda.elementwise import activation_constants, activation_kernel
from multilora_kernels.cuda.step_inputs import fill_constants, fill_kernel


def launch(*, warmup: bool) -> None:
    """Two kernels, one of which has pointers to nothing. warmup: compile only."""
    x, y = torch.zeros(8, 64, dtype=torch.bfloat16), torch.zeros(8, 32, dtype=torch.bfloat16)
    numbers = torch.zeros(16, dtype=torch.int64)
    activation_kernel.run(x, y, 32, grid=(8, 1), warmup=warmup, **activation_constants("silu", is_gated=True))
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
        ahead = compile_ahead([*kernels, unknown], TARGET, 1, lambda done, total, name: begun.append(f"{done}/{total}"))
    assert ahead == Ahead(num_compiled=2, num_found=0, num_failed=1, num_processes=1)
    assert begun == ["0/3", "1/3", "2/3"]
    assert "no_kernel was not compiled ahead: AttributeError" in caplog.text

    hits: list[bool] = []
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, cache_hit, **_: hits.append(cache_hit))
    launch(warmup=True)
    assert hits == [True, True]


def test_nothing_to_compile_starts_no_process() -> None:
    assert compile_ahead([], TARGET) == Ahead(0, 0, 0, 0)
