"""The names of adapters, the task ids that go with names, and the tenant whose adapter a task id means."""

from __future__ import annotations

import re
from dataclasses import dataclass

from multilora_engine.errors import InvalidRequest
from multilora_wire.adapter_names import PLAIN_PART, is_plain_name, task_id_of_name

_PATH = re.compile(f"{PLAIN_PART}(?:/{PLAIN_PART})*", re.ASCII)
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
