from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from multilora_engine.lora.adapter_events import AdapterEventLog
from multilora_engine.lora.life_cycle import adapter_event
from multilora_engine.lora.names import scoped_task_id


@given(tenants=st.lists(st.sampled_from(["", "acme", "bolt"]), max_size=100))
def test_a_tenants_log_is_as_if_there_were_no_other(tenants: list[str]) -> None:
    events, alone = AdapterEventLog(80), {name: AdapterEventLog(80) for name in ("acme", "bolt")}
    for number, tenant in enumerate(tenants):
        event = adapter_event("uploaded", scoped_task_id(tenant, number), "digest")
        events.append(event)
        if tenant:
            alone[tenant].append(event)
    for name, log in alone.items():
        assert events.of(name).since(0) == log.of(name).since(0)
        assert {event.tenant for event in events.of(name).since(0).events} <= {name}
    assert events.since(0).last == len(tenants)
