"""/api/uploads: an adapter's files from the page become an adapter of the server."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Query, Request, Response
from starlette.types import Receive, Scope, Send

from multilora_client.adapter import Adapter
from multilora_client.client import AsyncClient
from multilora_client.console.replies import JsonLines, line
from multilora_client.console.state import MAX_UPLOADS_AT_ONCE, TheClient, Writable
from multilora_client.convert import content_task_id, load_content
from multilora_client.errors import AdapterError, MultiloraClientError
from multilora_client.openai.errors import Failure
from multilora_wire.adapter_names import task_id_of_name
from multilora_wire.adapter_use import USE_FILES
from multilora_wire.converted_files import CONFIG_FILE, OLD_CONFIG_FILE, ORIGIN_FILE, WEIGHTS_FILE
from multilora_wire.peft_config import PEFT_CONFIG_FILE, PEFT_WEIGHTS_FILE

router = APIRouter()

FILE_NAMES = frozenset(
    {PEFT_CONFIG_FILE, PEFT_WEIGHTS_FILE, WEIGHTS_FILE, CONFIG_FILE, OLD_CONFIG_FILE, ORIGIN_FILE, *USE_FILES}
)
"""The only files of an adapter that are read, and so the only ones that are taken."""

_FILE = re.compile(r"([\w./]+):(\d{1,12})", re.ASCII)
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
    """The body is the files, one after another, as `file=NAME:BYTES&file=...` lists them.

    The answer is lines: `{"phase": "sending", "bytes"}`, and in the end `{"phase": "done", "lora_task_id",
    "lora_digest"}` or `{"error"}`.
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
        await _receive(request, files, folder)
        lines = _upload(folder, client, lora_name, lora_task_id)
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
    """Raises Failure for a file that no adapter has, for a file that is listed twice, and for too many bytes."""
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
        (folder / file.name).parent.mkdir(exist_ok=True)
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
    folder: Path, client: AsyncClient, lora_name: str, lora_task_id: int | None
) -> AsyncGenerator[str, None]:
    try:
        adapter = await asyncio.to_thread(_load, folder, lora_name, lora_task_id)
        yield line({"phase": "sending", "bytes": adapter.content.nbytes})
        answer = await client.upload(adapter, lora_name=lora_name or None, timeout_s=_UPLOAD_TIMEOUT_S)
        yield line({"phase": "done", "lora_task_id": str(adapter.lora_task_id), "lora_digest": answer.lora_digest})
    except MultiloraClientError as error:
        yield line({"error": {"code": error.code, "message": _shown(error, folder)}})


def _load(folder: Path, lora_name: str, lora_task_id: int | None) -> Adapter:
    """The adapter under the id of its name, under the id given, or under one of its content.

    Reading and hashing hundreds of megabytes takes seconds: call it off the event loop.
    """
    _check_arrays(folder)
    content = load_content(folder)
    own_task_id = content_task_id(content)  # The content keeps the digest, which the client asks for in any case.
    if lora_name:
        return Adapter(task_id_of_name(lora_name), content)
    return Adapter(own_task_id if lora_task_id is None else lora_task_id, content)


def _check_arrays(folder: Path) -> None:
    """Raises AdapterError for an array that says to be larger than its file, before anything makes room for it."""
    for path in folder.glob("*.npy"):
        try:
            np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise AdapterError(f"{path.name} is not a readable .npy array without pickled objects: {error}") from None


def _shown(error: MultiloraClientError, folder: Path) -> str:
    """An error's text without the path of the console's own folder."""
    return str(error).replace(f"{folder}/", "").replace(str(folder), "the upload")
