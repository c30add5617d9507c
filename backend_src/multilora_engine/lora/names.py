"""The names of adapters, the task ids that go with names, the tenant whose adapter a task id means, and the members by
which a request may name a set.
"""

from __future__ import annotations

import hashlib
import math
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import msgspec

from multilora_engine.errors import InvalidRequest
from multilora_wire.adapter_names import PLAIN_PART, is_plain_name, task_id_of_name

_PATH = re.compile(f"{PLAIN_PART}(?:/{PLAIN_PART})*", re.ASCII)
_DIGEST = re.compile(r"[0-9a-f]{32}", re.ASCII)
_LABEL = re.compile(r"(?:(?P<tenant>[A-Za-z0-9_][\w.-]{0,63})@)?(?P<number>0|[1-9][0-9]{0,19})", re.ASCII)


def check_name(name: str) -> str:
    """`name`, if it is plain: letters, digits, `_`, `.`, `-`, and at most one slash between two such parts.

    Raises InvalidRequest: a plain name cannot lead out of a directory or a bucket.
    """
    if not is_plain_name(name):
        raise InvalidRequest(
            f"lora_name {name[:200]!r} is not plain: write letters, digits, _, . and -, with at most one / inside"
        )
    return name


DIGEST_FORM = "32 hex digits in lower case, as lora_digest tells them"


def is_digest(text: str) -> bool:
    """Whether a text could be the digest of an adapter: `DIGEST_FORM`."""
    return _DIGEST.fullmatch(text) is not None


def is_plain_path(path: str) -> bool:
    """Whether a relative path has parts as names have, as many as there may be, so that it cannot lead elsewhere."""
    return _PATH.fullmatch(path) is not None


def task_id_of(name: str) -> int:
    """The task id of an adapter with a plain name. Raises InvalidRequest for another one."""
    return task_id_of_name(check_name(name))


@dataclass(frozen=True, slots=True)
class TenantTaskId:
    """The task id of an adapter that belongs to a tenant. The same number of two tenants is two adapters.

    It reads like the number that the tenant knows: errors show it as it is.
    """

    tenant: str
    lora_task_id: int

    def __str__(self) -> str:
        return str(self.lora_task_id)


TaskId = int | TenantTaskId
"""The identity of an adapter, everywhere in the engine; a plain number is one that belongs to no tenant."""


def scoped_task_id(tenant: str, lora_task_id: int) -> TaskId:
    """The adapter that `lora_task_id` means among those of a tenant; an empty tenant is none."""
    return TenantTaskId(tenant, lora_task_id) if tenant else lora_task_id


def tenant_of(task_id: TaskId) -> str:
    """The tenant that an adapter belongs to; empty for none."""
    return task_id.tenant if isinstance(task_id, TenantTaskId) else ""


def number_of(task_id: TaskId) -> int:
    """The number by which clients name an adapter."""
    return task_id.lora_task_id if isinstance(task_id, TenantTaskId) else task_id


def label_of(task_id: TaskId, name: str = "") -> str:
    """`7`, or `acme@7` of a tenant: for logs, metrics and file names. name: stands in place of the number."""
    label = name or str(task_id)
    return f"{task_id.tenant}@{label}" if isinstance(task_id, TenantTaskId) else label


def parse_label(label: str) -> TaskId:
    """The task id that `label_of` writes as `label`. Raises ValueError, which says the expected form."""
    match = _LABEL.fullmatch(label)
    if match is None or int(match["number"]) >= 1 << 64:
        raise ValueError("the decimal form of a task id of 64 bits, with or without a tenant and @ before it")
    return scoped_task_id(match["tenant"] or "", int(match["number"]))


MAX_MEMBERS = 8
"""Members of a set."""


class SetMember(msgspec.Struct, frozen=True):
    """A member of a set that is asked for.

    weight: of its update in the sum, a float32. tenant: whose adapter it is, empty if it belongs to none.
    """

    lora_task_id: int
    weight: float
    tenant: str = ""

    @property
    def task_id(self) -> TaskId:
        """The member as the engine knows it."""
        return scoped_task_id(self.tenant, self.lora_task_id)


def checked_members(members: Iterable[SetMember]) -> tuple[SetMember, ...]:
    """The members by ascending task id, their weights rounded to float32. Raises InvalidRequest."""
    chosen = sorted(members, key=lambda member: member.lora_task_id)
    if not 1 <= len(chosen) <= MAX_MEMBERS:
        raise InvalidRequest(f"a set has 1 to {MAX_MEMBERS} members, this one has {len(chosen)}")
    for member, other in pairwise(chosen):
        if member.lora_task_id == other.lora_task_id:
            raise InvalidRequest(
                f"LoRA task {member.lora_task_id} is in the set twice, with the weights {member.weight:g} and "
                f"{other.weight:g}; name it once, with their sum"
            )
    return tuple(msgspec.structs.replace(member, weight=_float32(member)) for member in chosen)


def _float32(member: SetMember) -> float:
    try:
        (weight,) = struct.unpack("<f", struct.pack("<f", member.weight))
    except OverflowError:
        weight = math.inf
    if not math.isfinite(weight) or weight == 0:
        raise InvalidRequest(
            f"the weight of LoRA task {member.lora_task_id} in the set is {member.weight:g}; weights are finite in "
            "float32, and a member of weight 0 is left out"
        )
    return float(weight)


def set_task_id(members: Iterable[SetMember]) -> int:
    """The task id of the set that a request means by its members, which `checked_members` gave.

    63 bits, as of a name, and no name has them: 63 bits of the SHA-256 of ids and weights.
    """
    text = "set of " + ", ".join(f"{member.weight.hex()} * {member.lora_task_id}" for member in members)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
