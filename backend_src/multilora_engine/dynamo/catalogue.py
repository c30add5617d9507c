"""`FleetCatalogue`: takes adapters into the fleet and out of it, and tells the other workers.

`SourceReader` reads adapters from the worker's sources.
"""

from __future__ import annotations

import asyncio
import logging
import random
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Protocol

import msgspec

from multilora_engine.config import EngineConfig
from multilora_engine.dynamo.adapters import FleetAdapters
from multilora_engine.dynamo.cards import AdapterCard, card_of
from multilora_engine.dynamo.fleet_messages import NEW_VERSION, Announce, FindUpload, Forget, Found, ReadNews, Upload
from multilora_engine.dynamo.fleet_uploads import FleetUploads, Reader, digest_of, pages_of
from multilora_engine.dynamo.keyed_locks import KeyedLocks
from multilora_engine.dynamo.workers import WorkerGone, Workers, checked
from multilora_engine.errors import AdapterNotFound, InvalidRequest, PathNotCovered, RequestError
from multilora_engine.lora.names import TaskId, check_name, number_of, task_id_of, tenant_of
from multilora_engine.process.messages import adapter_header
from multilora_engine.text.tokenizer import Tokenizer
from multilora_wire.adapter_info import AdapterInfo
from multilora_wire.layout import AdapterLayout

if TYPE_CHECKING:
    from multilora_engine.lora.layout import PackedAdapter
    from multilora_engine.lora.sources.fetcher import AdapterFetcher


class SourceReader:
    """Reads the sources of the engine for its worker. The other workers get the adapter from this one, by digest.

    The sources are built when the first adapter is read: that imports torch, which takes seconds and 100 MB.
    """

    def __init__(self, config: EngineConfig, layout: AdapterLayout) -> None:
        self._config = config
        self._layout = layout
        self._lock = asyncio.Lock()
        self._fetcher: AdapterFetcher | None = None

    async def read(self, lora_task_id: int, name: str, source: str, path: str) -> PackedAdapter:
        """The adapter at `path`, from the source of that name only, if one is given.

        Raises PathNotCovered where no source covers the path, and the other RequestErrors of a fetch.
        """
        if not self._config.lora.lora_sources:
            raise PathNotCovered(path, [])
        async with self._lock:
            if self._fetcher is None:
                self._fetcher = await asyncio.to_thread(_build, self._config, self._layout)
        from multilora_engine.lora.sources.source import AdapterKey

        fetch = self._fetcher.fetch(AdapterKey(lora_task_id, name), source, path)
        try:
            return (await asyncio.wrap_future(fetch)).packed
        except AdapterNotFound as error:
            raise error.under_name(name) from None

    def close(self) -> None:
        """End the threads of the sources."""
        if self._fetcher is not None:
            self._fetcher.close()


def _build(config: EngineConfig, layout: AdapterLayout) -> AdapterFetcher:
    from multilora_engine.engine.build import build_fetcher
    from multilora_engine.lora.folder_use import UseReader

    tokenizer = Tokenizer(config.tokenizer_path or config.model_path)
    vocab_size = layout.sites.outer.vocab_size if layout.sites.outer else tokenizer.vocab_size
    fetcher = build_fetcher(config, layout, UseReader(tokenizer, config.model_path, vocab_size))
    assert fetcher is not None, "there are sources"
    return fetcher


_NEWS_INTERVAL_S = 2.0
"""A worker that was cut off hears the news that it missed within so many seconds."""

_NEWS_TIMEOUT_S = 10.0
_KEEP_TIMEOUT_S = 10.0
_NUM_FIRST_LOOKS = 10
_FIRST_LOOK_INTERVAL_S = 0.1

logger = logging.getLogger(__name__)


class AdapterLoader(Protocol):
    """The part of `EngineOperator` that is needed."""

    async def load(self, name: str) -> AdapterInfo: ...
    async def unload(self, lora_task_id: int, tenant: str = "") -> AdapterInfo: ...


class FleetCatalogue:
    """Makes an adapter that one worker takes in known to all; an adapter with a name has a card at each worker.

    Loading a name again moves it to the weights that are there now: new requests get these, running requests keep
    theirs, and no request waits. A worker that is new, or that was cut off, asks another worker for the news that it
    missed. Loads of one name run one after the other.
    """

    def __init__(
        self,
        uploads: FleetUploads,
        adapters: FleetAdapters,
        workers: Workers,
        operator: AdapterLoader,
        reader: Reader,
        layout: AdapterLayout,
    ) -> None:
        self._uploads = uploads
        self._adapters = adapters
        self._workers = workers
        self._operator = operator
        self._reader = reader
        self._layout = layout
        self._locks: KeyedLocks[int] = KeyedLocks()
        self._without_card: dict[TaskId, Upload] = {}
        self._seen: frozenset[int] = frozenset()  # the reachable workers, when they were last counted
        self._module_names = layout.sites.part_names

    async def take_piece(self, upload: Upload, offset: int, piece: bytes) -> Upload | None:
        """Take the next bytes of an upload. Returns the complete upload as all workers know it, None before.

        A client that sends other weights for an adapter of the sources names its task id only: the name stays with it.
        Raises RequestError, as `FleetUploads.outcome` does.
        """
        if not upload.name and not upload.header.tenant:
            upload = msgspec.structs.replace(upload, name=self._adapters.name_of(upload.header.lora_task_id))
        taken = await self._uploads.take_piece(upload, offset, piece)
        return None if taken is None else await self._spread(taken, upload)

    async def read(self, lora_task_id: int, name: str, source: str, path: str) -> Upload:
        """Read an adapter from a path in the sources, and make it known to all workers. Raises RequestError."""
        async with self._locks.held(lora_task_id):
            packed = await self._reader.read(lora_task_id, name, source, path)
            pages = await asyncio.to_thread(pages_of, packed)
            digest = await asyncio.to_thread(digest_of, packed, self._layout)
            upload = Upload(adapter_header(lora_task_id, packed), name, digest, len(pages), NEW_VERSION, path)
            return await self._spread(await self._uploads.add(upload, pages), upload)

    async def load(self, name: str, path: str = "") -> AdapterCard:
        """Load the adapter at `path`, or the one that the fleet or the sources have under `name`, and publish its card.

        Raises RequestError. If the card cannot be published, the adapter is forgotten.
        """
        self._adapters.check_free(check_name(name))
        task_id = task_id_of(name)
        if path:
            return self._card_of(await self.read(task_id, name, "", path))
        if await self._uploads.bring(task_id) and (upload := self._uploads.find(task_id)) is not None:
            card = self._card_of(upload)
        else:
            card = card_of(await self._operator.load(name), self._module_names)
        await self._adapters.show(card)
        return card

    async def unload(self, name: str) -> AdapterCard:
        """Make every worker forget the adapter. Raises RequestError if no card has the name."""
        card = await self._adapters.hide(check_name(name))
        if card is None:
            raise InvalidRequest(f"LoRA adapter {name!r} is not loaded; loaded are {len(self._adapters.cards)} others")
        forget = self._uploads.forget(task_id_of(name), name)
        await self._unload(task_id_of(name))
        if forget is not None:
            await self._workers.ask_all(forget)
        return card

    async def forget(self, task_id: TaskId, name: str) -> None:
        """Forget an adapter that every worker is told to unload: its card is withdrawn before the engine unloads it."""
        upload = self._uploads.find(task_id)
        if name := name or (upload.name if upload is not None else ""):
            await self._adapters.hide(name)
        self._uploads.forget(task_id)

    async def learn(self, news: Upload | Forget) -> None:
        """Take in another worker's news of an adapter, unless a later version is known."""
        if not self._uploads.learn(news):
            return
        if isinstance(news, Upload):
            await self._show(news)
            return
        if news.name and not news.tenant:
            await self._adapters.hide(news.name)
        await self._unload(news.task_id)

    async def hear_first_news(self) -> None:
        """Ask the fleet for all its news before the first request: an adapter's source may have an older version.

        A worker that finds no other worker within a second is the first one.
        """
        for _ in range(_NUM_FIRST_LOOKS):
            if self._workers.ids:
                break
            await asyncio.sleep(_FIRST_LOOK_INTERVAL_S)
        for worker_id in self._workers.ids:
            with suppress(RequestError):
                await self._ask_for_news(worker_id)
                return

    async def follow_news(self) -> None:
        """Ask another worker for missed news, again and again until cancelled; keep twice what a lost worker kept."""
        while True:
            try:
                await self._replace_keepers()
                for upload in list(self._without_card.values()):
                    await self._show_again(upload)
                if worker_ids := self._workers.ids:
                    await self._ask_for_news(random.choice(worker_ids))
            except Exception as error:
                # A worker's errors, and those of Dynamo's discovery, which have no types.
                logger.warning("the news of another worker did not come whole: %s", error)
            await asyncio.sleep(_NEWS_INTERVAL_S)

    async def _ask_for_news(self, worker_id: int) -> None:
        """Raises WorkerGone."""
        asked = ReadNews(self._uploads.state)
        try:
            async with asyncio.timeout(_NEWS_TIMEOUT_S), aclosing(self._workers.call(worker_id, asked)) as answers:
                async for answer in answers:
                    news = answer.upload if isinstance(answer, Found) else answer
                    if isinstance(news, Upload | Forget):
                        await self.learn(news)
        except TimeoutError:
            raise WorkerGone(f"a worker has not told its news within {_NEWS_TIMEOUT_S:g} s") from None

    async def _spread(self, upload: Upload, sent: Upload) -> Upload:
        """Publish the adapter's card and tell the others of the adapter. Returns the upload that counts then.

        sent: the upload as it came. Raises the error of a worker that refuses, and those of `FleetUploads.outcome`.
        """
        try:
            await self._show(upload)
        except Exception:
            self._uploads.forget(upload.task_id)
            await self._unload(upload.task_id)
            raise
        for answer in await self._workers.ask_all(Announce(upload)):
            # A worker that is lost asks for news when it is back.
            if isinstance(answer, RequestError) and not isinstance(answer, WorkerGone):
                raise answer
        if not self._uploads.replaces:
            await self._hear_of_rivals(upload)
            upload = self._uploads.outcome(sent)
        if not upload.place:
            await self._keep_twice(upload)
        return upload

    async def _hear_of_rivals(self, upload: Upload) -> None:
        """Learn other weights that another worker took at the same moment.

        It has heard of `upload` by now. If it still knows others, theirs is the later version.
        """
        asked = FindUpload(number_of(upload.task_id), tenant_of(upload.task_id))
        for answer in await self._workers.ask_all(asked):
            if isinstance(answer, Found) and answer.upload is not None:
                await self.learn(answer.upload)

    async def _replace_keepers(self) -> None:
        """Once a worker is gone, make another keep each adapter here that a client sent: it may be the only copy."""
        here = frozenset(self._workers.reachable)
        if self._seen - here:
            for upload in self._uploads.sent_and_here:
                await self._keep_twice(upload)
        self._seen = here

    async def _keep_twice(self, upload: Upload) -> None:
        """Make a second worker keep an adapter that a client sent: no source has it, and this worker may die."""
        for worker_id in self._workers.by_chance():
            try:
                checked(await self._workers.ask(worker_id, Announce(upload, keeps=True), _KEEP_TIMEOUT_S))
            except RequestError as error:
                logger.info("a worker does not keep an adapter: %s", error)
            else:
                return

    async def _show(self, upload: Upload) -> None:
        """Publish the card of an upload that has a name and no tenant, so that Dynamo's front finds it."""
        if upload.name and not upload.header.tenant:
            self._without_card[upload.task_id] = upload  # until its card is published: discovery may fail
            await self._adapters.show(self._card_of(upload))
            self._without_card.pop(upload.task_id, None)

    async def _show_again(self, upload: Upload) -> None:
        if self._uploads.find(upload.task_id) == upload:
            await self._show(upload)
        else:
            self._without_card.pop(upload.task_id, None)

    def _card_of(self, upload: Upload) -> AdapterCard:
        rows = upload.header.rows
        ranks = tuple(sorted({row.rank for row in rows if not row.is_tokens}))
        modules = tuple(self._module_names[module_id] for module_id in sorted({row.module_id for row in rows}))
        return AdapterCard(upload.name, upload.header.digest, ranks, modules)

    async def _unload(self, task_id: TaskId) -> None:
        try:
            await self._operator.unload(number_of(task_id), tenant_of(task_id))
        except RequestError as error:
            if error.code != "NOT_FOUND":  # no tier had it any more
                raise
