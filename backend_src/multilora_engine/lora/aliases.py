"""`Aliases`: names that stand for adapters by weight, so that an operator moves requests from one version to another.

The member that answers is chosen by weighted rendezvous hashing (Schindelhauer and Schomaker, "Weighted distributed
hash tables", 2005). Each member draws an exponential time whose rate is its weight, from a hash of alias, member and
session. The member with the least time answers. So the shares are those of the weights, and every server chooses the
same member. A larger weight takes sessions from other members and moves none between them.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

import msgspec

from multilora_engine.errors import AliasConflict, AliasNotKnown, AliasVersionNotFound, InvalidRequest
from multilora_engine.lora.disk_tier import DiskTier
from multilora_engine.lora.names import SetMember, TaskId, check_name, scoped_task_id, task_id_of, tenant_of
from multilora_engine.request import GenerationRequest
from multilora_wire.adapter_info import Alias, AliasMember

MAX_ALIASES = 256
"""Of one tenant, or of the server."""

MAX_ALIAS_MEMBERS = 16

MAX_TOTAL_WEIGHT = 1_000_000

_FILE = "aliases.json"

_logger = logging.getLogger(__name__)


class _Stored(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file. format: its version."""

    aliases: list[Alias]
    format: int = 1


@dataclass(frozen=True)
class _Change:
    """by_id: all aliases after the change. stored: done when they are in the file; raises OSError if they are not."""

    by_id: dict[TaskId, Alias]
    stored: Future[None]


class Aliases:
    """The aliases of an engine. Belongs to the engine's thread.

    With a disk tier they are in a file beside its adapters, and outlive a restart. A change holds as soon as it is
    stored. One that cannot be stored never holds.
    """

    def __init__(self, disk: DiskTier | None = None) -> None:
        self._disk = disk
        self._stored = {} if disk is None else _read(disk)
        self._change: _Change | None = None

    @property
    def is_storing(self) -> bool:
        """Whether a change is being stored. The next one must wait for its end."""
        return self._change is not None and not self._change.stored.done()

    @property
    def _by_id(self) -> dict[TaskId, Alias]:
        if self._change is not None and self._change.stored.done():
            if self._change.stored.exception() is None:
                self._stored = self._change.by_id
            self._change = None
        return self._stored

    def get(self, task_id: TaskId) -> Alias | None:
        """The alias that an adapter's task id would mean; None if it means no alias."""
        return self._by_id.get(task_id)

    def describe(self) -> list[Alias]:
        """All aliases, by owner and name."""
        return _sorted(self._by_id)

    def set(self, alias: Alias) -> Future[None]:
        """Have requests by a name answered by these members, as soon as that is stored. No adapter has the name.

        The future is done when the alias is stored, if there is a disk tier, else at once. It raises OSError, and
        `set` InvalidRequest, and nothing has changed.
        """
        _check_members(alias)
        task_id = task_id_of_alias(alias)
        for member in alias.members:
            if member.name == alias.name or self.get(scoped_task_id(alias.tenant, task_id_of(member.name))):
                raise InvalidRequest(f"{member.name!r} is an alias, and the members of an alias are adapters")
        own = [other for other in self._by_id.values() if other.tenant == alias.tenant and other.name != alias.name]
        if above := [other.name for other in own if any(member.name == alias.name for member in other.members)]:
            raise InvalidRequest(f"{alias.name!r} is a member of the alias {above[0]!r}, and members are adapters")
        if len(own) >= MAX_ALIASES:
            raise InvalidRequest(f"there are {len(own)} aliases, and {MAX_ALIASES} may be; remove one first")
        _logger.info("alias %s: %s", alias.name, ", ".join(f"{m.name} {m.weight}" for m in alias.members))
        return self._store({**self._by_id, task_id: alias})

    def remove(self, name: str, tenant: str) -> tuple[Alias, Future[None]]:
        """Forget an alias. Returns it as it was, and a future as `set` does. Raises AliasNotKnown."""
        left = dict(self._by_id)
        alias = left.pop(scoped_task_id(tenant, task_id_of(name)), None)
        if alias is None:
            raise AliasNotKnown(name)
        _logger.info("alias %s is removed", name)
        return alias, self._store(left)

    def check_adapter(self, task_id: TaskId, name: str) -> None:
        """Raises AliasConflict for an adapter whose task id or name is an alias's, or may soon be one's."""
        named = scoped_task_id(tenant_of(task_id), task_id_of(name)) if name else task_id
        taken = self._by_id if self._change is None else {**self._change.by_id, **self._by_id}
        if (alias := taken.get(task_id) or taken.get(named)) is not None:
            raise AliasConflict(
                f"{alias.name!r} is an alias of {_listed(alias)}, and a name has one meaning: give the adapter another "
                "name, or remove the alias first"
            )

    def check_members(self, members: Iterable[SetMember]) -> None:
        """Raises InvalidRequest for an alias among the members of a set: the set would be another sum each time."""
        for member in members:
            if (alias := self.get(member.task_id)) is not None:
                raise InvalidRequest(f"{alias.name!r} is an alias, and the members of a set are adapters")

    def resolve(
        self, request: GenerationRequest, call_id: str, digest_of: Callable[[TaskId], str]
    ) -> GenerationRequest:
        """A request by an alias as a request by the member that answers; any other request as it is.

        A digest that the request demands chooses the member, whatever its weight. call_id: stands for the session of a
        request that has none. digest_of: the digest of the current version of an adapter, empty if no tier has it.
        Raises InvalidRequest, AliasVersionNotFound.
        """
        self.check_members(request.lora_set)
        task_id = request.task_id
        if task_id is None or (alias := self.get(task_id)) is None:
            return request
        return resolved(alias, request, call_id, digest_of)

    def _store(self, by_id: dict[TaskId, Alias]) -> Future[None]:
        assert not self.is_storing, "changes are stored one after the other"
        if self._disk is None:
            stored: Future[None] = Future()
            stored.set_result(None)
        else:
            stored = self._disk.write_beside(_FILE, msgspec.json.encode(_Stored(_sorted(by_id))))
        self._change = _Change(by_id, stored)
        return stored


def task_id_of_alias(alias: Alias) -> TaskId:
    """The task id that an adapter of the alias's name would have. Raises InvalidRequest unless the name is plain."""
    return scoped_task_id(alias.tenant, task_id_of(alias.name))


def resolved(
    alias: Alias, request: GenerationRequest, call_id: str, digest_of: Callable[[TaskId], str]
) -> GenerationRequest:
    """A request by an alias as a request by the member that answers; see `Aliases.resolve`."""
    if request.lora_path:
        raise InvalidRequest(f"lora_path is the place of an adapter, and {alias.name!r} is an alias; name a member")
    if demanded := request.lora_expected_digest:
        member = _member_of_digest(alias, demanded, digest_of)
    else:
        member = choose_member(alias, request.lora_session or call_id)
    return msgspec.structs.replace(request, lora_task_id=task_id_of(member.name), lora_name=member.name)


def choose_member(alias: Alias, session: str) -> AliasMember:
    """The member that answers a session, the same on every server."""
    weighted = [member for member in alias.members if member.weight]
    return min(weighted, key=lambda member: (_time(alias, member, session), member.name))


def _member_of_digest(alias: Alias, demanded: str, digest_of: Callable[[TaskId], str]) -> AliasMember:
    """The member with a digest, or the only one whose digest is not known. Raises AliasVersionNotFound."""
    digests = {member: digest_of(scoped_task_id(alias.tenant, task_id_of(member.name))) for member in alias.members}
    found = [member for member, digest in digests.items() if digest == demanded]
    unknown = [member for member, digest in digests.items() if not digest]
    if found or len(unknown) == 1:
        return (found or unknown)[0]
    raise AliasVersionNotFound(alias.name, demanded, {member.name: digest for member, digest in digests.items()})


def _time(alias: Alias, member: AliasMember, session: str) -> float:
    """Exponentially distributed with the rate `weight`."""
    text = f"{alias.tenant}\0{alias.name}\0{member.name}\0{session}"
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")
    return -math.log((number + 0.5) / 2**64) / member.weight


def _check_members(alias: Alias) -> None:
    """Raises InvalidRequest."""
    names = [check_name(member.name) for member in alias.members]
    if not 1 <= len(names) <= MAX_ALIAS_MEMBERS:
        raise InvalidRequest(f"an alias has 1 to {MAX_ALIAS_MEMBERS} members, {alias.name!r} would have {len(names)}")
    if twice := [name for name in names if names.count(name) > 1]:
        raise InvalidRequest(f"{twice[0]!r} is in the alias {alias.name!r} twice; name it once, with one weight")
    if below := [member for member in alias.members if member.weight < 0]:
        raise InvalidRequest(f"the weight of {below[0].name!r} is {below[0].weight}, expected a whole number >= 0")
    if not 0 < (total := sum(member.weight for member in alias.members)) <= MAX_TOTAL_WEIGHT:
        raise InvalidRequest(f"the weights of {alias.name!r} add up to {total}, expected 1 .. {MAX_TOTAL_WEIGHT}")


def _sorted(by_id: dict[TaskId, Alias]) -> list[Alias]:
    return sorted(by_id.values(), key=lambda alias: (alias.tenant, alias.name))


def _listed(alias: Alias) -> str:
    return ", ".join(member.name for member in alias.members)


def _read(disk: DiskTier) -> dict[TaskId, Alias]:
    """The stored aliases. A file that cannot be read is named in the log; requests by its aliases find nothing.

    An alias with the name of a stored adapter is left out: whoever put the file or the adapter there was not a server.
    """
    try:
        content = disk.read_beside(_FILE)
        stored = msgspec.json.decode(content, type=_Stored) if content else _Stored([])
        if stored.format != _Stored([]).format:
            raise ValueError(f"its format is {stored.format}")
        for alias in stored.aliases:
            _check_members(alias)
        aliases = {task_id_of_alias(alias): alias for alias in stored.aliases}
    except (OSError, ValueError, InvalidRequest, msgspec.MsgspecError) as error:
        _logger.error("the aliases of %s in lora_cache_dir are not used: %s", _FILE, error)
        return {}
    for task_id in [task_id for task_id in aliases if disk.find(task_id) is not None]:
        name = aliases.pop(task_id).name
        _logger.error("the alias %r of %s in lora_cache_dir is not used: an adapter has its name", name, _FILE)
    return aliases
