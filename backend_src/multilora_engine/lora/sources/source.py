"""A source of adapters: the protocol, its errors, and the files that are an adapter.

Only the files named here are ever looked at, all of them formats that hold numbers and nothing that can run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from multilora_engine.errors import InvalidRequest
from multilora_engine.lora.names import task_id_of
from multilora_wire.adapter_use import USE_FILES, UseError, check_use_sizes
from multilora_wire.converted_files import CONFIG_FILE, OLD_CONFIG_FILE, ORIGIN_FILE, WEIGHTS_FILE
from multilora_wire.peft_config import PEFT_CONFIG_FILE, PEFT_WEIGHTS_FILE
from multilora_wire.peft_files import describe_foreign

PEFT_FILES = (PEFT_CONFIG_FILE, PEFT_WEIGHTS_FILE)
CONVERTED_FILES = (WEIGHTS_FILE, CONFIG_FILE)
OLD_CONVERTED_FILES = (WEIGHTS_FILE, OLD_CONFIG_FILE)
ALLOWED_FILES = tuple(dict.fromkeys((*PEFT_FILES, *CONVERTED_FILES, *OLD_CONVERTED_FILES, ORIGIN_FILE)))

GGUF_ENDING = ".gguf"
"""Of the one file of an adapter in llama.cpp's form."""

_MAX_CONFIG_BYTES = 1 << 20


class SourceError(Exception):
    """Base of the reasons for which a source gives no adapter. The text is for the client: no paths, no credentials."""


class NotThere(SourceError):
    """The source does not have the adapter, or may not be asked for it. Another source may have it."""


class Unusable(SourceError):
    """The source has something under this name that is refused, damaged or unsupported. No other source is asked."""


class Unreachable(SourceError):
    """The source cannot tell whether it has the adapter, or cannot deliver it now. No other source is asked."""


@dataclass(frozen=True)
class AdapterKey:
    """The adapter that is wanted.

    name: empty if only the id is known: then a source looks under its digits.
    Raises InvalidRequest for a name that is not plain, or that has another id.
    """

    lora_task_id: int
    name: str = ""

    def __post_init__(self) -> None:
        if self.name and (named_id := task_id_of(self.name)) != self.lora_task_id:
            raise InvalidRequest(f"lora_name {self.name!r} is LoRA task {named_id}, not {self.lora_task_id}")

    def __str__(self) -> str:
        return self.name or str(self.lora_task_id)


@dataclass(frozen=True)
class LocalAdapter:
    """An adapter on disk: a PEFT directory, or one with the `.npy` files of TensorRT-LLM's converter.

    root: no link in `directory` may lead out of it.
    revision: tells this version from others of the same name; for the log.
    name: the source's name for it, empty for an adapter that it knows by its id alone.
    """

    directory: Path
    root: Path
    revision: str
    name: str


class AdapterSource(Protocol):
    """A place that has adapters. One instance is asked by several threads at once, never by the engine's own."""

    def open(self, key: AdapterKey, max_bytes: int) -> AbstractContextManager[LocalAdapter]:
        """Have an adapter on disk while the context lasts. Raises NotThere, Unusable or Unreachable.

        max_bytes: files that are larger in sum are no adapter of this model; Unusable, before anything is transferred.
        """
        ...

    def list_keys(self) -> Iterable[AdapterKey]:
        """The adapters it has, if it can tell; else none."""
        ...


@runtime_checkable
class PathSource(AdapterSource, Protocol):
    """A source that also gives adapters by their paths, within the places it covers, under any name."""

    def covers(self, path: str) -> bool:
        """Whether the path is within the places that the operator allowed, by its text; there may be nothing."""
        ...

    def open_path(self, path: str, max_bytes: int) -> AbstractContextManager[LocalAdapter]:
        """`open` the adapter at a path that the source covers; it has no name of its own."""
        ...


@dataclass(frozen=True)
class FolderChange:
    """A watched folder that has come to rest in another state, or that is at rest as the first look found it.

    reason: why it is no whole adapter; empty if it is. changed_s: when a folder that is as the first look found it was
    changed last, in seconds since the epoch; None for one that has changed since.
    """

    key: AdapterKey
    reason: str = ""
    changed_s: float | None = None


@runtime_checkable
class WatchedSource(AdapterSource, Protocol):
    """A source that can tell which of its adapters have changed, if its configuration wants that."""

    @property
    def is_watched(self) -> bool: ...

    def scan(self) -> list[FolderChange]:
        """The changes that have come to rest since the last call. One thread calls this, at intervals of seconds."""
        ...


def choose_files(names: Collection[str]) -> tuple[str, ...]:
    """Which of the files of a directory are the adapter. Raises NotThere or Unusable."""
    if PEFT_FILES[1] in names and WEIGHTS_FILE in names:
        raise Unusable(f"it has {PEFT_FILES[1]} and {WEIGHTS_FILE}, which may differ; leave one of them")
    for files in (CONVERTED_FILES, OLD_CONVERTED_FILES):
        if set(files) <= set(names):
            return (*files, ORIGIN_FILE) if ORIGIN_FILE in names else files
    if set(PEFT_FILES) <= set(names):
        return PEFT_FILES
    gguf = [name for name in names if name.endswith(GGUF_ENDING)]
    if gguf and not set(names) & set(ALLOWED_FILES):
        if len(gguf) > 1:
            raise Unusable(f"it has {len(gguf)} GGUF files; leave one of them")
        return tuple(gguf)
    if foreign := describe_foreign(names):
        raise Unusable(foreign)
    if found := [name for name in ALLOWED_FILES if name in names]:
        raise Unusable(f"it has {' and '.join(found)} alone; {' and '.join(PEFT_FILES)} belong together")
    raise NotThere(f"it has no {' and '.join(PEFT_FILES)}")


def choose_use_files(names: Collection[str]) -> tuple[str, ...]:
    """The files of a directory that say something about the adapter's use."""
    return tuple(name for name in USE_FILES if name in names)


def check_sizes(sizes: Mapping[str, int], max_bytes: int) -> None:
    """Raises Unusable for an adapter that is larger than any of this model can be."""
    try:
        check_use_sizes(sizes)
    except UseError as error:
        raise Unusable(str(error)) from None
    sizes = {name: size for name, size in sizes.items() if name not in USE_FILES}
    config_bytes = sizes.get(PEFT_FILES[0], 0)
    if config_bytes > _MAX_CONFIG_BYTES:
        raise Unusable(f"{PEFT_FILES[0]} has {config_bytes} bytes, at most {_MAX_CONFIG_BYTES} are read")
    if (total := sum(sizes.values())) > max_bytes:
        raise Unusable(f"it has {total} bytes, more than the {max_bytes} that an adapter of this model can have")
