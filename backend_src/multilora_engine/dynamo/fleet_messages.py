"""The messages between the front of a fleet and its workers, and between workers.

They travel as requests to the endpoint that Dynamo's own front sends prompts to, so that discovery, the routing of
answers, draining and health are Dynamo's. Its requests have a place for `extra_args` and its answers one for
`engine_data`, both JSON: a message is the text of its msgpack there. Every output of a request, refusals
included, is a `TokenOutput`, as between a front and its own engine: codes and texts of errors arrive as they left.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

import msgspec

from multilora_engine.engine_info import EngineInfo
from multilora_engine.errors import InvalidRequest
from multilora_engine.lora.names import TaskId, scoped_task_id
from multilora_engine.process.messages import AdapterHeader, AdapterScope
from multilora_engine.process.operations import Operation
from multilora_engine.request import GenerationRequest, Sender, TokenOutput
from multilora_wire.adapter_info import Alias

PIECE_BYTES = 1 << 20
"""Weights travel in pieces of this size: Dynamo refuses messages of more than 32 MiB."""

NEW_VERSION = 0
"""The version of an upload that no worker has taken yet."""

_KEY = "multilora"


class Upload(msgspec.Struct, frozen=True, tag=True):
    """An adapter that has come to the fleet, without its pages: a client sent it, or a worker read it from a source.

    name: empty if the client named its task id only. pages_digest: of rows, pages and traits as they are stored, which
    every receiver checks. num_bytes: of the pages. version: of two uploads of one task id the one of the larger version
    counts. The worker that takes the upload sets it: nanoseconds since the epoch, and more than any version of the task
    id that the worker knows; NEW_VERSION before that. place: the path in the sources from which the adapter was read,
    empty for an adapter that a client sent.
    """

    header: AdapterHeader
    name: str
    pages_digest: str
    num_bytes: int
    version: int
    place: str = ""

    @property
    def task_id(self) -> TaskId:
        return self.header.task_id

    @property
    def is_new(self) -> bool:
        """Whether no worker has taken it yet."""
        return self.version == NEW_VERSION


class Forget(msgspec.Struct, frozen=True, tag=True):
    """Forget the uploads of this task id up to `version`. name: of the upload, perhaps empty."""

    lora_task_id: int
    tenant: str
    name: str
    version: int

    @property
    def task_id(self) -> TaskId:
        return scoped_task_id(self.tenant, self.lora_task_id)


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Answer a request. upload: of its adapter, if the front knows one; the worker may know a later one."""

    request: GenerationRequest
    client_request_id: str = ""
    trace_id: str = ""
    upload: Upload | None = None


class TakePiece(msgspec.Struct, frozen=True, tag=True):
    """Take the bytes of an upload from `offset` on.

    After the last piece the worker and its engine have the adapter, and all other workers know of it. The answer is
    then the upload with its version.
    """

    upload: Upload
    offset: int
    piece: bytes


class Announce(msgspec.Struct, frozen=True, tag=True):
    """Know of an upload that another worker has; fetch it when a request needs it.

    keeps: fetch its pages at once, so that they outlive the other worker.
    """

    upload: Upload
    keeps: bool = False


class ReadNews(msgspec.Struct, frozen=True, tag=True):
    """Send all your news of uploads, one by one, unless the asker knows the same.

    state: the asker's `FleetUploads.state`.
    """

    state: str


class FindUpload(msgspec.Struct, frozen=True, tag=True):
    """Say which upload of a task id you have."""

    lora_task_id: int
    tenant: str = ""


class ReadPages(msgspec.Struct, frozen=True, tag=True):
    """Send the pages of an upload, piece by piece."""

    pages_digest: str


class Carry(msgspec.Struct, frozen=True, tag=True):
    """Carry out an operation on adapters; the answer is a final output whose text is the report, in JSON."""

    operation: Operation
    scope: AdapterScope = AdapterScope()
    sender: Sender = Sender()


class EndRequests(msgspec.Struct, frozen=True, tag=True):
    """End the sender's requests of this id, wherever they came from; they finish as `cancelled`."""

    client_request_id: str
    sender: Sender = Sender()


class LearnAliases(msgspec.Struct, frozen=True, tag=True):
    """Know of changed aliases. A name that was removed has no members."""

    aliases: list[Alias]


class ReadAliases(msgspec.Struct, frozen=True, tag=True):
    """Send all aliases that you know, and the names that were removed."""


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Describe the model that you serve."""


ToWorker = (
    Generate
    | TakePiece
    | Announce
    | Forget
    | ReadNews
    | FindUpload
    | ReadPages
    | Carry
    | EndRequests
    | LearnAliases
    | ReadAliases
    | Describe
)


class Said(msgspec.Struct, frozen=True, tag=True):
    """An output of a request, or the end of a call that has no other answer."""

    output: TokenOutput


class Found(msgspec.Struct, frozen=True, tag=True):
    """upload: None if the worker knows none."""

    upload: Upload | None


class PagesPiece(msgspec.Struct, frozen=True, tag="Piece"):
    """The next bytes of the pages."""

    piece: bytes


class Described(msgspec.Struct, frozen=True, tag=True):
    """model_name: the clients' name for the base model. block_size: of the prefix cache, in tokens."""

    info: EngineInfo
    model_name: str
    block_size: int


class AliasTable(msgspec.Struct, frozen=True, tag=True):
    """The answer to `ReadAliases`."""

    aliases: list[Alias]


FromWorker = Said | Found | Forget | PagesPiece | Described | AliasTable

_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def worker_request(message: ToWorker) -> dict[str, Any]:
    """A message as a request of Dynamo. The fields that Dynamo reads are empty, but for the token that it demands."""
    return {
        "model": "",
        "token_ids": [0],
        "stop_conditions": {},
        "sampling_options": {},
        "output_options": {},
        "eos_token_ids": [],
        "annotations": [],
        "extra_args": {_KEY: _text(message)},
    }


def read_worker_request(request: Mapping[str, Any]) -> ToWorker | None:
    """The message in a request of Dynamo, None in a prompt of its front. Raises InvalidRequest."""
    text = (request.get("extra_args") or {}).get(_KEY)
    if text is None:
        return None
    try:
        return _to_worker.decode(b64decode(text, validate=True))
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise InvalidRequest(f"the message to the worker cannot be read: {error}") from None


def worker_chunk(answer: FromWorker) -> dict[str, Any]:
    """An answer as a chunk of Dynamo."""
    return {"token_ids": [], "index": 0, "engine_data": {_KEY: _text(answer)}}


def read_worker_chunk(chunk: Mapping[str, Any]) -> FromWorker | None:
    """The answer in a chunk of Dynamo, None in one that has none: the last. Raises msgspec.MsgspecError."""
    text = (chunk.get("engine_data") or {}).get(_KEY)
    return None if text is None else _from_worker.decode(b64decode(text))


def _text(message: ToWorker | FromWorker) -> str:
    return b64encode(msgspec.msgpack.encode(message)).decode()
