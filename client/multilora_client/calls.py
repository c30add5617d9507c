"""A client's handling of adapters, free of I/O, so that the blocking and the asyncio client share it.

The first use of an adapter carries its weights, later uses only the id. When the server has forgotten the adapter in
between, the weights are sent once more, and a second refusal is the caller's to see. An adapter counts as known to the
server only after an answer, never after a mere attempt.
"""

from __future__ import annotations

import dataclasses
import threading
from dataclasses import dataclass

from multilora_client.adapter import Adapter, AdapterTensors
from multilora_client.answers import ChunkReader, parse_generation
from multilora_client.errors import (
    AdapterConflict,
    AdapterNotFound,
    InvalidRequest,
    NotFound,
    PermissionDenied,
    Unsupported,
)
from multilora_client.generation import Chunk, Generation
from multilora_client.generation_inputs import task_id_input
from multilora_client.messages import InferRequest, Response
from multilora_client.operations import operation_request
from multilora_client.tensors import adapter_tensors
from multilora_wire.adapter_origin import AdapterOrigin

SITES_UNTOLD = (NotFound, InvalidRequest, Unsupported, PermissionDenied)
"""The errors of a server that is not ours or too old to tell its sites, and of a proxy that does not let one ask."""


@dataclass(frozen=True)
class _Known:
    content: bytes
    server_digest: str


class AdapterLedger:
    """The adapters that the server has confirmed to this client, by task id. Thread-safe; keeps digests, no weights."""

    def __init__(self) -> None:
        self._known: dict[int, _Known] = {}
        self._lock = threading.Lock()

    def knows(self, adapter: Adapter) -> bool:
        """Whether the server had exactly these weights under this id when last heard of."""
        return self._find(adapter) is not None

    def server_digest(self, adapter: Adapter) -> str:
        """The server's own digest of a known adapter; "" when it has not told one."""
        known = self._find(adapter)
        return known.server_digest if known else ""

    def confirm(self, adapter: Adapter, server_digest: str) -> None:
        with self._lock:
            self._known[adapter.lora_task_id] = _Known(adapter.content.digest, server_digest)

    def forget(self, adapter: Adapter) -> None:
        with self._lock:
            self._known.pop(adapter.lora_task_id, None)

    def _find(self, adapter: Adapter) -> _Known | None:
        with self._lock:
            known = self._known.get(adapter.lora_task_id)
        return known if known and known.content == adapter.content.digest else None


class Call:
    """One request that may carry an adapter, from the first attempt to its answer.

    `sends_weights` tells whether `request` has the weights. Only `resend_weights` and `weights_are_uploaded` change it.
    """

    def __init__(
        self, request: InferRequest, adapter: Adapter | int | None, ledger: AdapterLedger, num_sequences: int = 1
    ) -> None:
        self.adapter = adapter if isinstance(adapter, Adapter) else None
        self.sends_weights = self.adapter is not None and not ledger.knows(self.adapter)
        self._lora_task_id = adapter.lora_task_id if isinstance(adapter, Adapter) else adapter
        self._request = request
        self._ledger = ledger
        self._is_answered = False
        self._chunks = ChunkReader(request.request_id, num_sequences)

    @property
    def request(self) -> InferRequest:
        inputs = dict(self._request.inputs)
        if self._lora_task_id is not None:
            inputs |= task_id_input(self._lora_task_id)
        if self.adapter is not None and self.sends_weights:
            inputs |= adapter_tensors(self.adapter.content)
        return dataclasses.replace(self._request, inputs=inputs)

    @property
    def origin(self) -> AdapterOrigin | None:
        """The model of the tensors that `request` has, to be compared with the server's.

        None if nobody knows it, and for PEFT's files, whose sizes the server compares.
        """
        content = self.adapter.content if self.adapter is not None and self.sends_weights else None
        return content.origin if isinstance(content, AdapterTensors) else None

    @property
    def sites_request(self) -> InferRequest:
        """The question for the sites of the server's model."""
        return dataclasses.replace(operation_request("layout"), timeout_s=self._request.timeout_s)

    def resend_weights(self, error: AdapterNotFound) -> None:
        """Prepare the second attempt. Raises `error` again when the weights went along or part of an answer came."""
        if self.adapter is None or self.sends_weights or self._is_answered:
            raise error
        self._ledger.forget(self.adapter)
        self.sends_weights = True

    def check_upload_apart(self) -> None:
        """Raises InvalidRequest for a request whose weights must not go in a request of their own.

        The weights would replace another version before the server reads the digest that the request demands.
        """
        if "lora_expected_digest" in self._request.inputs:
            raise InvalidRequest(
                "lora_expected_digest with weights in a stream over HTTP: upload the adapter first, or use gRPC"
            )

    def weights_are_uploaded(self) -> None:
        """The weights went in a request of their own."""
        self.sends_weights = False

    def generation(self, response: Response) -> Generation:
        self._settle(response)
        return parse_generation(response, self._request.request_id)

    def chunk(self, response: Response) -> Chunk:
        self._settle(response)
        return self._chunks.read(response)

    def check_ended(self) -> None:
        """Raises Unavailable if a stream has ended before its answers."""
        self._chunks.check_ended()

    def _settle(self, response: Response) -> None:
        """Check that the requested adapter answered, and remember that the server has it."""
        answered_by = response.first("lora_task_id_out")
        if self._lora_task_id is not None and answered_by not in (None, self._lora_task_id):
            raise self._conflict(f"LoRA task {self._lora_task_id} was asked for and {answered_by} answered")
        if self.adapter is not None and not self._is_answered:
            self._settle_version(self.adapter, response.first("lora_digest") or "")
        self._is_answered = True

    def _settle_version(self, adapter: Adapter, server_digest: str) -> None:
        known_digest = "" if self.sends_weights else self._ledger.server_digest(adapter)
        if known_digest and server_digest and known_digest != server_digest:
            self._ledger.forget(adapter)
            raise self._conflict(f"LoRA task {adapter.lora_task_id} was replaced on the server by other weights")
        self._ledger.confirm(adapter, server_digest or known_digest)

    def _conflict(self, message: str) -> AdapterConflict:
        return AdapterConflict(message, request_id=self._request.request_id)
