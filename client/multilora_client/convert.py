"""PEFT directory -> wire tensors, in the layout of TensorRT-LLM's converter, with NumPy alone.

A row is A `[rank, in]` then B `[out, rank]`. The server applies no scale, so the scale goes into B, in float32 and
before the cast to the storage type. A DoRA row ends with the magnitude `[out]`, which upstream wants normalised:
divided by the lengths of the adapted weight's rows. Converting it takes the base model's weights.

A fused `gate_up_proj` (module id 18) computes gate | up in Hugging Face checkpoints; upstream's fused module computes
up | gate. The outputs of B (and a magnitude) are therefore exchanged half by half. A fused `qkv_proj` is q | k | v on
both sides. `multilora_wire.peft_files` reads the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from multilora_client.adapter import Adapter, AdapterFiles, AdapterTensors, is_converted
from multilora_client.base_weights import MODEL_CONFIG_FILE, BaseWeights
from multilora_client.errors import AdapterError
from multilora_client.sizing import read_sites
from multilora_wire.adapter_origin import WrongBaseModel
from multilora_wire.peft_config import PEFT_CONFIG_FILE, PeftError, quoted
from multilora_wire.peft_files import (
    NUMPY_DTYPES,
    AdapterDtype,
    LinearReader,
    PeftAdapter,
    describe_foreign,
    open_peft_directory,
)
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
    model = "" if base_model is None else base_model.resolve().name
    try:
        with open_peft_directory(directory, sites, model, trusts_patterns=True) as adapter:
            return _convert(adapter, base, _DTYPES[storage_dtype] if storage_dtype else adapter.dtype, on_progress)
    except WrongBaseModel as error:
        raise AdapterError(str(error)) from error
    except (PeftError, OSError) as error:
        raise AdapterError(f"{directory}: {error}") from error


def is_peft(directory: Path) -> bool:
    """Whether `directory` claims to be a PEFT adapter."""
    return (directory / PEFT_CONFIG_FILE).exists()


def load_content(directory: Path) -> AdapterFiles | AdapterTensors:
    """The adapter in `directory`: PEFT's files as they are, or the tensors of converted ones. Raises AdapterError."""
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
        return AdapterFiles.load(directory)
    raise AdapterError(_describe_no_adapter(directory))


def _describe_no_adapter(directory: Path) -> str:
    names = sorted(entry.name for entry in directory.iterdir())
    if foreign := describe_foreign(names):
        return f"{directory}/{foreign}"
    inside = [name for name in names if is_peft(directory / name)]
    advice = f"; {directory / inside[-1]} is one" if inside else ""
    return f"{directory} is neither a PEFT adapter (adapter_config.json) nor a converted one (*.npy){advice}"


def load_adapter(directory: Path | str, lora_task_id: int | None = None) -> Adapter:
    """The adapter in `directory`, PEFT or converted, under a task id.

    Without `lora_task_id` the id is taken from the content, see `content_task_id`. Raises AdapterError.
    """
    content = load_content(Path(directory))
    return Adapter(content_task_id(content) if lora_task_id is None else lora_task_id, content)


def content_task_id(content: AdapterFiles | AdapterTensors) -> int:
    """63 bits of the digest of an adapter's content: the same files, or the same tensors, have the same id in every
    process, and different adapters do not meet under one id."""
    return int.from_bytes(content.digest[:8], "big") >> 1


def _convert(
    adapter: PeftAdapter, base: BaseWeights | None, dtype: AdapterDtype, on_progress: Progress | None
) -> AdapterTensors:
    if tokens := adapter.config.invocation_tokens:
        raise PeftError(
            f"{PEFT_CONFIG_FILE}: alora_invocation_tokens is {quoted(tokens)}, which the two tensors cannot tell; send "
            "the PEFT files as they are"
        )
    if adapter.outer or adapter.rows:
        names = dict.fromkeys([linear.name for linear in adapter.outer] + [rows.base_name for rows in adapter.rows])
        raise AdapterError(
            f"the adapter changes {' and '.join(names)}, for which the wire's tensors have no place; send the files as "
            "they are (multilora upload DIR)"
        )
    if rope := adapter.config.rope:
        raise PeftError(
            f"{PEFT_CONFIG_FILE} has rotary embeddings, {quoted(rope)}, which the two tensors cannot tell; send the "
            "PEFT files as they are"
        )
    linears, reader = adapter.linears, LinearReader(adapter, base, dtype)
    weights = np.zeros((len(linears), max(linear.num_values for linear in linears)), NUMPY_DTYPES[dtype])
    for index, linear in enumerate(linears):
        end = 0
        for one in reader.read(linear):
            start, end = end, end + one.values.size
            weights[index, start:end] = one.values.ravel()
        if on_progress:
            on_progress(index + 1, len(linears))
    config = [[m.module_id, m.layer, m.rank, int(m.magnitude is not None)] for m in linears]
    return AdapterTensors(weights, np.array(config, np.int32), dtype, adapter.origin)
