"""`Front`: accepts the requests of a Triton model and hands them to the engine."""

from __future__ import annotations

import logging
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial

from multilora_engine.errors import MAX_REQUEST_ID_CHARS, InternalError, InvalidRequest, RequestError
from multilora_engine.serving.engine_link import EngineLink
from multilora_engine.serving.replies import Responder
from multilora_engine.serving.triton_api import TritonRequest

logger = logging.getLogger(__name__)


class Front(ABC):
    """One of the doors to the engine. has_flat_text: its text_output has no batch dimension."""

    def __init__(self, link: EngineLink, has_flat_text: bool = False) -> None:
        self._link = link
        self._has_flat_text = has_flat_text

    def accept(self, request: TritonRequest) -> None:
        """Start answering. An error of the request is its answer; the client's thread sends it."""
        responder = Responder(request, self._has_flat_text)
        self._try(responder, partial(self._accept, request, responder))

    def _accept(self, request: TritonRequest, responder: Responder) -> None:
        _check_request_id(responder.request_id)
        self._submit(request, responder)

    def _try(self, responder: Responder, work: Callable[[], None]) -> None:
        """Do a part of a request's work, on any thread; an error of it is the request's answer."""
        try:
            work()
        except RequestError as error:
            # With its traceback the error would keep all of the request until it is told.
            self._fail(responder, error.with_traceback(None))
        except Exception as error:
            logger.exception("request %s failed", responder.request_id)
            self._fail(responder, InternalError(f"{type(error).__name__}: {error}"))

    def _fail(self, responder: Responder, error: RequestError) -> None:
        def fail() -> None:
            responder.fail(error)
            responder.flush()

        self._link.client.call_soon(fail)

    @abstractmethod
    def _submit(self, request: TritonRequest, responder: Responder) -> None:
        """Read a request and hand it to the engine's client, with a listener that answers it. Raises RequestError."""


def _check_request_id(request_id: str) -> None:
    if (num_chars := len(request_id)) > MAX_REQUEST_ID_CHARS:
        raise InvalidRequest(f"the request id has {num_chars} characters, at most {MAX_REQUEST_ID_CHARS} are accepted")


def new_id() -> str:
    """An id for a request that no other request of the engine has."""
    return uuid.uuid4().hex
