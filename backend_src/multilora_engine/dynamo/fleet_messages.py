"""The messages between the front of a fleet and its workers, and between workers.

They travel as requests to the endpoint that Dynamo's own front sends prompts to, so that discovery, the routing of
answers, draining and health are Dynamo's. Its requests have a place for `extra_args` and its answers one for
`engine_data`, both JSON: a message is the text of its msgpack there. Everything said about a request, refusals
included, is a `TokenOutput`, as between a front and its own engine: codes and texts of errors arrive as they left.
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Mapping
from typing import Any

import msgspec

from multilora_engine.engine_info import EngineInfo
from multilora_engine.errors import InvalidRequest
from multilora_engine.lora.names import TaskId
from multilora_engine.process.messages import AdapterHeader, AdapterScope
from multilora_engine.process.operations import Operation
from multilora_engine.request import GenerationRequest, Sender, TokenOutput

PIECE_BYTES = 1 << 20
"""Weights travel in pieces of this size: Dynamo refuses messages of more than 32 MiB."""

_KEY = "multilora"


class Upload(msgspec.Struct, frozen=True):
    """An adapter that a client has sent to the fleet, without its pages.

    name: empty if the client named its task id only. pages_digest: `content_digest` of rows and pages, which whoever
    receives them checks. num_bytes: of the pages. version: nanoseconds since the epoch when it came: of two uploads of
    one task id the later one counts.
    """

    header: AdapterHeader
    name: str
    pages_digest: str
    num_bytes: int
    version: int

    @property
    def task_id(self) -> TaskId:
        return self.header.task_id


class Generate(msgspec.Struct, frozen=True, tag=True):
    """Answer a request. upload: its adapter as far as the front knows of one; the worker may know of a later one."""

    request: GenerationRequest
    client_request_id: str = ""
    trace_id: str = ""
    upload: Upload | None = None


class TakePiece(msgspec.Struct, frozen=True, tag=True):
    """The bytes of an upload from `offset` on. With the last piece the worker has the adapter, and its engine too."""

    upload: Upload
    offset: int
    piece: bytes


class Announce(msgspec.Struct, frozen=True, tag=True):
    """Know of an upload that another worker has; fetch it when somebody asks for it."""

    upload: Upload


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


class Describe(msgspec.Struct, frozen=True, tag=True):
    """Say what you serve."""


ToWorker = Generate | TakePiece | Announce | FindUpload | ReadPages | Carry | EndRequests | Describe


class Said(msgspec.Struct, frozen=True, tag=True):
    """An output of a request, or the end of a call that has no other answer."""

    output: TokenOutput


class Found(msgspec.Struct, frozen=True, tag=True):
    """upload: None if there is none here."""

    upload: Upload | None


class Piece(msgspec.Struct, frozen=True, tag=True):
    """The next bytes of the pages."""

    piece: bytes


class Described(msgspec.Struct, frozen=True, tag=True):
    """model_name: the clients' name for the base model. block_size: of the prefix cache, in tokens."""

    info: EngineInfo
    model_name: str
    block_size: int


FromWorker = Said | Found | Piece | Described

_to_worker: msgspec.msgpack.Decoder[ToWorker] = msgspec.msgpack.Decoder(ToWorker)
_from_worker: msgspec.msgpack.Decoder[FromWorker] = msgspec.msgpack.Decoder(FromWorker)


def worker_request(message: ToWorker) -> dict[str, Any]:
    """A message as a request of Dynamo. What Dynamo itself reads of it is empty, but for a token, which it wants."""
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
