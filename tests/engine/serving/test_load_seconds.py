from __future__ import annotations

import pytest
from support.fake_triton import FakeMetricFamily

from multilora_engine.histogram import Histogram
from multilora_engine.lora.life_cycle import Residency
from multilora_engine.serving.metrics import LOAD_SECONDS, LoadSeconds


def observed(transition: str) -> list[float]:
    return FakeMetricFamily.observed[LOAD_SECONDS, (("transition", transition),)]


def test_each_load_is_observed_once_also_after_the_engine_has_begun_anew() -> None:
    load_seconds, loads, copies = LoadSeconds(), Histogram(), Histogram()
    for seconds in (0.3, 0.02):
        loads.observe(seconds)
        load_seconds.update(Residency(load_seconds=loads.plus(Histogram()), activate_seconds=copies))
    load_seconds.update(Residency(load_seconds=loads, activate_seconds=copies))
    assert observed("load") == pytest.approx([0.3, 0.02])
    assert observed("activate") == []
    anew = Histogram()
    anew.observe(2.0)
    load_seconds.update(Residency(load_seconds=anew, activate_seconds=anew))
    assert observed("load") == pytest.approx([0.3, 0.02, 2.0])
    assert observed("activate") == pytest.approx([2.0])
    load_seconds.clear()
    assert FakeMetricFamily.observed == {}
