"""`AdapterInfo`: a server's report of one adapter. `Alias`: a name that stands for adapters by weight."""

from __future__ import annotations

from typing import Literal

import msgspec

Status = Literal["NOT_DOWNLOADED", "DOWNLOADING", "DOWNLOADED", "LOADED", "READY_FOR_USE"]
"""NOT_DOWNLOADED: a source has it. DOWNLOADING: on its way from there. DOWNLOADED: in host memory or on disk.
LOADED: on its way to the device. READY_FOR_USE: a step can use it."""

Location = Literal["DEVICE", "HOST", "DISK", "REMOTE"]
"""The fastest tier that has it. REMOTE: no tier has it, only its source."""


Kind = Literal["LoRA", "DoRA", "embeddings", "head", "tokens", "activated", "rope", "use"]
"""What an adapter has. LoRA, DoRA: matrices on linears. embeddings, head: matrices on these. tokens: rows of tokens.
activated: it counts from its invocation tokens on. rope: rotary embeddings of its own. use: its folder says how it is
asked, as `AdapterInfo.use` tells."""


class AdapterMember(msgspec.Struct, frozen=True, gc=False):
    """A member of a set: an adapter whose update, times `weight`, is part of the set's.

    digest: of the version that the set was made of. tenant: whose adapter it is, empty if it belongs to none.
    """

    lora_task_id: int
    weight: float
    digest: str
    name: str = ""
    tenant: str = ""


class AdapterInfo(msgspec.Struct, frozen=True, gc=False):
    """One adapter of a server at one moment. Plain values, so that it travels between processes; made by the thousand.

    digest: content of the current version. bytes: its size in its tier. ranks: the different ranks of its rows.
    num_pins: requests that use it. is_pinned: an operator keeps it. last_used_s: seconds since the epoch, of its
    insertion if no request has used it. num_hits: requests that have used it since it entered the host tier.
    tenant: whose adapter it is, empty if it belongs to none. module_ids: the wire modules that it has rows for,
    ascending, where the report is on this adapter alone and its rows are in memory. kinds: empty where only its source
    has it. is_dora: whether DoRA is among them. members: of a set, by digest; empty for any other adapter. use: what
    its folder says about its use, as of `AdapterUse.describe`.
    """

    lora_task_id: int
    name: str
    digest: str
    status: Status
    location: Location
    bytes: int
    ranks: tuple[int, ...]
    num_pins: int
    is_pinned: bool
    last_used_s: float
    num_hits: int
    tenant: str = ""
    module_ids: tuple[int, ...] = ()
    is_dora: bool = False
    kinds: tuple[Kind, ...] = ()
    members: tuple[AdapterMember, ...] = ()
    use: tuple[str, ...] = ()


class AliasMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A member of an alias: the name of an adapter, and its share of the alias's requests, a whole number >= 0."""

    name: str
    weight: int


class Alias(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A name that stands for adapters of its owner. A request by the name is answered by one of them, as often as its
    weight is of the sum of all weights.

    tenant: the owner, empty if the alias belongs to none. members: empty where the reader may use the alias and not see
    its members. version: of the latest change in a fleet, nanoseconds since the epoch; 0 on a server by itself.
    """

    name: str
    members: tuple[AliasMember, ...]
    tenant: str = ""
    version: int = 0
