"""`FleetUploads`: the adapters that have come to the fleet, as a worker knows them."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Iterator
from contextlib import aclosing
from typing import TYPE_CHECKING, Protocol

import msgspec
from blake3 import blake3

from multilora_engine.dynamo.fleet_messages import FindUpload, Forget, Found, PagesPiece, ReadPages, Upload
from multilora_engine.dynamo.keyed_locks import KeyedLocks
from multilora_engine.dynamo.page_store import PageStore
from multilora_engine.dynamo.workers import PIECE_TIMEOUT_S, WorkerGone, Workers, checked
from multilora_engine.errors import AdapterConflict, AdapterNotFound, InvalidRequest, RequestError
from multilora_engine.lora.names import TaskId, label_of, number_of, tenant_of
from multilora_wire.layout import AdapterLayout

if TYPE_CHECKING:
    from multilora_engine.lora.layout import PackedAdapter

MAX_KNOWN = 16_384
"""The most uploads that a worker knows, unloaded ones included. Every worker forgets the oldest first, so that all
workers know the same."""

logger = logging.getLogger(__name__)


class AdapterStore(Protocol):
    """The part of `EngineOperator` that is needed."""

    async def put(self, upload: Upload, pages: bytearray) -> None: ...
    async def unload(self, lora_task_id: int, tenant: str = "") -> object: ...


class Reader(Protocol):
    """The part of `SourceReader` that is needed."""

    async def read(self, lora_task_id: int, name: str, source: str, path: str) -> PackedAdapter: ...


class FleetUploads:
    """Knows the latest upload of each task id that it has heard of, and gives it to the engine when a request needs it.

    Pages that are not here come from another worker, by their digest, which is checked: a worker that is new, or that
    was started again, asks the others and not the client. Pages that no worker has any more are read again from the
    source that they came from, if there was one, and must be the same. Calls for one task id run one after the other.
    """

    def __init__(
        self,
        engine: AdapterStore,
        workers: Workers,
        reader: Reader,
        layout: AdapterLayout,
        max_bytes: int,
        replaces: bool,
        max_known: int = MAX_KNOWN,
        piece_timeout_s: float = PIECE_TIMEOUT_S,
    ) -> None:
        """replaces: whether a client's other weights for a known task id take its place (`lora_on_conflict`).

        piece_timeout_s: for each piece of pages from another worker.
        """
        self._engine = engine
        self._workers = workers
        self._reader = reader
        self._layout = layout
        self._replaces = replaces
        self._max_known = max_known
        self._piece_timeout_s = piece_timeout_s
        self._pages = PageStore(max_bytes)
        self._known: dict[TaskId, Upload | Forget] = {}
        self._state: str | None = None
        self._in_engine: dict[TaskId, str] = {}
        self._locks: KeyedLocks[TaskId] = KeyedLocks()

    @property
    def replaces(self) -> bool:
        """Whether a client's other weights for a known task id take its place."""
        return self._replaces

    @property
    def state(self) -> str:
        """A digest of all known uploads: equal at workers that know the same."""
        if self._state is None:
            known = sorted(f"{label_of(news.task_id)} {news.version}" for news in self._known.values())
            self._state = blake3("\n".join(known).encode()).hexdigest(16)
        return self._state

    def news(self) -> Iterator[Upload | Forget]:
        """Each known upload, and a `Forget` for each one that was unloaded."""
        yield from list(self._known.values())

    def find(self, task_id: TaskId) -> Upload | None:
        """The upload of a task id, as far as it is known here."""
        known = self._known.get(task_id)
        return known if isinstance(known, Upload) else None

    @property
    def sent_and_here(self) -> list[Upload]:
        """The uploads of clients, which no source has, whose pages are here."""
        known = [news for news in self._known.values() if isinstance(news, Upload)]
        return [upload for upload in known if not upload.place and upload.pages_digest in self._pages]

    def digest(self, task_id: TaskId) -> str:
        """The digest of the upload of a task id; empty if none is known."""
        upload = self.find(task_id)
        return "" if upload is None else upload.header.digest

    def is_behind(self, task_id: TaskId) -> bool:
        """Whether a later upload of a task id is known than the engine was given."""
        upload = self.find(task_id)
        return upload is not None and self._in_engine.get(task_id) != upload.pages_digest

    def pages(self, pages_digest: str) -> bytearray | None:
        """The pages of an upload, if they are here."""
        return self._pages.get(pages_digest)

    def learn(self, news: Upload | Forget) -> bool:
        """Remember an upload, or its end, unless a later version is known. Returns whether it was news.

        The order of versions alone decides, also where other weights are refused: workers that have heard the same, in
        whatever order, know the same.
        """
        known = self._known.get(news.task_id)
        if known is not None and known.version >= news.version:
            return False
        if isinstance(known, Upload) and isinstance(news, Upload) and self._is_conflict(known, news):
            logger.warning(
                "LoRA task %s had two uploads at the same time, or while workers were cut off; the later one counts",
                label_of(news.task_id),
            )
        self._known[news.task_id] = news
        if isinstance(news, Forget):
            self._in_engine.pop(news.task_id, None)
        if len(self._known) > self._max_known:
            first = min(self._known.values(), key=lambda one: one.version)
            del self._known[first.task_id]
            self._in_engine.pop(first.task_id, None)
        self._state = None
        return news.task_id in self._known

    def forget(self, task_id: TaskId, name: str = "") -> Forget | None:
        """Forget the upload of a task id. Returns the message for the other workers.

        Returns None if no upload was known, unless `name` is given: the adapter may then be one of the sources.
        """
        upload = self.find(task_id)
        if upload is None and not name:
            return None
        version, name = (time.time_ns(), name) if upload is None else (upload.version + 1, upload.name)
        forget = Forget(number_of(task_id), tenant_of(task_id), name, version)
        self.learn(forget)
        return forget

    async def take_piece(self, upload: Upload, offset: int, piece: bytes) -> Upload | None:
        """Take the next bytes of an upload. After the last ones the engine has it, and the known upload is returned.

        Raises RequestError; nothing has changed then.
        """
        pages = self._pages.take_piece(upload, offset, piece)
        if pages is None:
            return None
        await asyncio.to_thread(check_pages, upload, pages, self._layout)
        return await self.add(upload, pages)

    async def add(self, upload: Upload, pages: bytearray) -> Upload:
        """Give the engine an upload whose pages were checked. Returns the upload as it is known then.

        A new upload gets its version, and the name that its task id has, unless the same weights are known already.
        Raises RequestError, as `outcome` does; the upload is not known then.
        """
        task_id, sent = upload.task_id, upload
        known = self._known.get(task_id)
        if upload.is_new and isinstance(known, Upload):
            self._check_conflict(known, upload)  # A client's own upload only: with a version it has passed this check.
        if upload.is_new and isinstance(known, Upload) and known.pages_digest == upload.pages_digest:
            upload = known
        elif upload.is_new:
            version, name = time.time_ns(), upload.name
            if known is not None:
                version, name = max(version, known.version + 1), name or known.name
            upload = msgspec.structs.replace(upload, version=version, name=name)
        is_news = self.learn(upload)
        self._pages.put(upload.pages_digest, pages)
        try:
            await self.bring(task_id, may_replace=not sent.is_new)
        except RequestError:
            if is_news and self._known.get(task_id) is upload:
                self._take_back(task_id, known)
            raise
        return self.outcome(sent)

    def outcome(self, sent: Upload) -> Upload:
        """The upload that counts after `sent` has come.

        Raises AdapterNotFound if the adapter was unloaded since `sent` got its version, and AdapterConflict if `sent`
        is a client's own upload, and other weights that came at the same moment have the later version.
        """
        known = self.find(sent.task_id)
        if known is None:
            raise AdapterNotFound(sent.task_id)
        if sent.is_new:
            self._check_conflict(known, sent)
        return known

    async def bring(self, task_id: TaskId, is_lost: bool = False, may_replace: bool = True) -> bool:
        """Give the engine the latest upload of a task id. Returns whether there is one.

        is_lost: the engine has said that it lacks the upload. may_replace: an engine that refuses other weights forgets
        those that it has. Raises RequestError if the pages cannot be had.
        """
        async with self._locks.held(task_id):
            known = self._known.get(task_id)
            upload = await self._ask_others(task_id) if known is None else self.find(task_id)
            if upload is None:
                return False
            if is_lost or self._in_engine.get(task_id) != upload.pages_digest:
                await self._put(upload, await self._pages_of(upload), may_replace)
                self._in_engine[task_id] = upload.pages_digest
            return True

    async def keep(self, upload: Upload) -> None:
        """Fetch and keep the pages of an upload, if it is the latest one. Raises RequestError if they cannot be had."""
        async with self._locks.held(upload.task_id):
            known = self.find(upload.task_id)
            if known is not None and known.pages_digest == upload.pages_digest:
                await self._pages_of(known)

    def _take_back(self, task_id: TaskId, known: Upload | Forget | None) -> None:
        if known is None:
            del self._known[task_id]
        else:
            self._known[task_id] = known
        self._state = None

    async def _put(self, upload: Upload, pages: bytearray, may_replace: bool) -> None:
        try:
            await self._engine.put(upload, pages)
        except RequestError as error:
            if error.code != AdapterConflict.code or not may_replace:
                raise
            # The fleet has decided; the engine knows the order of its own uploads only.
            await self._engine.unload(number_of(upload.task_id), tenant_of(upload.task_id))
            await self._engine.put(upload, pages)

    def _is_conflict(self, known: Upload, upload: Upload) -> bool:
        return known.header.digest != upload.header.digest and not self._replaces

    def _check_conflict(self, known: Upload, upload: Upload) -> None:
        if self._is_conflict(known, upload):
            raise AdapterConflict(upload.task_id, known.header.digest, upload.header.digest)

    async def _ask_others(self, task_id: TaskId) -> Upload | None:
        answers = await self._workers.ask_all(FindUpload(number_of(task_id), tenant_of(task_id)))
        found = [answer.upload for answer in answers if isinstance(answer, Found) and answer.upload is not None]
        for upload in found:
            self.learn(upload)
        return self.find(task_id)

    async def _pages_of(self, upload: Upload) -> bytearray:
        pages = self._pages.get(upload.pages_digest)
        if pages is None:
            pages = await self._fetch(upload)
            self._pages.put(upload.pages_digest, pages)
        return pages

    async def _fetch(self, upload: Upload) -> bytearray:
        worker_ids, is_any_gone = self._workers.ids, False
        for worker_id in random.sample(worker_ids, len(worker_ids)):
            try:
                pages = await self._fetch_from(worker_id, upload)
                await asyncio.to_thread(check_pages, upload, pages, self._layout)
            except RequestError as error:
                is_any_gone = is_any_gone or isinstance(error, WorkerGone)
                logger.info("LoRA task %s is not to be had from %x: %s", label_of(upload.task_id), worker_id, error)
            else:
                logger.info("LoRA task %s came from %x", label_of(upload.task_id), worker_id)
                return pages
        return await self._read_again(upload, is_any_gone)

    async def _fetch_from(self, worker_id: int, upload: Upload) -> bytearray:
        pages = bytearray()
        read = ReadPages(upload.pages_digest)
        async with aclosing(self._workers.call(worker_id, read, self._piece_timeout_s)) as answers:
            async for answer in answers:
                piece = checked(answer)
                if not isinstance(piece, PagesPiece):
                    raise InvalidRequest(f"it sends {type(piece).__name__} in place of a piece")
                pages += piece.piece
                if len(pages) > upload.num_bytes:
                    raise InvalidRequest(f"it sends more than the {upload.num_bytes} bytes of the adapter")
        return pages

    async def _read_again(self, upload: Upload, is_any_gone: bool) -> bytearray:
        if not upload.place:
            raise UploadLost(upload, "no worker has them", is_any_gone)
        number = upload.header.lora_task_id
        try:
            pages = pages_of(await self._reader.read(number, upload.name, "", upload.place))
            await asyncio.to_thread(check_pages, upload, pages, self._layout)
        except RequestError as error:
            raise UploadLost(upload, f"no worker has them, and at their source: {error}", is_any_gone) from error
        return pages


class UploadLost(RequestError):
    """No worker has the pages of an upload any more. Existing clients match this text and send the weights again.

    may_be_elsewhere: a worker that may have them could not be reached.
    """

    code = "NOT_FOUND"

    def __init__(self, upload: Upload, reason: str, may_be_elsewhere: bool) -> None:
        adapter = f"LoRA adapter {upload.name!r}" if upload.name else f"LoRA task {upload.task_id}"
        super().__init__(f"{adapter} not found in cache. Please send LoRA weights with request ({reason})")
        self.may_be_elsewhere = may_be_elsewhere


def pages_of(packed: PackedAdapter) -> bytearray:
    """The bytes of the pages, as they travel."""
    return bytearray(packed.pages.numpy().data.cast("B"))


def digest_of(packed: PackedAdapter, layout: AdapterLayout) -> str:
    """The `pages_digest` of an adapter."""
    from multilora_engine.lora.format import content_digest

    return packed.traits.digest(content_digest(packed.rows, packed.pages, layout.lora_dtype))


def check_pages(upload: Upload, pages: bytearray, layout: AdapterLayout) -> None:
    """Raises InvalidRequest unless the pages are those of the upload, and an adapter of this model."""
    import torch  # with the code that reads weights: seconds and 100 MB, only in a worker that gets some

    from multilora_engine.lora.format import check_rows, content_digest

    if upload.header.page_bytes != layout.page_bytes or len(pages) != upload.num_bytes or not pages:
        raise InvalidRequest(
            f"the adapter has {len(pages)} bytes in pages of {upload.header.page_bytes}, its header says "
            f"{upload.num_bytes}, and the pages of this model have {layout.page_bytes}"
        )
    if len(pages) % layout.page_bytes:
        raise InvalidRequest(f"{len(pages)} bytes are no whole pages of {layout.page_bytes}")
    tensor = torch.frombuffer(pages, dtype=torch.uint8).view(-1, layout.page_bytes)
    try:
        check_rows(upload.header.rows, len(tensor), layout)
    except ValueError as error:
        raise InvalidRequest(f"the adapter does not fit this model: {error}") from None
    header = upload.header
    found = header.traits.digest(content_digest(header.rows, tensor, layout.lora_dtype))
    if found != upload.pages_digest:
        raise InvalidRequest(f"the adapter has the digest {found}, not {upload.pages_digest}")
