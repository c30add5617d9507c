"""`DirectorySource`: adapters in folders below a directory, by their names or the digits of their task ids."""

from __future__ import annotations

import math
import os
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from multilora_engine.errors import ConfigError, InvalidRequest
from multilora_engine.lora.names import check_name, task_id_of
from multilora_engine.lora.sources.source import (
    ALLOWED_FILES,
    GGUF_ENDING,
    AdapterKey,
    FolderChange,
    LocalAdapter,
    NotThere,
    SourceError,
    Unreachable,
    Unusable,
    check_sizes,
    choose_files,
    choose_use_files,
)
from multilora_wire.adapter_use import TEMPLATE_FOLDER, USE_FILES

_NAMES_S = 5.0
"""How old the table of the folders' names may be. It only serves requests by the ids of names."""


@dataclass(frozen=True)
class _FolderState:
    """What `stat` tells about a folder. files: (name, inode, bytes, time of change) of each file that is read."""

    folder: tuple[int, int]
    files: frozenset[tuple[str, int, int, int]]

    def kept_files(self, old: _FolderState) -> list[str]:
        """The files that are still those of an older state; none after the whole folder was exchanged."""
        return sorted(file[0] for file in self.files & old.files) if self.folder == old.folder else []


class DirectorySource:
    """`NAME` and `OWNER/NAME` are folders of these names; a folder named in digits has that task id and no name.

    A watched folder is a new version when it has come to rest and no file that is read is of the version before. Until
    then a version that is exchanged file by file is given to nobody, so that no old file is read with a new one.
    """

    def __init__(self, root: str, watch: bool = False) -> None:
        """Raises ConfigError unless `root` is an absolute path of a directory."""
        self._root = Path(root)
        self._is_watched = watch
        # By the folders' names: of the first scan and of the last; at rest, as judged; and the last whole versions.
        self._first: dict[str, _FolderState] | None = None
        self._seen: dict[str, _FolderState] = {}
        self._judged: dict[str, _FolderState] = {}
        self._whole: dict[str, _FolderState] = {}
        self._lock = threading.Lock()
        self._names: dict[int, str] = {}
        self._names_read = -math.inf
        if not self._root.is_absolute() or not self._root.is_dir():
            raise ConfigError(f"root is {root!r}; write the absolute path of a directory")

    @contextmanager
    def open(self, key: AdapterKey, max_bytes: int) -> Iterator[LocalAdapter]:
        name = self._find(key)
        with self._open(self._root / name, max_bytes, "" if name.isdecimal() else name) as adapter:
            yield adapter

    def covers(self, path: str) -> bool:
        """Absolute paths below the root, as it is written or with its links resolved."""
        asked, roots = Path(path), (self._root, self._root.resolve())
        is_plain = ".." not in asked.parts and "\0" not in path
        return is_plain and any(asked.is_relative_to(root) for root in roots)

    @contextmanager
    def open_path(self, path: str, max_bytes: int) -> Iterator[LocalAdapter]:
        with self._open(Path(path), max_bytes, name="") as adapter:
            yield adapter

    @contextmanager
    def _open(self, path: Path, max_bytes: int, name: str) -> Iterator[LocalAdapter]:
        root = self._root.resolve()
        directory = _resolve(path, root)
        names = _list(directory)
        files = (*choose_files(names), *choose_use_files([*names, *_list_inner(directory / TEMPLATE_FOLDER)]))
        status = {file: _regular_file(directory / file, root) for file in files}
        check_sizes({file: s.st_size for file, s in status.items()}, max_bytes)
        modified = datetime.fromtimestamp(max(s.st_mtime for s in status.values()), UTC)
        # After the first look at the files: a change from now on is found when they have been read.
        self._check_at_rest(str(path.relative_to(self._root if path.is_relative_to(self._root) else root)))
        yield LocalAdapter(directory, root, modified.isoformat(), name)
        for file, before in status.items():
            if _version(_regular_file(directory / file, root)) != _version(before):
                raise Unreachable(f"{file} changed while it was read; ask again")

    def list_keys(self) -> Iterator[AdapterKey]:
        for folder in _folders(self._root):
            if _has_adapter(folder):
                yield from _key_of(folder.name)
            else:
                for inner in filter(_has_adapter, _folders(folder)):
                    yield from _key_of(f"{folder.name}/{inner.name}")

    @property
    def is_watched(self) -> bool:
        return self._is_watched

    def scan(self) -> list[FolderChange]:
        """As of `WatchedSource`. A folder rests if two scans find the same files."""
        keys = {str(key): key for key in self.list_keys()}
        seen = {name: state for name in keys if (state := _state_of(self._root / name)) is not None}
        before, self._seen = self._seen, seen
        first = seen if self._first is None else self._first
        self._first = {name: state for name, state in first.items() if seen.get(name) == state}
        self._judged = {name: state for name, state in self._judged.items() if name in seen}
        self._whole = {name: state for name, state in self._whole.items() if name in seen}
        changes = []
        for name, state in seen.items():
            if state == before.get(name) and state != self._judged.get(name):
                self._judged[name] = state
                reason = self._fault_of(name, state)
                if not reason:
                    self._whole[name] = state
                changed_s = self._changed_s(name, state) if self._first.get(name) == state else None
                changes.append(FolderChange(keys[name], reason, changed_s))
        return changes

    def _changed_s(self, name: str, state: _FolderState) -> float:
        """When a folder, a file that is read or a link on the way was changed last, also by another name.

        A time of modification would not tell: it is copied with the file.
        """
        folder = self._root / name
        links = [path for path in (folder, *folder.parents) if path.is_relative_to(self._root) and path.is_symlink()]
        try:
            status = [
                *(link.lstat() for link in links),
                folder.stat(),
                *((folder / file[0]).stat() for file in state.files),
            ]
        except OSError:
            return time.time()  # It is changing now.
        return max(one.st_ctime for one in status)

    def _fault_of(self, name: str, state: _FolderState) -> str:
        """Why a folder at rest is no whole version; empty if it is one, as far as can be told without its weights."""
        old = self._whole.get(name)
        if old is not None and (kept := state.kept_files(old)):
            return f"{', '.join(kept)} as before, other files new; exchange the whole folder"
        try:
            directory = _resolve(self._root / name, self._root.resolve())
            for file in choose_files(_list(directory)):
                _check_whole(_resolve(directory / file, self._root.resolve()))
        except SourceError as error:
            return str(error)
        return ""

    def _check_at_rest(self, name: str) -> None:
        """Raises Unreachable for a version that is exchanged file by file, and for half of one."""
        whole, state = self._whole.get(name), _state_of(self._root / name)
        if whole is not None and state is not None and state.folder == whole.folder and state != whole:
            kept = ", ".join(state.kept_files(whole)) or "none"
            raise Unreachable(f"its files are being exchanged (as before: {kept}); ask again when all are new")

    def _find(self, key: AdapterKey) -> str:
        """The folder of an adapter; of one that is asked for by its id alone, whose name or digits give that id."""
        if key.name or (self._root / str(key)).exists():
            return str(key)
        name = self._name_of(key.lora_task_id)
        if name is None:
            raise NotThere(f"no folder is named {key}, and the id of no folder's name is that")
        return name

    def _name_of(self, lora_task_id: int) -> str | None:
        """The folder whose name has this id. All names are read for that, but not for every unknown id anew."""
        with self._lock:
            if time.monotonic() - self._names_read > _NAMES_S:
                self._names = {key.lora_task_id: key.name for key in self.list_keys() if key.name}
                self._names_read = time.monotonic()
            return self._names.get(lora_task_id)


def _resolve(path: Path, root: Path) -> Path:
    try:
        real = path.resolve(strict=True)
    except FileNotFoundError:
        raise NotThere("no such folder") from None
    except (OSError, RuntimeError) as error:
        raise Unusable(f"{path.name} cannot be opened: {type(error).__name__}") from None
    if not real.is_relative_to(root):
        raise Unusable(f"{path.name} is a link out of the source's directory")
    return real


def _state_of(folder: Path) -> _FolderState | None:
    """None for a folder that cannot be looked at, or is gone."""
    try:
        top = folder.stat()
        inner = os.listdir(folder / TEMPLATE_FOLDER) if (folder / TEMPLATE_FOLDER).is_dir() else []
        names = [*os.listdir(folder), *(f"{TEMPLATE_FOLDER}/{name}" for name in inner)]
        read = [name for name in names if name in ALLOWED_FILES or name in USE_FILES or name.endswith(GGUF_ENDING)]
        files = frozenset((name, *_version((folder / name).stat())) for name in read)
    except OSError:
        return None
    return _FolderState((top.st_dev, top.st_ino), files)


def _check_whole(file: Path) -> None:
    """Raises Unusable for a file that ends before the tensors that its header names."""
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, "numpy"):
                pass
        elif file.suffix == ".npy":
            np.load(file, mmap_mode="r", allow_pickle=False)
    except (SafetensorError, ValueError, OSError) as error:
        raise Unusable(f"{file.name} is not whole: {type(error).__name__}") from None


def _list(directory: Path) -> list[str]:
    try:
        return os.listdir(directory)
    except NotADirectoryError:
        raise NotThere("no such folder") from None
    except OSError as error:
        raise Unreachable(f"the folder cannot be read: {error.strerror}") from None


def _list_inner(folder: Path) -> list[str]:
    """The files of a folder within an adapter's, each with the folder's name before its own; none without it."""
    return [f"{folder.name}/{name}" for name in _list(folder)] if folder.is_dir() else []


def _regular_file(path: Path, root: Path) -> os.stat_result:
    status = _resolve(path, root).stat()
    if not stat.S_ISREG(status.st_mode):
        raise Unusable(f"{path.name} is not a file")
    return status


def _version(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_ino, status.st_size, status.st_mtime_ns


def _folders(directory: Path) -> list[Path]:
    try:
        return sorted(Path(entry.path) for entry in os.scandir(directory) if _is_folder(entry))
    except OSError:
        return []


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # such as a link to itself
        return False


def _has_adapter(folder: Path) -> bool:
    try:
        return any((folder / name).is_file() for name in ALLOWED_FILES) or any(folder.glob(f"*{GGUF_ENDING}"))
    except OSError:  # such as a folder that may not be searched
        return False


def _key_of(name: str) -> Iterator[AdapterKey]:
    """The key of a folder's name; none for a name that no request can ask for."""
    if name.isdecimal() and name.isascii() and str(int(name)) == name and int(name) < 1 << 64:
        yield AdapterKey(int(name))
        return
    try:
        yield AdapterKey(task_id_of(check_name(name)), name)
    except InvalidRequest:
        return
