"""Adapters that are there from the start: `lora_prefetch_dir`, as TensorRT-LLM's Triton backend defines it.

One folder for each adapter, named after its task id in digits; its files are those of `multilora_wire.converted_files`,
and of its use. Other files, such as PEFT's, are named in the log.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from multilora_engine.errors import AdapterCacheFull, AdapterConflict, ConfigError, InvalidRequest
from multilora_engine.log_lines import one_line
from multilora_engine.lora.folder_use import UseReader
from multilora_engine.lora.format import pack_adapter
from multilora_engine.lora.layout import AdapterTraits, PackedAdapter
from multilora_engine.lora.manager import LoRAManager
from multilora_wire.adapter_origin import WrongBaseModel
from multilora_wire.adapter_use import TEMPLATE_FOLDER, USE_FILES
from multilora_wire.converted_files import (
    CONFIG_FILE,
    OLD_CONFIG_FILE,
    ORIGIN_FILE,
    STORED_BFLOAT16,
    WEIGHTS_FILE,
    BrokenFiles,
    read_origin,
    read_rows,
)
from multilora_wire.layout import AdapterLayout

_NUM_REPORTS = 10

_logger = logging.getLogger(__name__)


def preload_adapters(directory: Path, loras: LoRAManager, layout: AdapterLayout, uses: UseReader | None = None) -> None:
    """Load every adapter of a directory, telling progress. A broken one is reported and skipped.

    uses: reads what a folder says about its adapter's use; None where no chats are answered.

    Stops when the next one could only be kept by losing another. Raises ConfigError if there is no such directory.
    """
    if not directory.is_dir():
        raise ConfigError(f"lora_prefetch_dir: {directory} is not a directory")
    try:
        folders = list(_numbered_folders(directory))
    except OSError as error:
        raise ConfigError(f"lora_prefetch_dir: {error}; write a directory that the server may read") from error
    num_loaded, unread = 0, Counter[str]()
    for index, (lora_task_id, folder) in enumerate(folders, start=1):
        try:
            packed = _read(folder, directory, layout, uses)
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
            with suppress(OSError):  # a folder that may be read and not listed
                unread.update(set(os.listdir(folder)) - _READ)
        except (BrokenFiles, WrongBaseModel, InvalidRequest, AdapterConflict, AdapterCacheFull) as error:
            _logger.error("lora_prefetch_dir: %s is skipped: %s", folder.name, error)
        if index % max(1, len(folders) // _NUM_REPORTS) == 0:
            _logger.info("lora_prefetch_dir: %d of %d folders read", index, len(folders))
    _logger.info("lora_prefetch_dir: %d adapters loaded from %s", num_loaded, directory)
    if unread:
        names = ", ".join(f"{name} (in {count})" for name, count in unread.most_common(_NUM_REPORTS))
        _logger.warning("lora_prefetch_dir: only the two .npy files of an adapter are read, and not %s", names)


_READ = {WEIGHTS_FILE, CONFIG_FILE, OLD_CONFIG_FILE, ORIGIN_FILE, TEMPLATE_FOLDER, *USE_FILES}


def _read(folder: Path, root: Path, layout: AdapterLayout, uses: UseReader | None) -> PackedAdapter:
    """`read_folder`, whose own errors and BrokenFiles in place of any other are all that it raises."""
    try:
        use = "" if uses is None else uses.read_folder(folder, root)
        return read_folder(folder, root, layout, use=use)
    except (BrokenFiles, InvalidRequest, WrongBaseModel):
        raise
    except Exception as error:
        raise BrokenFiles(f"it cannot be read: {type(error).__name__}: {one_line(str(error), 200)}") from error


def read_folder(folder: Path, root: Path, layout: AdapterLayout, model: str = "", use: str = "") -> PackedAdapter:
    """The adapter of a folder below `root`; no link may lead out of there. model: the name of the base model.

    use: of `AdapterTraits`.

    Raises BrokenFiles, InvalidRequest, or WrongBaseModel.
    """
    weights, config = read_rows(folder, root)
    if config.dtype not in (np.int32, np.int64):
        raise BrokenFiles(f"{CONFIG_FILE} holds {config.dtype}; int32 is expected")
    if (origin := read_origin(folder, config, root)) is not None:
        origin.check(layout.sites, model)
    return pack_adapter(_weights_tensor(weights), torch.from_numpy(config), layout, AdapterTraits(use=use))


def _numbered_folders(directory: Path) -> Iterator[tuple[int, Path]]:
    """Folders and their task ids, ascending; a name that is no 64-bit number, or a number twice, is reported."""
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


def _weights_tensor(weights: npt.NDArray[Any]) -> torch.Tensor:
    if weights.dtype == STORED_BFLOAT16:
        return torch.from_numpy(weights.view(np.int16)).view(torch.bfloat16)
    if weights.dtype not in (np.float16, np.float32):
        raise BrokenFiles(f"{WEIGHTS_FILE} holds {weights.dtype}; float16, float32 and bfloat16 are read")
    return torch.from_numpy(weights)
