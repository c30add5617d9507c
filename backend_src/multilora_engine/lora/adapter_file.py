"""The file of an adapter in the disk tier.

A safetensors file: a tensor `pages`, uint8 [num_pages, page_bytes], and in the metadata the fields of `_Metadata`.
Files are read with plain reads and not through a memory map: with that, a bad sector or a truncation would be a SIGBUS
that ends the engine, and copying would hold the GIL.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch

from multilora_engine.log_lines import one_line
from multilora_engine.lora.format import check_rows, content_digest, kinds_of, ranks_of
from multilora_engine.lora.layout import NO_TRAITS, AdapterTraits, PackedRow, page_shape
from multilora_engine.lora.names import TaskId, label_of, parse_label
from multilora_wire.adapter_info import Kind
from multilora_wire.layout import AdapterLayout, PageShape

FORMAT_VERSION = "3"
"""The version of the files' format. 1 had SHA-256 digests, which do not tell whether an upload is the same adapter.
2 counted offsets in values, and its layout had no version."""

_NO_DIGEST = "0" * 32
"""Stands for a digest that is yet to come."""

_DIGEST = re.compile(f"[0-9a-f]{{{len(_NO_DIGEST)}}}")

_MAX_HEADER_BYTES = 16 << 20
_READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
"""NONBLOCK: opening a FIFO must not wait for a writer."""


_MAX_REASON_CHARS = 200


class DamagedFile(Exception):
    """A file is damaged; the text, a line, says in which way."""

    def __init__(self, text: str) -> None:
        super().__init__(one_line(text, _MAX_REASON_CHARS))


@contextmanager
def _failing_alone() -> Iterator[None]:
    """Whatever reading a file raises is about that file: a DamagedFile, or an OSError, for want of memory, too."""
    try:
        yield
    except (OSError, DamagedFile):
        raise
    except MemoryError as error:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)) from error
    except Exception as error:
        raise DamagedFile(f"it cannot be read: {type(error).__name__}: {error}") from error


@dataclass(frozen=True)
class DiskAdapter:
    """The facts about a file that its header tells, without its pages."""

    lora_task_id: TaskId
    digest: str
    name: str
    ranks: tuple[int, ...]
    shape: PageShape
    num_bytes: int
    last_used_s: float
    kinds: tuple[Kind, ...]
    traits: AdapterTraits

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
    checkpoint: str = ""

    @classmethod
    def of(cls, layout: AdapterLayout) -> _StoredLayout:
        return cls(
            layout.version,
            layout.fingerprint,
            layout.max_rank,
            layout.lora_dtype,
            layout.page_bytes,
            layout.checkpoint,
        )


class _Metadata(msgspec.Struct, frozen=True, omit_defaults=True):
    """safetensors knows only strings: `layout`, `rows` and `traits` are JSON.

    pages_digest: the digest of the stored pages with the traits, for codes, whose `digest` is of the values that were
        sent, and for sets, whose `digest` is of their members; empty where `digest` is that digest.
    traits: empty for a plain adapter.
    """

    format_version: str
    lora_task_id: str
    name: str
    digest: str
    layout: str
    rows: str
    pages_digest: str = ""
    traits: str = ""


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
    pages_digest: str


WriteFile = Callable[[Path, bytes, Sequence[torch.Tensor]], None]
"""Writes a file at a path, atomically: the header, then the pages. Raises OSError."""


def write_file_atomically(path: Path, header: bytes, pages: Sequence[torch.Tensor]) -> None:
    """Write a file under another name first. It is not synced: the digest betrays a file that lost power cut short."""
    part = path.with_name(f".{path.name}.part")
    try:
        with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600), "wb", 0) as file:
            _write_all(file.fileno(), memoryview(header))
            for page in pages:
                _write_all(file.fileno(), page.numpy().data)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise


def encode_header(
    lora_task_id: TaskId,
    digest: str,
    name: str,
    rows: list[PackedRow],
    num_pages: int,
    layout: AdapterLayout,
    traits: AdapterTraits = NO_TRAITS,
) -> bytes:
    """A safetensors header: its length as 8 bytes, and JSON filled up with spaces to a multiple of 8.

    Of codes and of sets, it is finished by `with_pages_digest`.
    """
    label, stored = label_of(lora_task_id), _layout_text(layout)
    pages_digest = _NO_DIGEST if _needs_pages_digest(traits, layout) else ""
    metadata = _Metadata(
        FORMAT_VERSION, label, name, digest, stored, _rows_text(rows), pages_digest, _traits_text(traits)
    )
    shape = (num_pages, layout.page_bytes)
    header = msgspec.json.encode(_Header(metadata, _TensorInfo("U8", shape, (0, shape[0] * shape[1]))))
    header += b" " * (-len(header) % 8)
    return len(header).to_bytes(8, "little") + header


def _needs_pages_digest(traits: AdapterTraits, layout: AdapterLayout) -> bool:
    """Whether an adapter's digest says nothing of its pages."""
    return bool(layout.code_bits or traits.members)


def with_pages_digest(
    header: bytes,
    rows: list[PackedRow],
    pages: Sequence[torch.Tensor],
    layout: AdapterLayout,
    traits: AdapterTraits = NO_TRAITS,
) -> bytes:
    """The header with the digest of the pages, which takes as long as reading them: for the thread that writes them."""
    if not _needs_pages_digest(traits, layout):
        return header
    head, _, tail = header.rpartition(_NO_DIGEST.encode())
    return head + traits.digest(content_digest(rows, pages, layout.lora_dtype)).encode() + tail


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]


def _layout_text(layout: AdapterLayout) -> str:
    return msgspec.json.encode(_StoredLayout.of(layout)).decode()


def _rows_text(rows: list[PackedRow]) -> str:
    return msgspec.json.encode(rows).decode()


def _traits_text(traits: AdapterTraits) -> str:
    return "" if traits == NO_TRAITS else msgspec.json.encode(traits).decode()


def describe_file(path: Path, layout: AdapterLayout) -> DiskAdapter:
    """The adapter of a file, by its header. Raises DamagedFile or OSError."""
    try:
        lora_task_id = parse_label(path.stem)
    except ValueError as error:
        raise DamagedFile(f"its name is not {error}") from None
    fd = open_regular(path)
    try:
        with _failing_alone():
            return _read_header(fd, lora_task_id, layout).adapter
    finally:
        os.close(fd)


def open_regular(path: Path) -> int:
    fd = os.open(path, _READ_FLAGS)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise DamagedFile("it is not a regular file")
    return fd


def _read_header(fd: int, lora_task_id: TaskId, layout: AdapterLayout) -> _Contents:
    """The header before the pages, checked. Raises DamagedFile or OSError."""
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
    pages, traits = page_shape(rows, shape[0], layout), _decode_traits(metadata.traits)
    adapter = DiskAdapter(
        lora_task_id,
        metadata.digest,
        metadata.name,
        ranks_of(rows),
        pages,
        status.st_size,
        status.st_mtime,
        kinds_of(rows, traits),
        traits,
    )
    has_pages_digest = _needs_pages_digest(adapter.traits, layout)
    return _Contents(adapter, rows, data_start, metadata.pages_digest if has_pages_digest else metadata.digest)


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
        raise DamagedFile(
            f"its layout has version {stored.version}, this server's has {layout.version}: it is of another lora_dtype "
            "or release"
        )
    if stored != _StoredLayout.of(layout):
        raise DamagedFile("it is another checkpoint's, or of other lora parameters")
    if metadata.lora_task_id != label_of(lora_task_id):
        raise DamagedFile(f"it is of LoRA task {metadata.lora_task_id[:90]}")
    if _DIGEST.fullmatch(metadata.digest) is None:
        raise DamagedFile(f"its digest is {metadata.digest[:40]!r}, expected {len(_NO_DIGEST)} hex digits")


def _decode_rows(text: str, num_pages: int, layout: AdapterLayout) -> list[PackedRow]:
    try:
        rows = msgspec.json.decode(text, type=list[PackedRow])
        check_rows(rows, num_pages, layout)
    except msgspec.MsgspecError as error:
        raise DamagedFile(f"its header is none of ours: {error}") from None
    except ValueError as error:
        raise DamagedFile(str(error)) from None
    return rows


def _decode_traits(text: str) -> AdapterTraits:
    try:
        return msgspec.json.decode(text, type=AdapterTraits) if text else NO_TRAITS
    except msgspec.MsgspecError as error:
        raise DamagedFile(f"its traits are none of ours: {error}") from None


def read_file(fd: int, expected: DiskAdapter, pages: Sequence[torch.Tensor], layout: AdapterLayout) -> list[PackedRow]:
    """Read an open file, which is closed then, into `pages`. Raises DamagedFile or OSError."""
    try:
        with _failing_alone():
            return _read_pages(fd, expected, pages, layout)
    finally:
        os.close(fd)


def _read_pages(
    fd: int, expected: DiskAdapter, pages: Sequence[torch.Tensor], layout: AdapterLayout
) -> list[PackedRow]:
    contents = _read_header(fd, expected.lora_task_id, layout)
    found = contents.adapter
    if (found.digest, found.traits, found.num_pages) != (expected.digest, expected.traits, expected.num_pages):
        raise DamagedFile("it was exchanged behind the server's back")
    for index, page in enumerate(pages):
        _read_all(fd, page.numpy().data, contents.data_start + index * layout.page_bytes)
    if found.traits.digest(content_digest(contents.rows, pages, layout.lora_dtype)) != contents.pages_digest:
        raise DamagedFile("its content does not have the digest that it names")
    os.utime(fd)
    return contents.rows


def _read_all(fd: int, target: memoryview, offset: int) -> None:
    while target:
        count = os.preadv(fd, [target], offset)
        if count == 0:
            raise DamagedFile("it ends too early")
        target, offset = target[count:], offset + count
