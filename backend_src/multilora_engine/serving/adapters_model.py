"""The Python model `adapters`: an operator's requests about adapters, as JSON in and JSON out.

{"operation": "list"}, {"operation": "pin", "lora_task_id": 7}, ...: see `multilora_engine.process.operations`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

import msgspec

from multilora_engine.errors import InvalidRequest, PermissionDenied
from multilora_engine.lora.names import task_id_of
from multilora_engine.process.operations import (
    CombineAdapters,
    ListAdapters,
    LoadAdapter,
    NamedMember,
    Operation,
    PinAdapter,
    ReadStats,
    RemoveAlias,
    SetAlias,
    SwitchWeights,
    UnloadAdapter,
    UnpinAdapter,
    parse_operation,
)
from multilora_engine.process.paths import socket_path
from multilora_engine.serving.front import EngineLink, Front, new_id
from multilora_engine.serving.inputs import InputTensors
from multilora_engine.serving.replies import Responder, TextReply
from multilora_engine.serving.senders import Rights
from multilora_engine.serving.triton_api import TritonRequest, prepare_stub

_MAX_OPERATION_BYTES = 1 << 20
"""Longer than any: a switch of a thousand weights by names of 256 characters."""


class AdaptersFront(Front):
    """The operator's door to the engine."""

    def _submit(self, request: TritonRequest, responder: Responder) -> None:
        rights = self._link.rights(request)
        text = InputTensors(request).text("request", row=0)
        if text is None:
            raise InvalidRequest("the tensor request is missing; it holds an operation in JSON")
        if (num_bytes := len(text.encode())) > _MAX_OPERATION_BYTES:
            raise InvalidRequest(f"the operation has {num_bytes} bytes, at most {_MAX_OPERATION_BYTES} are accepted")
        operation = grant_operation(parse_operation(text), rights)
        is_for_requests = isinstance(operation, ListAdapters) and operation.is_for_requests
        scope = rights.scope_of_requests if is_for_requests else rights.scope
        self._link.client.operate(TextReply(responder, "response"), new_id(), operation, scope, rights.sender)


def grant_operation(operation: Operation, rights: Rights) -> Operation:
    """An operation as the engine may take it from its sender: on an adapter that it may see and change.

    Raises PermissionDenied.
    """
    if rights.runs_the_server:
        return operation
    match operation:
        case ReadStats():
            raise PermissionDenied("stats are of all tenants; this API key does not run the server")
        case SwitchWeights():
            raise PermissionDenied("the weights are of all tenants; this API key does not run the server")
        case LoadAdapter() | UnloadAdapter() | PinAdapter() | UnpinAdapter() | CombineAdapters():
            return _grant_on_adapter(operation, rights)
        case SetAlias() | RemoveAlias():
            return _grant_on_alias(operation, rights)
        case _:
            return operation


_OnAdapter = LoadAdapter | UnloadAdapter | PinAdapter | UnpinAdapter | CombineAdapters


def _grant_on_adapter(operation: _OnAdapter, rights: Rights) -> Operation:
    rights.check_operate()
    name = operation.name or ""
    lora_task_id = task_id_of(name) if operation.lora_task_id is None else operation.lora_task_id
    tenant = rights.adapter_tenant(lora_task_id, name)
    if operation.tenant not in ("", tenant):
        raise PermissionDenied(f"this API key may not look after adapters of tenant {operation.tenant[:64]!r}")
    if isinstance(operation, LoadAdapter) and (operation.source or operation.path):
        raise PermissionDenied(
            "this API key may not choose the source or the path of an adapter; leave source and path out"
        )
    if not tenant and not isinstance(operation, LoadAdapter):
        raise PermissionDenied(
            f"LoRA adapter {name or lora_task_id} is the server's own, which this API key may only load"
        )
    if isinstance(operation, CombineAdapters):
        members = [_grant_member(member, rights) for member in operation.members]
        return msgspec.structs.replace(operation, tenant=tenant, members=members)
    return msgspec.structs.replace(operation, tenant=tenant)


def _grant_on_alias(operation: SetAlias | RemoveAlias, rights: Rights) -> Operation:
    """A tenant's aliases have the tenant's own adapters as members: its rights on the server's may change later."""
    rights.check_operate()
    tenant = rights.sender.tenant
    if operation.tenant not in ("", tenant):
        raise PermissionDenied(f"this API key may not look after aliases of tenant {operation.tenant[:64]!r}")
    members = operation.members if isinstance(operation, SetAlias) else ()
    for name in (operation.name, *(member.name for member in members)):
        if rights.adapter_tenant(task_id_of(name), name) != tenant:
            raise PermissionDenied(f"{name!r} is the server's own, and this API key may change its tenant's aliases")
    return msgspec.structs.replace(operation, tenant=tenant)


def _grant_member(member: NamedMember, rights: Rights) -> NamedMember:
    name = member.name or ""
    lora_task_id = task_id_of(name) if member.lora_task_id is None else member.lora_task_id
    tenant = rights.adapter_tenant(lora_task_id, name)
    if member.tenant not in ("", tenant):
        raise PermissionDenied(f"this API key may not use adapters of tenant {member.tenant[:64]!r}")
    return msgspec.structs.replace(member, tenant=tenant)


class AdaptersModel:
    """One response a request, sent when the engine has answered."""

    def initialize(self, args: Mapping[str, str]) -> None:
        prepare_stub(args["model_name"])
        self._link = EngineLink(socket_path(os.getppid()))
        self._front = AdaptersFront(self._link)

    def execute(self, requests: list[TritonRequest]) -> None:
        for request in requests:
            self._front.accept(request)

    def finalize(self) -> None:
        self._link.close()
