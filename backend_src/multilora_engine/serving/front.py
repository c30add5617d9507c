"""`Front`: accepts the requests of a Triton model for the engine; `EngineLink`: the engine as a model sees it."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from multilora_engine.engine_info import EngineInfo
from multilora_engine.errors import MAX_REQUEST_ID_CHARS, InternalError, InvalidRequest, RequestError
from multilora_engine.process.client import EngineClient
from multilora_engine.serving.replies import Responder
from multilora_engine.serving.senders import Rights, SenderBook
from multilora_engine.serving.triton_api import TritonRequest
from multilora_engine.text.tokenizer import Tokenizer
from multilora_wire.headers import CANARY_KEY_VARIABLE

_FIRST_CONTACT_S = 5.0
"""All models load at the same time; `generation` is ready a moment before the others have heard of its engine."""


class EngineLink:
    """The engine's client, description and tokenizer. All options come from the engine, which has all parameters."""

    def __init__(self, socket_path: Path, model_names: Collection[str] = ()) -> None:
        """model_names: of Triton's models, which clients may name in a request's body, too."""
        self._model_names = model_names
        self.client = EngineClient(socket_path)
        self._tokenizer: Tokenizer | None = None
        self._senders: SenderBook | None = None

    def rights(self, request: TritonRequest) -> Rights:
        """The sender of a request, and its rights. Raises Unauthenticated, InvalidRequest, EngineUnavailable."""
        if self._senders is None:
            info = self.client.wait_until_ready(_FIRST_CONTACT_S)
            canary_key = os.environ.get(CANARY_KEY_VARIABLE, "")
            self._senders = SenderBook(info.clients, info.limits.max_metadata_bytes, canary_key)
        return self._senders.rights(request)

    def describe(self) -> tuple[EngineInfo, Tokenizer]:
        """Raises EngineUnavailable while there is no engine."""
        info = self.client.wait_until_ready(0.0 if self._tokenizer else _FIRST_CONTACT_S)
        if self._tokenizer is None:
            self._tokenizer = Tokenizer(Path(info.tokenizer_path))
            # Reading its JSON takes 32 MB for the default model (49,152 tokens and merges); 18 MB stay in use.
            give_back_free_memory()
        return info, self._tokenizer

    def names_of_no_adapter(self, info: EngineInfo) -> set[str]:
        """The names that Triton's models and the base model have."""
        return {*self._model_names, info.model_path, Path(info.model_path).name}

    def close(self) -> None:
        self.client.close()


logger = logging.getLogger(__name__)


class Front(ABC):
    """One of the doors to the engine."""

    def __init__(self, link: EngineLink, make_responder: Callable[[TritonRequest], Responder] = Responder) -> None:
        """make_responder: makes the responder of a request. Raises nothing."""
        self._link = link
        self._make_responder = make_responder

    def accept(self, request: TritonRequest) -> None:
        """Start answering. An error of the request is its answer; the client's thread sends it."""
        responder = self._make_responder(request)
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


def give_back_free_memory() -> None:
    """Drop unreachable objects, and give free pages back to Linux, those in the middle of the heap, too.

    Where the C library has no `malloc_trim` (musl, which keeps few free pages), only the objects are dropped.
    """
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
