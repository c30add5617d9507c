"""An adapter as the wire carries it: PEFT's two files as they are, or the tensors of TensorRT-LLM's converter.

Of the tensors, row i of `weights` is A `[rank, in]` then B `[out, rank]`, both flat and row-major, zero-padded to the
widest row; the scale is already in B. Row i of `config` describes it: `[module_id, layer, rank]`, or with `is_dora`.

The converter's files are `model.lora_weights.npy` `[1, rows, width]` and
`model.lora_config.npy` int32 `[1, rows, 4]`. NumPy has no bfloat16: such weights are stored, as upstream stores them,
in the two-byte void type (`|V2`) of their bits, so that artefacts of both converters are interchangeable. A third file
of ours, `model.lora_origin.json`, tells the sides of the matrices.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from multilora_client.errors import AdapterError, InvalidRequest
from multilora_wire.adapter_origin import AdapterOrigin, WrongBaseModel
from multilora_wire.adapter_use import UseError, join_use_files, read_use_files, split_use_files
from multilora_wire.converted_files import (
    CONFIG_FILE,
    STORED_BFLOAT16,
    WEIGHTS_FILE,
    BrokenFiles,
    read_origin,
    read_rows,
    write_origin,
)
from multilora_wire.gguf.adapter import NO_CONFIG
from multilora_wire.peft_config import PEFT_CONFIG_FILE, PEFT_WEIGHTS_FILE
from multilora_wire.peft_files import NUMPY_DTYPES, AdapterDtype, describe_foreign
from multilora_wire.sites import ModelSites

_STORED_DTYPES: dict[str, AdapterDtype] = {"float16": "FP16", "void16": "BF16", "float32": "FP32"}


@dataclass(frozen=True, eq=False)
class AdapterTensors:
    """The tensors of one adapter.

    weights: `[rows, width]`, float16, float32, or (`dtype` BF16) the bits of bfloat16 in uint16.
    config: int32 `[rows, 3]` or `[rows, 4]`.
    origin: the model that the adapter was made for, which a client compares with the server's before it sends the
        weights; None where nobody knows it. No part of the content.
    use: the folder's files on the adapter's use, as of `join_use_files`; empty without any.
    Raises AdapterError when they do not fit each other.
    """

    weights: npt.NDArray[Any]
    config: npt.NDArray[np.int32]
    dtype: AdapterDtype
    origin: AdapterOrigin | None = None
    use: bytes = field(default=b"", repr=False)

    def __post_init__(self) -> None:
        if self.weights.dtype != NUMPY_DTYPES[self.dtype]:
            raise AdapterError(
                f"{self.dtype} weights are held in {NUMPY_DTYPES[self.dtype].__name__}, not in {self.weights.dtype}"
            )
        if self.weights.ndim != 2 or self.config.ndim != 2 or len(self.weights) != len(self.config):
            raise AdapterError(
                "weights must be [rows, width] and config [rows, 3 or 4] with equally many rows, "
                f"not {list(self.weights.shape)} and {list(self.config.shape)}"
            )
        if self.config.dtype != np.int32 or self.config.shape[1] not in (3, 4):
            raise AdapterError(
                f"config must be int32 [rows, 3 or 4], not {self.config.dtype} {list(self.config.shape)}"
            )
        if self.origin is not None and not self.origin.describes(self.config.tolist()):
            raise AdapterError("the origin's linears must be those of config's rows, in the same order")

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that name the content: equal exactly when dtype, shapes, rows and weights are."""
        digest = hashlib.sha256(f"{self.dtype} {self.weights.shape} {self.config.shape}".encode())
        digest.update(np.ascontiguousarray(self.config).data)
        digest.update(np.ascontiguousarray(self.weights).data)
        digest.update(self.use)
        return digest.digest()

    @property
    def nbytes(self) -> int:
        """Bytes on the wire, padding included."""
        return self.weights.nbytes + self.config.nbytes + len(self.use)

    @property
    def base_model(self) -> str:
        """The name that the adapter gives its base model; "" where nobody knows it."""
        return self.origin.base_model if self.origin else ""

    def save(self, directory: Path) -> None:
        """Write the files, with those on the adapter's use, into `directory`, which is made when it is missing.

        Raises AdapterError for a directory that has such files of something else, as of a model.
        """
        use = split_use_files(self.use or b"{}")
        if not is_converted(directory) and (found := [name for name in use if (directory / name).exists()]):
            raise AdapterError(f"{directory / found[0]} belongs to something else; write into another directory")
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in use.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_text(text, encoding="utf-8")
        weights = self.weights.view(STORED_BFLOAT16) if self.dtype == "BF16" else self.weights
        np.save(directory / WEIGHTS_FILE, weights[np.newaxis], allow_pickle=False)
        np.save(directory / CONFIG_FILE, self.config[np.newaxis], allow_pickle=False)
        write_origin(directory, self.origin)

    @classmethod
    def load(cls, directory: Path) -> AdapterTensors:
        """Read the files, also old ones: `model.lora_keys.npy`, no batch dimension, three columns."""
        try:
            weights, config = read_rows(directory)
            origin = read_origin(directory, config)
        except BrokenFiles as error:
            raise AdapterError(f"{directory}: {error}") from error
        dtype = _STORED_DTYPES.get(weights.dtype.name)
        if dtype is None:
            raise AdapterError(
                f"{directory / WEIGHTS_FILE} holds {weights.dtype}; float16, float32 and bfloat16 are read"
            )
        weights = weights.view(np.uint16) if dtype == "BF16" else weights
        return cls(weights, config, dtype, origin, read_use(directory))


@dataclass(frozen=True, eq=False)
class AdapterFiles:
    """PEFT's files as they are: the bytes of `adapter_config.json` and of `adapter_model.safetensors`; or a GGUF file.

    The server reads and checks them. use: as of `AdapterTensors`.
    """

    config: bytes = field(repr=False)
    weights: bytes = field(repr=False)
    use: bytes = field(default=b"", repr=False)

    @cached_property
    def digest(self) -> bytes:
        """32 bytes that name the content: equal exactly when all files are."""
        digest = hashlib.sha256(f"PEFT {len(self.config)} {len(self.weights)}".encode())
        digest.update(self.config)
        digest.update(self.weights)
        digest.update(self.use)
        return digest.digest()

    @property
    def nbytes(self) -> int:
        """Bytes on the wire."""
        return len(self.config) + len(self.weights) + len(self.use)

    @property
    def base_model(self) -> str:
        """The name that the adapter gives its base model; "" without one."""
        with suppress(ValueError, RecursionError):
            fields = json.loads(self.config)
            name = fields.get("base_model_name_or_path") if isinstance(fields, dict) else None
            return name if isinstance(name, str) else ""
        return ""

    @classmethod
    def load_gguf(cls, file: Path, use: bytes = b"") -> AdapterFiles:
        """An adapter in llama.cpp's form, which has its own configuration."""
        return cls(NO_CONFIG, file.read_bytes(), use)

    @classmethod
    def load(cls, directory: Path) -> AdapterFiles:
        """Read the files of a directory. Raises AdapterError if one of them is missing."""
        names = [entry.name for entry in directory.iterdir()]
        for name in (PEFT_CONFIG_FILE, PEFT_WEIGHTS_FILE):
            if not (directory / name).is_file():
                foreign = describe_foreign(names)
                raise AdapterError(f"{directory}/{foreign}" if foreign else f"{directory / name} is missing")
        config, weights = ((directory / name).read_bytes() for name in (PEFT_CONFIG_FILE, PEFT_WEIGHTS_FILE))
        return cls(config, weights, read_use(directory))


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter under the task id that the server knows it by (0 to 2**64 - 1)."""

    lora_task_id: int
    content: AdapterFiles | AdapterTensors

    def __post_init__(self) -> None:
        if not 0 <= self.lora_task_id < 2**64:
            raise InvalidRequest(f"lora_task_id must be between 0 and 2**64 - 1, not {self.lora_task_id}")


def read_use(directory: Path) -> bytes:
    """The files of a folder on its adapter's use, as of `join_use_files`; empty without any.

    Raises AdapterError for a file that cannot be read.
    """
    try:
        files = read_use_files(directory)
    except (UseError, OSError) as error:
        raise AdapterError(f"{directory}: {error}") from error
    return join_use_files(files) if files else b""


def check_origin(origin: AdapterOrigin, sites: ModelSites, model: str) -> None:
    """Raises AdapterError for an adapter of another model than the one of this name, which has these sites."""
    try:
        origin.check(sites, model)
    except WrongBaseModel as error:
        raise AdapterError(str(error)) from error


def is_converted(directory: Path) -> bool:
    """Whether `directory` holds an adapter in the wire format."""
    return (directory / WEIGHTS_FILE).is_file()
