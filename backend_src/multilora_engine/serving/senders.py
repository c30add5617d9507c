"""`SenderBook`: the sender of a request, and its rights.

Triton passes headers on to a model as parameters of the request. They come after the parameters that the client wrote
into the request itself. Over HTTP generate Triton passes no header on: all parameters are the client's own.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from multilora_engine.engine_info import ClientPolicy
from multilora_engine.errors import ConfigError, InvalidRequest, PermissionDenied, Unauthenticated
from multilora_engine.lora.names import SetMember, TaskId, scoped_task_id, task_id_of
from multilora_engine.process.messages import AdapterScope
from multilora_engine.request import GenerationRequest, Sender
from multilora_engine.serving.triton_api import TritonRequest, parameters_of
from multilora_wire.headers import CLIENT_HEADER, KEY_HEADER

if TYPE_CHECKING:
    from multilora_client.keys import Caller, KeyRing

_MAX_NAME_CHARACTERS = 128
_MIN_SECRET_CHARACTERS = 16


@dataclass(frozen=True)
class Rights:
    """The rights of the sender of a request. caller: its API key; None without keys, when every sender may do
    everything.

    min_priority: the smallest priority that its requests get.
    """

    sender: Sender
    min_priority: int
    caller: Caller | None = None

    @property
    def scope(self) -> AdapterScope:
        """The adapters that the sender may see."""
        if self.caller is None or self.runs_the_server:
            return AdapterScope()
        return self.scope_of_requests

    @property
    def scope_of_requests(self) -> AdapterScope:
        """The adapters that the sender's own requests mean by their names: none of other tenants, whoever it is."""
        if self.caller is None:
            return AdapterScope(False, shared=("*",))
        return AdapterScope(False, self.caller.tenant, self.caller.entry.adapters)

    @property
    def runs_the_server(self) -> bool:
        """Whether it may look after the adapters of all tenants."""
        return self.caller is None or self.caller.runs_the_server

    def adapter_tenant(self, lora_task_id: int | None, lora_name: str) -> str:
        """The tenant whose adapter a request means, empty for the server's own; None is the base model.

        Raises PermissionDenied where the key may not use it, whether there is such an adapter or not.
        """
        if self.caller is None:
            return ""
        if lora_task_id is None:
            if not self.caller.entry.base_model:
                raise PermissionDenied("this API key may not use the base model")
            return ""
        if not self.caller.may_use(lora_task_id, lora_name):
            raise PermissionDenied(f"this API key may not use LoRA adapter {lora_name or lora_task_id}")
        return self.caller.owner(lora_task_id, lora_name)

    def uploaded_task_id(self, lora_task_id: int, lora_name: str) -> TaskId:
        """The adapter that weights of the sender are for. Raises PermissionDenied when it may not send them."""
        tenant = self.adapter_tenant(lora_task_id, lora_name)
        self.check_upload()
        if tenant != self.sender.tenant:
            raise PermissionDenied(
                f"LoRA adapter {lora_name or lora_task_id} is the server's own; send yours under another id or name"
            )
        return scoped_task_id(tenant, lora_task_id)

    def check_upload(self) -> None:
        """Raises PermissionDenied unless the sender may send weights."""
        if self.caller is not None and not self.caller.entry.upload:
            raise PermissionDenied("this API key may not send LoRA weights")

    def check_operate(self) -> None:
        """Raises PermissionDenied unless the sender may look after adapters."""
        if self.caller is not None and not self.caller.entry.operate:
            raise PermissionDenied("this API key may not load, pin, unpin or unload adapters")

    def grant(self, request: GenerationRequest, is_streaming: bool) -> GenerationRequest:
        """A request as the engine may take it from the sender. Raises PermissionDenied."""
        if request.lora_path and not self.runs_the_server:
            raise PermissionDenied("this API key may not choose the path of an adapter; use one that the server has")
        is_unheard = not (is_streaming or self.sender.is_known or self.sender.is_canary)
        granted = msgspec.structs.replace(
            request,
            sender=msgspec.structs.replace(self.sender, is_unheard=is_unheard),
            priority=max(request.priority, self.min_priority),
        )
        if request.lora_set:
            members = tuple(self._grant_member(member) for member in request.lora_set)
            return msgspec.structs.replace(granted, lora_set=members, adapter_tenant=self.sender.tenant)
        tenant = self.adapter_tenant(request.lora_task_id, request.lora_name)
        return msgspec.structs.replace(granted, adapter_tenant=tenant)

    def _grant_member(self, member: SetMember) -> SetMember:
        """A set is a new adapter, which takes memory and disk: a key makes one if it may send one."""
        self.check_upload()
        return msgspec.structs.replace(member, tenant=self.adapter_tenant(member.lora_task_id, ""))


class SenderBook:
    """Reads the sender of a request. Any thread may ask."""

    def __init__(self, policy: ClientPolicy, max_metadata_bytes: int, canary_key: str = "") -> None:
        """canary_key: besides those of the file, the API key that may use the base model and nothing else. Who has it
            is the canary, also where no keys are needed.

        Raises ConfigError when the API keys or the proxy's secret cannot be read.
        """
        self._policy = policy
        self._max_metadata_bytes = max_metadata_bytes
        self._canary = f"Bearer {canary_key}" if canary_key else ""
        self._keys = read_key_ring(Path(policy.api_keys_file), canary_key) if policy.api_keys_file else None
        secret_file = policy.client_header_secret_file
        self._proxy_secret = read_proxy_secret(Path(secret_file)) if secret_file else ""

    def rights(self, request: TritonRequest) -> Rights:
        """Raises Unauthenticated when the request needs an API key and has none, InvalidRequest for a forged client."""
        parameters = parameters_of(request, self._max_metadata_bytes)
        authorization = parameters.get(KEY_HEADER, [""])[-1]
        is_canary = bool(self._canary) and hmac.compare_digest(
            authorization.encode(errors="replace"), self._canary.encode()
        )
        if self._keys is not None:
            rights = self._rights_of_key(self._keys, authorization)
            return replace(rights, sender=msgspec.structs.replace(rights.sender, is_canary=is_canary))
        if is_canary:
            return Rights(Sender(is_canary=True), self._policy.min_priority)
        return Rights(Sender(name=self._client(parameters.get(CLIENT_HEADER, []))), self._policy.min_priority)

    def _rights_of_key(self, keys: KeyRing, authorization: str) -> Rights:
        from multilora_client.keys import bearer_key

        caller = keys.caller(bearer_key(authorization))
        if caller is None:
            raise Unauthenticated
        entry = caller.entry
        sender = Sender(
            tenant=entry.tenant,
            name=entry.tenant,
            key_id=caller.id,
            requests_per_minute=entry.requests_per_minute,
            tokens_per_minute=entry.tokens_per_minute,
            weight=entry.weight,
        )
        return Rights(sender, self._policy.min_priority if entry.priority is None else entry.priority, caller)

    def _client(self, values: list[str]) -> str:
        """The client that a proxy names; empty without one."""
        if len(set(values)) > 1:
            raise InvalidRequest(
                f"{CLIENT_HEADER} has {len(set(values))} values; the proxy alone sets it, leave it out of the request"
            )
        if not values:
            return ""
        if not self._proxy_secret:
            return _plain(values[0])
        given, _, name = values[0].partition(" ")
        if not hmac.compare_digest(given.encode(), self._proxy_secret.encode()):
            raise InvalidRequest(
                f"{CLIENT_HEADER} is not from the proxy: it does not begin with the secret of "
                "client_header_secret_file; leave it out of the request"
            )
        return _plain(name)


def read_key_ring(path: Path, canary_key: str = "") -> KeyRing:
    """The API keys of a file, and one that may use the base model and nothing else. Raises ConfigError."""
    # Imports gRPC, which a server without keys has no use for in its many processes.
    from multilora_client.errors import InvalidRequest as UnusableFile
    from multilora_client.keys import KeyEntry, KeyRing

    canary = [KeyEntry(key=canary_key, base_model=True)] if canary_key else []
    try:
        return KeyRing(path, task_id_of, canary)
    except UnusableFile as error:
        raise ConfigError(f"parameter api_keys_file: {error}") from None


def read_proxy_secret(path: Path) -> str:
    """The secret that the proxy writes before the name of a client. Raises ConfigError."""
    try:
        secret = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"parameter client_header_secret_file: {path} cannot be read: {error}") from None
    if len(secret) < _MIN_SECRET_CHARACTERS or not secret.isalnum():
        raise ConfigError(
            f"parameter client_header_secret_file: {path} is not {_MIN_SECRET_CHARACTERS} letters and digits or more"
        )
    return secret


def _plain(name: str) -> str:
    """The name of a client as logs and metrics can show it. Raises InvalidRequest for any other."""
    if len(name) > _MAX_NAME_CHARACTERS or not name.isprintable():
        raise InvalidRequest(f"{CLIENT_HEADER} is not up to {_MAX_NAME_CHARACTERS} characters that can be printed")
    return name
