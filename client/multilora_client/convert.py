"""PEFT directory -> wire tensors, in the layout of TensorRT-LLM's converter, with NumPy alone.

A row is A `[rank, in]` then B `[out, rank]`; a row of experts is the A of all of them, then the B of all. The server
applies no scale, so the scale goes into B, in float32 and before the cast to the storage type. A DoRA row ends with
the magnitude `[out]`, which upstream wants normalised: divided by the lengths of the adapted weight's rows. Converting
it takes the base model's weights.

A fused `gate_up_proj` (module id 18) computes gate | up in Hugging Face checkpoints; upstream's fused module computes
up | gate. The outputs of B (and a magnitude) are therefore exchanged half by half. A fused `qkv_proj` is q | k | v on
both sides. `multilora_wire.peft_files` reads the values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from multilora_client.adapter import Adapter, AdapterFiles, AdapterTensors, is_converted, read_use
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
    PeftLinear,
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
    base_model: directory of the base model's checkpoint; DoRA needs its weights, adapters on experts its config.json.
    sites: of the base model; by default those of `base_model`, if that is given.
    Raises AdapterError for everything that the wire format or the storage type cannot hold, and for an adapter that was
    made for another model than these sites'.
    """
    has_config = base_model is not None and (base_model / MODEL_CONFIG_FILE).is_file()
    if sites is None and base_model is not None and has_config:
        sites = read_sites(base_model)
    model = "" if base_model is None else base_model.resolve().name
    try:
        with open_peft_directory(directory, sites, model, trusts_patterns=True) as adapter:
            has_dora = any(linear.magnitude is not None for linear in adapter.linears)
            base = None if base_model is None or (has_config and not has_dora) else BaseWeights(base_model)
            dtype = _DTYPES[storage_dtype] if storage_dtype else adapter.dtype
            return replace(_convert(adapter, base, sites, dtype, on_progress), use=read_use(directory))
    except WrongBaseModel as error:
        raise AdapterError(str(error)) from error
    except (PeftError, OSError) as error:
        raise AdapterError(f"{directory}: {error}") from error


def is_peft(directory: Path) -> bool:
    """Whether `directory` claims to be a PEFT adapter."""
    return (directory / PEFT_CONFIG_FILE).exists()


def load_content(directory: Path) -> AdapterFiles | AdapterTensors:
    """The adapter in `directory`: PEFT's files as they are, a GGUF file, or the tensors of converted files.

    `directory` may also be the GGUF file. Raises AdapterError.
    """
    if (gguf := _gguf_file(directory)) is not None:
        return AdapterFiles.load_gguf(gguf, read_use(directory) if directory.is_dir() else b"")
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


def _gguf_file(path: Path) -> Path | None:
    """The GGUF file that is an adapter alone; None where PEFT's or converted files are beside it, or several are."""
    if path.suffix == ".gguf" and path.is_file():
        return path
    files = [*path.glob("*.gguf")] if path.is_dir() else []
    return files[0] if len(files) == 1 and not is_peft(path) and not is_converted(path) else None


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
    adapter: PeftAdapter,
    base: BaseWeights | None,
    sites: ModelSites | None,
    dtype: AdapterDtype,
    on_progress: Progress | None,
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
    reader = LinearReader(adapter, base, dtype)
    rows = [_Row(list(group), sites) for _, group in groupby(adapter.linears, lambda one: (one.layer, one.module_id))]
    weights = np.zeros((len(rows), max(row.num_values for row in rows)), NUMPY_DTYPES[dtype])
    for index, row in enumerate(rows):
        row.fill(weights[index], reader)
        if on_progress:
            on_progress(index + 1, len(rows))
    config = [[row.first.module_id, row.first.layer, row.rank, int(row.is_dora)] for row in rows]
    return AdapterTensors(weights, np.array(config, np.int32), dtype, adapter.origin)


class _Row:
    """A row of the wire: one linear, or one of each expert of a layer.

    The experts that the adapter lacks are zero, and so are the ranks that another expert has and this one lacks.
    """

    def __init__(self, linears: list[PeftLinear], sites: ModelSites | None) -> None:
        """linears: of one layer and module id."""
        self._linears = linears
        self.first = linears[0]
        self.rank = max(linear.rank for linear in linears)
        self.is_dora = self.first.magnitude is not None
        module = None if sites is None else sites.module_at[self.first.layer, self.first.module_id]
        experts = 1 if module is None else module.experts
        self._a_shape = (experts, self.rank, self.first.in_size)
        self._b_shape = (experts, self.first.out_size, self.rank)

    @property
    def num_values(self) -> int:
        """Without padding."""
        return prod(self._a_shape) + prod(self._b_shape) + (self.first.out_size if self.is_dora else 0)

    def fill(self, values: npt.NDArray[Any], reader: LinearReader) -> None:
        """Write the row. values: zeros, at least `num_values`."""
        end_of_a = prod(self._a_shape)
        end_of_b = end_of_a + prod(self._b_shape)
        a, b = values[:end_of_a].reshape(self._a_shape), values[end_of_a:end_of_b].reshape(self._b_shape)
        for linear in self._linears:
            parts = (a[linear.expert], b[linear.expert, :, : linear.rank], values[end_of_b:])
            for one in reader.read(linear):
                parts[one.index][one.first : one.first + len(one.values)] = one.values
