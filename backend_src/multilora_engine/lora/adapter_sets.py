"""`AdapterSets`: adapters that are weighted sums of others, built beside the steps.

With A [rank, in] and B [out, rank] of each member, the sum of the updates w1 B1 A1 + w2 B2 A2 is the update of
A = [A1; A2] and B = [w1 B1, w2 B2]: the ranks of the members lie side by side. A member that lacks a site adds nothing
there.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from multilora_engine.errors import AdapterNotFound, AdapterNotLoaded, InvalidRequest, Unavailable, Unsupported
from multilora_engine.lora.adapter_file import DamagedFile
from multilora_engine.lora.format import TORCH_DTYPES, check_rank, check_size, is_finite
from multilora_engine.lora.host_tier import Loan, PlannedAdapter
from multilora_engine.lora.layout import AdapterTraits, PackedRow, TableEntries, set_digest
from multilora_engine.lora.manager import LoRAManager
from multilora_engine.lora.names import SetMember, TaskId, number_of, tenant_of
from multilora_engine.lora.remote import Fetch, RemoteAdapters
from multilora_engine.lora.sources.fetcher import DaemonThreads
from multilora_engine.lora.versions import ANY_VERSION, Expectation
from multilora_wire.adapter_info import AdapterMember, Kind
from multilora_wire.layout import ALIGNMENT_BYTES, AdapterLayout, Placement, round_up
from multilora_wire.sites import WireModule

_MAX_BUILDS = 16
"""Sets that wait for the thread that plans them, and whose members stay in memory for that."""


_NO_SUMS: tuple[Kind, ...] = ("DoRA", "tokens", "activated", "rope", "use")
"""Adapters that are more than products of matrices which count for all tokens. A sum of adapters that are asked in
different ways could be asked in none of them."""


class AdapterSets:
    """Belongs to the engine's thread. One thread of its own plans the sets, and makes them in the pages that they get.

    A set has the bytes of the versions of its members that were current when it was asked for. A set under a name stays
    as it is when its members are replaced or unloaded. A set that a request means by its members is always the set of
    their current versions: where the one that is cached has others, it is replaced.
    """

    def __init__(self, loras: LoRAManager, remote: RemoteAdapters) -> None:
        self._loras = loras
        self._remote = remote
        self._builder = DaemonThreads(1, "adapter-set")

    def fetch(
        self,
        task_id: TaskId,
        members: Sequence[SetMember],
        name: str = "",
        replaces: bool = False,
        expectation: Expectation = ANY_VERSION,
    ) -> Fetch | None:
        """Wait for a set under a task id, as of `RemoteAdapters.fetch`; None if a tier has it.

        members: as of `checked_members`. replaces: an older set under the task id gives way, whatever
        `lora_on_conflict` says. Raises AdapterNotFound for a member that no tier has, AdapterNotLoaded, Unsupported,
        Unavailable when too many sets are being built, and as `Expectation.check`.
        """
        if (layout := self._loras.device.layout).code_bits:
            raise Unsupported(
                f"sets of adapters with lora_dtype {layout.lora_dtype}: the ranks of an output share a scale, so the "
                "codes of a set would not be its members'; serve with a lora_dtype of floats"
            )
        digest = set_digest((self._digest(member), member.weight) for member in members)
        present = self._loras.inventory.digest(task_id)
        expectation.check(task_id, name, present, digest)
        if present == digest:
            return None
        begin = partial(self._begin, members, digest)
        return self._remote.build(task_id, name, digest, begin, replaces, expectation)

    def close(self) -> None:
        """End the thread."""
        self._builder.close()

    def _digest(self, member: SetMember) -> str:
        try:
            return self._loras.inventory.info(member.task_id).digest
        except AdapterNotFound:
            raise AdapterNotFound(member.lora_task_id, "it is a member of the set") from None

    def _begin(self, members: Sequence[SetMember], digest: str) -> tuple[Future[PlannedAdapter], Callable[[], None]]:
        """Have a set planned. Returns its future, and the function that lets its members go."""
        if (num_builds := self._remote.num_builds) >= _MAX_BUILDS:
            raise Unavailable(f"{num_builds} sets of adapters are being built already; try again")
        with ExitStack() as loans:
            lent = [self._lend(member, loans) for member in members]
            parts = sorted(zip(lent, members, strict=True), key=lambda part: (part[0].digest, part[1].weight))
            end = loans.pop_all().close
        weighted = [(loan, member.weight) for loan, member in parts]
        return self._builder.submit(partial(self._plan, weighted, digest, end)), end

    def _lend(self, member: SetMember, loans: ExitStack) -> Loan:
        """Raises Unsupported for an adapter of a kind that has no sums."""
        loan = self._loras.lend(member.task_id)
        loans.callback(loan.end)
        if refused := [kind for kind in loan.kinds if kind in _NO_SUMS]:
            raise Unsupported(
                f"LoRA task {loan.task_id} is of kind {', '.join(refused)}; the members of a set are LoRA, on linears, "
                "embeddings and head"
            )
        return loan

    def _plan(self, weighted: Sequence[tuple[Loan, float]], digest: str, end: Callable[[], None]) -> PlannedAdapter:
        """On the builder's thread."""
        plan = plan_set([_part(loan, weight) for loan, weight in weighted], self._loras.device.layout)
        return PlannedAdapter(
            digest,
            plan.rows,
            len(plan.placement.fill),
            AdapterTraits(members=tuple(part.member for part in plan.parts)),
            begin=lambda pages: self._builder.submit(partial(plan.fill, pages)),
            end=end,
            num_lent_pages=sum(len(part.pages) for part in plan.parts),
            entries=TableEntries.of(plan.rows, plan.layout),
        )


def _part(loan: Loan, weight: float) -> Part:
    """Raises AdapterNotLoaded when the member's file cannot be read."""
    try:
        rows = loan.rows.result()
    except (OSError, DamagedFile) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise AdapterNotLoaded(loan.task_id, f"its file cannot be read: {reason}") from error
    task_id = loan.task_id
    member = AdapterMember(number_of(task_id), weight, loan.digest, loan.name, tenant_of(task_id))
    return Part(member, rows, loan.pages)


@dataclass(frozen=True)
class Part:
    """A member of a set with its matrices. pages: as of `Loan`."""

    member: AdapterMember
    rows: list[PackedRow]
    pages: Sequence[torch.Tensor]


@dataclass(frozen=True)
class _Source:
    """The part of a row of a member that a row of the set has. first: row of the member's B that is the first."""

    part: Part
    row: PackedRow
    first: int


@dataclass(frozen=True)
class SetPlan:
    """The rows of a set and their places. sources: the parts of members' rows that each row is made of."""

    parts: Sequence[Part]
    rows: list[PackedRow]
    sources: list[list[_Source]]
    placement: Placement
    layout: AdapterLayout

    def fill(self, pages: Sequence[torch.Tensor]) -> None:
        """Make the set in pages, uint8 [page_bytes] each. Pages that one piece spans are consecutive memory.

        Raises InvalidRequest when weights take values out of the range of `lora_dtype`.
        """
        target = _Memory.of(pages)
        for start, used in zip(target.starts, self.placement.fill, strict=True):
            target.content[start + used : start + self.layout.page_bytes] = 0
        memories = {id(part): _Memory.of(part.pages) for part in self.parts}
        for row, sources in zip(self.rows, self.sources, strict=True):
            module = self.layout.sites.module_at[row.layer, row.module_id]
            a = self._place(target, row.a_offset, row.rank * module.in_size)
            b = self._place(target, row.b_offset, row.rank * module.out_size).reshape(-1, row.rank)
            start = 0
            for source in sources:
                memory, rank = memories[id(source.part)], source.row.rank
                size = rank * module.in_size
                values = self._values(memory, source.row.a_offset, size)
                if module.kind == "embedding":
                    a.reshape(-1, row.rank)[:, start : start + rank] = values.reshape(-1, rank)
                else:
                    a[start * module.in_size :][:size] = values
                _scale(
                    self._b(memory, source, module), source.part.member.weight, b[:, start : start + rank], self._dtype
                )
                start += rank
            if self._may_overflow and not is_finite(torch.from_numpy(b).view(self._dtype)):
                told = ", ".join(f"{source.part.member.weight:g}" for source in sources)
                raise InvalidRequest(
                    f"the set has values beyond the range of lora_dtype {self.layout.lora_dtype} in {module.name}, "
                    f"layer {module.layer}: its weights there are {told}"
                )

    def _b(self, memory: _Memory, source: _Source, module: WireModule) -> npt.NDArray[Any]:
        """[out, rank]"""
        row = source.row
        whole = self.layout.sites.module_at[row.layer, row.module_id]
        b = self._values(memory, row.b_offset, whole.out_size * row.rank).reshape(-1, row.rank)
        return b[source.first : source.first + module.out_size]

    def _place(self, memory: _Memory, offset: int, count: int) -> npt.NDArray[Any]:
        """The place of a piece; the bytes between it and the next piece become zero."""
        itemsize = self._dtype.itemsize
        values = self._values(memory, offset, round_up(count * itemsize, ALIGNMENT_BYTES) // itemsize)
        values[count:] = 0
        return values[:count]

    def _values(self, memory: _Memory, offset: int, count: int) -> npt.NDArray[Any]:
        """So many values, as unsigned integers, from an offset of an adapter's own pages on."""
        page, place = divmod(offset, self.layout.page_bytes)
        itemsize = self._dtype.itemsize
        start = memory.starts[page] + place
        return memory.content[start : start + count * itemsize].view(f"u{itemsize}")

    @cached_property
    def _may_overflow(self) -> bool:
        """Whether a value may leave the range of its type: the members' values are finite, times at most 1 as well."""
        return max(abs(part.member.weight) for part in self.parts) > 1

    @cached_property
    def _dtype(self) -> torch.dtype:
        return TORCH_DTYPES[self.layout.lora_dtype]


@dataclass(frozen=True)
class _Memory:
    """The memory that has an adapter's pages, at `starts`. In NumPy, whose views of it take a tenth of torch's time."""

    content: npt.NDArray[np.uint8]
    starts: list[int]

    @classmethod
    def of(cls, pages: Sequence[torch.Tensor]) -> _Memory:
        """pages: of one memory."""
        whole = torch.empty(0, dtype=torch.uint8).set_(pages[0].untyped_storage())
        return cls(whole.numpy(), [int(page.storage_offset()) for page in pages])


def _scale(values: npt.NDArray[Any], weight: float, target: npt.NDArray[Any], dtype: torch.dtype) -> None:
    """target = weight * values, rounded once. Both are bits of `dtype`, as unsigned integers."""
    torch.mul(torch.from_numpy(values).view(dtype), weight, out=torch.from_numpy(target).view(dtype))


def plan_set(parts: Sequence[Part], layout: AdapterLayout) -> SetPlan:
    """parts: by ascending (digest, weight). layout: of floats.

    Raises InvalidRequest when the ranks of a site add up to more than `max_lora_rank`, or the set is too large.
    """
    targets = dict(sorted(_targets(parts, layout).items()))
    modules = [layout.sites.module_at[layer, module_id] for layer, module_id, _ in targets]
    ranks = [sum(source.row.rank for source in sources) for sources in targets.values()]
    for module, rank, sources in zip(modules, ranks, targets.values(), strict=True):
        each = " + ".join(str(source.row.rank) for source in sources)
        check_rank(f"set ({module.name}, layer {module.layer}, ranks {each})", rank, layout)
    owners = _owners(modules, targets.values())
    pieces = [layout.pieces(module, rank, False) for module, rank in zip(modules, ranks, strict=True)]
    placement = layout.place(
        piece for index, row in enumerate(pieces) for piece in row[0 if owners[index] == index else 1 :]
    )
    check_size(len(placement.fill), layout)
    offsets, rows = iter(placement.offsets), list[PackedRow]()
    for index, ((layer, module_id, expert), rank) in enumerate(zip(targets, ranks, strict=True)):
        a_offset = next(offsets) if owners[index] == index else rows[owners[index]].a_offset
        rows.append(PackedRow(module_id, layer, rank, a_offset, next(offsets), -1, expert))
    return SetPlan(parts, rows, list(targets.values()), placement, layout)


def _owners(modules: Sequence[WireModule], targets: Iterable[Sequence[_Source]]) -> list[int]:
    """Of each row the first one that has the same A: experts of a layer share it where those of all members do."""
    first: dict[tuple[Any, ...], int] = {}
    owners = []
    for index, (module, sources) in enumerate(zip(modules, targets, strict=True)):
        same = tuple((id(source.part), source.row.a_offset, source.row.rank) for source in sources)
        key = (module.layer, module.in_size, same)
        owners.append(first.setdefault(key, index) if module.experts > 1 else index)
    return owners


def _targets(parts: Sequence[Part], layout: AdapterLayout) -> dict[tuple[int, int, int], list[_Source]]:
    """The rows of the set by (layer, module id, expert), with the rows that each is made of, in the order of the
    members.

    A row of several sites (q, k and v together) stays one where all members have it so, and becomes a row for each site
    elsewhere.
    """
    module_at, plain = layout.sites.module_at, {m.parts[0].column: m for m in layout.sites.plain_modules}
    ids_at: defaultdict[int, set[int]] = defaultdict(set)
    for module in (module_at[row.layer, row.module_id] for part in parts for row in part.rows):
        for site in module.parts:
            ids_at[site.column].add(module.module_id)
    targets: defaultdict[tuple[int, int, int], list[_Source]] = defaultdict(list)
    for part in parts:
        for row in part.rows:
            module = module_at[row.layer, row.module_id]
            if all(len(ids_at[site.column]) == 1 for site in module.parts):
                targets[row.layer, row.module_id, row.expert].append(_Source(part, row, 0))
                continue
            for site in module.parts:
                targets[row.layer, plain[site.column].module_id, 0].append(_Source(part, row, site.start))
    return targets
