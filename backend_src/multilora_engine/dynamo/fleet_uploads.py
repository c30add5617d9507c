"""`FleetUploads`: the adapters that clients have sent to the fleet, as a worker knows them."""

from __future__ import annotations

import asyncio
import logging
import random
from collections import defaultdict
from contextlib import aclosing
from typing import Protocol

from multilora_engine.dynamo.fleet_messages import FindUpload, Found, Piece, ReadPages, Upload
from multilora_engine.dynamo.page_store import PageStore
from multilora_engine.dynamo.workers import Workers, checked
from multilora_engine.errors import AdapterConflict, InvalidRequest, RequestError
from multilora_engine.lora.names import TaskId, label_of, number_of, tenant_of
from multilora_wire.layout import AdapterLayout

logger = logging.getLogger(__name__)


class Engine(Protocol):
    """The part of `EngineOperator` that is needed."""

    async def put(self, upload: Upload, pages: bytearray) -> None: ...


class FleetUploads:
    """Knows the latest upload of each task id that it has heard of, and has the engine know it when it is asked for.

    Pages that are not here come from another worker, by their digest, which is checked: a worker that is new, or that
    has started again, asks the others and not the client. Calls for one task id go one after the other.
    """

    def __init__(self, engine: Engine, workers: Workers, layout: AdapterLayout, max_bytes: int, replaces: bool) -> None:
        """replaces: whether other weights for a known task id take its place (`lora_on_conflict`)."""
        self._engine = engine
        self._workers = workers
        self._layout = layout
        self._replaces = replaces
        self._pages = PageStore(max_bytes)
        self._known: dict[TaskId, Upload] = {}
        self._in_engine: dict[TaskId, str] = {}
        self._locks: defaultdict[TaskId, asyncio.Lock] = defaultdict(asyncio.Lock)

    def find(self, task_id: TaskId) -> Upload | None:
        """The upload of a task id, as far as it is known here."""
        return self._known.get(task_id)

    def pages(self, pages_digest: str) -> bytearray | None:
        """The pages of an upload, if they are here."""
        return self._pages.get(pages_digest)

    def learn(self, upload: Upload) -> None:
        """Know of an upload, unless a later one is known. Raises AdapterConflict."""
        known = self._known.get(upload.task_id)
        if known is not None and known.header.digest != upload.header.digest and not self._replaces:
            raise AdapterConflict(upload.task_id, known.header.digest, upload.header.digest)
        if known is None or known.version < upload.version:
            self._known[upload.task_id] = upload

    def forget(self, task_id: TaskId) -> None:
        """Know of no upload of this task id."""
        self._known.pop(task_id, None)
        self._in_engine.pop(task_id, None)

    async def take_piece(self, upload: Upload, offset: int, piece: bytes) -> bool:
        """Take the next bytes of an upload; with the last ones the engine has it. Whether it is complete.

        Raises RequestError; nothing has changed then.
        """
        pages = self._pages.take_piece(upload, offset, piece)
        if pages is None:
            return False
        await asyncio.to_thread(check_pages, upload, pages, self._layout)
        self.learn(upload)
        self._pages.put(upload.pages_digest, pages)
        return await self.bring(upload.task_id)

    async def bring(self, task_id: TaskId, is_lost: bool = False) -> bool:
        """Have the engine know the latest upload of a task id; whether there is one.

        is_lost: the engine has said that it does not have it any more. Raises RequestError if it cannot be had.
        """
        async with self._locks[task_id]:
            upload = self._known.get(task_id) or await self._ask_others(task_id)
            if upload is None:
                return False
            if is_lost or self._in_engine.get(task_id) != upload.pages_digest:
                await self._engine.put(upload, await self._pages_of(upload))
                self._in_engine[task_id] = upload.pages_digest
            return True

    async def _ask_others(self, task_id: TaskId) -> Upload | None:
        answers = await self._workers.ask_all(FindUpload(number_of(task_id), tenant_of(task_id)))
        found = [answer.upload for answer in answers if isinstance(answer, Found) and answer.upload is not None]
        for upload in found:
            self.learn(upload)
        return self._known.get(task_id)

    async def _pages_of(self, upload: Upload) -> bytearray:
        pages = self._pages.get(upload.pages_digest)
        if pages is None:
            pages = await self._fetch(upload)
            self._pages.put(upload.pages_digest, pages)
        return pages

    async def _fetch(self, upload: Upload) -> bytearray:
        worker_ids = self._workers.ids
        for worker_id in random.sample(worker_ids, len(worker_ids)):
            try:
                pages = await self._fetch_from(worker_id, upload)
                await asyncio.to_thread(check_pages, upload, pages, self._layout)
            except RequestError as error:
                logger.info("LoRA task %s is not to be had from %x: %s", label_of(upload.task_id), worker_id, error)
            else:
                logger.info("LoRA task %s came from %x", label_of(upload.task_id), worker_id)
                return pages
        raise UploadLost(upload)

    async def _fetch_from(self, worker_id: int, upload: Upload) -> bytearray:
        pages = bytearray()
        async with aclosing(self._workers.call(worker_id, ReadPages(upload.pages_digest))) as answers:
            async for answer in answers:
                piece = checked(answer)
                assert isinstance(piece, Piece), f"{type(piece).__name__} is no piece"
                pages += piece.piece
                if len(pages) > upload.num_bytes:
                    raise InvalidRequest(f"it sends more than the {upload.num_bytes} bytes of the adapter")
        return pages


class UploadLost(RequestError):
    """No worker has the pages of an upload any more. Existing clients match this text and send the weights again."""

    code = "NOT_FOUND"

    def __init__(self, upload: Upload) -> None:
        adapter = f"LoRA adapter {upload.name!r}" if upload.name else f"LoRA task {upload.task_id}"
        super().__init__(f"{adapter} not found in cache. Please send LoRA weights with request (no worker has them)")


def check_pages(upload: Upload, pages: bytearray, layout: AdapterLayout) -> None:
    """Raises InvalidRequest unless the pages are those of the upload, and an adapter of this model."""
    import torch  # with all that reads weights: seconds and 100 MB, for those alone that are sent some

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
    found = content_digest(upload.header.rows, tensor, layout.lora_dtype)
    if found != upload.pages_digest:
        raise InvalidRequest(f"the adapter has the digest {found}, not {upload.pages_digest}")
