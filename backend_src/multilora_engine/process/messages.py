"""The messages between the fronts and the engine process, and the outputs that a front has not taken yet.

A message is one ZeroMQ frame of msgpack. `Add` and `PutAdapter` have the packed weights of an adapter in a second
frame, as they lie in memory. `Outputs` have one more frame for each output with logits of a prompt. All that the engine
says about a request is a `TokenOutput`, also a refusal. A request ends with its first output that is final.

The engine process writes one line to its stdout, a `StartReport` for the supervisor that started the process.
"""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from collections.abc import Iterable
from itertools import chain
from typing import TextIO

import msgspec

from multilora_engine.engine.block_events import BlockEvent
from multilora_engine.engine_info import EngineInfo
from multilora_engine.errors import RequestError
from multilora_engine.lora.layout import NO_TRAITS, AdapterTraits, PackedAdapter, PackedRow
from multilora_engine.lora.names import TaskId, number_of, scoped_task_id, tenant_of
from multilora_engine.lora.versions import Expectation
from multilora_engine.process.operations import Operation
from multilora_engine.request import GenerationRequest, Sender, TokenOutput

PROTOCOL_VERSION = 14
"""The version of the protocol. Every change to this file that an older peer would misread raises it."""


class Hello(msgspec.Struct, frozen=True, tag=True):
    """The first message of a front. The engine accepts nothing else before it."""

    protocol_version: int


class AdapterHeader(msgspec.Struct, frozen=True):
    """A `PackedAdapter` without its pages, which are the frame that follows: uint8 [num_pages, page_bytes].

    tenant: whose adapter it is, empty if it belongs to none.
    """

    lora_task_id: int
    digest: str
    rows: list[PackedRow]
    page_bytes: int
    tenant: str = ""
    traits: AdapterTraits = NO_TRAITS

    @property
    def task_id(self) -> TaskId:
        return scoped_task_id(self.tenant, self.lora_task_id)


class Add(msgspec.Struct, frozen=True, tag=True):
    """Accept all of `requests`, or none of them. They have one sender. The adapter is stored first, so that nothing can
    evict it in between.

    client_request_id: the client's own id, which a later `Stop` names. It may be empty, and need not be unique.
    trace_id: the trace of the requests, for the log; empty for no trace.
    """

    requests: list[GenerationRequest]
    client_request_id: str = ""
    adapter: AdapterHeader | None = None
    trace_id: str = ""

    def check_sent(self) -> None:
        """Raises AdapterVersionNotFound where a request demands another version than the one that came with it."""
        if self.adapter is None:
            return
        number, digest = self.adapter.lora_task_id, self.adapter.digest
        for request in self.requests:
            if request.task_id == self.adapter.task_id:
                Expectation(request.lora_expected_digest).check(number, request.lora_name, digest, digest)


class PutAdapter(msgspec.Struct, frozen=True, tag=True):
    """Store an adapter and answer with an empty final output that has its digest.

    expected_digest: the digest of the version that the new one replaces, empty for any version or none.
    """

    request_id: str
    adapter: AdapterHeader
    lora_name: str = ""
    sender: Sender = Sender()
    expected_digest: str = ""


class GivePrompt(msgspec.Struct, frozen=True, tag=True):
    """Go on with a request whose output had `asked_use`: it has now the prompt and the options that its chat makes by
    that use. There is no answer of its own.
    """

    request: GenerationRequest


class Stop(msgspec.Struct, frozen=True, tag=True):
    """End the sender's requests with this id; they finish as `cancelled`. Then answer with an empty final output.

    client_request_id: the id that the sender gave the requests, or the engine's id of one of them.
    """

    request_id: str
    client_request_id: str
    sender: Sender = Sender()


class AdapterScope(msgspec.Struct, frozen=True):
    """The adapters that an operation may show: all adapters, or a tenant's own and some of the server's.

    shared: the server's adapters among them, by ids, names and beginnings of names, as in the file of API keys.
    """

    is_everything: bool = True
    tenant: str = ""
    shared: tuple[str | int, ...] = ()


class Operate(msgspec.Struct, frozen=True, tag=True):
    """Carry out an operation on adapters and answer with a final output whose text is the report, in JSON."""

    request_id: str
    operation: Operation
    scope: AdapterScope = AdapterScope()
    sender: Sender = Sender()


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Forget requests that no client waits for. There is no answer."""

    request_ids: list[str]


class WatchBlocks(msgspec.Struct, frozen=True, tag=True):
    """Send the prefix cache's events to this front from now on, and to no other."""


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """The answer to a `Hello`."""

    info: EngineInfo


class Refused(msgspec.Struct, frozen=True, tag=True):
    """The peers do not understand each other; the text is for the operator."""

    reason: str


class Outputs(msgspec.Struct, frozen=True, tag=True):
    """Everything one step of the engine had for one front.

    with_logits: the places of the outputs whose `context_logits` are in the frames that follow, in their order.
    """

    outputs: list[TokenOutput]
    with_logits: list[int] = []


class AdapterTaken(msgspec.Struct, frozen=True, tag=True):
    """The engine has the adapter that came with a request, and the front need not hold it any longer.

    A front that reads too slowly does not get this message. The end of the request tells it the same.
    """

    request_id: str


class BlockChanges(msgspec.Struct, frozen=True, tag=True):
    """The prefix cache's events since the last message, in their order: nothing is left out."""

    events: list[BlockEvent]


class Launch(msgspec.Struct, frozen=True):
    """The line the supervisor writes to the engine's stdin.

    heartbeat_fd, heartbeat_interval_s: of the engine's `Heartbeat`; the file is inherited.
    """

    parameters: dict[str, str]
    socket_path: str
    heartbeat_fd: int
    heartbeat_interval_s: float | None


class Started(msgspec.Struct, frozen=True, tag=True):
    """The line the engine writes to its stdout once fronts can connect."""


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """The line the engine writes to its stdout when it cannot start."""

    reason: str


ToEngine = Hello | Add | PutAdapter | GivePrompt | Stop | Operate | Abort | WatchBlocks
FromEngine = Welcome | Refused | Outputs | AdapterTaken | BlockChanges
StartReport = Started | StartFailed

_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_from_engine: msgspec.msgpack.Decoder[FromEngine] = msgspec.msgpack.Decoder(FromEngine)


def encode(message: ToEngine | FromEngine) -> bytes:
    return msgspec.msgpack.encode(message)


def output_frames(outputs: list[TokenOutput]) -> list[bytes]:
    """`Outputs` with its frames. The logits of a prompt are megabytes a step: they are not copied into a message."""
    places = [place for place, output in enumerate(outputs) if output.context_logits]
    if not places:
        return [encode(Outputs(outputs))]
    without = list(outputs)
    for place in places:
        without[place] = msgspec.structs.replace(outputs[place], context_logits=b"")
    return [encode(Outputs(without, places)), *(outputs[place].context_logits for place in places)]


def decode_to_engine(frame: memoryview) -> ToEngine:
    """Raises msgspec.MsgspecError for bytes that are no message of this version."""
    return _to_engine.decode(frame)


def decode_from_engine(frame: memoryview, *more: memoryview) -> FromEngine:
    """more: the frames that follow; the returned message refers to their memory.

    Raises msgspec.MsgspecError for frames that are no message of this version.
    """
    message = _from_engine.decode(frame)
    if isinstance(message, Outputs):
        for place, logits in zip(message.with_logits, more, strict=True):
            message.outputs[place] = msgspec.structs.replace(message.outputs[place], context_logits=logits)
    return message


def adapter_header(task_id: TaskId, adapter: PackedAdapter) -> AdapterHeader:
    number, tenant, page_bytes = number_of(task_id), tenant_of(task_id), adapter.pages.shape[1]
    return AdapterHeader(number, adapter.digest, adapter.rows, page_bytes, tenant, adapter.traits)


def adapter_payload(adapter: PackedAdapter) -> memoryview:
    """The bytes of the pages, not copied."""
    return adapter.pages.numpy().data.cast("B")


def read_adapter(header: AdapterHeader, payload: memoryview) -> PackedAdapter:
    """The adapter of a message; its pages are the payload itself, not a copy."""
    import torch  # the engine has it; some fronts, which only send, do without

    pages = torch.frombuffer(payload, dtype=torch.uint8).view(-1, header.page_bytes)
    return PackedAdapter(header.digest, header.rows, pages, header.traits)


def error_output(request_id: str, error: RequestError) -> TokenOutput:
    """The final output of a request that failed."""
    return TokenOutput(request_id, [], "", error_code=error.code, error_message=str(error))


def take_stdout() -> TextIO:
    """The stream of the report. The output of libraries goes to stderr from here on."""
    stream = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return stream


def report_start(stream: TextIO, outcome: StartReport) -> None:
    """Tell the supervisor how the start went; nothing more is told then."""
    stream.write(msgspec.json.encode(outcome).decode() + "\n")
    stream.close()


MAX_QUEUED_MESSAGES = 16
"""How many messages ZeroMQ holds on either side for a front that does not read. Further outputs wait here, and are
joined.
"""


class Outbox:
    """The waiting outputs of each front: never more than the answers of running requests."""

    def __init__(self) -> None:
        self._waiting: defaultdict[bytes, list[TokenOutput]] = defaultdict(list)

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def fronts(self) -> list[bytes]:
        """The fronts with waiting outputs."""
        return list(self._waiting)

    def add(self, front: bytes, output: TokenOutput) -> None:
        self._waiting[front].append(output)

    def take(self, front: bytes) -> list[TokenOutput]:
        """Take out the outputs that wait for a front, joined by `join_outputs`."""
        return join_outputs(self._waiting.pop(front, []))


def join_outputs(outputs: Iterable[TokenOutput]) -> list[TokenOutput]:
    """The same outputs, joined by request, so that a slow listener catches up.

    Errors stay apart, and logits of prompts, which are megabytes each.
    """
    grouped: defaultdict[tuple[str, bool, int], list[TokenOutput]] = defaultdict(list)
    for place, output in enumerate(outputs):
        apart = place if output.context_logits else -1
        grouped[output.request_id, output.error_code is not None, apart].append(output)
    return [group[0] if len(group) == 1 else _join(group) for group in grouped.values()]


def _join(outputs: list[TokenOutput]) -> TokenOutput:
    """Join outputs of one request. The totals and the end come from the last output."""
    return msgspec.structs.replace(
        outputs[-1],
        token_ids=list(chain.from_iterable(output.token_ids for output in outputs)),
        text="".join(output.text for output in outputs),
        log_probs=list(chain.from_iterable(output.log_probs for output in outputs)),
        generation_logits=b"".join(output.generation_logits for output in outputs),
        prompt_log_probs=b"".join(output.prompt_log_probs for output in outputs),
    )
