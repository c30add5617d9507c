"""`FleetOperator`: an operator's requests about adapters, carried out by every worker of a fleet."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from multilora_engine.dynamo.fleet_aliases import FleetAliases
from multilora_engine.dynamo.fleet_messages import Carry, Described, FromWorker, Said
from multilora_engine.dynamo.front_uploads import FrontUploads
from multilora_engine.dynamo.workers import Workers, checked
from multilora_engine.errors import AdapterNotFound, EngineUnavailable, RequestError, Unsupported
from multilora_engine.lora.names import scoped_task_id
from multilora_engine.process.messages import Operate
from multilora_engine.process.operations import (
    AdapterList,
    AdapterReport,
    CombineAdapters,
    DescribeModel,
    LayoutReport,
    ListAdapters,
    LoadAdapter,
    ModelReport,
    ReadEvents,
    ReadLayout,
    ReadStats,
    RemoveAlias,
    Report,
    SetAlias,
    SwitchWeights,
    UnloadAdapter,
)
from multilora_engine.process.server import report_output
from multilora_engine.request import TokenOutput
from multilora_wire.adapter_info import AdapterInfo, Alias

_TIMEOUT_S = 120.0
"""A worker that loads an adapter may have to download it."""


class FleetOperator:
    """Carries out `load`, `unload`, `pin` and `unpin` on every worker that is there; `list` merges the lists of all.

    One worker changes an alias for all. aliases: as this front knows them.
    """

    def __init__(self, workers: Workers, uploads: FrontUploads, description: Described, aliases: FleetAliases) -> None:
        self.aliases = aliases
        self._workers = workers
        self._uploads = uploads
        self._description = description

    async def carry_out(self, message: Operate) -> TokenOutput:
        """The final output of an operation: its text is the report. Raises RequestError."""
        match message.operation:
            case ReadLayout():
                return report_output(message.request_id, LayoutReport(self._description.info.adapter_layout))
            case DescribeModel():
                return report_output(message.request_id, ModelReport.of(self._description.info))
            case ReadStats() | ReadEvents():
                raise Unsupported("stats and events of a whole fleet; each worker tells its own on its metrics page")
            case CombineAdapters():
                raise Unsupported("sets of adapters in a fleet; combine the adapters' files, and send the sum")
            case SetAlias() | RemoveAlias():
                return await self._change_alias(message)
            case SwitchWeights():
                raise Unsupported("weights of a whole fleet; each worker has its own")
            case _:
                return report_output(message.request_id, await self._ask_all(message))

    async def _ask_all(self, message: Operate) -> Report:
        operation = message.operation
        if isinstance(operation, LoadAdapter) and operation.expected_digest is not None:
            raise Unsupported(
                "expected_digest of a load in a fleet: each worker loads for itself; load each version under a name of "
                "its own"
            )
        if isinstance(operation, LoadAdapter) and operation.path:
            await self._read(operation, message)
            operation = LoadAdapter(operation.lora_task_id, operation.name, operation.tenant)
        carry = Carry(operation, message.scope, message.sender)
        texts = _texts(await self._workers.ask_all(carry, timeout_s=_TIMEOUT_S))
        if isinstance(operation, ListAdapters):
            lists = [msgspec.json.decode(text, type=AdapterList) for text in texts]
            return AdapterList(_merged(lists), _merged_aliases(lists))
        report = msgspec.json.decode(texts[0], type=AdapterReport)
        if isinstance(operation, UnloadAdapter):
            self._uploads.forget(scoped_task_id(report.adapter.tenant, report.adapter.lora_task_id))
        return report

    async def _change_alias(self, message: Operate) -> TokenOutput:
        worker_ids = self._workers.by_chance()
        if not worker_ids:
            raise EngineUnavailable("the fleet has no worker; try again")
        carry = Carry(message.operation, message.scope, message.sender)
        answer = checked(await self._workers.ask(worker_ids[0], carry, _TIMEOUT_S))
        await self.aliases.read(self._workers, worker_ids[0])
        assert isinstance(answer, Said), f"{type(answer).__name__} is no report"
        return msgspec.structs.replace(answer.output, request_id=message.request_id)

    async def _read(self, operation: LoadAdapter, message: Operate) -> None:
        """Make one worker read an adapter from its sources; the others get the same adapter from that worker.

        A worker out of reach, or whose source is, or has nothing at the path, leaves it to the next one. Raises
        RequestError.
        """
        carry = Carry(operation, message.scope, message.sender)
        errors: list[RequestError] = []
        for worker_id in self._workers.by_chance():
            try:
                checked(await self._workers.ask(worker_id, carry, _TIMEOUT_S))
                return
            except RequestError as error:
                if error.code not in (AdapterNotFound.code, EngineUnavailable.code):
                    raise
                errors.append(error)
        raise _gravest(errors)


def _texts(answers: Sequence[FromWorker | RequestError]) -> list[str]:
    """The reports. A worker without the adapter is an error only if no worker has it.

    Raises the first error of another kind.
    """
    errors = [answer for answer in answers if isinstance(answer, RequestError)]
    texts = [answer.output.text for answer in answers if isinstance(answer, Said)]
    if not texts or any(error.code != AdapterNotFound.code for error in errors):
        raise _gravest(errors)
    return texts


def _gravest(errors: Sequence[RequestError]) -> RequestError:
    """The first error that says more than that a worker lacks the adapter, or the first one. No error: no worker."""
    others = [error for error in errors if error.code != AdapterNotFound.code]
    return next(iter([*others, *errors]), EngineUnavailable("the fleet has no worker; try again"))


def _merged_aliases(lists: Sequence[AdapterList]) -> list[Alias]:
    """Of each alias the latest version that a worker knows."""
    latest: dict[tuple[str, str], Alias] = {}
    for alias in (alias for one in lists for alias in one.aliases):
        key = (alias.tenant, alias.name)
        if key not in latest or latest[key].version < alias.version:
            latest[key] = alias
    return [latest[key] for key in sorted(latest)]


def _merged(lists: Sequence[AdapterList]) -> list[AdapterInfo]:
    """Of each adapter the report of the worker that has it in the fastest tier."""
    locations = ("DEVICE", "HOST", "DISK", "REMOTE")
    best: dict[tuple[str, int], AdapterInfo] = {}
    for info in (info for one in lists for info in one.adapters):
        key = (info.tenant, info.lora_task_id)
        if key not in best or locations.index(info.location) < locations.index(best[key].location):
            best[key] = info
    return [best[key] for key in sorted(best)]
