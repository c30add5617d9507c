"""Which source gives an adapter, and how each failure of a source ends."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
from support.adapters import TINY
from support.fronts import TIMEOUT_S
from support.sources import NO_BASE, GivenSource, digest_of, key, save_adapter

from multilora_engine.errors import (
    AdapterNotFound,
    AdapterUnusable,
    InternalError,
    InvalidRequest,
    PathNotCovered,
    RequestError,
    SourceUnavailable,
)
from multilora_engine.lora.sources import fetcher as fetcher_module
from multilora_engine.lora.sources.directory import DirectorySource
from multilora_engine.lora.sources.fetcher import AdapterFetcher, DaemonThreads
from multilora_engine.lora.sources.source import (
    AdapterKey,
    AdapterSource,
    FolderChange,
    LocalAdapter,
    Unreachable,
    Unusable,
)


class FailingSource(GivenSource):
    """Raises the same whatever it is asked."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    @contextmanager
    def open(self, key: AdapterKey, max_bytes: int) -> Iterator[LocalAdapter]:
        raise self.error
        yield

    def list_keys(self) -> Iterator[AdapterKey]:
        raise self.error


@pytest.fixture
def folders(tmp_path: Path) -> dict[str, Path]:
    return {name: save_adapter(tmp_path / name, seed) for seed, name in enumerate(("a", "b", "c"))}


@contextmanager
def fetcher_of(**sources: AdapterSource) -> Iterator[AdapterFetcher]:
    fetcher = AdapterFetcher(sources, TINY, NO_BASE, num_threads=2)
    yield fetcher
    fetcher.close()


def test_a_watched_source_is_scanned_until_the_fetcher_is_closed(
    tmp_path: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetcher_module, "_SCAN_INTERVAL_S", 0.001)
    changes: queue.SimpleQueue[FolderChange] = queue.SimpleQueue()
    source = DirectorySource(str(tmp_path), watch=True)
    first_scans = [source.scan(), source.scan()]
    with fetcher_of(plain=DirectorySource(str(tmp_path)), given=GivenSource(), watched=source) as fetcher:
        assert fetcher.watch(changes.put)
        folders["a"].rename(tmp_path / "d")
        assert changes.get(timeout=TIMEOUT_S) == FolderChange(key("d"))
    with fetcher_of(plain=DirectorySource(str(tmp_path)), given=GivenSource()) as fetcher:
        assert not fetcher.watch(changes.put)
    assert [[change.reason for change in scan] for scan in first_scans] == [[], [""] * len(folders)]


def test_the_first_source_that_has_an_adapter_gives_it(folders: dict[str, Path]) -> None:
    first, second = GivenSource({"x": folders["a"]}), GivenSource({"x": folders["b"], "y": folders["c"]})
    with fetcher_of(first=first, second=second) as fetcher:
        assert fetcher.fetch(key("x")).result(TIMEOUT_S).packed.digest == digest_of(0)
        assert fetcher.fetch(key("y")).result(TIMEOUT_S).packed.digest == digest_of(2)
        assert fetcher.fetch(key("x"), source="second").result(TIMEOUT_S).packed.digest == digest_of(1)
    assert (first.asked, second.asked) == (["x", "y"], ["y", "x"])


def test_an_adapter_that_no_source_has_is_not_found_and_each_tells_why() -> None:
    with fetcher_of(first=GivenSource(), second=GivenSource()) as fetcher:
        error = fetcher.fetch(key("x")).exception(TIMEOUT_S)
    assert isinstance(error, AdapterNotFound)
    assert "not found in cache. Please send LoRA weights with request" in str(error)
    assert "first: not among the given ones; second: not among the given ones" in str(error)
    assert str(error.under_name("x")).startswith("LoRA adapter 'x' not found in cache")


@pytest.mark.parametrize(
    ("failure", "kind", "message"),
    [
        (
            Unusable("it is a pickle"),
            AdapterUnusable,
            "LoRA adapter 'x' of source 'first' cannot be used: it is a pickle",
        ),
        (
            Unreachable("no route"),
            SourceUnavailable,
            "LoRA adapter 'x' cannot be had from source 'first' now: no route",
        ),
        (KeyError("oops"), InternalError, "source 'first' failed on adapter 'x': KeyError: 'oops'"),
    ],
)
def test_a_source_that_fails_ends_the_search(
    folders: dict[str, Path], failure: Exception, kind: type[RequestError], message: str
) -> None:
    second = GivenSource({"x": folders["a"], "y": folders["b"]})
    with fetcher_of(first=FailingSource(failure), second=second) as fetcher:
        error = fetcher.fetch(key("x")).exception(TIMEOUT_S)
        assert second.asked == [], "another source's adapter of the same name may be another adapter"
        assert fetcher.fetch(key("y"), source="second").result(TIMEOUT_S).packed.digest == digest_of(1)
    assert type(error) is kind
    assert str(error) == message


def test_an_unknown_source_is_refused_by_name() -> None:
    with (
        fetcher_of(first=GivenSource(), second=GivenSource()) as fetcher,
        pytest.raises(InvalidRequest, match="there is no source 'third'; lora_sources has first, second"),
    ):
        fetcher.fetch(key("x"), source="third")


def test_what_sources_have_is_listed_even_if_one_of_them_cannot_tell(folders: dict[str, Path]) -> None:
    with fetcher_of(broken=FailingSource(OSError("gone")), sound=GivenSource(folders)) as fetcher:
        assert set(fetcher.list_keys().result(TIMEOUT_S)) == set(map(key, folders))


def test_a_job_that_has_not_begun_can_be_cancelled() -> None:
    threads, gate, ran = DaemonThreads(1, "test"), threading.Event(), []
    first = threads.submit(gate.wait)
    second = threads.submit(lambda: ran.append("second"))
    third = threads.submit(lambda: ran.append("third"))
    assert second.cancel()
    gate.set()
    third.result(TIMEOUT_S)
    threads.close()
    assert first.result(TIMEOUT_S)
    assert ran == ["third"]


def test_the_first_source_that_covers_a_path_gives_what_is_there(folders: dict[str, Path], tmp_path: Path) -> None:
    sources = {"given": GivenSource(), "a": DirectorySource(str(folders["a"])), "all": DirectorySource(str(tmp_path))}
    with fetcher_of(**sources) as fetcher:
        for name, seed in (("a", 0), ("b", 1)):
            fetched = fetcher.fetch(key("x"), path=str(folders[name])).result(TIMEOUT_S)
            assert (fetched.packed.digest, fetched.name) == (digest_of(seed), "")
        assert isinstance(fetcher.fetch(key("x"), "a", str(folders["b"])).exception(TIMEOUT_S), PathNotCovered)
        missing = fetcher.fetch(key("x"), path=str(tmp_path / "nobody")).exception(TIMEOUT_S)
    assert isinstance(missing, AdapterNotFound)
    assert f"nor at '{tmp_path}/nobody' in all: no such folder" in str(missing)


def test_a_path_that_no_source_covers_is_refused_without_a_word_of_what_they_cover(tmp_path: Path) -> None:
    with fetcher_of(given=GivenSource(), secret=DirectorySource(str(tmp_path))) as fetcher:
        error = fetcher.fetch(key("x"), path="/etc").exception(TIMEOUT_S)
    assert isinstance(error, PathNotCovered)
    assert (error.code, "none of the sources asked (given, secret) covers it" in str(error)) == ("INVALID_ARG", True)
    assert str(tmp_path) not in str(error)


def test_a_source_that_cannot_say_what_it_covers_fails_its_own_fetch_alone() -> None:
    class Confused(GivenSource):
        def covers(self, path: str) -> bool:
            raise OSError("the volume is gone")

        def open_path(self, path: str, max_bytes: int) -> AbstractContextManager[LocalAdapter]:
            raise AssertionError("no fetch comes so far")

    with fetcher_of(confused=Confused()) as fetcher:
        error = fetcher.fetch(key("x"), path="/there").exception(TIMEOUT_S)
    assert isinstance(error, InternalError)
    assert "source 'confused' failed on adapter 'x': OSError: the volume is gone" in str(error)
