"""Adapters that are there from the start: `lora_prefetch_dir`, as TensorRT-LLM's Triton backend defines it.

One folder for each adapter, named after its task id in digits, with `model.lora_weights.npy` `[1, rows, width]` and
`model.lora_config.npy` `[1, rows, 3 or 4]`. Older artefacts, with `model.lora_keys.npy` or without the batch dimension,
are read as well. NumPy has no bfloat16: such weights are stored as two-byte voids of their bits.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from multilora_engine.errors import AdapterCacheFull, AdapterConflict, ConfigError, InvalidRequest
from multilora_engine.lora.format import pack_adapter
from multilora_engine.lora.layout import PackedAdapter
from multilora_engine.lora.manager import LoRAManager
from multilora_wire.layout import AdapterLayout

_WEIGHTS_FILE = "model.lora_weights.npy"
_CONFIG_FILES = ("model.lora_config.npy", "model.lora_keys.npy")
_BFLOAT16 = np.dtype("V2")
_NUM_REPORTS = 10

_logger = logging.getLogger(__name__)


class BrokenFolder(Exception):
    """A folder does not hold an adapter; the text says why."""


def prefetch_adapters(directory: Path, loras: LoRAManager, layout: AdapterLayout) -> None:
    """Load every adapter of a directory, telling progress. A broken one is reported and skipped.

    Stops when the next one could only be kept by losing another. Raises ConfigError if there is no such directory.
    """
    if not directory.is_dir():
        raise ConfigError(f"lora_prefetch_dir: {directory} is not a directory")
    folders = list(_numbered_folders(directory))
    num_loaded = 0
    for index, (lora_task_id, folder) in enumerate(folders, start=1):
        try:
            packed = read_folder(folder, directory, layout)
            if not loras.has_room(packed):
                left_out = len(folders) - index + 1
                _logger.error(
                    "lora_prefetch_dir: no room for %d of its adapters, from %s on; raise "
                    "lora_cache_host_memory_bytes or write a lora_cache_dir",
                    left_out,
                    folder.name,
                )
                break
            loras.put(lora_task_id, packed, origin="downloaded")
            loras.settle()
            num_loaded += 1
        except (BrokenFolder, InvalidRequest, AdapterConflict, AdapterCacheFull) as error:
            _logger.error("lora_prefetch_dir: %s is skipped: %s", folder.name, error)
        if index % max(1, len(folders) // _NUM_REPORTS) == 0:
            _logger.info("lora_prefetch_dir: %d of %d folders read", index, len(folders))
    _logger.info("lora_prefetch_dir: %d adapters loaded from %s", num_loaded, directory)


def read_folder(folder: Path, root: Path, layout: AdapterLayout) -> PackedAdapter:
    """The adapter of a folder below `root`; no link may lead out of there. Raises BrokenFolder or InvalidRequest."""
    weights = _load_rows(folder / _WEIGHTS_FILE, root)
    new, old = (folder / name for name in _CONFIG_FILES)
    config = _load_rows(old if old.exists() and not new.exists() else new, root)
    if config.dtype not in (np.int32, np.int64):
        raise BrokenFolder(f"{new.name} holds {config.dtype}; int32 is expected")
    return pack_adapter(_weights_tensor(weights), torch.from_numpy(config), layout)


def _numbered_folders(directory: Path) -> Iterator[tuple[int, Path]]:
    """Folders and their task ids, ascending; what is no 64-bit number, or one that was there before, is reported."""
    numbered = []
    for path in directory.iterdir():
        if re.fullmatch("[0-9]{1,40}", path.name) and int(path.name) < 1 << 64:
            numbered.append((int(path.name), path))
        else:
            _logger.warning("lora_prefetch_dir: %s is ignored: its name is not a task id of 64 bits", path.name)
    previous = None
    for lora_task_id, path in sorted(numbered):
        if lora_task_id == previous:
            _logger.error("lora_prefetch_dir: %s is skipped: another folder has the same task id", path.name)
        else:
            yield lora_task_id, path
        previous = lora_task_id


def _load_rows(path: Path, root: Path) -> npt.NDArray[Any]:
    """The array of a .npy file, mapped and not read, without the batch dimension that it may have."""
    try:
        real = path.resolve(strict=True)
        if not real.is_relative_to(root.resolve()):
            raise BrokenFolder(f"{path.name} is a link out of the directory")
        if not real.is_file():
            raise BrokenFolder(f"{path.name} is not a file")
        # Copy on write, because torch takes only writable memory. Nothing is written.
        array = np.load(real, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise BrokenFolder(f"{path.name} is not a readable .npy array without pickled objects: {error}") from None
    if not isinstance(array, np.ndarray):
        raise BrokenFolder(f"{path.name} is an archive, not a .npy array")
    return array[0] if array.ndim == 3 and array.shape[0] == 1 else array


def _weights_tensor(weights: npt.NDArray[Any]) -> torch.Tensor:
    if weights.dtype == _BFLOAT16:
        return torch.from_numpy(weights.view(np.int16)).view(torch.bfloat16)
    if weights.dtype not in (np.float16, np.float32):
        raise BrokenFolder(f"{_WEIGHTS_FILE} holds {weights.dtype}; float16, float32 and bfloat16 are read")
    return torch.from_numpy(weights)
