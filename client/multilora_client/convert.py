"""PEFT directory -> wire tensors, in the layout of TensorRT-LLM's converter, with NumPy alone.

A row is A `[rank, in]` then B `[out, rank]`. The server applies no scale, so the scale goes into B, in float32 and
before the cast to the storage type. A DoRA row ends with the magnitude `[out]`, which upstream wants normalised:
divided by the lengths of the adapted weight's rows. Converting it takes the base model's weights.

A fused `gate_up_proj` (module id 18) computes gate | up in Hugging Face checkpoints; upstream's fused module computes
up | gate. The outputs of B (and a magnitude) are therefore exchanged half by half. A fused `qkv_proj` is q | k | v on
both sides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from multilora_client.adapter import NUMPY_DTYPES, Adapter, AdapterDtype, AdapterTensors, is_converted
from multilora_client.base_weights import MODEL_CONFIG_FILE, BaseWeights
from multilora_client.bfloat16 import bfloat16_to_float32, float32_to_bfloat16
from multilora_client.errors import AdapterError
from multilora_client.peft_directory import LoRAModule, describe_foreign, is_peft, read_peft_directory
from multilora_client.sizing import read_sites
from multilora_wire.module_names import MLP_GATE_UP
from multilora_wire.sites import ModelSites

StorageDtype = Literal["float16", "bfloat16", "float32"]
Progress = Callable[[int, int], None]

_DTYPES: Mapping[StorageDtype, AdapterDtype] = {"float16": "FP16", "bfloat16": "BF16", "float32": "FP32"}


def convert_peft(
    directory: Path,
    storage_dtype: StorageDtype | None = None,
    on_progress: Progress | None = None,
    base_model: Path | None = None,
    sites: ModelSites | None = None,
) -> AdapterTensors:
    """Convert the PEFT adapter in `directory`.

    storage_dtype: type of the weights; None keeps the one of the file.
    on_progress: called with (rows done, rows in all) after each row.
    base_model: directory of the base model's checkpoint; DoRA needs its weights.
    sites: of the base model; by default those of `base_model`, if that is given.
    Raises AdapterError for everything that the wire format or the storage type cannot hold, and for an adapter that was
    made for another model than these sites'.
    """
    base = None
    if base_model is not None:
        base = BaseWeights(base_model)
        if sites is None and (base_model / MODEL_CONFIG_FILE).is_file():
            sites = read_sites(base_model)
    adapter = read_peft_directory(directory, sites, "" if base_model is None else base_model.resolve().name)
    dtype = _DTYPES[storage_dtype] if storage_dtype else adapter.dtype
    weights = np.zeros((len(adapter.modules), max(map(_row_size, adapter.modules))), NUMPY_DTYPES[dtype])
    for index, module in enumerate(adapter.modules):
        weights[index, : _row_size(module)] = _row(module, dtype, base)
        if on_progress:
            on_progress(index + 1, len(adapter.modules))
    config = [[m.module_id, m.layer, m.rank, int(m.magnitude is not None)] for m in adapter.modules]
    return AdapterTensors(weights, np.array(config, np.int32), dtype, adapter.origin)


def load_adapter_tensors(directory: Path, base_model: Path | None = None) -> AdapterTensors:
    """The adapter in `directory`, whether it is converted already or a PEFT directory; see `convert_peft`."""
    if directory.is_file():
        foreign = describe_foreign([directory.name])
        raise AdapterError(f"{directory} is a file, and an adapter is a directory{foreign and f'. {foreign}'}")
    if not directory.is_dir():
        raise AdapterError(f"there is no directory {directory}")
    if is_converted(directory) and is_peft(directory):
        raise AdapterError(f"{directory} is a PEFT adapter with converted files, which may differ; leave one of them")
    if is_converted(directory):
        return AdapterTensors.load(directory)
    if is_peft(directory):
        return convert_peft(directory, base_model=base_model)
    raise AdapterError(_describe_no_adapter(directory))


def _describe_no_adapter(directory: Path) -> str:
    names = sorted(entry.name for entry in directory.iterdir())
    if foreign := describe_foreign(names):
        return f"{directory}/{foreign}"
    inside = [name for name in names if is_peft(directory / name)]
    advice = f"; {directory / inside[-1]} is one" if inside else ""
    return f"{directory} is neither a PEFT adapter (adapter_config.json) nor a converted one (*.npy){advice}"


def load_adapter(
    directory: Path | str, lora_task_id: int | None = None, base_model: Path | str | None = None
) -> Adapter:
    """The adapter in `directory`, PEFT or converted, under a task id. base_model: see `convert_peft`.

    Without `lora_task_id` the id is taken from the content, see `content_task_id`.
    """
    tensors = load_adapter_tensors(Path(directory), None if base_model is None else Path(base_model))
    return Adapter(content_task_id(tensors) if lora_task_id is None else lora_task_id, tensors)


def content_task_id(tensors: AdapterTensors) -> int:
    """63 bits of the digest of an adapter's content: the same adapter has the same id in every process, and different
    adapters do not meet under one id."""
    return int.from_bytes(tensors.digest[:8], "big") >> 1


def _row_size(module: LoRAModule) -> int:
    return module.lora_a.size + module.lora_b.size + (0 if module.magnitude is None else module.magnitude.size)


def _row(module: LoRAModule, dtype: AdapterDtype, base: BaseWeights | None) -> npt.NDArray[Any]:
    with np.errstate(over="ignore"):
        lora_b = module.lora_b * np.float32(module.scaling)
    outputs = [lora_b]
    if module.magnitude is not None:
        outputs.append(module.magnitude / _row_lengths(module, lora_b, base))
    if module.module_id == MLP_GATE_UP:
        outputs = [_swap_halves(values, module.name) for values in outputs]
    return _cast(np.concatenate([module.lora_a.ravel(), *map(np.ravel, outputs)]), dtype, module.name)


def _row_lengths(
    module: LoRAModule, lora_b: npt.NDArray[np.float32], base: BaseWeights | None
) -> npt.NDArray[np.float32]:
    """The row norms of the adapted weight W + B A, `[out]`. lora_b: with the scale in it."""
    if base is None:
        raise AdapterError(
            f"{module.name} is a DoRA module, which takes the base model's weights to convert: name its checkpoint "
            "(multilora convert --base-model DIR)"
        )
    lengths = np.empty(len(lora_b), np.float32)
    first = 0
    for weight in base.tiles(module.name, (len(lora_b), module.lora_a.shape[1])):
        rows = slice(first, first + len(weight))
        lengths[rows] = np.linalg.norm(weight + lora_b[rows] @ module.lora_a, axis=1)
        first = rows.stop
    if not lengths.all():
        raise AdapterError(f"{module.name} has a row of zeros, which no magnitude can stretch")
    return lengths


def _swap_halves(outputs: npt.NDArray[np.float32], name: str) -> npt.NDArray[np.float32]:
    """`[gate; up]` -> `[up; gate]` along the outputs."""
    if outputs.shape[0] % 2:
        raise AdapterError(f"{name} has {outputs.shape[0]} outputs, which are not two halves")
    gate, up = np.split(outputs, 2)
    return np.concatenate([up, gate])


def _cast(values: npt.NDArray[np.float32], dtype: AdapterDtype, name: str) -> npt.NDArray[Any]:
    """Cast a row; a value beyond the range of `dtype` is an error, never an infinity."""
    if dtype == "BF16":
        bits = float32_to_bfloat16(values)
        _check_range(values, bfloat16_to_float32(bits), dtype, name)
        return bits
    with np.errstate(over="ignore"):
        row = values.astype(NUMPY_DTYPES[dtype])
    _check_range(values, row, dtype, name)
    return row


def _check_range(values: npt.NDArray[np.float32], row: npt.NDArray[Any], dtype: AdapterDtype, name: str) -> None:
    if not np.isfinite(row).all():
        raise AdapterError(f"{name}: {np.abs(values).max():g} does not fit into {dtype}; use a wider storage type")
