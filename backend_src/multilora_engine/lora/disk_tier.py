"""`DiskTier`: adapters as files, so that their ids survive eviction, a restart, and the death of the engine.

One safetensors file for each adapter, named after its task id alone, with its tenant if it has one (`7`, `acme@7`): a
tensor `pages`, uint8 [num_pages, page_bytes], and in the metadata what `_Metadata` lists. Files are read with plain
reads and not through a memory map: with that, a bad sector or a truncation would be a SIGBUS that ends the engine, and
copying would hold the GIL.

The directory is a cache: a file that is damaged costs its own adapter and nothing else. What is in there at start and
cannot be used (another model or page size, an older format, a symbolic link) is named in the log and left alone.
"""

from __future__ import annotations

import fcntl
import logging
import os
import re
import stat
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch

from multilora_engine.errors import ConfigError
from multilora_engine.lora.format import check_rows, content_digest, ranks_of
from multilora_engine.lora.layout import PackedRow, page_shape
from multilora_engine.lora.life_cycle import AdapterEvent, EventKind, OnEvent, TierStats, ignore_event
from multilora_engine.lora.names import TaskId, label_of, parse_label
from multilora_wire.layout import AdapterLayout, PageShape

FORMAT_VERSION = "3"
"""Of the files. 1 had SHA-256 digests: those say nothing about whether an upload is the same adapter. 2 counted offsets
in values, and its layout had no version."""

_MAX_HEADER_BYTES = 16 << 20
_NUM_READERS = 2
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""NONBLOCK: opening a FIFO must not wait for somebody to write."""

_logger = logging.getLogger(__name__)


class DamagedFile(Exception):
    """A file is not what it should be; the text says in what way."""


@dataclass(frozen=True)
class DiskAdapter:
    """What is known of a file without reading its pages."""

    lora_task_id: TaskId
    digest: str
    name: str
    ranks: tuple[int, ...]
    shape: PageShape
    num_bytes: int
    last_used_s: float

    @property
    def num_pages(self) -> int:
        return self.shape.num_pages


class _StoredLayout(msgspec.Struct, frozen=True):
    """The layout of a file's pages. sites: `AdapterLayout.fingerprint`; all sites would be many times the header."""

    version: int
    sites: str
    max_rank: int
    lora_dtype: str
    page_bytes: int

    @classmethod
    def of(cls, layout: AdapterLayout) -> _StoredLayout:
        return cls(layout.version, layout.fingerprint, layout.max_rank, layout.lora_dtype, layout.page_bytes)


class _Metadata(msgspec.Struct, frozen=True):
    """safetensors knows only strings: `layout` and `rows` are JSON."""

    format_version: str
    lora_task_id: str
    name: str
    digest: str
    layout: str
    rows: str


class _TensorInfo(msgspec.Struct, frozen=True):
    dtype: str
    shape: tuple[int, int]
    data_offsets: tuple[int, int]


class _Header(msgspec.Struct, frozen=True):
    metadata: _Metadata = msgspec.field(name="__metadata__")
    pages: _TensorInfo


@dataclass(frozen=True)
class _Contents:
    """A file that was read up to its pages."""

    adapter: DiskAdapter
    rows: list[PackedRow]
    data_start: int


WriteFile = Callable[[Path, bytes, Sequence[torch.Tensor]], None]
"""Writes a file at a path, atomically: the header, then the pages. Raises OSError."""

OnWritten = Callable[[OSError | None], None]
"""Hears once, from `store` or `poll`, that the pages are no longer read; and why there can be no file of them."""


@dataclass
class _Write:
    """A file in the making. is_wanted: nobody has deleted the adapter since."""

    adapter: DiskAdapter
    future: Future[float]
    on_written: OnWritten
    is_wanted: bool = True


@dataclass(frozen=True)
class OpenFile:
    """An adapter's file that can be read whatever becomes of its name from now on. `read` or `close` it, once.

    read: is given the pages to fill, uint8 [page_bytes] each; the future's result is the adapter's rows, or it raises
        DamagedFile or OSError.
    """

    read: Callable[[Sequence[torch.Tensor]], Future[list[PackedRow]]]
    close: Callable[[], None]


class DiskTier:
    """Adapters in the files of one directory, least recently used deleted first. Changed only by `LoRAManager`.

    One thread owns it and never waits for the disk. Writing, deleting and reading happen on threads of its own, which
    touch files and memory that they are given, never the index. One thread writes and deletes, in the order it was
    told, so what belongs to an older version of an adapter never comes after a newer one. `poll` takes up what they
    have finished.
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
        """Take over a directory and what is in it. Raises ConfigError if that is impossible, or another has it.

        workers: makes that many threads.
        """
        self._directory = directory
        self._num_bytes = num_bytes
        self._layout = layout
        self._on_event = on_event
        self._write_file = write_file or write_file_atomically
        self._adapters: OrderedDict[TaskId, DiskAdapter] = OrderedDict()
        self._writes: deque[_Write] = deque()
        self._bytes_used = 0
        self._hits = self._misses = self._evictions = self._copies = self._failures = 0
        self._copy_seconds = 0.0
        self._lock_fd = _lock(directory)
        self._writer = workers(1)
        self._readers = workers(_NUM_READERS)
        self._find_files()

    def __len__(self) -> int:
        return len(self._adapters)

    @property
    def adapters(self) -> list[DiskAdapter]:
        """Those that are written, least recently used first."""
        return list(self._adapters.values())

    @property
    def num_bytes(self) -> int:
        """The size all files together may have."""
        return self._num_bytes

    @property
    def writes(self) -> list[Future[float]]:
        """Whose end `poll` will take up."""
        return [write.future for write in self._writes]

    def find(self, lora_task_id: TaskId) -> DiskAdapter | None:
        """What is known of an adapter's file, once it is written."""
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
    ) -> Future[float]:
        """Have an adapter that is not here written. What cannot be kept is logged.

        The future is done with the write; it raises OSError if that failed, and is cancelled if the adapter is deleted
        before. pages: uint8 [page_bytes] each; nobody may write to them until `on_written` is called.
        """
        assert lora_task_id not in self._adapters
        header = _encode_header(lora_task_id, digest, name, rows, len(pages), self._layout)
        size = len(header) + len(pages) * self._layout.page_bytes
        if size > self._num_bytes:
            error = OSError(f"{size} bytes are more than lora_cache_disk_bytes ({self._num_bytes})")
            self._note_failure(lora_task_id, error)
            on_written(error)
            return _failed(error)
        while self._bytes_used + size > self._num_bytes:
            self._delete_oldest()
        self._bytes_used += size
        shape = page_shape(rows, len(pages), self._layout)
        adapter = DiskAdapter(lora_task_id, digest, name, ranks_of(rows), shape, size, last_used_s=time.time())
        future = self._writer.submit(self._write, self._path(lora_task_id), header, pages)
        self._writes.append(_Write(adapter, future, on_written))
        return future

    def touch(self, lora_task_id: TaskId) -> None:
        """Make an adapter that is here the most recently used, for later starts too."""
        self._adapters.move_to_end(lora_task_id)
        self._writer.submit(_touch, self._path(lora_task_id))

    def open(self, lora_task_id: TaskId) -> OpenFile:
        """The file of an adapter that is here."""
        adapter = self._adapters[lora_task_id]
        self._adapters.move_to_end(lora_task_id)
        try:
            fd = _open_regular(self._path(lora_task_id))
        except (OSError, DamagedFile) as error:
            failure = error
            return OpenFile(read=lambda pages: _failed(failure), close=lambda: None)
        return OpenFile(
            read=lambda pages: self._readers.submit(_read_file, fd, adapter, pages, self._layout),
            close=lambda: os.close(fd),
        )

    def delete(self, lora_task_id: TaskId) -> None:
        """Forget an adapter, if it is here or being written, and have its file removed: no later start may find it."""
        adapter = self._adapters.pop(lora_task_id, None)
        if adapter is not None:
            self._bytes_used -= adapter.num_bytes
            self._emit("deleted_from_disk", adapter)
        for write in self._writes:
            if write.adapter.lora_task_id == lora_task_id and write.is_wanted:
                write.is_wanted = False
                write.future.cancel()
                self._bytes_used -= write.adapter.num_bytes
                adapter = write.adapter
        if adapter is not None:
            self._writer.submit(_unlink, self._path(lora_task_id))

    def drop_damaged(self, lora_task_id: TaskId, digest: str, error: BaseException) -> None:
        """Reading this version failed: forget it, and remove its file."""
        _logger.error("LoRA task %s: %s: %s; it is dropped", label_of(lora_task_id), self._path(lora_task_id), error)
        self._failures += 1
        adapter = self._adapters.get(lora_task_id)
        if adapter is not None and adapter.digest == digest:
            self.delete(lora_task_id)

    def note_unread(self, lora_task_id: TaskId, error: OSError) -> None:
        """Reading an adapter failed for want of something, and not because of its file, which stays."""
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
        being_written = [write.adapter for write in self._writes if write.is_wanted]
        kept = [*self._adapters.values(), *being_written]
        assert self._bytes_used == sum(adapter.num_bytes for adapter in kept) <= self._num_bytes
        assert len({adapter.lora_task_id for adapter in kept}) == len(kept)

    def close(self) -> None:
        """Finish what is being written and read, and leave the directory to others."""
        self._writer.shutdown()
        self._readers.shutdown()
        self.poll()
        os.close(self._lock_fd)

    def _path(self, lora_task_id: TaskId) -> Path:
        return self._directory / f"{label_of(lora_task_id)}.safetensors"

    def _find_files(self) -> None:
        found: list[DiskAdapter] = []
        unusable: dict[str, list[str]] = {}
        for path in sorted(self._directory.iterdir()):
            try:
                if re.fullmatch(r"\.([A-Za-z0-9_][\w.-]*@)?[0-9]{1,20}\.safetensors\.part", path.name):
                    path.unlink()
                elif path.suffix == ".safetensors":
                    found.append(_describe_file(path, self._layout))
            except (OSError, DamagedFile) as error:
                unusable.setdefault(str(error), []).append(path.name)
        for reason, (name, *others) in unusable.items():
            names = f"{name} and {len(others)} more in lora_cache_dir are" if others else f"{name} in lora_cache_dir is"
            _logger.warning("%s not used: %s", names, reason)
        found.sort(key=lambda adapter: adapter.last_used_s)
        self._adapters.update((adapter.lora_task_id, adapter) for adapter in found)
        self._bytes_used = sum(adapter.num_bytes for adapter in found)
        while self._bytes_used > self._num_bytes:
            self._delete_oldest()
        _logger.info("disk tier: %d adapters found in %s", len(self), self._directory)

    def _delete_oldest(self) -> None:
        being_written = (write.adapter.lora_task_id for write in self._writes if write.is_wanted)
        self.delete(next(chain(self._adapters, being_written)))
        self._evictions += 1

    def _write(self, path: Path, header: bytes, pages: Sequence[torch.Tensor]) -> float:
        started = time.perf_counter()
        self._write_file(path, header, pages)
        return time.perf_counter() - started

    def _end_write(self, write: _Write) -> None:
        write.on_written(self._take_up(write.adapter, write.future) if write.is_wanted else None)

    def _take_up(self, adapter: DiskAdapter, future: Future[float]) -> OSError | None:
        """An adapter whose writing has ended is here now, or there is an error."""
        try:
            self._copy_seconds += future.result()
        except OSError as error:
            self._bytes_used -= adapter.num_bytes
            self._note_failure(adapter.lora_task_id, error)
            return error
        self._copies += 1
        self._adapters[adapter.lora_task_id] = adapter
        self._emit("spilled_to_disk", adapter)
        return None

    def _note_failure(self, lora_task_id: TaskId, error: OSError) -> None:
        self._failures += 1
        label = label_of(lora_task_id)
        _logger.error("LoRA task %s: cannot be kept in lora_cache_dir, only in memory: %s", label, error)

    def _emit(self, kind: EventKind, adapter: DiskAdapter) -> None:
        self._on_event(AdapterEvent.of(kind, adapter.lora_task_id, adapter.digest))


def write_file_atomically(path: Path, header: bytes, pages: Sequence[torch.Tensor]) -> None:
    """Under another name first. Not synced: what a power failure leaves half written, its digest gives away."""
    part = path.with_name(f".{path.name}.part")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb", 0) as file:
            _write_all(file.fileno(), memoryview(header))
            for page in pages:
                _write_all(file.fileno(), page.numpy().data)
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise


def _touch(path: Path) -> None:
    with suppress(OSError):
        os.utime(path)


def _unlink(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError:
        _logger.exception("%s cannot be deleted; the next start would find it", path)


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


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


def _encode_header(
    lora_task_id: TaskId, digest: str, name: str, rows: list[PackedRow], num_pages: int, layout: AdapterLayout
) -> bytes:
    """A safetensors header: its length as 8 bytes, and JSON filled up with spaces to a multiple of 8."""
    metadata = _Metadata(FORMAT_VERSION, label_of(lora_task_id), name, digest, _layout_text(layout), _rows_text(rows))
    shape = (num_pages, layout.page_bytes)
    header = msgspec.json.encode(_Header(metadata, _TensorInfo("U8", shape, (0, shape[0] * shape[1]))))
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def _layout_text(layout: AdapterLayout) -> str:
    return msgspec.json.encode(_StoredLayout.of(layout)).decode()


def _rows_text(rows: list[PackedRow]) -> str:
    return msgspec.json.encode(rows).decode()


def _describe_file(path: Path, layout: AdapterLayout) -> DiskAdapter:
    """What a file holds, by its header. Raises DamagedFile or OSError."""
    try:
        lora_task_id = parse_label(path.stem)
    except ValueError as error:
        raise DamagedFile(f"its name is not {error}") from None
    fd = _open_regular(path)
    try:
        return _read_header(fd, lora_task_id, layout).adapter
    finally:
        os.close(fd)


def _open_regular(path: Path) -> int:
    fd = os.open(path, _READ_FLAGS)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise DamagedFile("it is not a regular file")
    return fd


def _read_header(fd: int, lora_task_id: TaskId, layout: AdapterLayout) -> _Contents:
    """What stands before the pages, checked. Raises DamagedFile or OSError."""
    status = os.fstat(fd)
    header, data_start = _decode_header(fd, status.st_size)
    metadata, shape = header.metadata, header.pages.shape
    _check_metadata(metadata, lora_task_id, layout)
    num_bytes = shape[0] * layout.page_bytes
    if header.pages != _TensorInfo("U8", (shape[0], layout.page_bytes), (0, num_bytes)) or shape[0] < 1:
        raise DamagedFile(f"its tensor is {header.pages}")
    if status.st_size != data_start + num_bytes:
        raise DamagedFile(f"it has {status.st_size} bytes, its header accounts for {data_start + num_bytes}")
    rows = _decode_rows(metadata.rows, shape[0], layout)
    pages = page_shape(rows, shape[0], layout)
    adapter = DiskAdapter(
        lora_task_id, metadata.digest, metadata.name, ranks_of(rows), pages, status.st_size, status.st_mtime
    )
    return _Contents(adapter, rows, data_start)


def _decode_header(fd: int, file_bytes: int) -> tuple[_Header, int]:
    """The header of a file, and where its pages start."""
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if file_bytes < 8 + length or length > _MAX_HEADER_BYTES:
        raise DamagedFile(
            f"its header claims {length} bytes, the file has {file_bytes} and a header at most {_MAX_HEADER_BYTES}"
        )
    try:
        return msgspec.json.decode(os.pread(fd, length, 8), type=_Header), 8 + length
    except msgspec.MsgspecError as error:
        raise DamagedFile(f"its header is none of ours: {error}") from None


def _check_metadata(metadata: _Metadata, lora_task_id: TaskId, layout: AdapterLayout) -> None:
    if metadata.format_version != FORMAT_VERSION:
        raise DamagedFile(f"its format version is {metadata.format_version[:20]}, this server's is {FORMAT_VERSION}")
    try:
        stored = msgspec.json.decode(metadata.layout, type=_StoredLayout)
    except msgspec.MsgspecError as error:
        raise DamagedFile(f"its layout is none of ours: {error}") from None
    if stored.version != layout.version:
        raise DamagedFile(f"its layout has version {stored.version}, this server's has {layout.version}")
    if stored != _StoredLayout.of(layout):
        raise DamagedFile("its layout is another model's, or of other lora parameters")
    if metadata.lora_task_id != label_of(lora_task_id):
        raise DamagedFile(f"it is of LoRA task {metadata.lora_task_id[:90]}")


def _decode_rows(text: str, num_pages: int, layout: AdapterLayout) -> list[PackedRow]:
    try:
        rows = msgspec.json.decode(text, type=list[PackedRow])
        check_rows(rows, num_pages, layout)
    except msgspec.MsgspecError as error:
        raise DamagedFile(f"its header is none of ours: {error}") from None
    except ValueError as error:
        raise DamagedFile(str(error)) from None
    return rows


def _read_file(fd: int, expected: DiskAdapter, pages: Sequence[torch.Tensor], layout: AdapterLayout) -> list[PackedRow]:
    """Read an open file, which is closed then, into `pages`."""
    try:
        contents = _read_header(fd, expected.lora_task_id, layout)
        if (contents.adapter.digest, contents.adapter.num_pages) != (expected.digest, expected.num_pages):
            raise DamagedFile("it was exchanged behind the server's back")
        for index, page in enumerate(pages):
            _read_all(fd, page.numpy().data, contents.data_start + index * layout.page_bytes)
        if content_digest(contents.rows, pages, layout.lora_dtype) != expected.digest:
            raise DamagedFile("its content does not have the digest that it names")
        os.utime(fd)
        return contents.rows
    finally:
        os.close(fd)


def _read_all(fd: int, target: memoryview, offset: int) -> None:
    while target:
        count = os.preadv(fd, [target], offset)
        if count == 0:
            raise DamagedFile("it ends too early")
        target, offset = target[count:], offset + count


def _failed(error: Exception) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future
