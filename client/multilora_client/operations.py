"""An operator's requests to the model `adapters`, and its answers: JSON on the wire, records here. No I/O."""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import msgspec

from multilora_client.errors import InvalidRequest, ServerFault
from multilora_client.messages import InferRequest, Response
from multilora_client.tensors import string_tensor
from multilora_wire.adapter_event import AdapterEvent
from multilora_wire.adapter_info import AdapterInfo, AdapterMember, Alias, AliasMember
from multilora_wire.layout import AdapterLayout, layout_version
from multilora_wire.sites import ModelSites

OperationName = Literal[
    "list",
    "load",
    "unload",
    "pin",
    "unpin",
    "combine",
    "alias",
    "unalias",
    "events",
    "stats",
    "layout",
    "describe",
    "weights",
]

WeightAction = Literal["list", "pack", "unpack"]

_MODEL = "adapters"

Parsed = TypeVar("Parsed", bound=msgspec.Struct)


class ModelInfo(msgspec.Struct, frozen=True):
    """The model that a server serves. model: its name. max_model_len: tokens of a prompt and its answer.

    version: the version of the server's engine. model_implementation: who computes the layers: the engine itself
        (`native`), or modules of `transformers`.
    has_encoder: whether an encoder reads the prompts, which answers do not continue then.
    """

    model: str
    max_model_len: int
    vocab_size: int
    version: str
    model_implementation: str = "native"
    has_encoder: bool = False


@dataclass(frozen=True)
class AdapterEvents:
    """A piece of the server's log. last: number of the latest event, to ask for later ones by.

    num_missed: events that were asked for and that the server has forgotten.
    """

    events: list[AdapterEvent]
    last: int
    num_missed: int


def which_adapter(adapter: int | str, tenant: str = "", expected_digest: str | None = None) -> dict[str, int | str]:
    """The fields that name an adapter: by its task id or its name, and its tenant and digest where they are given."""
    named: dict[str, int | str] = {"name": adapter} if isinstance(adapter, str) else {"lora_task_id": adapter}
    named |= {"tenant": tenant} if tenant else {}
    return named if expected_digest is None else named | {"expected_digest": expected_digest}


def request_names_fields(names: Sequence[str]) -> dict[str, Any]:
    """The fields of a `list` of what requests can name. names: instead of all, those of these."""
    return {"is_for_requests": True} | ({"names": [*names]} if names else {})


def load_fields(adapter: int | str, source: str, path: str, expected_digest: str | None = None) -> dict[str, int | str]:
    """The fields of a `load`. A server that knows no paths refuses the field, so it goes only where there is a path."""
    which = which_adapter(adapter, expected_digest=expected_digest)
    return which | {"source": source} | ({"path": path} if path else {})


def combine_fields(
    adapter: int | str, members: Mapping[int | str, float], expected_digest: str | None = None
) -> dict[str, Any]:
    """The fields of a `combine`. members: the weights of the adapters that the set is made of."""
    named = [which_adapter(member) | {"weight": weight} for member, weight in members.items()]
    return {**which_adapter(adapter, expected_digest=expected_digest), "members": named}


def alias_fields(name: str, members: Mapping[str, int], tenant: str) -> dict[str, Any]:
    """The fields of an `alias`. members: the weights of the adapters that it stands for."""
    named = [{"name": member, "weight": weight} for member, weight in members.items()]
    return which_adapter(name, tenant) | {"members": named}


def operation_request(operation: OperationName, fields: Mapping[str, Any] | None = None) -> InferRequest:
    text = json.dumps({"operation": operation, **(fields or {})})
    try:
        return InferRequest(_MODEL, uuid.uuid4().hex, {"request": string_tensor([text])})
    except UnicodeEncodeError as error:
        raise InvalidRequest(f"{operation}: {error}") from error


def parse_adapters(response: Response) -> list[AdapterInfo]:
    return [_parse_info(fields) for fields in parse_report(response)["adapters"]]


def parse_adapter(response: Response) -> AdapterInfo:
    return _parse_info(parse_report(response)["adapter"])


def parse_aliases(response: Response) -> list[Alias]:
    return [_parse_alias(fields) for fields in parse_report(response).get("aliases", ())]


def parse_request_names(response: Response) -> list[str]:
    adapters, aliases = parse_adapters(response), parse_aliases(response)
    return [*(adapter.name for adapter in adapters if adapter.name), *(alias.name for alias in aliases)]


def parse_alias(response: Response) -> Alias:
    return _parse_alias(parse_report(response)["alias"])


def parse_events(response: Response) -> AdapterEvents:
    report = parse_report(response)
    events = [_parse(AdapterEvent, fields) for fields in report["events"]]
    return AdapterEvents(events, report["last"], report["num_missed"])


def parse_model(response: Response) -> ModelInfo:
    return _parse(ModelInfo, parse_report(response))


def parse_layout(response: Response) -> AdapterLayout:
    """The layout in an answer. Raises ServerFault when the server lays adapters out in a way unknown to this client."""
    report = parse_report(response)["layout"]
    version = report.get("version", 1)
    known = layout_version(report["lora_dtype"])
    if version != known:
        raise ServerFault(f"the server's adapter layout has version {version}, this client knows {known}")
    return msgspec.convert(report, AdapterLayout)


def parse_sites(response: Response) -> ModelSites | None:
    """The sites in an answer to `layout`, whatever the version of the rest; None from a model that is not ours."""
    if response.first("response") is None:
        return None
    try:
        return msgspec.convert(parse_report(response)["layout"]["sites"], ModelSites)
    except (KeyError, TypeError, msgspec.ValidationError) as error:
        raise ServerFault(f"the server does not tell the sites of its model: {error!r}") from error


def parse_report(response: Response) -> dict[str, Any]:
    """The JSON object of an answer. Raises ServerFault when there is none."""
    try:
        report = json.loads(response.first("response") or "")
    except ValueError as error:
        raise ServerFault(f"the model {_MODEL} answered with no JSON: {error}") from error
    if not isinstance(report, dict):
        raise ServerFault(f"the model {_MODEL} answered with a JSON {type(report).__name__}")
    return report


def _parse_info(fields: Mapping[str, Any]) -> AdapterInfo:
    members = tuple(_parse(AdapterMember, member) for member in fields.get("members", ()))
    return _parse(AdapterInfo, {**fields, "ranks": tuple(fields["ranks"]), "members": members})


def _parse_alias(fields: Mapping[str, Any]) -> Alias:
    members = tuple(_parse(AliasMember, member) for member in fields["members"])
    return _parse(Alias, {**fields, "members": members})


def _parse(kind: type[Parsed], fields: Mapping[str, Any]) -> Parsed:
    """A record of the fields that it knows; a newer server may send more."""
    return kind(**{name: value for name, value in fields.items() if name in kind.__struct_fields__})
