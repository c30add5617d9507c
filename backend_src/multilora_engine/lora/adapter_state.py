"""`AdapterState`: the four states of one version of an adapter, and the steps between them.

Four machines run beside each other; `AdapterState.move` is the only way from one state to the next:

    version   CURRENT -> RETIRED                                                   moved by `HostTier`
    memory    WAITING -> FILLED -> GONE; WAITING -> READING -> FILLED or LOST;     by `HostTier`, `DiskTraffic` and
              WAITING -> LOST -> GONE                                              `Arrivals`
    file      NONE -> WRITING -> WRITTEN -> NONE; WRITING -> REFUSED -> WRITING    by `DiskTraffic`
    device    ABSENT -> COPYING -> READY <-> IN_USE; READY -> ABSENT;              by `DeviceTier`
              COPYING -> FAILED -> ABSENT

Requests pin a version and an operator holds it: those are counts, not states. Their meaning together with the four
states is asked here (`freed_by`, `is_left_over`), and `check_integrity` asserts which combinations there can be.
"""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass, field
from enum import Enum, auto

from multilora_engine.lora.layout import NO_TRAITS, AdapterTraits, PackedRow, TableEntries
from multilora_engine.lora.names import TaskId
from multilora_wire.adapter_info import Kind
from multilora_wire.layout import PageShape


class Version(Enum):
    """Whether requests find this version by its task id."""

    CURRENT = auto()
    RETIRED = auto()
    """Another version has replaced it, it was unloaded, or its file is lost: it goes with its last request."""


class Memory(Enum):
    """The adapter's pages in host memory."""

    WAITING = auto()
    """It has none yet."""
    READING = auto()
    """Its file is being read into them."""
    FILLED = auto()
    """They hold the adapter."""
    LOST = auto()
    """They hold nothing and never will: its file could not be read, or there can be no pages for it."""
    GONE = auto()
    """They are free, or another adapter's."""


class File(Enum):
    """The adapter's file in the disk tier."""

    NONE = auto()
    WRITING = auto()
    """The disk tier reads the adapter's pages, even if the file is not wanted any more."""
    WRITTEN = auto()
    REFUSED = auto()
    """It could not be written, or there is no disk tier."""


class Device(Enum):
    """The adapter's pages on the device."""

    ABSENT = auto()
    COPYING = auto()
    READY = auto()
    """A step can use them."""
    IN_USE = auto()
    """Running sequences use them."""
    FAILED = auto()
    """The last copy, or the write of its row, failed, which the requests that wait for it have not heard yet."""


class FreedBy(Enum):
    """The event that frees an adapter's pages in host memory for another one; the sooner event comes first."""

    EVICTION = auto()
    END_OF_WRITE = auto()
    WRITE = auto()
    """It has no file, and one has to be written first."""
    END_OF_READ = auto()
    END_OF_USE = auto()
    """Requests pin it, or an operator holds it."""


State = Version | Memory | File | Device

TRANSITIONS: frozenset[tuple[State, State]] = frozenset(
    {
        (Version.CURRENT, Version.RETIRED),
        (Memory.WAITING, Memory.FILLED),  # copied from an upload
        (Memory.WAITING, Memory.READING),
        (Memory.WAITING, Memory.LOST),  # adapters that an operator holds lie where its runs would have to be
        (Memory.WAITING, Memory.GONE),  # retired before it had pages
        (Memory.READING, Memory.FILLED),
        (Memory.READING, Memory.LOST),
        (Memory.FILLED, Memory.GONE),
        (Memory.LOST, Memory.GONE),
        (File.NONE, File.WRITING),
        (File.WRITING, File.WRITTEN),
        (File.WRITING, File.NONE),  # deleted before it was written
        (File.WRITING, File.REFUSED),
        (File.WRITTEN, File.NONE),  # deleted: for other files, for a new name, or with its version
        (File.REFUSED, File.WRITING),  # tried again
        (Device.ABSENT, Device.READY),  # the device's memory is the host's
        (Device.ABSENT, Device.COPYING),
        (Device.ABSENT, Device.FAILED),  # the copy could not begin, or the row not be written
        (Device.COPYING, Device.READY),
        (Device.COPYING, Device.FAILED),
        (Device.COPYING, Device.ABSENT),  # failed while the adapter was dropped: nobody waits to hear of it
        (Device.READY, Device.IN_USE),
        (Device.READY, Device.ABSENT),
        (Device.IN_USE, Device.READY),
        (Device.FAILED, Device.ABSENT),
    }
)
"""Every step that a version of an adapter can take."""


@dataclass(eq=False, slots=True)
class AdapterState:
    """The states of one version of an adapter, its pins and its hold.

    file: WRITTEN from the start if there is a file of this version, REFUSED if there is no disk tier.
    num_pins: requests that use it, from acceptance to the last token. is_held: an operator wants it in memory, used or
    not. Both are written by `MemoryTiers`.
    """

    file: File = File.REFUSED
    memory: Memory = Memory.WAITING
    device: Device = Device.ABSENT
    version: Version = Version.CURRENT
    num_pins: int = 0
    is_held: bool = False

    def move(self, target: State) -> None:
        """Take one of `TRANSITIONS`."""
        match target:
            case Version():
                _check(self.version, target)
                self.version = target
            case Memory():
                _check(self.memory, target)
                self.memory = target
            case File():
                _check(self.file, target)
                self.file = target
            case Device():
                _check(self.device, target)
                self.device = target

    @property
    def is_filled(self) -> bool:
        """Whether host memory has the adapter."""
        return self.memory is Memory.FILLED

    @property
    def is_retired(self) -> bool:
        return self.version is Version.RETIRED

    @property
    def is_busy(self) -> bool:
        """Whether a thread reads or writes the adapter's pages."""
        return self.memory is Memory.READING or self.file is File.WRITING

    @property
    def is_wanted(self) -> bool:
        """Whether it has to stay in memory."""
        return self.num_pins > 0 or self.is_held

    @property
    def is_left_over(self) -> bool:
        """Whether no request, operator, read or write needs a retired version any more."""
        return self.is_retired and not self.is_wanted and not self.is_busy

    @property
    def freed_by(self) -> FreedBy:
        """The event that frees the pages."""
        if self.is_wanted:
            return FreedBy.END_OF_USE
        if self.memory is Memory.READING:
            return FreedBy.END_OF_READ
        if self.file is File.WRITING:
            return FreedBy.END_OF_WRITE
        return FreedBy.WRITE if self.file is File.NONE else FreedBy.EVICTION

    def check_integrity(self) -> None:
        """The states go together."""
        assert self.num_pins >= 0
        assert not (self.is_held and self.is_retired), "an operator holds a version that nobody finds"
        assert not self.is_left_over or self.memory is Memory.GONE, "a retired version outlived its last pin"
        if self.device in (Device.COPYING, Device.READY, Device.IN_USE) or self.file is File.WRITING:
            assert self.is_filled, "pages are used that hold nothing"
        if self.device is Device.IN_USE:
            assert self.num_pins > 0, "a running sequence has no pin"
        if self.memory is Memory.LOST:
            assert self.is_retired, "a request would find an adapter without weights"
        if self.memory is Memory.GONE:
            assert not self.is_wanted, "its pages were freed under a request"


def _check(source: State, target: State) -> None:
    assert (source, target) in TRANSITIONS, f"an adapter goes from {source} to {target}"


@dataclass(eq=False)
class CachedAdapter:
    """One version of one adapter in the host tier. Compared by identity: two versions of an id are two adapters.

    ranks: the different ranks of its rows, ascending. kinds: what it has, for people. traits: what it is
    beside its matrices. state: of its life cycle.
    name: its source's name for it, if any.
    shape: of the pages it needs; `pages` and `rows` are empty until it has them, and until they are filled. entries:
        of the rows; None until these are known.
    arrived: done when its pages are filled; raises RequestError if its file could not be read, cancelled if the adapter
        went before.
    saved: done when its file is written; raises OSError if that failed last, cancelled if the file is not wanted any
        more.
    last_used_s: seconds since the epoch of the last pin, at first of the insertion. num_hits: pins so far.
    """

    lora_task_id: TaskId
    digest: str
    ranks: tuple[int, ...]
    shape: PageShape
    name: str = ""
    state: AdapterState = field(default_factory=AdapterState)
    rows: list[PackedRow] = field(default_factory=list)
    entries: TableEntries | None = None
    pages: list[int] = field(default_factory=list)
    arrived: Future[None] = field(default_factory=Future)
    saved: Future[None] = field(default_factory=Future)
    last_used_s: float = field(default_factory=time.time)
    num_hits: int = 0
    kinds: tuple[Kind, ...] = ()
    traits: AdapterTraits = NO_TRAITS

    def __post_init__(self) -> None:
        if self.state.file is File.WRITTEN:
            self.saved.set_result(None)

    @property
    def num_pages(self) -> int:
        return self.shape.num_pages
