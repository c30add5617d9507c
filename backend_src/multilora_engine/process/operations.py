"""The operations on the adapters of a running engine, and the reports that answer them.

The operations are also the JSON of the model `adapters`, told apart by the key `operation`. A front reads them without
the tiers, whose import takes seconds and tens of MB.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import msgspec

from multilora_engine.engine.engine_stats import AdaptersInUse, EngineStats, WeightInfo, WeightStats
from multilora_engine.errors import InvalidRequest
from multilora_engine.lora.life_cycle import LoRAStats, Residency
from multilora_engine.lora.names import DIGEST_FORM, is_digest
from multilora_engine.lora.versions import Expectation
from multilora_engine.process.telemetry import RequestStats, Usage
from multilora_wire.adapter_event import AdapterEvent
from multilora_wire.adapter_info import AdapterInfo, Alias, AliasMember
from multilora_wire.layout import AdapterLayout

if TYPE_CHECKING:
    from multilora_engine.engine_info import EngineInfo

_MAX_TASK_ID = 2**64 - 1
_MAX_NAMES, _MAX_GLOBS, _MAX_NAME_CHARS = 1024, 64, 256

_Action = Literal["list", "pack", "unpack"]


def check_task_id(lora_task_id: int | None) -> None:
    """Raises ValueError for a number that is no task id."""
    if lora_task_id is not None and not 0 <= lora_task_id <= _MAX_TASK_ID:
        raise ValueError(f"lora_task_id is {lora_task_id}, expected 0 .. {_MAX_TASK_ID}")


class _Operation(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="operation"):
    """Base of all operations: an unknown key is an error, not a misunderstanding."""


class _OnAdapter(_Operation, frozen=True):
    """An operation on one adapter, by its task id or its name; both must mean the same one.

    tenant: whose adapter it is, empty if it belongs to none. expected_digest: the digest of the version that the task
        id or the name means now; the operation is refused and changes nothing if that is another one. None: any.
    """

    lora_task_id: int | None = None
    name: str | None = None
    tenant: str = ""
    expected_digest: str | None = None

    def __post_init__(self) -> None:
        if self.lora_task_id is None and self.name is None:
            raise ValueError("say which adapter: give lora_task_id or name")
        check_task_id(self.lora_task_id)
        if self.expected_digest is not None and not is_digest(self.expected_digest):
            raise ValueError(f"expected_digest is {self.expected_digest[:80]!r}, expected {DIGEST_FORM}")

    @property
    def expectation(self) -> Expectation:
        """The version that the operation is on."""
        return Expectation(replaced=self.expected_digest or "")


class ListAdapters(_Operation, frozen=True, tag="list"):
    """All adapters, in any tier, and the adapters of the sources, as far as these can tell; and all aliases.

    names: instead of all, those adapters of a tenant, or of the server, that a tier has under these names; they are
    looked up, and no source is asked.
    is_for_requests: only adapters and aliases that a request of the sender means by their names, and of `names` those
    in the sources, too.
    """

    names: list[str] = msgspec.field(default_factory=list)
    tenant: str = ""
    is_for_requests: bool = False


class UnloadAdapter(_OnAdapter, frozen=True, tag="unload"):
    """Forget an adapter. New requests for it are refused; those in flight keep it until they have finished."""


class PinAdapter(_OnAdapter, frozen=True, tag="pin"):
    """Keep an adapter in host memory until it is unpinned."""


class UnpinAdapter(_OnAdapter, frozen=True, tag="unpin"):
    """The counterpart of `pin`."""


class LoadAdapter(_OnAdapter, frozen=True, tag="load"):
    """Have an adapter in host memory, from disk or from a source; answered when it is there.

    source: the only one of `lora_sources` to ask, by its name; empty asks all of them.
    path: where its files are, in a place that one of the sources covers: the absolute path of a directory, the name of
        a repository, or a URL. They are read even if the adapter is known; other weights than it has follow
        `lora_on_conflict`. Empty looks where the sources look for its name.
    """

    source: str = ""
    path: str = ""


class NamedMember(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A member of a set, by its task id or its name. tenant: whose adapter it is, empty if it belongs to none."""

    weight: float
    lora_task_id: int | None = None
    name: str | None = None
    tenant: str = ""

    def __post_init__(self) -> None:
        if (self.lora_task_id is None) == (self.name is None):
            raise ValueError("a member of a set has one of lora_task_id and name")
        check_task_id(self.lora_task_id)


class CombineAdapters(_OnAdapter, frozen=True, tag="combine"):
    """Have a set made of other adapters, under a task id or a name; answered when it is there.

    Its update is the sum of its members' updates times their weights. It has the bytes of the members' current versions
    and keeps them when members are replaced or unloaded. Another adapter under its name follows `lora_on_conflict`.
    """

    members: list[NamedMember] = msgspec.field(default_factory=list)


class SetAlias(_Operation, frozen=True, tag="alias"):
    """Have requests by a name answered by adapters of the same owner, by weight. Requests in flight go on as they are.

    The members need not be cached. tenant: the owner, empty if the alias belongs to none. version: as of `Alias`; a
    fleet sets it.
    """

    name: str
    members: tuple[AliasMember, ...]
    tenant: str = ""
    version: int = 0


class RemoveAlias(_Operation, frozen=True, tag="unalias"):
    """Forget an alias. New requests by its name are refused."""

    name: str
    tenant: str = ""


class ReadEvents(_Operation, frozen=True, tag="events"):
    """The events after number `since`, as far as they are remembered."""

    since: int = 0


class ReadStats(_Operation, frozen=True, tag="stats"):
    """Counts and sizes of every tier, and requests and tokens of the adapters most asked for."""


class ReadLayout(_Operation, frozen=True, tag="layout"):
    """The layout of the model's adapters: the rows that fit, and the pages that store them."""


class DescribeModel(_Operation, frozen=True, tag="describe"):
    """The model that the engine serves."""


class SwitchWeights(_Operation, frozen=True, tag="weights"):
    """The quantised weights of the model: `list` them, `unpack` them to floats beside their codes, or `pack` them.

    From the next step on unpacked weights are multiplied as floats, packed ones as codes: answers may differ in their
    last bits, also those that are being computed. No prompt uses keys and values in the prefix cache from before.

    modules: names of the checkpoint, or globs like `model.layers.0.*`; every one must mean a weight. The engine looks
        for them between two steps, so they are few.
    """

    action: _Action = "list"
    modules: list[str] = msgspec.field(default_factory=lambda: ["*"])

    def __post_init__(self) -> None:
        num_globs = sum(any(character in name for character in "*?[") for name in self.modules)
        if not 0 < len(self.modules) <= _MAX_NAMES or num_globs > _MAX_GLOBS:
            raise ValueError(
                f"modules has {len(self.modules)} names, of which {num_globs} are globs; expected 1 to {_MAX_NAMES}, "
                f"and {_MAX_GLOBS} globs at most"
            )
        if (longest := max(map(len, self.modules))) > _MAX_NAME_CHARS:
            raise ValueError(f"modules has a name of {longest} characters, at most {_MAX_NAME_CHARS} are accepted")


Operation = (
    ListAdapters
    | LoadAdapter
    | UnloadAdapter
    | PinAdapter
    | UnpinAdapter
    | CombineAdapters
    | SetAlias
    | RemoveAlias
    | ReadEvents
    | ReadStats
    | ReadLayout
    | DescribeModel
    | SwitchWeights
)

_decoder: msgspec.json.Decoder[Operation] = msgspec.json.Decoder(Operation)


def parse_operation(text: str) -> Operation:
    """The operation of a JSON text. Raises InvalidRequest, naming the mistake in it."""
    try:
        operation = _decoder.decode(text)
        msgspec.msgpack.encode(operation)  # Refuses numbers that no message to the engine can have.
    except (msgspec.MsgspecError, RecursionError, OverflowError) as error:
        advice = f"; expected {' or '.join(get_args(_Action))}" if "`$.action`" in str(error) else ""
        raise InvalidRequest(f"not an operation on adapters or weights: {error}{advice}") from None
    return operation


class AdapterList(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to `list`, by task id; aliases by name."""

    adapters: list[AdapterInfo]
    aliases: list[Alias] = []


class AdapterReport(msgspec.Struct, frozen=True):
    """The answer to `load`, `pin` and `unpin`.

    Also to `unload`, as the adapter was: its pins are the requests that go on.
    """

    adapter: AdapterInfo


class AliasReport(msgspec.Struct, frozen=True):
    """The answer to `alias`, and to `unalias`, with the alias as it was."""

    alias: Alias


class EventList(msgspec.Struct, frozen=True):
    """The answer to `events`; see `NumberedEvents`."""

    events: list[AdapterEvent]
    last: int
    num_missed: int


class LoadReport(msgspec.Struct, frozen=True):
    """The load of the engine, and its work so far, over all adapters."""

    engine: EngineStats
    adapters: AdaptersInUse
    requests: RequestStats


class StatsReport(msgspec.Struct, frozen=True):
    """The answer to `stats`. usage: of the adapters most asked for, by their labels; other_usage: of all the others.

    clients, other_clients: likewise, of the tenants or clients that asked, as far as the server knows them.
    """

    tiers: LoRAStats
    usage: dict[str, Usage]
    other_usage: Usage
    load: LoadReport
    residency: Residency = msgspec.field(default_factory=Residency)
    clients: dict[str, Usage] = {}
    other_clients: Usage = msgspec.field(default_factory=Usage)


class LayoutReport(msgspec.Struct, frozen=True):
    """The answer to `layout`."""

    layout: AdapterLayout


class ModelReport(msgspec.Struct, frozen=True):
    """The answer to `describe`. model: the name of its checkpoint's directory. version: of the engine.

    model_implementation: as of `EngineInfo`. has_encoder: whether an encoder reads the prompts.
    """

    model: str
    max_model_len: int
    vocab_size: int
    version: str
    model_implementation: str
    has_encoder: bool

    @classmethod
    def of(cls, info: EngineInfo) -> ModelReport:
        name = Path(info.model_path).name
        implementation, has_encoder = info.model_implementation, info.source is not None
        return cls(name, info.max_model_len, info.vocab_size, info.version, implementation, has_encoder)


class WeightList(msgspec.Struct, frozen=True):
    """The answer to `weights`: the weights that the operation named, as they are now. stats: of all weights."""

    weights: list[WeightInfo]
    stats: WeightStats


Report = AdapterList | AdapterReport | AliasReport | EventList | StatsReport | LayoutReport | ModelReport | WeightList
