"""/v1/load_lora_adapter and /v1/unload_lora_adapter, as vLLM has them: adapters of the server become models."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import PlainTextResponse

from multilora_client.errors import MultiloraClientError, NotFound
from multilora_client.openai.errors import Failure
from multilora_client.openai.front import OpenaiFront, Operator, TheFront
from multilora_client.openai.schemas.adapters import LoadRequest, UnloadRequest

router = APIRouter()


@router.post("/v1/load_lora_adapter")
async def load_adapter(body: LoadRequest, operator: Operator, front: TheFront) -> PlainTextResponse:
    """Has the server fetch an adapter from its sources; a path may lead to nothing else."""
    _check_allowed(front)
    name = body.lora_name
    is_replacement = body.expected_digest is not None and front.catalogue.is_loaded(name)
    if name in front.catalogue.names and not is_replacement:
        raise Failure(400, f"there is a model {name!r} already", "model_exists", "lora_name")
    await front.client_of(operator).load_adapter(name, path=body.lora_path, expected_digest=body.expected_digest)
    front.catalogue.add(name)
    return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")


@router.post("/v1/unload_lora_adapter")
async def unload_adapter(body: UnloadRequest, operator: Operator, front: TheFront) -> PlainTextResponse:
    """Unloads only an adapter that was loaded that way; the others are the operator's."""
    _check_allowed(front)
    name = body.lora_name
    if not front.catalogue.is_loaded(name):
        raise Failure(404, f"no adapter {name!r} was loaded", "model_not_found", "lora_name")
    front.catalogue.remove(name)
    try:
        await front.client_of(operator).unload_adapter(name, expected_digest=body.expected_digest)
    except NotFound:
        pass  # evicted, or gone with a server that was started anew
    except MultiloraClientError:
        front.catalogue.add(name)  # the server has it still
        raise
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _check_allowed(front: OpenaiFront) -> None:
    if not front.catalogue.allows_loading:
        raise Failure(403, "this front was started without --allow-lora-loading", "not_allowed")
