"""/api/adapters: all adapters, and the operations on one of them."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from multilora_client.console.replies import json_reply
from multilora_client.console.state import TheClient, Writable
from multilora_wire.adapter_info import AdapterInfo

router = APIRouter()

COLUMNS = (
    *("lora_task_id", "name", "tenant", "digest", "status", "location", "bytes", "ranks", "num_pins", "is_pinned"),
    *("last_used_s", "num_hits", "kinds"),
)


def as_task_id(value: Any) -> Any:
    """The number that a text of digits means; anything else as it is, for the type to refuse."""
    return int(value) if isinstance(value, str) and value.isascii() and value.isdecimal() else value


TaskId = Annotated[int, BeforeValidator(as_task_id), Field(ge=0, lt=2**64)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class ById(_Strict):
    """An adapter by its task id, as text or as a number."""

    lora_task_id: TaskId

    @property
    def adapter(self) -> int | str:
        return self.lora_task_id


class ByName(_Strict):
    """An adapter by its name."""

    lora_name: Annotated[str, Field(min_length=1, max_length=200)]

    @property
    def adapter(self) -> int | str:
        return self.lora_name


class Which(_Strict):
    """An adapter, and its tenant if it has one. expected_digest: of the version that is meant."""

    which: ById | ByName
    tenant: str = ""
    expected_digest: str | None = None


class AdapterToLoad(_Strict):
    """An adapter that the server shall fetch; an empty source asks all of them, an empty path is where they look."""

    which: ById | ByName
    source: str = ""
    path: str = ""


@router.get("/api/adapters")
async def list_adapters(client: TheClient) -> Response:
    """Rows of values, so that thousands of adapters are short; and the aliases."""
    adapters, aliases = await client.list_all()
    return json_reply({"columns": COLUMNS, "rows": [_row(adapter) for adapter in adapters], "aliases": aliases})


@router.post("/api/load")
async def load(body: AdapterToLoad, client: TheClient, _: Writable) -> Response:
    return json_reply(await client.load_adapter(body.which.adapter, body.source, body.path))


@router.post("/api/unload")
async def unload(body: Which, client: TheClient, _: Writable) -> Response:
    return json_reply(await client.unload_adapter(body.which.adapter, body.tenant, body.expected_digest))


@router.post("/api/pin")
async def pin(body: Which, client: TheClient, _: Writable) -> Response:
    return json_reply(await client.pin_adapter(body.which.adapter, body.tenant, body.expected_digest))


@router.post("/api/unpin")
async def unpin(body: Which, client: TheClient, _: Writable) -> Response:
    return json_reply(await client.unpin_adapter(body.which.adapter, body.tenant, body.expected_digest))


def _row(adapter: AdapterInfo) -> list[Any]:
    task_id, *rest = (getattr(adapter, column) for column in COLUMNS)
    return [str(task_id), *rest]
