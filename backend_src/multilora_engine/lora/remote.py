"""`RemoteAdapters`: adapters that no tier has, on their way from a source into the host tier, or sets in the making."""

from __future__ import annotations

import logging
import math
import queue
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any

from multilora_engine.errors import (
    AdapterCacheFull,
    AdapterConflict,
    AdapterNotFound,
    AdapterVersionChanged,
    AdapterVersionNotFound,
    FetchConflict,
    InternalError,
    InvalidRequest,
    PathNotCovered,
    RequestError,
)
from multilora_engine.histogram import Histogram
from multilora_engine.log_lines import one_line
from multilora_engine.lora.host_tier import PlannedAdapter
from multilora_engine.lora.life_cycle import OnEvent, TierStats, adapter_event
from multilora_engine.lora.manager import LoRAManager
from multilora_engine.lora.names import TaskId, number_of, scoped_task_id, tenant_of
from multilora_engine.lora.sources.source import AdapterKey, FolderChange
from multilora_engine.lora.versions import ANY_VERSION, Expectation
from multilora_wire.adapter_info import AdapterInfo, Status

if TYPE_CHECKING:
    from multilora_engine.lora.sources.fetcher import AdapterFetcher

_logger = logging.getLogger(__name__)

_MISSES = (AdapterConflict, AdapterNotFound, AdapterVersionChanged, AdapterVersionNotFound, PathNotCovered)
"""Errors that are no more than a client's mistake."""

_MAX_REFRESHES = 2
"""Changed folders that are read at once: threads are left for adapters that requests wait for."""

_NUM_PATHS = 1024
"""How many adapters' paths are remembered before those of adapters that no tier has are forgotten."""

BeginBuild = Callable[[], tuple[Future[PlannedAdapter], Callable[[], None]]]
"""Begins to plan a set. The function of the result is that of `Fetch.on_end`."""


def _nothing() -> None:
    """Nothing is left to do."""


@dataclass(eq=False)
class Fetch:
    """An adapter under way. Only `RemoteAdapters` changes it.

    future: its result is a FetchedAdapter, or a PlannedAdapter.
    path: where it comes from, when that was asked for; empty: from where the sources have it under the key.
    source: the only one that is asked; empty: the first one that has it.
    set_digest: of a set that is made of other adapters; empty for an adapter that a source has.
    tenant: the owner of the set, empty for none. Sources have adapters that belong to no tenant.
    replaces_set: as of `LoRAManager.put`.
    on_end: called when the fetch has ended without its set, or is dropped.
    stale_digest: of the cached adapter whose folder has changed; empty for an adapter that no tier had.
    num_waiting: the requests and operators that wait for it. expectations: of all who have waited for it.
    present, found: once the adapter has come, the digest that its task id had until then, and the adapter's own.
    is_done: it has ended; then `error` tells why there is no adapter, if there is none.
    arrived: that of the adapter which it brought, see `CachedAdapter`.
    """

    key: AdapterKey
    path: str
    future: Future[Any]
    source: str = ""
    set_digest: str = ""
    tenant: str = ""
    replaces_set: bool = False
    on_end: Callable[[], None] = _nothing
    stale_digest: str = ""
    num_waiting: int = 0
    expectations: set[Expectation] = field(default_factory=set)
    present: str = ""
    found: str = ""
    is_done: bool = False
    error: RequestError | None = None
    arrived: Future[None] | None = None
    started: float = field(default_factory=time.perf_counter)

    @property
    def task_id(self) -> TaskId:
        """The adapter as the engine knows it."""
        return scoped_task_id(self.tenant, self.key.lora_task_id)

    @property
    def asked(self) -> tuple[TaskId, str]:
        """What was asked for: the same for all who wait for one fetch. A set has a digest, and no path has its form."""
        return self.task_id, f"set {self.set_digest}" if self.set_digest else self.path

    def add(self, expectation: Expectation) -> None:
        """One more waits for it."""
        self.num_waiting += 1
        self.expectations.add(expectation)

    def check(self, expectation: Expectation) -> None:
        """Raises, once it has ended, the error for somebody who waited with this expectation."""
        if self.found:
            expectation.check(self.key.lora_task_id, self.key.name, self.present, self.found)
        if self.error is not None:
            raise self.error

    def refusal(self) -> RequestError | None:
        """The error of an adapter that came and that nobody accepts. It takes no room and replaces no other version."""
        refused: RequestError | None = None
        for expectation in self.expectations:
            try:
                expectation.check(self.key.lora_task_id, self.key.name, self.present, self.found)
            except (AdapterVersionChanged, AdapterVersionNotFound) as error:
                refused = error
            else:
                return None
        return refused


class RemoteAdapters:
    """Belongs to the engine's thread, like the tiers; the fetching itself goes on elsewhere.

    However many ask for an adapter, it is fetched once. When nobody waits for it any more, a fetch that has not begun
    is dropped; one that has is finished, since the client that gave up may ask again.

    A cached adapter whose watched folder has changed is fetched again, and put as one that a client sends. So is an
    adapter on disk whose folder has changed since it was used last, while no server was there to see it.

    load_seconds: from the first to ask for an adapter until it was there.
    """

    def __init__(self, loras: LoRAManager, fetcher: AdapterFetcher | None, on_event: OnEvent) -> None:
        """fetcher: None if there are no sources."""
        self._loras = loras
        self._fetcher = fetcher
        self._on_event = on_event
        self._fetches: dict[tuple[TaskId, str], Fetch] = {}
        # Written by the fetcher's threads as well. With it, a step looks at no fetch that is still under way.
        self._to_take_up: queue.SimpleQueue[Fetch] = queue.SimpleQueue()
        self._read_at: dict[TaskId, tuple[str, str]] = {}
        self._max_paths = _NUM_PATHS
        self._num_fetched = 0
        self.load_seconds = Histogram()
        self._num_misses = 0
        self._num_failures = 0
        # Written by the thread that watches.
        self._changes: queue.SimpleQueue[FolderChange] = queue.SimpleQueue()
        self._stale: OrderedDict[TaskId, AdapterKey] = OrderedDict()
        self.is_watching = fetcher is not None and fetcher.watch(self._changes.put)
        known = loras.inventory.describe() if self.is_watching else []
        self._used_s: dict[TaskId, float] = {info.lora_task_id: info.last_used_s for info in known if not info.tenant}

    @property
    def is_busy(self) -> bool:
        """Whether `poll` may have something to take up, now or later. A watched folder changes that at any time."""
        return bool(self._fetches or self._stale) or not self._changes.empty()

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

    def fetch(self, key: AdapterKey, source: str = "", path: str = "", expectation: Expectation = ANY_VERSION) -> Fetch:
        """Wait for an adapter that no tier has, or for the one at `path`: until `poll` gives the fetch, or `give_up`.

        source: asks only the source of this name. expectation: an adapter that nobody who waits accepts is not put into
        the host tier.
        Raises AdapterNotFound (PathNotCovered with a path) if there are no sources, InvalidRequest if none has this
        name, FetchConflict if the adapter is on its way and may come from another source.
        """
        if self._fetcher is None:
            raise PathNotCovered(path, []) if path else AdapterNotFound(key.lora_task_id)
        fetch = self._fetches.get((key.lora_task_id, path))
        if fetch is None:
            fetch = self._begin(Fetch(key, path, self._fetcher.fetch(key, source, path), source=source))
        elif source not in ("", fetch.source):
            raise FetchConflict(key.lora_task_id, key.name, fetch.source, source)
        fetch.add(expectation)
        return fetch

    def has_from(self, lora_task_id: TaskId, path: str, demanded: str = "") -> bool:
        """Whether the current version of an adapter, in any tier, is the one that was last read at this path.

        demanded: the digest that the version must have: another version may be at the path now. Empty: any.
        """
        known_path, digest = self._read_at.get(lora_task_id, ("", ""))
        is_current = known_path == path and self._loras.inventory.digest(lora_task_id) == digest
        return is_current and demanded in ("", digest)

    def build(
        self,
        task_id: TaskId,
        name: str,
        digest: str,
        begin: BeginBuild,
        replaces_set: bool,
        expectation: Expectation = ANY_VERSION,
    ) -> Fetch:
        """Wait for a set of this digest, as `fetch` does for an adapter. `begin` is called unless it is under way."""
        key, tenant = AdapterKey(number_of(task_id), name), tenant_of(task_id)
        fetch = self._fetches.get((task_id, f"set {digest}"))
        if fetch is None:
            future, on_end = begin()
            fetch = self._begin(Fetch(key, "", future, "", digest, tenant, replaces_set, on_end))
        fetch.add(expectation)
        return fetch

    @property
    def num_builds(self) -> int:
        """The sets that are under way."""
        return sum(bool(fetch.set_digest) for fetch in self._fetches.values())

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
            del self._fetches[fetch.asked]
            fetch.on_end()

    def poll(self) -> Iterator[Fetch]:
        """The fetches that have ended since, one by one, each adapter being in the host tier when it is given.

        A caller that wants to use one has to pin it before asking for the next. Does not wait.
        """
        for _ in range(self._changes.qsize()):
            self._note_change(self._changes.get_nowait())
        if self._stale:
            self._refresh()
        for _ in range(self._to_take_up.qsize()):
            fetch = self._to_take_up.get_nowait()
            is_under_way = self._fetches.get(fetch.asked) is fetch
            if is_under_way and (fetch.future.done() or self._is_superfluous(fetch)):
                del self._fetches[fetch.asked]
                fetch.error = self._take_up(fetch)
                fetch.on_end()
                fetch.is_done = True
                yield fetch

    def wait(self, timeout_s: float) -> None:
        """Wait, in a caller that has nothing else to do, until `poll` has a fetch to take up, if any is under way."""
        wait([fetch.future for fetch in self._fetches.values()], timeout_s, FIRST_COMPLETED)

    def describe(self) -> list[AdapterInfo]:
        """The adapters that are on their way from a source."""
        return [_describe(fetch.key, "DOWNLOADING") for fetch in self._fetches.values() if not fetch.set_digest]

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
            assert fetch.asked == asked
            assert not fetch.is_done
            assert not fetch.future.cancelled()

    def _is_superfluous(self, fetch: Fetch) -> bool:
        """Whether a client has uploaded the adapter meanwhile. The adapter at a path may be another version of it."""
        if fetch.path or fetch.set_digest:
            return False
        return self._loras.inventory.digest(fetch.task_id) not in ("", fetch.stale_digest)

    def _note_change(self, change: FolderChange) -> None:
        """An adapter that was read at the folder's path is compared again when a request has the path."""
        task_id = change.key.lora_task_id
        if change.reason:
            self._note_failure(change.key, change.reason)
        elif change.changed_s is None or change.changed_s > self._used_s.get(task_id, math.inf):
            self._forget_paths(change.key)
            self._stale[task_id] = change.key

    def _refresh(self) -> None:
        """Fetch cached adapters again whose folders have changed, by their names as ever: a folder may be one that
        another source's hides.
        """
        num_refreshes = sum(bool(fetch.stale_digest) for fetch in self._fetches.values())
        for _ in range(min(len(self._stale), _MAX_REFRESHES - num_refreshes)):
            task_id, key = self._stale.popitem(last=False)
            present = self._loras.inventory.digest(task_id)
            if (task_id, "") in self._fetches:
                self._stale[task_id] = key  # That fetch may have read the version before.
            elif present:
                assert self._fetcher is not None
                fetch = self._begin(Fetch(key, "", self._fetcher.fetch(key), stale_digest=present))
                # An adapter that a client has unloaded meanwhile stays away until somebody asks for it.
                fetch.add(Expectation(replaced=present))

    def _forget_paths(self, key: AdapterKey) -> None:
        """What was read at paths that may lead to a changed folder is to be read again."""
        parts = PurePosixPath(str(key)).parts
        self._read_at = {
            task_id: read
            for task_id, read in self._read_at.items()
            if PurePosixPath(read[0]).parts[-len(parts) :] != parts
        }

    def _note_failure(self, key: AdapterKey, reason: object) -> None:
        self._num_failures += 1
        _logger.warning("adapter %s could not be fetched: %s", key, reason)
        self._on_event(adapter_event("fetch_failed", key.lora_task_id, digest=""))

    def _begin(self, fetch: Fetch) -> Fetch:
        self._fetches[fetch.asked] = fetch
        fetch.future.add_done_callback(lambda _: self._to_take_up.put(fetch))
        return fetch

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
        if fetch.set_digest:
            return error
        if isinstance(error, _MISSES) and not (fetch.stale_digest and isinstance(error, AdapterConflict)):
            # Told to the client, and neither to the log nor to the events.
            self._num_misses += 1
            return error
        self._note_failure(fetch.key, error)
        return error

    def _put(self, fetch: Fetch) -> RequestError | None:
        fetched = fetch.future.result(timeout=0)
        if isinstance(fetched, PlannedAdapter):
            return self._put_set(fetch, fetched)
        fetch.present, fetch.found = self._loras.inventory.digest(fetch.task_id), fetched.packed.digest
        if (refusal := fetch.refusal()) is not None:
            return refusal
        self._num_fetched += 1
        self.load_seconds.observe(time.perf_counter() - fetch.started)
        try:
            name = fetched.name or fetch.key.name
            fetch.arrived = self._loras.put(fetch.key.lora_task_id, fetched.packed, name, "downloaded").arrived
        except (AdapterCacheFull, AdapterConflict, InvalidRequest) as error:
            return error
        if fetch.path:
            self._note_path(fetch.task_id, fetch.path, fetched.packed.digest)
        self.supersede(fetch.key.lora_task_id)
        return None

    def _note_path(self, task_id: TaskId, path: str, digest: str) -> None:
        self._read_at[task_id] = (path, digest)
        if len(self._read_at) > self._max_paths:
            known = self._loras.inventory.is_known
            self._read_at = {task_id: read for task_id, read in self._read_at.items() if known(task_id)}
            self._max_paths = max(_NUM_PATHS, 2 * len(self._read_at))

    def _put_set(self, fetch: Fetch, planned: PlannedAdapter) -> RequestError | None:
        fetch.present, fetch.found = self._loras.inventory.digest(fetch.task_id), planned.digest
        if (refusal := fetch.refusal()) is not None:
            return refusal
        try:
            adapter = self._loras.put(fetch.task_id, planned, fetch.key.name, "combined", fetch.replaces_set)
        except (AdapterCacheFull, AdapterConflict, InvalidRequest) as error:
            return error
        fetch.on_end = _nothing  # The host tier lets the members go.
        fetch.arrived = adapter.arrived
        self.supersede(fetch.task_id)
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
