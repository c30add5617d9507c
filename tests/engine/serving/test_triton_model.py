from __future__ import annotations

import subprocess
import sys

import pytest

from multilora_engine.config import EngineConfig
from multilora_engine.serving.triton_model import engine_environ

CPU = {"model_instance_kind": "CPU", "model_instance_device_id": "0"}
MODEL = {"model_instance_kind": "MODEL", "model_instance_device_id": "0"}
GPU_1 = {"model_instance_kind": "GPU", "model_instance_device_id": "1"}


@pytest.mark.parametrize(
    ("args", "device", "environ", "visible"),
    [
        (GPU_1, "auto", {}, "1"),
        (GPU_1, "auto", {"CUDA_VISIBLE_DEVICES": "4,GPU-abc"}, "GPU-abc"),
        (CPU, "auto", {"CUDA_VISIBLE_DEVICES": "0"}, ""),
        (CPU, "cuda", {"CUDA_VISIBLE_DEVICES": "0"}, "0"),
        (CPU, "cuda", {}, None),
        (MODEL, "auto", {"CUDA_VISIBLE_DEVICES": "2,3"}, "2,3"),
        (MODEL, "auto", {}, None),
    ],
)
def test_the_engine_sees_the_gpu_of_its_instance(
    args: dict[str, str], device: str, environ: dict[str, str], visible: str | None
) -> None:
    config = EngineConfig.model_construct(device=device)
    result = engine_environ(args, config, {"PATH": "/bin", **environ})
    assert result["PATH"] == "/bin"
    assert result.get("CUDA_VISIBLE_DEVICES") == visible


def imported_by(module: str) -> set[str]:
    script = f"import sys, multilora_engine.serving.{module}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], stdin=subprocess.DEVNULL, capture_output=True, check=True)
    return set(done.stdout.decode().split())


def test_a_front_does_not_import_the_tiers_and_their_operators() -> None:
    """They would cost every start and every recovery a second or more."""
    assert {"multilora_kernels", "multilora_engine.lora.manager"} & imported_by("triton_model") == set()


@pytest.mark.parametrize("module", ["adapters_model", "immediate_model", "triton_model"])
def test_a_front_starts_without_torch_and_transformers(module: str) -> None:
    """They would cost each of them seconds and 200 MB, while the engine starts beside them."""
    assert {"torch", "transformers"} & imported_by(module) == set()
