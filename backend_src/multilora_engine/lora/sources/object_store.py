"""`ObjectStoreSource`: adapters below URLs that fsspec opens: s3://, gs://, file://, ...

An adapter is the folder `PREFIX/NAME`. Its files are downloaded one after another, each into a temporary file that gets
its name when it is complete and verified. The files that an interrupted download left are continued by the next
one, where the store lets one read from the middle.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec  # type: ignore[import-untyped]
from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

from multilora_engine.errors import ConfigError
from multilora_engine.lora.names import is_plain_path
from multilora_engine.lora.sources.source import (
    AdapterKey,
    LocalAdapter,
    NotThere,
    SourceError,
    Unreachable,
    Unusable,
    check_sizes,
    choose_files,
    choose_use_files,
)
from multilora_wire.adapter_use import TEMPLATE_FOLDER

_CHUNK_BYTES = 4 << 20
_EXTRAS = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs"}
"""Schemes whose packages are extras of this distribution."""


@dataclass(frozen=True)
class _RemoteFile:
    """properties: the store's data on this version: size, times, checksums."""

    path: str
    properties: Mapping[str, Any]

    @property
    def size(self) -> int:
        return int(self.properties["size"])

    @property
    def md5(self) -> bytes | None:
        """The MD5 as Google's stores tell it. An S3 ETag is no MD5 for objects that are encrypted or sent in parts."""
        encoded = self.properties.get("md5Hash")
        return None if encoded is None else base64.b64decode(encoded)


class ObjectStoreSource:
    """Looks below each of the operator's URLs in turn, and nowhere else."""

    def __init__(
        self, urls: Sequence[str], options: Mapping[str, Any] | None = None, download_dir: str | None = None
    ) -> None:
        """urls: such as `s3://bucket/adapters`. options: of fsspec's file systems of these URLs.

        download_dir: where downloads lie while they are under way. Raises ConfigError.
        """
        if isinstance(urls, str) or not urls:
            raise ConfigError('urls is missing; write where adapters are, as in "urls": ["s3://bucket/adapters"]')
        self._prefixes = [_open_prefix(url, options or {}) for url in urls]
        self._downloads = Path(download_dir) if download_dir else _cache_dir() / "multilora" / "downloads"

    @contextmanager
    def open(self, key: AdapterKey, max_bytes: int) -> Iterator[LocalAdapter]:
        filesystem, files = self._find(key, max_bytes)
        with self._download_all(filesystem, files, key.name) as adapter:
            yield adapter

    def covers(self, path: str) -> bool:
        """URLs below the operator's, with plain names between the slashes."""
        return self._place_of(path) is not None

    @contextmanager
    def open_path(self, path: str, max_bytes: int) -> Iterator[LocalAdapter]:
        place = self._place_of(path)
        assert place is not None, "asked for what it does not cover"
        filesystem, prefix, inside = place
        with self._download_all(filesystem, _find_files(filesystem, prefix, inside, max_bytes), name="") as adapter:
            yield adapter

    @contextmanager
    def _download_all(self, filesystem: Any, files: list[_RemoteFile], name: str) -> Iterator[LocalAdapter]:
        revision = _hash(repr([file.properties for file in files]))
        with _directory(self._downloads / _hash(files[0].path), revision) as directory:
            for file in files:
                _download(filesystem, file, directory)
            _check_unchanged(filesystem, files)
            yield LocalAdapter(directory, directory.resolve(), revision, name)

    def _place_of(self, url: str) -> tuple[Any, str, str] | None:
        """The file system of a URL, the prefix that covers it, and the rest of the URL."""
        scheme, separator, _ = url.partition("://")
        for filesystem, prefix in self._prefixes if separator else ():
            if scheme in _schemes(filesystem):
                before, covered, inside = _absolute(filesystem, url).partition(f"{prefix}/")
                if covered and not before and is_plain_path(inside):
                    return filesystem, prefix, inside
        return None

    def list_keys(self) -> Iterator[AdapterKey]:
        """Listing a bucket can take minutes."""
        return iter(())

    def _find(self, key: AdapterKey, max_bytes: int) -> tuple[Any, list[_RemoteFile]]:
        reasons = []
        for filesystem, prefix in self._prefixes:
            try:
                return filesystem, _find_files(filesystem, prefix, str(key), max_bytes)
            except NotThere as error:
                reasons.append(str(error))
        raise NotThere(f"{str(key)!r}: {'; '.join(dict.fromkeys(reasons))}")


def _open_prefix(url: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """The file system of a URL, and the path in it. Raises ConfigError."""
    scheme, separator, _ = url.partition("://")
    if not separator or not scheme.isalnum() or "::" in url:
        raise ConfigError(f"{url!r} is not a plain URL; write one like s3://bucket/adapters")
    try:
        filesystem = fsspec.filesystem(scheme, **options)
    except ImportError as error:
        extra = f"multilora-engine[{_EXTRAS[scheme]}]" if scheme in _EXTRAS else str(error)
        raise ConfigError(f"{url} needs a package that is not installed: {extra}") from None
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{url}: {error}") from None
    return filesystem, _absolute(filesystem, url)


def _schemes(filesystem: Any) -> tuple[str, ...]:
    return (filesystem.protocol,) if isinstance(filesystem.protocol, str) else tuple(filesystem.protocol)


def _absolute(filesystem: Any, url: str) -> str:
    """The path of a URL in its file system; of local ones the real one."""
    path: str = filesystem._strip_protocol(url).rstrip("/")
    return os.path.realpath(path) if isinstance(filesystem, LocalFileSystem) else path


def _cache_dir() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")


def _find_files(filesystem: Any, prefix: str, name: str, max_bytes: int) -> list[_RemoteFile]:
    """The files of an adapter, none of them transferred yet. Raises NotThere, Unusable or Unreachable."""
    folder = f"{prefix}/{name}"
    with _as_unreachable("the store cannot be asked"):
        filesystem.invalidate_cache(folder)
        try:
            entries = filesystem.ls(folder, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            raise NotThere("no such folder") from None
    # Of a file, stores list the file itself.
    inside = {entry["name"].removeprefix(f"{folder}/"): entry for entry in entries if entry["type"] == "file"}
    chosen = (*choose_files(inside), *choose_use_files(inside))
    if any(entry["name"].endswith(f"/{TEMPLATE_FOLDER}") for entry in entries if entry["type"] == "directory"):
        raise Unusable(f"it has {TEMPLATE_FOLDER}, which is not downloaded; write the templates into one file")
    files = {file: _RemoteFile(f"{folder}/{file}", inside[file]) for file in chosen}
    if isinstance(filesystem, LocalFileSystem):
        for file in files.values():
            if not Path(os.path.realpath(file.path)).is_relative_to(prefix):
                raise Unusable(f"{Path(file.path).name} is a link out of the source's directory")
    check_sizes({name: file.size for name, file in files.items()}, max_bytes)
    return list(files.values())


@contextmanager
def _directory(path: Path, revision: str) -> Iterator[Path]:
    """A directory in `path` for the downloads of one version of an adapter.

    Only files that a later download of the same version can continue are left there.
    """
    lock = _lock(path)
    try:
        for other in path.iterdir():
            if other.name != revision:
                shutil.rmtree(other)
        (path / revision).mkdir(exist_ok=True)
        yield path / revision
    except Unreachable:
        raise
    except BaseException:
        shutil.rmtree(path)
        raise
    else:
        shutil.rmtree(path)
    finally:
        os.close(lock)


def _lock(path: Path) -> int:
    """Make a directory and lock it: another thread, or another server, may be at the same adapter."""
    while True:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        with suppress(FileNotFoundError):
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            # The last holder of the lock may have removed the directory.
            if path.exists() and os.path.samestat(path.stat(), os.fstat(lock)):
                return lock
            os.close(lock)


def _download(filesystem: Any, file: _RemoteFile, directory: Path) -> None:
    """Raises Unreachable (the part that came is kept, to be continued) or Unusable."""
    target = directory / Path(file.path).name
    if target.exists():
        return
    part = target.with_name(f"{target.name}.part")
    with _as_unreachable(f"{target.name} cannot be downloaded"):
        _continue(filesystem, file, part)
    if part.stat().st_size != file.size:
        part.unlink()
        raise Unreachable(f"{target.name} changed while it was downloaded")
    if file.md5 is not None and _md5(part) != file.md5:
        part.unlink()
        raise Unusable(f"{target.name} arrived damaged: its MD5 is not the one that the store tells")
    part.replace(target)


def _check_unchanged(filesystem: Any, files: list[_RemoteFile]) -> None:
    """Files of two versions would be an adapter that nobody made. Raises Unreachable."""
    folder = files[0].path.rpartition("/")[0]
    with _as_unreachable("the store cannot be asked"):
        filesystem.invalidate_cache(folder)
        entries = {entry["name"]: entry for entry in filesystem.ls(folder, detail=True)}
    for file in files:
        if entries.get(file.path) != file.properties:
            raise Unreachable(f"{Path(file.path).name} changed while it was downloaded")


def _continue(filesystem: Any, file: _RemoteFile, part: Path) -> None:
    with filesystem.open(file.path, "rb") as source, part.open("ab") as sink:
        if sink.tell() and source.seekable():
            source.seek(sink.tell())
        else:
            sink.truncate(0)
        while sink.tell() <= file.size and (chunk := source.read(_CHUNK_BYTES)):
            sink.write(chunk)
        if sink.tell() < file.size:
            raise OSError(f"it ended after {sink.tell()} of {file.size} bytes")


@contextmanager
def _as_unreachable(failure: str) -> Iterator[None]:
    """Stores raise the errors of their clients: OSError, but also errors of HTTP and of credentials."""
    try:
        yield
    except SourceError:
        raise
    except Exception as error:
        raise Unreachable(f"{failure}: {type(error).__name__}: {error}") from error


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _md5(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").digest()
