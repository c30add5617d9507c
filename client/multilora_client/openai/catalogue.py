"""The model names, the meaning of each, and the names that an API key may use."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multilora_client.adapter import Adapter
from multilora_client.convert import load_adapter
from multilora_client.errors import InvalidRequest
from multilora_client.keys import Caller, KeyRing, bearer_key
from multilora_client.openai.errors import Failure
from multilora_wire.adapter_names import is_plain_name


@dataclass(frozen=True)
class NamedModel:
    """The meaning of a model name: an adapter with its weights, one of the server by name, or neither: the base."""

    name: str
    adapter: Adapter | None = None
    lora_name: str | None = None


@dataclass(frozen=True)
class Catalogue:
    """The base model's name, and the adapters by theirs. A name that is in neither is refused, never the base model.

    Without adapters and keys the server decides: a name is an adapter that it has or finds in its sources.

    keys: without them everybody may use everything.
    is_forwarding: whether the server has the same keys. Then each caller's key goes with its requests, and a name that
        is not in the catalogue means an adapter that the server has by this name, if the key may use it.
    allows_loading: whether the people who run the server may have it load adapters, and forget them again.
    Raises InvalidRequest when an adapter is called like the base model.
    """

    base: str
    adapters: Mapping[str, Adapter]
    keys: KeyRing | None = None
    is_forwarding: bool = False
    allows_loading: bool = False
    _loaded: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.base in self.adapters:
            raise InvalidRequest(f"an adapter is called {self.base!r}, like the base model")

    @property
    def names(self) -> list[str]:
        return [self.base, *self.adapters, *self._loaded]

    @property
    def is_the_servers(self) -> bool:
        """Whether every adapter of the server is a model."""
        return not self.adapters and self.keys is None

    def access(self, authorization: str | None) -> Access:
        """The models that the sender of this Authorization header may use. Raises Failure (401) for an unknown key."""
        if self.keys is None:
            return Access(self)
        # The header's bytes, which ASGI servers decode as Latin-1.
        key = bearer_key((authorization or "").encode("latin-1").decode(errors="surrogateescape"))
        caller = self.keys.caller(key)
        if caller is None:
            raise Failure(
                401,
                "no valid API key: send `Authorization: Bearer KEY`",
                "invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return Access(self, caller, key if self.is_forwarding else "")

    def model(self, name: str, param: str = "model") -> NamedModel:
        """The model of this name. Raises Failure (404). param: the field that has the name."""
        if name not in self.names:
            raise Failure(404, f"there is no model {name!r}", "model_not_found", param)
        return NamedModel(name, self.adapters.get(name), name if name in self._loaded else None)

    def is_loaded(self, name: str) -> bool:
        """Whether clients had the server load the adapter."""
        return name in self._loaded

    def add(self, name: str) -> None:
        """Add an adapter that the server has by this name now."""
        self._loaded[name] = None

    def remove(self, name: str) -> None:
        self._loaded.pop(name, None)


@dataclass(frozen=True)
class Access:
    """The part of a catalogue that one caller may use.

    caller: None where everybody may do everything. key: the API key of its requests to the server; empty where all
        requests go with the front's own key, if it has any.
    """

    catalogue: Catalogue
    caller: Caller | None = None
    key: str = field(default="", repr=False)

    @property
    def names(self) -> list[str]:
        """The names of the catalogue that the caller may use."""
        return [name for name in self.catalogue.names if self.may_use(name)]

    def model(self, name: str, param: str = "model") -> NamedModel:
        """The model of this name. Raises Failure (404, 403), regardless of adapters beyond the catalogue.

        param: the field of the request that has the name.
        """
        if not self.may_use(name):
            raise Failure(403, f"this API key may not use model {name!r}", "model_not_allowed", param)
        if self.sees_the_server and name not in self.catalogue.names and is_plain_name(name):
            return NamedModel(name, lora_name=name)
        return self.catalogue.model(name, param)

    @property
    def sees_the_server(self) -> bool:
        """Whether adapters of the server are models by their names, as far as the server lets the caller use them."""
        return bool(self.key) or self.catalogue.is_the_servers

    def check_operator(self) -> None:
        """Raises Failure (403) for a caller who does not run the server, and so may not see to its adapters."""
        if self.caller is not None and not self.caller.runs_the_server:
            raise Failure(
                403,
                'this API key does not run the server: it belongs to a tenant, or its entry lacks "operate": true',
                "not_allowed",
            )

    def may_use(self, name: str) -> bool:
        """Whether the caller may use the model of this name, if there is one."""
        if self.caller is None:
            return True
        if name == self.catalogue.base:
            return self.caller.entry.base_model
        if self.key and name not in self.catalogue.names:
            return self.caller.may_use(None, name)
        return self.caller.may_share(None, name)


def load_adapters(directories: Mapping[str, Path]) -> dict[str, Adapter]:
    """Adapters by name. Raises AdapterError for a directory that holds none, InvalidRequest for a bad name."""
    if "" in directories:
        raise InvalidRequest(f"the adapter of directory {directories['']} has an empty name; write NAME=DIR")
    return {name: load_adapter(directory) for name, directory in directories.items()}


def read_directories(path: Path) -> dict[str, Path]:
    """`{"name": "directory"}`, with directories relative to the file. Raises InvalidRequest."""
    entries = _read_object(path)
    if not all(isinstance(directory, str) for directory in entries.values()):
        raise InvalidRequest(f"{path} must map each adapter's name to its directory")
    return {name: path.parent / directory for name, directory in entries.items()}


def _read_object(path: Path) -> dict[str, Any]:
    try:
        entries = json.loads(path.read_bytes())
    except ValueError as error:
        raise InvalidRequest(f"{path} is not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise InvalidRequest(f"{path} is not a JSON object")
    return entries
