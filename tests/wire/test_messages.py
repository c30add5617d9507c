from __future__ import annotations

import pytest

from multilora_engine.errors import InvalidRequest
from multilora_wire.messages import shortened


@pytest.mark.parametrize("num_chars", [0, 1, 599, 600])
def test_a_message_of_some_lines_stays(num_chars: int) -> None:
    assert shortened("x" * num_chars) == "x" * num_chars


@pytest.mark.parametrize("num_chars", [601, 4_000_000])
def test_a_long_one_keeps_its_start_and_its_end(num_chars: int) -> None:
    message = shortened("role is " + "x" * num_chars + ", expected a name")
    assert message.startswith("role is xxx")
    assert message.endswith("xxx, expected a name")
    assert len(message) < 650


def test_every_error_of_a_request_quotes_no_more() -> None:
    assert len(InvalidRequest("the role is " + "7" * 4_000_000).wire_message("ab12")) < 700
