"""The files of an adapter in the wire format, as TensorRT-LLM's converter writes them.

A directory holds `model.lora_weights.npy` `[1, rows, width]` and `model.lora_config.npy` `[1, rows, 3 or 4]`. Older
directories have `model.lora_keys.npy` in place of the latter, or no batch dimension. NumPy has no bfloat16: weights of
that type are two-byte voids of their bits. Our own converter also writes `model.lora_origin.json`, an `AdapterOrigin`:
the sides of the matrices, without which an adapter of another model cannot always be told.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from multilora_wire.adapter_origin import AdapterOrigin

WEIGHTS_FILE = "model.lora_weights.npy"
CONFIG_FILE = "model.lora_config.npy"
OLD_CONFIG_FILE = "model.lora_keys.npy"
ORIGIN_FILE = "model.lora_origin.json"

STORED_BFLOAT16 = np.dtype("V2")


class BrokenFiles(Exception):
    """A directory holds no adapter in the wire format; the text says why, and names files without their directory."""


def read_rows(directory: Path, root: Path | None = None) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Weights and config of a directory, `[rows, columns]` each, in the types in which they are stored.

    root: no link may lead out of this directory. Raises BrokenFiles.
    """
    new, old = directory / CONFIG_FILE, directory / OLD_CONFIG_FILE
    weights = _read_array(directory / WEIGHTS_FILE, root)
    return weights, _read_array(old if old.exists() and not new.exists() else new, root)


def read_origin(directory: Path, config: npt.NDArray[Any], root: Path | None = None) -> AdapterOrigin | None:
    """The origin of the adapter in a directory; None where another converter wrote the files.

    config: its rows, as `read_rows` gives them. root: no link may lead out of this directory. Raises BrokenFiles.
    """
    path = directory / ORIGIN_FILE
    if not path.exists() and not path.is_symlink():
        return None
    try:
        origin = msgspec.json.decode(_real_path(path, root).read_bytes(), type=AdapterOrigin)
    except (OSError, msgspec.MsgspecError, RecursionError) as error:
        raise BrokenFiles(f"{path.name} is not readable: {error}") from None
    if config.shape[1] < 2 or not origin.describes(config.tolist()):
        raise BrokenFiles(f"{path.name} is of another adapter than the files beside it; convert again, or delete it")
    return origin


def write_origin(directory: Path, origin: AdapterOrigin | None) -> None:
    """Write the file of an adapter's origin; without one, delete the file of an earlier adapter."""
    path = directory / ORIGIN_FILE
    if origin is None:
        path.unlink(missing_ok=True)
    else:
        path.write_bytes(msgspec.json.encode(origin))


def _read_array(path: Path, root: Path | None) -> npt.NDArray[Any]:
    real = _real_path(path, root)
    try:
        # Not mapped: somebody who truncates the file meanwhile would end the process (SIGBUS).
        array: npt.NDArray[Any] = np.load(real, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise BrokenFiles(f"{path.name} is not a readable .npy array without pickled objects: {error}") from None
    if not isinstance(array, np.ndarray):
        raise BrokenFiles(f"{path.name} is an archive, not a .npy array")
    if array.ndim == 3 and array.shape[0] == 1:
        return array.squeeze(axis=0)
    if array.ndim != 2:
        raise BrokenFiles(f"{path.name} has shape {list(array.shape)}; [rows, columns] or [1, rows, columns] is read")
    return array


def _real_path(path: Path, root: Path | None) -> Path:
    try:
        real = path.resolve(strict=True)
    except OSError:
        raise BrokenFiles(f"{path.name} is missing") from None
    if root is not None and not real.is_relative_to(root.resolve()):
        raise BrokenFiles(f"{path.name} is a link out of the directory")
    if not real.is_file():
        raise BrokenFiles(f"{path.name} is not a file")
    return real
