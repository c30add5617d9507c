"""`RemoteAdapters`: adapters that no tier has, on their way from a source into the host tier."""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from multilora_engine.errors import (
    AdapterCacheFull,
    AdapterConflict,
    AdapterNotFound,
    InternalError,
    PathNotCovered,
    RequestError,
)
from multilora_engine.histogram import Histogram
from multilora_engine.log_lines import one_line
from multilora_engine.lora.arrivals import LoRAManager
from multilora_engine.lora.life_cycle import OnEvent, TierStats, adapter_event
from multilora_engine.lora.names import TaskId
from multilora_engine.lora.sources.source import AdapterKey
from multilora_wire.adapter_info import AdapterInfo, Status

if TYPE_CHECKING:
    from multilora_engine.lora.sources.fetcher import AdapterFetcher, FetchedAdapter

_logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Fetch:
    """An adapter under way. Only `RemoteAdapters` changes it.

    path: where it comes from, when that was asked for; empty: from where the sources have it under the key.
    num_waiting: the requests and operators that wait for it.
    is_done: it has ended; then `error` tells why there is no adapter, if there is none.
    arrived: that of the adapter which it brought, see `CachedAdapter`.
    """

    key: AdapterKey
    path: str
    future: Future[FetchedAdapter]
    num_waiting: int = 0
    is_done: bool = False
    error: RequestError | None = None
    arrived: Future[None] | None = None
    started: float = field(default_factory=time.perf_counter)


class RemoteAdapters:
    """Belongs to the engine's thread, like the tiers; the fetching itself goes on elsewhere.

    However many ask for an adapter, it is fetched once. When nobody waits for it any more, a fetch that has not begun
    is dropped; one that has is finished, since the client that gave up may ask again.

    load_seconds: from the first to ask for an adapter until it was there.
    """

    def __init__(self, loras: LoRAManager, fetcher: AdapterFetcher | None, on_event: OnEvent) -> None:
        """fetcher: None if there are no sources."""
        self._loras = loras
        self._fetcher = fetcher
        self._on_event = on_event
        self._fetches: dict[tuple[int, str], Fetch] = {}
        # Written by the fetcher's threads as well. With it, a step looks at no fetch that is still under way.
        self._to_take_up: queue.SimpleQueue[Fetch] = queue.SimpleQueue()
        self._num_fetched = 0
        self.load_seconds = Histogram()
        self._num_misses = 0
        self._num_failures = 0

    @property
    def is_busy(self) -> bool:
        """Whether `poll` may have something to take up, now or later."""
        return bool(self._fetches)

    @property
    def stats(self) -> TierStats:
        """num_adapters: under way. hits, copies: adapters that arrived. misses: that no source has."""
        return TierStats(
            num_adapters=len(self._fetches),
            hits=self._num_fetched,
            misses=self._num_misses,
            copies=self._num_fetched,
            copy_seconds=self.load_seconds.total,
            failures=self._num_failures,
        )

    def fetch(self, key: AdapterKey, source: str = "", path: str = "") -> Fetch:
        """Wait for an adapter that no tier has, or for the one at `path`: until `poll` gives the fetch, or `give_up`.

        source: asks only the source of this name, unless a fetch is under way already.
        Raises AdapterNotFound (PathNotCovered with a path) if there are no sources, InvalidRequest if none has this
        name.
        """
        if self._fetcher is None:
            raise PathNotCovered(path, []) if path else AdapterNotFound(key.lora_task_id)
        asked = key.lora_task_id, path
        if asked not in self._fetches:
            fetch = self._fetches[asked] = Fetch(key, path, self._fetcher.fetch(key, source, path))
            fetch.future.add_done_callback(lambda _: self._to_take_up.put(fetch))
        fetch = self._fetches[asked]
        fetch.num_waiting += 1
        return fetch

    def supersede(self, lora_task_id: TaskId) -> None:
        """An adapter was put under this task id: the next `poll` ends a fetch of it, unless it comes from a path."""
        # Sources have the server's adapters only, whose task ids are plain numbers.
        if isinstance(lora_task_id, int) and (fetch := self._fetches.get((lora_task_id, ""))) is not None:
            self._to_take_up.put(fetch)

    def give_up(self, fetch: Fetch) -> None:
        """Do not wait any longer for a fetch that is not done."""
        assert not fetch.is_done
        assert fetch.num_waiting > 0
        fetch.num_waiting -= 1
        if fetch.num_waiting == 0 and fetch.future.cancel():
            del self._fetches[fetch.key.lora_task_id, fetch.path]

    def poll(self) -> Iterator[Fetch]:
        """The fetches that have ended since, one by one, each adapter being in the host tier when it is given.

        A caller that wants to use one has to pin it before asking for the next. Does not wait.
        """
        for _ in range(self._to_take_up.qsize()):
            fetch = self._to_take_up.get_nowait()
            asked = fetch.key.lora_task_id, fetch.path
            is_under_way = self._fetches.get(asked) is fetch
            if is_under_way and (fetch.future.done() or self._is_superfluous(fetch)):
                del self._fetches[asked]
                fetch.error = self._take_up(fetch)
                fetch.is_done = True
                yield fetch

    def wait(self, timeout_s: float) -> None:
        """Wait, in a caller that has nothing else to do, until `poll` has a fetch to take up, if any is under way."""
        wait([fetch.future for fetch in self._fetches.values()], timeout_s, FIRST_COMPLETED)

    def describe(self) -> list[AdapterInfo]:
        """The adapters under way."""
        return [_describe(fetch.key, "DOWNLOADING") for fetch in self._fetches.values()]

    def list_sources(self) -> Future[list[AdapterKey]]:
        """The adapters of the sources, as far as these can tell, in a tier or not."""
        if self._fetcher is not None:
            return self._fetcher.list_keys()
        nothing: Future[list[AdapterKey]] = Future()
        nothing.set_result([])
        return nothing

    def close(self) -> None:
        if self._fetcher is not None:
            self._fetcher.close()

    def check_integrity(self) -> None:
        """For tests, after every step."""
        for asked, fetch in self._fetches.items():
            assert (fetch.key.lora_task_id, fetch.path) == asked
            assert not fetch.is_done
            assert not fetch.future.cancelled()

    def _is_superfluous(self, fetch: Fetch) -> bool:
        """Whether a client has uploaded the adapter meanwhile. The adapter at a path may be another version of it."""
        return not fetch.path and self._loras.inventory.is_known(fetch.key.lora_task_id)

    def _take_up(self, fetch: Fetch) -> RequestError | None:
        """Put the adapter into the host tier; why it is not there, if it is not."""
        if self._is_superfluous(fetch):
            fetch.future.cancel()
            return None
        error = fetch.future.exception(timeout=0)
        if error is None:
            error = self._put(fetch)
        if error is None:
            return None
        if not isinstance(error, RequestError):
            _logger.error("adapter %s could not be taken up", fetch.key, exc_info=error)
            error = InternalError(f"{type(error).__name__}: {one_line(str(error), 200)}")
        if isinstance(error, AdapterNotFound | AdapterConflict | PathNotCovered):
            # No more than a client's mistake: told to the client, and neither to the log nor to the events.
            self._num_misses += 1
            return error
        self._num_failures += 1
        _logger.warning("adapter %s could not be fetched: %s", fetch.key, error)
        self._on_event(adapter_event("fetch_failed", fetch.key.lora_task_id, digest=""))
        return error

    def _put(self, fetch: Fetch) -> AdapterCacheFull | AdapterConflict | None:
        fetched = fetch.future.result(timeout=0)
        self._num_fetched += 1
        self.load_seconds.observe(time.perf_counter() - fetch.started)
        try:
            name = fetched.name or fetch.key.name
            fetch.arrived = self._loras.put(fetch.key.lora_task_id, fetched.packed, name, "downloaded").arrived
        except (AdapterCacheFull, AdapterConflict) as error:
            return error
        self.supersede(fetch.key.lora_task_id)
        return None


def describe_remote(key: AdapterKey) -> AdapterInfo:
    """An adapter that a source has and no request has asked for."""
    return _describe(key, "NOT_DOWNLOADED")


def _describe(key: AdapterKey, status: Status) -> AdapterInfo:
    return AdapterInfo(
        lora_task_id=key.lora_task_id,
        name=key.name,
        digest="",
        status=status,
        location="REMOTE",
        bytes=0,
        ranks=(),
        num_pins=0,
        is_pinned=False,
        last_used_s=0.0,
        num_hits=0,
    )
