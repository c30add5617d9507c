"""`AdapterFetcher`: asks the sources for adapters, and packs the adapters they give, on threads of its own."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from multilora_engine.errors import (
    AdapterNotFound,
    AdapterUnusable,
    InternalError,
    InvalidRequest,
    PathNotCovered,
    RequestError,
    SourceUnavailable,
)
from multilora_engine.lora.folder_use import UseReader
from multilora_engine.lora.layout import PackedAdapter
from multilora_engine.lora.sources.packing import largest_adapter_bytes, pack_directory
from multilora_engine.lora.sources.source import (
    AdapterKey,
    AdapterSource,
    FolderChange,
    LocalAdapter,
    NotThere,
    PathSource,
    SourceError,
    Unreachable,
    Unusable,
    WatchedSource,
)
from multilora_wire.layout import AdapterLayout

_logger = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True)
class FetchedAdapter:
    """An adapter as a source had it. name: the source's own, empty without one."""

    packed: PackedAdapter
    name: str


NUM_THREADS = 4
"""Adapters that are fetched at once."""


_SCAN_INTERVAL_S = 3.0
"""Between two looks at the watched sources. A folder that has not changed in this time is at rest."""

_MAX_SCAN_SHARE = 0.05
"""Of the time, for scans of many thousand folders, which take the interpreter from the steps."""


class AdapterFetcher:
    """Sources are asked in the order they are configured in; the first that has the adapter gives it.

    A source that fails ends the search: the next one might have another adapter under the same name.
    """

    def __init__(
        self,
        sources: Mapping[str, AdapterSource],
        layout: AdapterLayout,
        base_model: Path,
        num_threads: int = NUM_THREADS,
        uses: UseReader | None = None,
    ) -> None:
        """base_model: the checkpoint that the adapters are for. uses: as of `pack_directory`."""
        self._sources = sources
        self._layout = layout
        self._base_model = base_model
        self._uses = uses
        self._max_bytes = largest_adapter_bytes(layout)
        self._fetchers = DaemonThreads(num_threads, "adapter-fetch")
        # A thread apart, so that no list of adapters waits for downloads.
        self._lister = DaemonThreads(1, "adapter-list")
        self._closing = threading.Event()

    def fetch(self, key: AdapterKey, source: str = "", path: str = "") -> Future[FetchedAdapter]:
        """The adapter, from the source of that name only, if one is given. The future's exception is a RequestError.

        path: take the adapter there instead of the one under the key; from the first source that covers it.
        Raises InvalidRequest if there is no such source.
        """
        if source and source not in self._sources:
            raise InvalidRequest(f"there is no source {source!r}; lora_sources has {', '.join(self._sources)}")
        names = [source] if source else list(self._sources)
        return self._fetchers.submit(lambda: self._fetch_path(key, names, path) if path else self._fetch(key, names))

    def list_keys(self) -> Future[list[AdapterKey]]:
        """The adapters of all the sources that can tell which they have."""
        return self._lister.submit(self._list_keys)

    def watch(self, on_change: Callable[[FolderChange], None]) -> bool:
        """Call this for every change of a watched source from now on, on a thread. False if none is watched."""
        sources = self._sources.items()
        watched = {name: s for name, s in sources if isinstance(s, WatchedSource) and s.is_watched}
        if watched:
            # Here, so that no adapter is read before its folder is known.
            _scan(watched, on_change)
            threading.Thread(target=self._watch, args=(watched, on_change), name="adapter-watch", daemon=True).start()
        return bool(watched)

    def close(self) -> None:
        """End the threads, each after the job it is at."""
        self._closing.set()
        self._fetchers.close()
        self._lister.close()

    def _watch(self, watched: Mapping[str, WatchedSource], on_change: Callable[[FolderChange], None]) -> None:
        took_s = 0.0
        while not self._closing.wait(max(_SCAN_INTERVAL_S, took_s / _MAX_SCAN_SHARE)):
            started = time.perf_counter()
            _scan(watched, on_change)
            took_s = time.perf_counter() - started

    def _fetch(self, key: AdapterKey, names: list[str]) -> FetchedAdapter:
        reasons = []
        for name in names:
            try:
                return self._fetch_from(name, key, partial(self._sources[name].open, key, self._max_bytes))
            except NotThere as error:
                reasons.append(f"{name}: {error}")
        raise AdapterNotFound(key.lora_task_id, f"nor in its sources: {'; '.join(reasons)}")

    def _fetch_path(self, key: AdapterKey, names: list[str], path: str) -> FetchedAdapter:
        for name in names:
            source = self._sources[name]
            if isinstance(source, PathSource) and _covers(source, path, name, key):
                try:
                    return self._fetch_from(name, key, partial(source.open_path, path, self._max_bytes))
                except NotThere as error:
                    raise AdapterNotFound(key.lora_task_id, f"nor at {path[:200]!r} in {name}: {error}") from error
        raise PathNotCovered(path, names)

    def _fetch_from(
        self, name: str, key: AdapterKey, open_source: Callable[[], AbstractContextManager[LocalAdapter]]
    ) -> FetchedAdapter:
        """Raises NotThere, or a RequestError."""
        started = time.perf_counter()
        try:
            with _failing_alone(name, key, NotThere, Unusable, Unreachable), open_source() as adapter:
                packed = pack_directory(adapter, self._layout, self._base_model, self._uses)
        except Unusable as error:
            raise AdapterUnusable(str(key), name, str(error)) from error
        except Unreachable as error:
            raise SourceUnavailable(str(key), name, str(error)) from error
        seconds = time.perf_counter() - started
        _logger.info("adapter %s fetched from source %s in %.2f s, revision %s", key, name, seconds, adapter.revision)
        return FetchedAdapter(packed, adapter.name)

    def _list_keys(self) -> list[AdapterKey]:
        known: dict[int, AdapterKey] = {}
        for name, source in self._sources.items():
            try:
                for key in source.list_keys():
                    known.setdefault(key.lora_task_id, key)
            except Exception:
                _logger.exception("source %s cannot tell which adapters it has", name)
        return list(known.values())


def _scan(watched: Mapping[str, WatchedSource], on_change: Callable[[FolderChange], None]) -> None:
    for name, source in watched.items():
        try:
            for change in source.scan():
                on_change(change)
        except Exception:
            _logger.exception("source %s cannot tell which adapters have changed", name)


def _covers(source: PathSource, path: str, name: str, key: AdapterKey) -> bool:
    with _failing_alone(name, key):
        return source.covers(path)


@contextmanager
def _failing_alone(name: str, key: AdapterKey, *expected: type[SourceError]) -> Iterator[None]:
    """Sources may be plug-ins of any kind: an error of one ends this fetch and nothing else."""
    try:
        yield
    except Exception as error:
        if isinstance(error, (RequestError, *expected)):
            raise
        _logger.exception("source %s failed on adapter %s", name, key)
        raise InternalError(
            f"source {name!r} failed on adapter {str(key)!r}: {type(error).__name__}: {error}"
        ) from None


class DaemonThreads:
    """A few threads that run jobs in order. Unlike an executor's they never hold up the end of the process."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._num_threads = num_threads
        for index in range(num_threads):
            threading.Thread(target=self._run, name=f"{name}-{index}", daemon=True).start()

    def submit(self, job: Callable[[], Result]) -> Future[Result]:
        future: Future[Result] = Future()
        self._jobs.put(lambda: _run_job(job, future))
        return future

    def close(self) -> None:
        for _ in range(self._num_threads):
            self._jobs.put(None)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


def _run_job(job: Callable[[], Result], future: Future[Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(job())
    except BaseException as error:
        future.set_exception(error)
