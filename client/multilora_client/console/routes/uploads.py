"""/api/uploads: an adapter's files from the page become an adapter of the server."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from starlette.types import Receive, Scope, Send

from multilora_client.adapter import Adapter, AdapterTensors
from multilora_client.client import AsyncClient
from multilora_client.console.converting import FILE_NAMES, converted
from multilora_client.console.replies import JsonLines, line
from multilora_client.console.settings import ConsoleSettings
from multilora_client.console.state import MAX_UPLOADS_AT_ONCE, TheClient, Writable
from multilora_client.convert import content_task_id
from multilora_client.errors import MultiloraClientError
from multilora_client.openai.errors import Failure
from multilora_wire.adapter_names import task_id_of_name

router = APIRouter()

_FILE = re.compile(r"([\w.]+):(\d{1,12})", re.ASCII)
_SENT = "sent"
_UPLOAD_TIMEOUT_S = 600.0


@dataclass(frozen=True)
class SentFile:
    """A file of the body. name: one of FILE_NAMES."""

    name: str
    num_bytes: int


@router.post("/api/uploads")
async def upload(
    request: Request,
    client: TheClient,
    console: Writable,
    file: Annotated[list[str], Query(max_length=len(FILE_NAMES))],
    lora_name: Annotated[str, Query(max_length=200)] = "",
    lora_task_id: Annotated[int | None, Query(ge=0, lt=2**64)] = None,
) -> Response:
    """The body is the files, one behind the other, as `file=NAME:BYTES&file=...` lists them.

    The answer is lines: `{"phase": "converting", "done", "total"}`, `{"phase": "sending"}`, and in the end
    `{"phase": "done", "lora_task_id", "lora_digest"}` or `{"error"}`.
    """
    files = parse_files(file, console.settings.max_upload_bytes)
    if lora_name and lora_task_id is not None:
        raise Failure(400, "give lora_name or lora_task_id: a name has a task id of its own", "invalid_value")
    await client.describe_model()  # Nobody without a valid key has the console take megabytes.
    if console.uploads.locked():
        raise Failure(503, f"{MAX_UPLOADS_AT_ONCE} uploads are under way, the most at once; try again", "unavailable")
    with ExitStack() as resources:
        await console.uploads.acquire()
        resources.callback(console.uploads.release)
        folder = Path(resources.enter_context(TemporaryDirectory(prefix="multilora-console-")))
        (folder / _SENT).mkdir()
        await _receive(request, files, folder / _SENT)
        lines = _upload(folder, console.settings, client, lora_name, lora_task_id)
        return _UploadLines(lines, resources.pop_all())


class _UploadLines(JsonLines):
    """Frees the resources of an upload when its last line is sent, or the page has hung up."""

    def __init__(self, lines: AsyncGenerator[str, None], resources: ExitStack) -> None:
        super().__init__(lines)
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._resources:
            await super().__call__(scope, receive, send)


def parse_files(listed: Sequence[str], max_bytes: int) -> list[SentFile]:
    """Raises Failure for a file that no adapter has, one that is listed twice, and too many bytes."""
    files: list[SentFile] = []
    for text in listed:
        match = _FILE.fullmatch(text)
        if match is None or match[1] not in FILE_NAMES:
            raise Failure(400, f"{text!r} is no file of an adapter: {', '.join(sorted(FILE_NAMES))}", "invalid_value")
        files.append(SentFile(match[1], int(match[2])))
    if repeated := [name for name, count in Counter(file.name for file in files).items() if count > 1]:
        raise Failure(400, f"{repeated[0]} is listed more than once; send it once", "invalid_value")
    total = sum(file.num_bytes for file in files)
    if total > max_bytes:
        raise Failure(413, f"the adapter has {total} bytes, and at most {max_bytes} are taken", "too_large")
    return files


async def _receive(request: Request, files: Sequence[SentFile], folder: Path) -> None:
    """Write the body's files into `folder`. Raises Failure if it has more or fewer bytes than they."""
    body = _Body(request.stream())
    for file in files:
        with (folder / file.name).open("xb") as output:
            num_missing = file.num_bytes
            while num_missing:
                piece = await body.read(num_missing)
                if not piece:
                    raise Failure(
                        400, f"{file.name} ends {num_missing} bytes before its {file.num_bytes}", "invalid_value"
                    )
                num_missing -= output.write(piece)
    if await body.read(1):
        total = sum(file.num_bytes for file in files)
        raise Failure(400, f"the body has more bytes than its {len(files)} files, which have {total}", "invalid_value")


class _Body:
    """Reads a body in pieces of at most a given length."""

    def __init__(self, chunks: AsyncGenerator[bytes, None]) -> None:
        self._chunks = chunks
        self._rest = b""

    async def read(self, max_bytes: int) -> bytes:
        """The next bytes, `max_bytes` at most; none at the end."""
        if not self._rest:
            self._rest = await anext(self._chunks, b"")
        piece, self._rest = self._rest[:max_bytes], self._rest[max_bytes:]
        return piece


async def _upload(
    folder: Path, settings: ConsoleSettings, client: AsyncClient, lora_name: str, lora_task_id: int | None
) -> AsyncGenerator[str, None]:
    output = folder / "converted"
    try:
        conversion = converted(folder / _SENT, output, settings.base_model, settings.max_conversion_s)
        async with aclosing(conversion):
            async for done, total in conversion:
                yield line({"phase": "converting", "done": done, "total": total})
        adapter = await asyncio.to_thread(_load, output, lora_name, lora_task_id)
        yield line({"phase": "sending", "bytes": adapter.tensors.nbytes})
        answer = await client.upload(adapter, lora_name=lora_name or None, timeout_s=_UPLOAD_TIMEOUT_S)
        yield line({"phase": "done", "lora_task_id": str(adapter.lora_task_id), "lora_digest": answer.lora_digest})
    except MultiloraClientError as error:
        yield line({"error": {"code": error.code, "message": str(error)}})


def _load(directory: Path, lora_name: str, lora_task_id: int | None) -> Adapter:
    """The adapter under the id of its name, under the id given, or under one of its content.

    Reading and hashing hundreds of megabytes takes seconds: call it off the event loop.
    """
    tensors = AdapterTensors.load(directory)
    own_task_id = content_task_id(tensors)  # The tensors keep the digest, which the client asks for in any case.
    if lora_name:
        return Adapter(task_id_of_name(lora_name), tensors)
    return Adapter(own_task_id if lora_task_id is None else lora_task_id, tensors)
