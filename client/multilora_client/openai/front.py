"""What every request to the application finds in `request.state`, and the dependencies made of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Annotated, TypedDict

from fastapi import Depends, Request

from multilora_client.client import AsyncClient
from multilora_client.errors import MultiloraClientError
from multilora_client.openai.catalogue import Access, Catalogue
from multilora_client.openai.errors import Failure
from multilora_client.openai.metrics import FrontMetrics
from multilora_client.openai.settings import FrontSettings
from multilora_client.operations import ModelInfo

_PATIENCE_S = 5.0
"""With a server that says nothing: probes give up not much later."""


@dataclass(frozen=True)
class Front:
    """One running application. started_s: when it began, in seconds since the epoch."""

    client: AsyncClient
    catalogue: Catalogue
    settings: FrontSettings
    metrics: FrontMetrics
    started_s: int

    async def describe_model(self) -> ModelInfo:
        """What the server behind serves. Raises Failure (503) when it does not say so soon."""
        try:
            return await asyncio.wait_for(self.client.describe_model(), _PATIENCE_S)
        except (MultiloraClientError, TimeoutError):
            raise Failure(503, "the server behind does not answer", "unavailable") from None


class State(TypedDict):
    front: Front


def front_of(request: Request) -> Front:
    front: Front = request.state.front
    return front


def access_of(request: Request) -> Access:
    """Raises Failure (401) for a caller without a valid key."""
    return front_of(request).catalogue.access(request.headers.get("authorization"))


def operator_of(request: Request) -> Access:
    """Raises Failure (401, 403) for a caller who may not use every model."""
    access = access_of(request)
    access.check_operator()
    return access


TheFront = Annotated[Front, Depends(front_of)]
Caller = Annotated[Access, Depends(access_of)]
Operator = Annotated[Access, Depends(operator_of)]
