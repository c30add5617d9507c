"""/v1/models."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from multilora_client.errors import MultiloraClientError, Unavailable
from multilora_client.openai.catalogue import Access
from multilora_client.openai.errors import Failure
from multilora_client.openai.front import Caller, OpenaiFront, TheFront
from multilora_client.openai.routes.reading import reads

router = APIRouter()


@reads(router, "/v1/models")
@reads(router, "/v1/models/", in_schema=False)
async def list_models(caller: Caller, front: TheFront) -> dict[str, Any]:
    """The models that the caller may use: the base model and every adapter."""
    max_model_len = await _max_model_len(front, caller)
    names = dict.fromkeys([*caller.names, *await _names_at_server(front, caller)])
    return {"object": "list", "data": [_card(name, front, max_model_len) for name in names]}


@reads(router, "/v1/models/{name:path}")
async def retrieve_model(name: str, caller: Caller, front: TheFront) -> dict[str, Any]:
    """Raises Failure (404) for a name that neither the front nor the server has for the caller."""
    model = caller.model(name)
    if model.name not in caller.names and model.name not in await _names_at_server(front, caller):
        raise Failure(404, f"there is no model {name!r}", "model_not_found", "model")
    return _card(model.name, front, await _max_model_len(front, caller))


def _card(name: str, front: OpenaiFront, max_model_len: int | None) -> dict[str, Any]:
    base = front.catalogue.base
    return {
        "id": name,
        "object": "model",
        "created": front.started_s,
        "owned_by": "multilora",
        "root": base,
        "parent": None if name == base else base,
        "max_model_len": max_model_len,
    }


async def _names_at_server(front: OpenaiFront, caller: Access) -> list[str]:
    """The names that the caller's requests can ask for at the server, where its adapters are models for the caller."""
    if not caller.sees_the_server:
        return []
    try:
        names = await front.client_of(caller).list_names()
    except Unavailable:
        if caller.key:
            raise
        return []  # the list tells whether the front answers, too
    return [name for name in names if caller.may_use(name)]


async def _max_model_len(front: OpenaiFront, caller: Access) -> int | None:
    """The most tokens of a prompt and its answer; None while the server does not tell."""
    try:
        return (await front.describe_model(caller)).max_model_len
    except (Failure, MultiloraClientError):
        return None
