"""`EngineLink`: a model's client of the engine, and the facts it needs before it can read a request."""

from __future__ import annotations

import os
from pathlib import Path

from multilora_engine.client_header import CANARY_KEY_VARIABLE
from multilora_engine.engine_info import EngineInfo
from multilora_engine.free_memory import give_back_free_memory
from multilora_engine.process.client import EngineClient
from multilora_engine.serving.senders import Rights, SenderBook
from multilora_engine.serving.triton_api import TritonRequest
from multilora_engine.text.tokenizer import Tokenizer

_FIRST_CONTACT_S = 5.0
"""All models load at the same time; `generation` is ready a moment before the others have heard of its engine."""


class EngineLink:
    """The engine's client, description and tokenizer. All options come from the engine, which has all parameters."""

    def __init__(self, socket_path: Path) -> None:
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
            # It was read as JSON: of the default model's 49,152 tokens and as many merges 32 MB, of which 18 are used.
            give_back_free_memory()
        return info, self._tokenizer

    def close(self) -> None:
        self.client.close()
