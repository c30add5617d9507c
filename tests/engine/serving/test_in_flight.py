from __future__ import annotations

import pytest

from multilora_engine.errors import TooManyUploads
from multilora_engine.serving.uploads import InFlight


def too_many(num_under_way: int, amount: int) -> TooManyUploads:
    return TooManyUploads(num_under_way)


def test_each_owner_may_have_so_much_under_way_and_gets_it_back() -> None:
    in_flight = InFlight()
    end_first = in_flight.begin("a", 2, 5, too_many)
    in_flight.begin("a", 3, 5, too_many)
    in_flight.begin("b", 5, 5, too_many)
    with pytest.raises(TooManyUploads, match="5 adapters"):
        in_flight.begin("a", 1, 5, too_many)
    end_first()
    in_flight.begin("a", 2, 5, too_many)
    with pytest.raises(TooManyUploads, match="5 adapters"):
        in_flight.begin("a", 1, 5, too_many)
