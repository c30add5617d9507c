"""Which model names there are, what each means, and which of them an API key may use."""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from multilora_client.adapter import Adapter
from multilora_client.convert import load_adapter
from multilora_client.errors import InvalidRequest
from multilora_client.openai.errors import Failure

_EVERY_MODEL = "*"


@dataclass(frozen=True)
class Model:
    """What a model name means: an adapter with its weights, one that the server has by name, or neither: the base."""

    name: str
    adapter: Adapter | None = None
    lora_name: str | None = None


@dataclass(frozen=True)
class Catalogue:
    """The base model's name, and the adapters by theirs. A name that is in neither is refused, never the base model.

    keys: model names that each API key may use, `*` for all; None lets everybody use everything.
    allows_loading: whether those who may use every model may have the server load adapters, and forget them again.
    Raises InvalidRequest when an adapter is called like the base model, or a key may use what there is not.
    """

    base: str
    adapters: Mapping[str, Adapter]
    keys: Mapping[str, frozenset[str]] | None = None
    allows_loading: bool = False
    _loaded: dict[str, None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.base in self.adapters:
            raise InvalidRequest(f"an adapter is called {self.base!r}, like the base model")
        for allowed in (self.keys or {}).values():
            if unknown := allowed - {*self.names, _EVERY_MODEL}:
                raise InvalidRequest(f"an API key may use {sorted(unknown)}, and there are no such models")

    @property
    def names(self) -> list[str]:
        return [self.base, *self.adapters, *self._loaded]

    def access(self, authorization: str | None) -> Access:
        """What the sender of this Authorization header may use. Raises Failure (401) for an unknown key."""
        if self.keys is None:
            return Access(self, frozenset({_EVERY_MODEL}))
        scheme, _, key = (authorization or "").partition(" ")
        # Every key is compared, each in constant time: how long it takes tells nothing about any of them.
        given = key.strip().encode("latin-1")  # the header's bytes, as ASGI servers decode them
        matches = [allowed for known, allowed in self.keys.items() if hmac.compare_digest(known.encode(), given)]
        if scheme.lower() != "bearer" or not matches:
            raise Failure(
                401,
                "no valid API key: send `Authorization: Bearer KEY`",
                "invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return Access(self, matches[0])

    def model(self, name: str) -> Model:
        """Raises Failure (404)."""
        if name not in self.names:
            raise Failure(404, f"there is no model {name!r}", "model_not_found", "model")
        return Model(name, self.adapters.get(name), name if name in self._loaded else None)

    def is_loaded(self, name: str) -> bool:
        """Whether clients had the server load it."""
        return name in self._loaded

    def add(self, name: str) -> None:
        """An adapter that the server has by this name now."""
        self._loaded[name] = None

    def remove(self, name: str) -> None:
        self._loaded.pop(name, None)


@dataclass(frozen=True)
class Access:
    """The part of a catalogue that one caller may use."""

    catalogue: Catalogue
    allowed: frozenset[str]

    @property
    def names(self) -> list[str]:
        return [name for name in self.catalogue.names if self._may_use(name)]

    def model(self, name: str) -> Model:
        """Raises Failure (404, 403)."""
        model = self.catalogue.model(name)
        if not self._may_use(name):
            raise Failure(403, f"this API key may not use model {name!r}", "model_not_allowed", "model")
        return model

    def check_operator(self) -> None:
        """Raises Failure (403) for a caller who may not use every model, and so may not see to all of them."""
        if _EVERY_MODEL not in self.allowed:
            raise Failure(403, "this API key may not do that: it is for keys with every model", "not_allowed")

    def _may_use(self, name: str) -> bool:
        return not self.allowed.isdisjoint({name, _EVERY_MODEL})


def load_adapters(directories: Mapping[str, Path]) -> dict[str, Adapter]:
    """Adapters by name. Raises AdapterError for a directory that holds none, InvalidRequest for a bad name."""
    if "" in directories:
        raise InvalidRequest("an adapter has an empty name")
    return {name: load_adapter(directory) for name, directory in directories.items()}


def read_directories(path: Path) -> dict[str, Path]:
    """`{"name": "directory"}`, with directories relative to the file. Raises InvalidRequest."""
    entries = _read_object(path)
    if not all(isinstance(directory, str) for directory in entries.values()):
        raise InvalidRequest(f"{path} must map each adapter's name to its directory")
    return {name: path.parent / directory for name, directory in entries.items()}


def read_keys(path: Path) -> dict[str, frozenset[str]]:
    """`{"key": ["model name", ...]}`, `*` for every model. Raises InvalidRequest, which quotes no key."""
    entries = _read_object(path)
    for key, names in entries.items():
        if not key or not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise InvalidRequest(f"{path} must map each API key, which may not be empty, to a list of model names")
    return {key: frozenset(names) for key, names in entries.items()}


def _read_object(path: Path) -> dict[str, Any]:
    try:
        entries = json.loads(path.read_bytes())
    except ValueError as error:
        raise InvalidRequest(f"{path} is not JSON: {error}") from error
    if not isinstance(entries, dict):
        raise InvalidRequest(f"{path} is not a JSON object")
    return entries
