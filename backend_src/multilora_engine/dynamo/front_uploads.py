"""`FrontUploads`: the adapters that clients have sent through this front, on their way to the workers."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from multilora_engine.dynamo.fleet_messages import NEW_VERSION, Found, FromWorker, TakePiece, Upload
from multilora_engine.dynamo.fleet_uploads import MAX_KNOWN
from multilora_engine.dynamo.keyed_locks import KeyedLocks
from multilora_engine.dynamo.page_store import PageStore, pieces
from multilora_engine.dynamo.workers import Workers, checked
from multilora_engine.errors import AdapterNotFound, InternalError, RequestError
from multilora_engine.lora.names import TaskId
from multilora_engine.process.messages import AdapterHeader

_PIECE_TIMEOUT_S = 30.0
"""After the last piece the worker checks the adapter, gives it to its engine, and tells all other workers."""


class FrontUploads:
    """Sends an adapter to one worker, which tells the others; they fetch the adapter from that worker.

    The adapter also stays here as long as there is room, and is sent again, under the version that it had, when no
    worker has it for a request. It is no longer sent once a worker has told that it was unloaded or replaced: workers
    that were all started again do not know that any more, and would take it for the latest one. A front learns it by
    asking: if nobody asks this front for the adapter between its end and the end of all workers, it comes back.
    """

    def __init__(self, workers: Workers, max_bytes: int, lora_dtype: str, max_known: int = MAX_KNOWN) -> None:
        """max_bytes: of the adapters that stay here. lora_dtype: the dtype in which they are packed."""
        self._workers = workers
        self._pages = PageStore(max_bytes)
        self._lora_dtype = lora_dtype
        self._max_known = max_known
        self._latest: dict[TaskId, Upload] = {}
        self._locks: KeyedLocks[TaskId] = KeyedLocks()

    def find(self, task_id: TaskId | None) -> Upload | None:
        """The latest upload of a task id that came through this front."""
        return None if task_id is None else self._latest.get(task_id)

    def digest(self, task_id: TaskId) -> str:
        """The digest of the upload of a task id; empty if none is known."""
        upload = self.find(task_id)
        return "" if upload is None else upload.header.digest

    def forget(self, task_id: TaskId) -> None:
        """Forget the upload of a task id."""
        self._latest.pop(task_id, None)

    def drop(self, upload: Upload) -> None:
        """Forget an upload that a worker has told to be unloaded or replaced; a later one that came here stays."""
        if self._latest.get(upload.task_id) == upload:
            del self._latest[upload.task_id]

    async def settle(self, task_id: TaskId | None) -> None:
        """Wait until the earlier uploads of a task id have arrived, or failed."""
        if task_id is not None and task_id in self._locks:
            async with self._locks.held(task_id):
                pass

    async def take(
        self, header: AdapterHeader, name: str, payload: memoryview, pick: Callable[[], Awaitable[int]]
    ) -> int:
        """Upload an adapter to a worker that `pick` chooses, and that tells all others of it. Returns the worker.

        Raises RequestError.

        The lock is taken before anything is awaited: a request that comes later for the task id waits for it.
        """
        async with self._locks.held(header.task_id):
            pages = bytearray(payload)
            digest = await asyncio.to_thread(_digest, header, pages, self._lora_dtype)
            worker_id = await pick()
            upload = Upload(header, name, digest, len(pages), NEW_VERSION)
            self._pages.put(digest, pages)
            self._remember(await self._send(upload, pages, worker_id))
            return worker_id

    async def send_again(self, upload: Upload, worker_id: int) -> bool:
        """Send an upload to a worker, because no worker has it any more. Returns whether its pages are still here.

        Raises RequestError: NOT_FOUND if the worker knows that the adapter was unloaded.
        """
        async with self._locks.held(upload.task_id):
            pages = self._pages.get(upload.pages_digest)
            if pages is None:
                return False
            try:
                taken = await self._send(upload, pages, worker_id)
            except RequestError as error:
                if error.code == AdapterNotFound.code:
                    self.drop(upload)
                raise
            if taken.version > upload.version:
                self.drop(upload)
        return True

    def _remember(self, upload: Upload) -> None:
        """Know this upload as the latest one; the uploads that came first are forgotten beyond `max_known`."""
        self._latest.pop(upload.task_id, None)
        self._latest[upload.task_id] = upload
        if len(self._latest) > self._max_known:
            del self._latest[next(iter(self._latest))]

    async def _send(self, upload: Upload, pages: bytearray, worker_id: int) -> Upload:
        """Send all pieces of an upload. Returns the upload as the worker has it then."""
        answer: FromWorker = Found(None)
        for offset, piece in pieces(pages):
            answer = checked(await self._workers.ask(worker_id, TakePiece(upload, offset, piece), _PIECE_TIMEOUT_S))
        if not isinstance(answer, Found) or answer.upload is None:
            raise InternalError(f"a worker answers the last piece of an adapter with {type(answer).__name__}")
        return answer.upload


def _digest(header: AdapterHeader, pages: bytearray, lora_dtype: str) -> str:
    import torch  # with the code that reads weights: seconds and 100 MB, only in a front that gets some

    from multilora_engine.lora.format import content_digest

    tensor = torch.frombuffer(pages, dtype=torch.uint8).view(-1, header.page_bytes)
    return header.traits.digest(content_digest(header.rows, tensor, lora_dtype))
