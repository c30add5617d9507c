"""API keys: a file gives each key its permissions. The server's models and the OpenAI front both read it by this code.

{"keys": [
  {"key": "a secret of 16 characters or more", "tenant": "acme", "upload": true,
   "adapters": ["pirate", "json-*", 7], "requests_per_minute": 600, "tokens_per_minute": 100000, "weight": 2},
  {"key_sha256": "64 hexadecimal digits", "operate": true, "adapters": ["*"]}
]}
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec

from multilora_client.errors import InvalidRequest

_EVERY = "*"
_TENANT = re.compile(r"[A-Za-z0-9_][\w.-]{0,63}", re.ASCII)
_SHA256 = re.compile(r"[0-9a-f]{64}")
_MIN_KEY_CHARACTERS = 16
_NUM_ID_DIGITS = 12
_SETTLED_S = 2.0
"""Two changes of a file within this many seconds may leave it with the same time of change."""

_logger = logging.getLogger(__name__)

Rate = Annotated[int, msgspec.Meta(ge=1, le=10**12)]
Weight = Annotated[float, msgspec.Meta(ge=0.01, le=100.0)]
Priority = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]


class KeyEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One key of the file. Either `key` or `key_sha256` is set.

    tenant: the owner of the key; empty for the people who run the server.
    adapters: the server's own adapters that the key may use: task ids, names, or beginnings of names followed by `*`.
        The server's own adapters come from its sources, its prefetch directory, and uploads of keys without a tenant.
        A name that matches always means the server's adapter; any other name means the tenant's. An alias's name is
        enough for requests by it: the key needs no right to the members.
    own_adapters: the tenant's own adapters that the key may use, in the same form.
    base_model: whether the key may use the base model without an adapter. upload: whether the key may send adapters.
    operate: whether the key may load, pin, unpin and unload adapters, and set aliases: those of its tenant, or without
        a tenant all.
    requests_per_minute, tokens_per_minute: the limits of this key; None means no limit.
    priority: the smallest priority that its requests may have; smaller is served first. None: the server's limit.
    weight: the key's share of the server when others wait, too, relative to their weights.
    """

    key: str = ""
    key_sha256: str = ""
    tenant: str = ""
    adapters: tuple[str | int, ...] = ()
    own_adapters: tuple[str | int, ...] = (_EVERY,)
    base_model: bool = False
    upload: bool = False
    operate: bool = False
    requests_per_minute: Rate | None = None
    tokens_per_minute: Rate | None = None
    priority: Priority | None = None
    weight: Weight = 1.0

    def __post_init__(self) -> None:
        if bool(self.key) == bool(self.key_sha256):
            raise ValueError("write either key or key_sha256")
        if self.key and len(self.key) < _MIN_KEY_CHARACTERS:
            raise ValueError(f"key has {len(self.key)} characters, at least {_MIN_KEY_CHARACTERS} are needed")
        if self.key_sha256 and not _SHA256.fullmatch(self.key_sha256):
            raise ValueError("key_sha256 is not 64 hexadecimal digits in lower case")
        if self.tenant and not _TENANT.fullmatch(self.tenant):
            raise ValueError("tenant is not plain: write up to 64 letters, digits, _, . and -, a letter or digit first")
        if self.tenant and self.upload and _EVERY in self.adapters:
            raise ValueError(
                "with upload, adapters cannot be *: every name would mean the server's adapter, and none be left for "
                "what the tenant sends; name the server's adapters, or their beginnings"
            )
        if not (self.base_model or self.adapters or self.tenant):
            raise ValueError("the key may use nothing; give adapters or base_model")

    @property
    def digest(self) -> str:
        return self.key_sha256 or digest_of(self.key)


_UNLIMITED: Mapping[str, Any] = {
    "requests_per_minute": None,
    "tokens_per_minute": None,
    "priority": None,
    "weight": 1.0,
}


class _KeyFile(msgspec.Struct, frozen=True):
    """Unknown fields are ignored: an error would quote their names, and in a file of another form names are keys."""

    keys: tuple[KeyEntry, ...]


class AdapterPatterns:
    """The adapters that match a list of task ids, names, and beginnings of names."""

    def __init__(self, patterns: tuple[str | int, ...], id_of_name: Callable[[str], int] | None = None) -> None:
        """id_of_name: gives the task id of a name. Without it, an id matches no name."""
        names = [pattern for pattern in patterns if isinstance(pattern, str)]
        self._prefixes = tuple(name.removesuffix("*") for name in names if name.endswith("*"))
        self._names = frozenset(name for name in names if not name.endswith("*"))
        self._ids = {pattern for pattern in patterns if isinstance(pattern, int)}
        if id_of_name is not None:
            self._ids.update(map(id_of_name, self._names))
        self._is_every = _EVERY in names

    def match(self, lora_task_id: int | None, name: str = "") -> bool:
        """Whether an adapter matches. name: empty for an adapter without a name."""
        return (
            self._is_every
            or lora_task_id in self._ids
            or (bool(name) and (name in self._names or name.startswith(self._prefixes)))
        )


class Caller:
    """The sender of a request, known by its key.

    entry: the key's permissions. id: names the key in logs and errors, which must not contain the key itself.
    """

    def __init__(self, entry: KeyEntry, id_of_name: Callable[[str], int] | None = None) -> None:
        self.entry = entry
        self.id = entry.digest[:_NUM_ID_DIGITS]
        self._shared = AdapterPatterns(entry.adapters, id_of_name)
        self._own = AdapterPatterns(entry.own_adapters, id_of_name)

    @property
    def tenant(self) -> str:
        """The owner of the key; empty for the people who run the server."""
        return self.entry.tenant

    @property
    def runs_the_server(self) -> bool:
        """Whether the caller may look after the adapters of all tenants."""
        return self.entry.operate and not self.tenant

    def owner(self, lora_task_id: int | None, name: str = "") -> str:
        """The owner of the adapter that the caller means: its tenant, or "" for the server."""
        return "" if self.may_share(lora_task_id, name) else self.tenant

    def may_share(self, lora_task_id: int | None, name: str = "") -> bool:
        """Whether the caller may use the server's adapter of this id or name."""
        return self._shared.match(lora_task_id, name)

    def may_use(self, lora_task_id: int | None, name: str = "") -> bool:
        """Whether the caller may use the adapter that it means. The adapter may be missing."""
        return self.may_share(lora_task_id, name) or (bool(self.tenant) and self._own.match(lora_task_id, name))


class KeyRing:
    """The keys of a file. Changes of the file are noticed. Any thread may ask.

    If a new version of the file cannot be used, the log says so, and the keys stay those of the last usable version.
    """

    def __init__(
        self, path: Path, id_of_name: Callable[[str], int] | None = None, others: Sequence[KeyEntry] = ()
    ) -> None:
        """others: further valid keys, beside the file's.

        Raises InvalidRequest, which quotes no key, for a file that cannot be used.
        """
        self._path = path
        self._others = others
        self._id_of_name = id_of_name
        self._version = _version_of(path)
        self._content = _read_file(path)
        self._callers = self._parse()

    def caller(self, key: str) -> Caller | None:
        """The caller with this key; None if no key matches. The time taken tells nothing about the file's keys."""
        self._read_again_if_changed()
        return self._callers.get(digest_of(key))

    def limited_ids(self) -> list[str]:
        """The ids of the keys with limits, a priority or a weight, which only the engine keeps."""
        callers = self._callers.values()
        return [one.id for one in callers if msgspec.structs.replace(one.entry, **_UNLIMITED) != one.entry]

    def _read_again_if_changed(self) -> None:
        version = _version_of(self._path)
        if version == self._version:
            return
        self._version = version
        try:
            content = _read_file(self._path)
            if content != self._content:
                self._content = content
                self._callers = self._parse()
        except InvalidRequest as error:
            _logger.error("%s; the keys that it had before stay as they were", error)

    def _parse(self) -> dict[str, Caller]:
        entries = (*self._others, *parse_keys(self._content, self._path))
        return {entry.digest: Caller(entry, self._id_of_name) for entry in entries}


def parse_keys(content: bytes, path: Path) -> tuple[KeyEntry, ...]:
    """The keys in `content`, which was read from the file `path`. Raises InvalidRequest, which quotes no key."""
    try:
        entries = msgspec.json.decode(content, type=_KeyFile).keys
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(
            f'{path} holds no API keys: {error}; write {{"keys": [{{"key": ..., "tenant": ..., "adapters": [...]}}]}}'
        ) from None
    if len({entry.digest for entry in entries}) < len(entries):
        raise InvalidRequest(f"{path} has the same API key twice")
    return entries


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise InvalidRequest(f"the API keys of {path} cannot be read: {error.strerror}") from None


def bearer_key(authorization: str) -> str:
    """The key of an Authorization header, `Bearer KEY`; empty if it has none."""
    scheme, _, key = authorization.strip().partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def digest_of(key: str) -> str:
    """The SHA-256 of a key, in hexadecimal digits. It identifies the key."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def _version_of(path: Path) -> tuple[float, ...]:
    """The version of a file. It differs if the file may have changed. Just after a change it differs at every call."""
    try:
        status = os.stat(path)
    except OSError:
        return ()
    may_change_unseen = time.time() - status.st_mtime < _SETTLED_S
    return status.st_ino, status.st_mtime_ns, status.st_size, time.monotonic() if may_change_unseen else 0.0
