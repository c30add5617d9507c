from __future__ import annotations

from multilora_engine.process.supervisor import Backoff


def test_it_waits_longer_for_each_death_in_a_row_up_to_a_bound() -> None:
    backoff = Backoff()
    assert [backoff.next_delay_s(lived_s=1) for _ in range(9)] == [0, 1, 2, 4, 8, 16, 30, 30, 30]
    assert backoff.num_deaths == 9


def test_one_that_lived_for_a_while_begins_a_new_row() -> None:
    backoff = Backoff()
    assert [backoff.next_delay_s(lived_s) for lived_s in (1, 1, 1, 61, 1, 1)] == [0, 1, 2, 0, 1, 2]
