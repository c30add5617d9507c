"""Whole steps of the engine with the GPU's operators, in Triton's interpreter on CPU tensors: the tokens of a CPU.

In a process of its own, since Triton looks at the variable when it is imported.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.compressed_checkpoints import save_tiny_w4a16
from support.encoder_decoders import make_model
from support.interpreted_engine import answer, make_engine
from support.mxfp4_checkpoints import save_tiny_mxfp4
from support.tiny_mixture import save_tiny_mixture

from checkpoints.tiny_llama import save_tiny_llama
from multilora_kernels import interpreter

_TESTS = Path(__file__).parents[2]


def save_tiny_t5(path: Path) -> Path:
    make_model("t5 v1.1").save_pretrained(path)
    return path


def save_tiny_bart(path: Path) -> Path:
    make_model("bart").save_pretrained(path)
    return path


@pytest.mark.long(reason="the interpreter takes a second for each kernel of the self-test")
@pytest.mark.parametrize(
    ("save", "options"),
    [
        *((save, {}) for save in (save_tiny_llama, save_tiny_w4a16, save_tiny_mixture, save_tiny_mxfp4)),
        *((save, {}) for save in (save_tiny_t5, save_tiny_bart)),
        (save_tiny_llama, {"lora": {"lora_dtype": "int8"}}),
        (save_tiny_llama, {"block_size": 64, "kv_cache_dtype": "int8"}),
        (save_tiny_t5, {"block_size": 64, "kv_cache_dtype": "fp8"}),
    ],
)
def test_the_gpu_operators_choose_the_tokens_of_a_cpu(
    tmp_path: Path, default_model_dir: Path, save: Callable[[Path], Path], options: dict[str, Any]
) -> None:
    model = save(tmp_path / "model")
    expected = answer(make_engine(model, default_model_dir, enable_async_scheduling=False, **options))
    command = [sys.executable, "-m", "support.interpreted_engine", model, default_model_dir, json.dumps(options)]
    paths = os.pathsep.join(
        [str(_TESTS), str(_TESTS.parent / "scripts"), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    environment = os.environ | interpreter.ENVIRONMENT | {"PYTHONPATH": paths}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    assert json.loads(done.stdout) == expected
    assert len({tuple(tokens) for tokens in expected.values()}) == len(expected)
