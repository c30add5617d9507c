"""Fixtures for all tests."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

_REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="session", autouse=True)
def one_torch_thread() -> None:
    """The tensors are small: on a busy machine threads that wait for each other take ten times as long as one."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def default_model_dir() -> Path:
    """The checkpoint directory of the default base model; made on first use, which needs the network."""
    script = _REPOSITORY / "scripts" / "checkpoints" / "prepare_default_model.py"
    done = subprocess.run([sys.executable, script], stdout=subprocess.PIPE, text=True, check=True)
    return Path(done.stdout.splitlines()[-1])
