"""Which adapters are in a worker's memory, as routers hear of it and requests ask for it."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from support.fake_fleet import FakeClient, FakeContext, FakeFleet
from support.fronts import generation_request

from multilora_engine.dynamo import residency_taints
from multilora_engine.dynamo.fleet_router import FleetRouter
from multilora_engine.dynamo.residency_taints import ResidencyTaints, preferred_taints
from multilora_engine.dynamo.workers import Workers
from multilora_engine.lora.life_cycle import Level, Residency, Resident


def residency(*names: str, level: Level = "gpu") -> Residency:
    return Residency([Resident(name, level, False, 8) for name in names])


def test_a_card_tells_of_a_change_but_not_at_every_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(residency_taints.time, "monotonic", lambda: now)
    told: list[set[str]] = []

    async def tell(taints: set[str]) -> None:
        told.append(taints)

    async def test() -> None:
        nonlocal now
        taints = ResidencyTaints(tell)
        await taints.report(residency("a", "acme@7"))
        await taints.report(residency("b"))
        now += 0.5
        await taints.report(residency("b"))
        now += 0.6
        await taints.report(residency("b", level="cpu"))
        now += 5
        await taints.report(residency("b", level="cpu"))

    asyncio.run(test())
    assert told == [{"lora-gpu/a", "lora-gpu/acme@7"}, {"lora-cpu/b"}]


@pytest.mark.parametrize(
    ("task_id", "name", "label"), [(7, "", "7"), (7, "pirate", "pirate"), (None, "", None)], ids=["id", "name", "base"]
)
def test_a_request_prefers_the_workers_that_have_its_adapter(task_id: int | None, name: str, label: str | None) -> None:
    fleet = FakeFleet(2)
    router = FleetRouter(fleet, Workers(FakeClient(fleet), FakeContext), dict)
    request = msgspec.structs.replace(generation_request("r", [5], lora_task_id=task_id), lora_name=name)
    assert asyncio.run(router.pick(request, ())) == 1
    assert fleet.constraints == [None if label is None else preferred_taints(label)]
    assert preferred_taints("7")["lora-gpu/7"] > preferred_taints("7")["lora-cpu/7"] > 0
