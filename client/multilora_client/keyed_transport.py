"""Transports that send every request with one API key, over another transport."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import AsyncGenerator, Generator

from multilora_client.messages import InferRequest, Response
from multilora_client.transport import AsyncTransport, Transport

API_KEY_VARIABLE = "MULTILORA_API_KEY"


def chosen_key(api_key: str | None) -> str:
    """The given key, where an empty one means no key; else the environment's."""
    return os.environ.get(API_KEY_VARIABLE, "") if api_key is None else api_key


class KeyedTransport:
    """The blocking transport. Closing it closes the transport beneath."""

    def __init__(self, transport: Transport, api_key: str) -> None:
        self._transport = transport
        self._api_key = api_key

    @property
    def streams_tensors(self) -> bool:
        return self._transport.streams_tensors

    def infer(self, request: InferRequest) -> Response:
        return self._transport.infer(dataclasses.replace(request, api_key=self._api_key))

    def stream(self, request: InferRequest) -> Generator[Response, None, None]:
        return self._transport.stream(dataclasses.replace(request, api_key=self._api_key))

    def close(self) -> None:
        self._transport.close()


class AsyncKeyedTransport:
    """The transport for asyncio."""

    def __init__(self, transport: AsyncTransport, api_key: str) -> None:
        self._transport = transport
        self._api_key = api_key

    @property
    def streams_tensors(self) -> bool:
        return self._transport.streams_tensors

    async def infer(self, request: InferRequest) -> Response:
        return await self._transport.infer(dataclasses.replace(request, api_key=self._api_key))

    def stream(self, request: InferRequest) -> AsyncGenerator[Response, None]:
        return self._transport.stream(dataclasses.replace(request, api_key=self._api_key))

    async def close(self) -> None:
        await self._transport.close()
