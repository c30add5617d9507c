"""`DiskTier`: adapters as files, so that their ids survive eviction, a restart, and the death of the engine.

One file for each adapter (`adapter_file`), named after its task id alone, with its tenant if it has one: `7`, `acme@7`.
Small files of others lie beside them (`write_beside`).

The directory is a cache: a file that is damaged costs its own adapter and nothing else. An entry there at start that
cannot be used (another model or page size, an older format, a symbolic link) is named in the log and left alone.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import stat
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch

from multilora_engine.errors import ConfigError
from multilora_engine.lora.adapter_file import (
    DamagedFile,
    DiskAdapter,
    WriteFile,
    describe_file,
    encode_header,
    open_regular,
    read_file,
    with_pages_digest,
    write_file_atomically,
)
from multilora_engine.lora.adapter_state import File
from multilora_engine.lora.format import kinds_of, ranks_of
from multilora_engine.lora.layout import NO_TRAITS, AdapterTraits, PackedRow, page_shape
from multilora_engine.lora.life_cycle import OnEvent, TierStats, adapter_event, ignore_event
from multilora_engine.lora.names import TaskId, label_of, parse_label
from multilora_wire.adapter_event import EventKind
from multilora_wire.layout import AdapterLayout

_NUM_READERS = 2

Result = TypeVar("Result")

_logger = logging.getLogger(__name__)

OnWritten = Callable[[File], None]
"""Hears once, from `store` or `poll`, that the pages are no longer read, and the fate of their file: WRITTEN,
REFUSED, or NONE if it was deleted before."""

OnDeleted = Callable[[TaskId], None]
"""Hears of each adapter that loses its file, written or being written, to make room for another one."""


@dataclass(frozen=True, eq=False)
class _Write:
    """A file in the making."""

    adapter: DiskAdapter
    future: Future[float]
    on_written: OnWritten


@dataclass(frozen=True)
class OpenFile:
    """An adapter's file, which can be read even when its name is deleted. `read` or `close` it, once.

    read: is given the pages to fill, uint8 [page_bytes] each; the future's result is the adapter's rows, or it raises
        DamagedFile or OSError.
    """

    read: Callable[[Sequence[torch.Tensor]], Future[list[PackedRow]]]
    close: Callable[[], None]


class DiskTier:
    """Adapters in the files of one directory, least recently used deleted first. Changed only by `LoRAManager`.

    One thread owns it and never waits for the disk. Writing, deleting and reading happen on threads of its own, which
    touch files and memory that they are given, never the index. One thread writes and deletes, in the order it was
    told, so work on an older version of an adapter never comes after work on a newer one. `poll` takes up the work
    they have finished.
    """

    def __init__(
        self,
        directory: Path,
        num_bytes: int,
        layout: AdapterLayout,
        on_event: OnEvent = ignore_event,
        write_file: WriteFile | None = None,
        workers: Callable[[int], Executor] = ThreadPoolExecutor,
    ) -> None:
        """Take over a directory and its files. Raises ConfigError if that is impossible, or another has it.

        workers: makes that many threads.
        """
        self._directory = directory
        self._num_bytes = num_bytes
        self._layout = layout
        self._on_event = on_event
        self._write_file = write_file or write_file_atomically
        self._adapters: OrderedDict[TaskId, DiskAdapter] = OrderedDict()
        self._writes: deque[_Write] = deque()
        self._wanted: dict[TaskId, _Write] = {}
        self._unreadable: OrderedDict[Path, int] = OrderedDict()
        self._bytes_used = 0
        self._hits = self._misses = self._evictions = self._copies = self._failures = 0
        self._copy_seconds = 0.0
        self._lock_fd = _lock(directory)
        self._writer = workers(1)
        self._readers = workers(_NUM_READERS)
        self._find_files()
        free_bytes = shutil.disk_usage(directory).free
        if self._bytes_used + free_bytes < num_bytes:
            _logger.warning(
                "disk tier: %.2f GiB are free at %s, fewer than lora_cache_disk_bytes (%.2f GiB) would take: adapters "
                "that find no room stay in memory only",
                free_bytes / (1 << 30),
                directory,
                num_bytes / (1 << 30),
            )

    def __len__(self) -> int:
        return len(self._adapters)

    @property
    def adapters(self) -> list[DiskAdapter]:
        """The adapters whose files are written, least recently used first."""
        return list(self._adapters.values())

    @property
    def num_bytes(self) -> int:
        """The size all files together may have."""
        return self._num_bytes

    @property
    def writes(self) -> list[Future[float]]:
        """The writes whose ends `poll` will take up."""
        return [write.future for write in self._writes]

    @property
    def is_writing(self) -> bool:
        """Whether there are any `writes`."""
        return bool(self._writes)

    def find(self, lora_task_id: TaskId) -> DiskAdapter | None:
        """The record of an adapter's file, once it is written."""
        return self._adapters.get(lora_task_id)

    def count_request(self, lora_task_id: TaskId) -> None:
        """A request looked here for its adapter: a hit if it is here."""
        if lora_task_id in self._adapters:
            self._hits += 1
        else:
            self._misses += 1

    def store(
        self,
        lora_task_id: TaskId,
        digest: str,
        name: str,
        rows: list[PackedRow],
        pages: Sequence[torch.Tensor],
        on_written: OnWritten,
        on_deleted: OnDeleted = lambda lora_task_id: None,
        traits: AdapterTraits = NO_TRAITS,
    ) -> Future[float]:
        """Have an adapter that is not here written. A write that fails is logged.

        The future is done with the write; it raises OSError if that failed, and is cancelled if the adapter is deleted
        before. pages: uint8 [page_bytes] each; nobody may write to them until `on_written` is called.
        """
        assert lora_task_id not in self._adapters
        header = encode_header(lora_task_id, digest, name, rows, len(pages), self._layout, traits)
        size = len(header) + len(pages) * self._layout.page_bytes
        if size > self._num_bytes:
            error = OSError(f"{size} bytes are more than lora_cache_disk_bytes ({self._num_bytes})")
            self._note_failure(lora_task_id, error)
            on_written(File.REFUSED)
            return _failed(error)
        self._bytes_used -= self._unreadable.pop(self._path(lora_task_id), 0)
        self._make_room(size, on_deleted)
        self._bytes_used += size
        shape = page_shape(rows, len(pages), self._layout)
        ranks, kinds = ranks_of(rows), kinds_of(rows, traits)
        adapter = DiskAdapter(lora_task_id, digest, name, ranks, shape, size, time.time(), kinds, traits)
        future = _submit(self._writer, self._write, self._path(lora_task_id), header, rows, pages, traits)
        write = _Write(adapter, future, on_written)
        self._writes.append(write)
        self._wanted[lora_task_id] = write
        return future

    def touch(self, lora_task_id: TaskId) -> None:
        """Make an adapter that is here the most recently used, for later starts too."""
        self._adapters.move_to_end(lora_task_id)
        _submit(self._writer, _touch, self._path(lora_task_id))

    def open(self, lora_task_id: TaskId) -> OpenFile:
        """The file of an adapter that is here."""
        adapter = self._adapters[lora_task_id]
        self._adapters.move_to_end(lora_task_id)
        try:
            fd = open_regular(self._path(lora_task_id))
        except (OSError, DamagedFile) as error:
            failure = error
            return OpenFile(read=lambda pages: _failed(failure), close=lambda: None)
        return OpenFile(
            read=lambda pages: _submit(self._readers, read_file, fd, adapter, pages, self._layout),
            close=lambda: os.close(fd),
        )

    def delete(self, lora_task_id: TaskId) -> Future[None] | None:
        """Forget an adapter, if it is here or being written, and have its file removed: no later start may find it.

        The future is done when the file is removed. It raises OSError. None: no start would find one.
        """
        adapter = self._adapters.pop(lora_task_id, None)
        if adapter is not None:
            self._bytes_used -= adapter.num_bytes
            self._emit("deleted_from_disk", adapter)
        write = self._wanted.pop(lora_task_id, None)
        if write is not None:
            write.future.cancel()
            self._bytes_used -= write.adapter.num_bytes
        if adapter is None and write is None:
            return None
        return _submit(self._writer, _unlink, self._path(lora_task_id))

    def read_beside(self, name: str) -> bytes:
        """The content that `write_beside` gave a file, now or before a restart; empty without one. Raises OSError."""
        path = self._directory / name
        if not path.is_symlink() and not path.exists():
            return b""
        try:
            fd = open_regular(path)
        except DamagedFile as error:
            raise OSError(errno.EINVAL, str(error)) from error
        with os.fdopen(fd, "rb") as file:
            return file.read()

    def write_beside(self, name: str, content: bytes) -> Future[None]:
        """Have a small file written beside the adapters, after the files before it. The future raises OSError."""
        return _submit(self._writer, self._write_beside, self._directory / name, content)

    def drop_damaged(self, lora_task_id: TaskId, digest: str, error: BaseException) -> None:
        """Reading this version failed: forget it, and remove its file."""
        _logger.error("LoRA task %s: %s: %s; it is dropped", label_of(lora_task_id), self._path(lora_task_id), error)
        self._failures += 1
        adapter = self._adapters.get(lora_task_id)
        if adapter is not None and adapter.digest == digest:
            self.delete(lora_task_id)

    def note_unread(self, lora_task_id: TaskId, error: OSError) -> None:
        """Reading an adapter failed for want of a resource, and not because of its file, which stays."""
        _logger.error("LoRA task %s: %s could not be read: %s", label_of(lora_task_id), self._path(lora_task_id), error)
        self._failures += 1

    def poll(self) -> None:
        """Take up the writes that have ended."""
        while self._writes and self._writes[0].future.done():
            self._end_write(self._writes.popleft())

    @property
    def stats(self) -> TierStats:
        return TierStats(
            bytes_used=self._bytes_used,
            bytes_total=self._num_bytes,
            num_adapters=len(self),
            hits=self._hits,
            misses=self._misses,
            evictions=self._evictions,
            copies=self._copies,
            copy_seconds=self._copy_seconds,
            failures=self._failures,
        )

    def check_integrity(self) -> None:
        being_written = [write.adapter for write in self._wanted.values()]
        files = [*self._adapters.values(), *being_written]
        num_bytes = sum(adapter.num_bytes for adapter in files) + sum(self._unreadable.values())
        assert self._bytes_used == num_bytes <= self._num_bytes
        assert not {self._path(adapter.lora_task_id) for adapter in files} & self._unreadable.keys()
        assert len({adapter.lora_task_id for adapter in files}) == len(files)
        assert set(self._wanted.values()) <= set(self._writes)

    def close(self) -> None:
        """Finish the writes and reads under way, and leave the directory to others."""
        self._writer.shutdown()
        self._readers.shutdown()
        self.poll()
        os.close(self._lock_fd)

    def _path(self, lora_task_id: TaskId) -> Path:
        return self._directory / f"{label_of(lora_task_id)}.safetensors"

    def _find_files(self) -> None:
        found: list[DiskAdapter] = []
        unusable: dict[str, list[str]] = {}
        for path in _entries(self._directory):
            try:
                if re.fullmatch(r"\.(([A-Za-z0-9_][\w.-]*@)?[0-9]{1,20}\.safetensors|\w+\.json)\.part", path.name):
                    path.unlink()
                elif path.suffix == ".safetensors":
                    found.append(describe_file(path, self._layout))
            except (OSError, DamagedFile) as error:
                unusable.setdefault(str(error), []).append(path.name)
                self._unreadable.update(_size_of_ours(path))
        for reason, (name, *others) in unusable.items():
            names = f"{name} and {len(others)} more in lora_cache_dir are" if others else f"{name} in lora_cache_dir is"
            _logger.warning("%s not used, and deleted when others need the room: %s", names, reason)
        found.sort(key=lambda adapter: adapter.last_used_s)
        self._adapters.update((adapter.lora_task_id, adapter) for adapter in found)
        self._bytes_used = sum(adapter.num_bytes for adapter in found) + sum(self._unreadable.values())
        self._make_room(0)
        _logger.info("disk tier: %d adapters found in %s", len(self), self._directory)

    def _make_room(self, num_bytes: int, on_deleted: OnDeleted = lambda lora_task_id: None) -> None:
        while self._bytes_used + num_bytes > self._num_bytes:
            if self._unreadable:
                self._delete_unreadable()
            else:
                on_deleted(self._delete_oldest())

    def _delete_unreadable(self) -> None:
        """Delete a file of an adapter that is stored in another way, or damaged."""
        path, num_bytes = self._unreadable.popitem(last=False)
        self._bytes_used -= num_bytes
        _submit(self._writer, _unlink, path)

    def _delete_oldest(self) -> TaskId:
        lora_task_id = next(chain(self._adapters, self._wanted))
        self.delete(lora_task_id)
        self._evictions += 1
        return lora_task_id

    def _write(
        self, path: Path, header: bytes, rows: list[PackedRow], pages: Sequence[torch.Tensor], traits: AdapterTraits
    ) -> float:
        started = time.perf_counter()
        with _telling_no_directory():
            self._write_file(path, with_pages_digest(header, rows, pages, self._layout, traits), pages)
        return time.perf_counter() - started

    def _write_beside(self, path: Path, content: bytes) -> None:
        with _telling_no_directory():
            self._write_file(path, content, ())

    def _end_write(self, write: _Write) -> None:
        if self._wanted.get(write.adapter.lora_task_id) is not write:
            write.on_written(File.NONE)
            return
        del self._wanted[write.adapter.lora_task_id]
        write.on_written(self._take_up(write.adapter, write.future))

    def _take_up(self, adapter: DiskAdapter, future: Future[float]) -> File:
        """An adapter whose writing has ended is here now, unless it failed."""
        try:
            self._copy_seconds += future.result()
        except OSError as error:
            self._bytes_used -= adapter.num_bytes
            self._note_failure(adapter.lora_task_id, error)
            return File.REFUSED
        self._copies += 1
        self._adapters[adapter.lora_task_id] = adapter
        self._emit("spilled_to_disk", adapter)
        return File.WRITTEN

    def _note_failure(self, lora_task_id: TaskId, error: OSError) -> None:
        self._failures += 1
        label = label_of(lora_task_id)
        _logger.error("LoRA task %s: cannot be kept in lora_cache_dir, only in memory: %s", label, error)

    def _emit(self, kind: EventKind, adapter: DiskAdapter) -> None:
        self._on_event(adapter_event(kind, adapter.lora_task_id, adapter.digest))


@contextmanager
def _telling_no_directory() -> Iterator[None]:
    """Any error becomes an OSError, whose text names the file without its directory: clients read it."""
    try:
        yield
    except OSError as error:
        if name := error.filename2 or error.filename:
            raise OSError(error.errno, error.strerror, Path(name).name) from error
        raise
    except Exception as error:
        raise OSError(f"{type(error).__name__}: {error}") from error


def _entries(directory: Path) -> list[Path]:
    """Raises ConfigError for a directory that cannot be listed."""
    try:
        return sorted(directory.iterdir())
    except OSError as error:
        raise ConfigError(f"lora_cache_dir: {error}; write a directory that the server may read") from error


def _touch(path: Path) -> None:
    with suppress(OSError):
        os.utime(path)


def _unlink(path: Path) -> None:
    with _telling_no_directory():
        try:
            path.unlink(missing_ok=True)
        except OSError:
            _logger.exception("%s cannot be deleted; the next start would find it", path)
            raise


def _size_of_ours(path: Path) -> dict[Path, int]:
    """The size of a file that has the name of an adapter's; empty for anything else, which is left alone."""
    try:
        parse_label(path.stem)
        status = path.lstat()
    except (ValueError, OSError):
        return {}
    return {path: status.st_size} if stat.S_ISREG(status.st_mode) else {}


def _lock(directory: Path) -> int:
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"lora_cache_dir: {error}; write a directory that the server may create and use") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise ConfigError(f"lora_cache_dir: another server uses {directory}; write one for each server") from None
    return fd


def _submit(threads: Executor, work: Callable[..., Result], *arguments: Any) -> Future[Result]:
    """Have a thread do some work; the future raises OSError where none can be started for it."""
    try:
        return threads.submit(work, *arguments)
    except RuntimeError as error:
        _logger.exception("no thread for files can be started")
        return _failed(OSError(errno.ENOMEM, str(error)))


def _failed(error: Exception) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future
