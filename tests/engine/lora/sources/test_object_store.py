"""Object stores through fsspec, against its file system in memory and the local one."""

from __future__ import annotations

import base64
import hashlib
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from support.adapters import TINY
from support.sources import MAX_BYTES, NO_BASE, USE, USE_FILES, digest_of, key, save_adapter

from multilora_engine.lora.folder_use import UseReader
from multilora_engine.lora.sources.object_store import ObjectStoreSource
from multilora_engine.lora.sources.packing import pack_directory
from multilora_engine.lora.sources.source import NotThere, Unreachable, Unusable
from multilora_wire.adapter_use import parse_use

WEIGHTS = "adapter_model.safetensors"


class FlakyStore(MemoryFileSystem):  # type: ignore[misc]
    """A store that breaks off after some bytes, tells checksums as Google's does, and keeps account of its reads.

    break_after: bytes of the weights that one download gets, None for all. reads: (where a read began, bytes read).
    """

    protocol = "flaky"
    store: ClassVar[dict[str, Any]] = {}
    break_after: int | None = None
    md5: bytes | None = None
    reads: ClassVar[list[tuple[int, int]]] = []

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(path.replace("flaky://", "memory://"))

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        return self._told(super().info(path, **kwargs))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        return [self._told(entry) for entry in super().ls(path, detail=True, **kwargs)]

    def _told(self, entry: dict[str, Any]) -> dict[str, Any]:
        if FlakyStore.md5 is None or not entry["name"].endswith(WEIGHTS):
            return entry
        return entry | {"md5Hash": base64.b64encode(FlakyStore.md5).decode()}

    def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
        content = self.store[self._strip_protocol(path)].getvalue()
        return _FlakyFile(content) if path.endswith(WEIGHTS) else io.BytesIO(content)


class _FlakyFile(io.BytesIO):
    def read(self, size: int | None = -1, /) -> bytes:
        begin, limit = self.tell(), FlakyStore.break_after
        if limit is not None and begin >= limit:
            raise ConnectionResetError("the line is dead")
        chunk = super().read(size if limit is None else min(size or 0, limit - begin))
        if chunk:
            FlakyStore.reads.append((begin, len(chunk)))
        return chunk


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[MemoryFileSystem]:
    """fsspec's memory with the adapters `pirate` (seed 1) below `/allowed` and `secret` beside it."""
    filesystem = fsspec.filesystem("memory")
    for seed, path in ((1, "/allowed/pirate"), (66, "/secret")):
        filesystem.put(str(save_adapter(tmp_path / str(seed), seed)), path, recursive=True)
    yield filesystem
    filesystem.store.clear()
    filesystem.pseudo_dirs[:] = [""]


@pytest.fixture
def flaky(memory: MemoryFileSystem) -> type[FlakyStore]:
    fsspec.register_implementation("flaky", FlakyStore, clobber=True)
    FlakyStore.store, FlakyStore.reads = memory.store, []
    FlakyStore.break_after = FlakyStore.md5 = None
    return FlakyStore


def fetch(source: ObjectStoreSource, name: str, max_bytes: int = MAX_BYTES) -> str:
    with source.open(key(name), max_bytes) as adapter:
        return pack_directory(adapter, TINY, NO_BASE).digest


@pytest.fixture
def source(memory: MemoryFileSystem, tmp_path: Path) -> ObjectStoreSource:
    return ObjectStoreSource(["memory://empty", "memory://allowed"], download_dir=str(tmp_path / "downloads"))


def test_an_adapter_is_downloaded_and_nothing_is_left(source: ObjectStoreSource, tmp_path: Path) -> None:
    assert fetch(source, "pirate") == digest_of(1)
    assert list((tmp_path / "downloads").iterdir()) == []


def test_what_a_folder_says_of_the_use_is_read(
    source: ObjectStoreSource, memory: MemoryFileSystem, reader: UseReader
) -> None:
    for name, text in USE_FILES.items():
        memory.pipe(f"/allowed/pirate/{name}", text.encode())
    with source.open(key("pirate"), MAX_BYTES) as adapter:
        packed = pack_directory(adapter, TINY, NO_BASE, reader)
    assert parse_use(packed.traits.use) == USE
    assert packed.digest != digest_of(1)


def test_what_is_not_below_the_urls_is_not_there(source: ObjectStoreSource) -> None:
    for name in ("secret", "allowed/pirate", "nobody", "pirate/adapter_config.json"):
        with pytest.raises(NotThere):
            fetch(source, name)


def _pickle(memory: MemoryFileSystem) -> None:
    memory.mv(f"/allowed/pirate/{WEIGHTS}", "/allowed/pirate/adapter_model.bin")


def _damage(memory: MemoryFileSystem) -> None:
    memory.pipe(f"/allowed/pirate/{WEIGHTS}", b"\xff" * 100)


@pytest.mark.parametrize(
    ("damage", "max_bytes", "reason"),
    [
        (_pickle, MAX_BYTES, "adapter_model.bin is a pickle"),
        (_damage, MAX_BYTES, "its header has 18446744073709551615 bytes"),
        (lambda memory: None, 1000, "more than the 1000 that an adapter of this model can have"),
    ],
)
def test_what_is_refused_is_named_and_leaves_nothing(
    source: ObjectStoreSource,
    memory: MemoryFileSystem,
    tmp_path: Path,
    damage: Callable[[MemoryFileSystem], None],
    max_bytes: int,
    reason: str,
) -> None:
    damage(memory)
    with pytest.raises(Unusable, match=reason):
        fetch(source, "pirate", max_bytes)
    assert list(tmp_path.glob("downloads/*")) == []


def test_an_interrupted_download_is_continued_where_it_broke_off(flaky: type[FlakyStore], tmp_path: Path) -> None:
    source = ObjectStoreSource(["flaky://allowed"], download_dir=str(tmp_path / "downloads"))
    size = len(flaky.store[f"/allowed/pirate/{WEIGHTS}"].getvalue())
    flaky.break_after = 5000
    with pytest.raises(Unreachable, match=f"{WEIGHTS} cannot be downloaded: ConnectionResetError"):
        fetch(source, "pirate")
    flaky.break_after = None
    assert fetch(source, "pirate") == digest_of(1)
    assert flaky.reads == [(0, 5000), (5000, size - 5000)]
    assert list((tmp_path / "downloads").iterdir()) == []


def test_a_download_of_an_older_version_is_not_continued(flaky: type[FlakyStore], tmp_path: Path) -> None:
    source = ObjectStoreSource(["flaky://allowed"], download_dir=str(tmp_path / "downloads"))
    flaky.break_after = 5000
    with pytest.raises(Unreachable):
        fetch(source, "pirate")
    flaky.break_after = None
    newer = save_adapter(tmp_path / "newer", seed=2)
    fsspec.filesystem("memory").put(str(newer / WEIGHTS), f"/allowed/pirate/{WEIGHTS}")
    flaky.reads.clear()
    assert fetch(source, "pirate") == digest_of(2)
    assert flaky.reads[0][0] == 0
    assert list((tmp_path / "downloads").iterdir()) == []


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_checksum_that_the_store_tells_is_checked(flaky: type[FlakyStore], tmp_path: Path, is_damaged: bool) -> None:
    source = ObjectStoreSource(["flaky://allowed"], download_dir=str(tmp_path / "downloads"))
    content = flaky.store[f"/allowed/pirate/{WEIGHTS}"].getvalue()
    flaky.md5 = hashlib.md5(content + b"x" * is_damaged).digest()
    if is_damaged:
        with pytest.raises(Unusable, match=f"{WEIGHTS} arrived damaged"):
            fetch(source, "pirate")
    else:
        assert fetch(source, "pirate") == digest_of(1)


def test_a_store_that_cannot_be_asked_is_unreachable(flaky: type[FlakyStore], monkeypatch: pytest.MonkeyPatch) -> None:
    class Refused(Exception):
        """As HTTP clients raise: no OSError."""

    def refuse(*args: object, **kwargs: object) -> None:
        raise Refused("no entry")

    monkeypatch.setattr(flaky, "ls", refuse)
    with pytest.raises(Unreachable, match="the store cannot be asked: Refused: no entry"):
        fetch(ObjectStoreSource(["flaky://allowed"]), "pirate")


def test_links_out_of_a_local_prefix_are_refused(tmp_path: Path) -> None:
    save_adapter(tmp_path / "secret", seed=66)
    save_adapter(tmp_path / "allowed" / "pirate", seed=1)
    (tmp_path / "allowed" / "folder").symlink_to(tmp_path / "secret")
    (tmp_path / "allowed" / "files").mkdir()
    for name in ("adapter_config.json", WEIGHTS):
        (tmp_path / "allowed" / "files" / name).symlink_to(tmp_path / "secret" / name)
    source = ObjectStoreSource([f"file://{tmp_path}/allowed"], download_dir=str(tmp_path / "downloads"))
    with pytest.raises(Unusable, match=r"adapter_config.json is a link out of the source's directory"):
        fetch(source, "folder")
    with pytest.raises(NotThere, match="it has no adapter_config"):
        fetch(source, "files")
    assert fetch(source, "pirate") == digest_of(1)


def test_an_adapter_is_found_by_its_url(source: ObjectStoreSource, memory: MemoryFileSystem) -> None:
    memory.cp("/allowed/pirate", "/allowed/team/2026/run-3", recursive=True)
    for url in ("memory://allowed/pirate", "memory://allowed/team/2026/run-3"):
        assert source.covers(url)
        with source.open_path(url, MAX_BYTES) as adapter:
            assert (adapter.name, pack_directory(adapter, TINY, NO_BASE).digest) == ("", digest_of(1))
    assert source.covers("memory://allowed/nobody")
    with pytest.raises(NotThere), source.open_path("memory://allowed/nobody", MAX_BYTES):
        pass


@pytest.mark.parametrize(
    "url",
    [
        "memory://secret",
        "memory://allowed",
        "memory://allowed/../secret",
        "memory://allowed-2/pirate",
        "memory://other/allowed/pirate",
        "s3://allowed/pirate",
        "allowed/pirate",
        "/allowed/pirate",
        "",
    ],
)
def test_a_url_that_is_not_below_the_operators_is_not_covered(source: ObjectStoreSource, url: str) -> None:
    assert not source.covers(url)


def test_a_local_url_that_leads_out_by_a_link_is_not_covered(tmp_path: Path) -> None:
    save_adapter(tmp_path / "root" / "pirate", seed=1)
    save_adapter(tmp_path / "secret", seed=66)
    (tmp_path / "root" / "innocent").symlink_to(tmp_path / "secret")
    source = ObjectStoreSource([f"file://{tmp_path}/root"], download_dir=str(tmp_path / "downloads"))
    assert source.covers(f"file://{tmp_path}/root/pirate")
    assert not source.covers(f"file://{tmp_path}/root/innocent")


def test_files_of_two_versions_are_no_adapter(memory: MemoryFileSystem, tmp_path: Path) -> None:
    """Both have the sizes of the first version."""
    other = save_adapter(tmp_path / "other", seed=2)

    class Replaced(MemoryFileSystem):  # type: ignore[misc]
        protocol = "replaced"
        store: ClassVar[dict[str, Any]] = memory.store
        pseudo_dirs: ClassVar[list[str]] = memory.pseudo_dirs

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return MemoryFileSystem._strip_protocol(path.replace("replaced://", "memory://"))

        def _open(self, path: str, mode: str = "rb", **kwargs: Any) -> Any:
            content = io.BytesIO(self.store[self._strip_protocol(path)].getvalue())
            memory.put(str(other / Path(path).name), path)
            return content

    fsspec.register_implementation("replaced", Replaced, clobber=True)
    source = ObjectStoreSource(["replaced://allowed"], download_dir=str(tmp_path / "downloads"))
    with pytest.raises(Unreachable, match="changed while it was downloaded"):
        fetch(source, "pirate")
