"""`SentAdapter`: an adapter that came with a request, not packed yet."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from multilora_engine.engine_info import EngineInfo
from multilora_engine.errors import InvalidRequest
from multilora_engine.lora.layout import PackedAdapter
from multilora_engine.lora.names import task_id_of
from multilora_engine.serving.inputs import InputTensors
from multilora_wire.layout import AdapterLayout

if TYPE_CHECKING:
    import torch

_WEIGHTS = ("lora_weights", "lora_weights_bf16", "lora_weights_fp32")


@dataclass(frozen=True, eq=False)
class SentAdapter:
    """The wire tensors of an adapter. They share the memory of the request, which lives as long as they do.

    weights: [rows, width], float16, bfloat16 or float32. config: [rows, 3 or 4], int32. layout: the engine's.
    """

    lora_task_id: int
    weights: torch.Tensor
    config: torch.Tensor
    layout: AdapterLayout

    def pack(self) -> PackedAdapter:
        """Check and copy the weights, which takes a second a GiB. Raises InvalidRequest."""
        # Here only: it imports torch, seconds and 140 MB that a front without uploads does without.
        from multilora_engine.lora.format import pack_adapter

        return pack_adapter(self.weights, self.config, self.layout)


def read_adapter(inputs: InputTensors, info: EngineInfo) -> SentAdapter:
    """The adapter of a request that has weights. Raises InvalidRequest."""
    task_id = read_task_id(inputs, 0)
    assert task_id is not None, "checked before"
    return SentAdapter(task_id, _read_weights(inputs, info), inputs.matrix("lora_config"), info.adapter_layout)


def weights_bytes(inputs: InputTensors, info: EngineInfo) -> int:
    """The bytes of the weights that a request has, their padding included. Raises InvalidRequest."""
    return _read_weights(inputs, info).nbytes


def _read_weights(inputs: InputTensors, info: EngineInfo) -> torch.Tensor:
    weights = inputs.matrix(inputs.present(*_WEIGHTS)[0])
    if weights.nbytes > info.max_adapter_bytes:
        raise InvalidRequest(
            f"lora_weights has {weights.nbytes} bytes and lora_max_adapter_bytes is {info.max_adapter_bytes}"
        )
    return weights


def has_weights(inputs: InputTensors) -> bool:
    """Whether an adapter comes with a request."""
    return bool(inputs.present(*_WEIGHTS))


def check_adapter_tensors(inputs: InputTensors) -> None:
    weights = inputs.present(*_WEIGHTS)
    if len(weights) > 1:
        raise InvalidRequest(f"an adapter has one dtype, the request has {' and '.join(weights)}")
    if bool(weights) != ("lora_config" in inputs):
        found = (weights or ["lora_config"])[0]
        raise InvalidRequest(
            f"Request for LoRA inference must have both lora_weights and lora_keys (lora_config); it has only {found}"
        )
    if weights and not inputs.present("lora_task_id", "lora_name"):
        raise InvalidRequest("lora_task_id must be set for LoRA inference: the request has lora_weights and no id")


def read_task_id(inputs: InputTensors, row: int) -> int | None:
    """The adapter of a row, by its id, its name or both; None is the base model."""
    task_id: int | None = inputs.scalar("lora_task_id", row)
    name = inputs.text("lora_name", row)
    if name is None:
        return task_id
    if task_id not in (None, task_id_of(name)):
        raise InvalidRequest(
            f"lora_name {name!r} is LoRA task {task_id_of(name)} and lora_task_id is {task_id}; send one of them"
        )
    return task_id_of(name)
