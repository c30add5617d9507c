from __future__ import annotations

import io
import logging

import pytest

from multilora_engine.errors import InvalidRequest
from multilora_engine.log_lines import OneLineFormatter, one_line


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("ab12 é 敏", "ab12 é 敏"),
        ("a\n2026 INFO forged", "a\\n2026 INFO forged"),
        ("\x1b[31mred\r", "\\x1b[31mred\\r"),
        ("\u2028\u202e", "\\u2028\\u202e"),
        ("x" * 41, "x" * 40 + "... (1 more)"),
    ],
)
def test_a_line_is_printable_and_of_a_bounded_length(text: str, shown: str) -> None:
    assert one_line(text, 40) == shown


def test_a_client_cannot_begin_a_line_of_the_log_and_a_traceback_can() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(OneLineFormatter("%(levelname)s %(message)s"))
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.info("request %s ended", "a\nERROR forged")
    logger.info("request %s", "x" * 1_000_000)
    try:
        raise ValueError("ours")
    except ValueError:
        logger.exception("request %s failed", "b")
    lines = stream.getvalue().splitlines()
    assert lines[0] == "INFO request a\\nERROR forged ended"
    assert len(lines[1]) < 10_000
    assert lines[2:4] == ["ERROR request b failed", "Traceback (most recent call last):"]


def test_an_error_shows_the_request_id_in_one_line() -> None:
    assert InvalidRequest("no").wire_message("a\nb") == "[INVALID_ARG] no (request a\\nb)"
    assert len(InvalidRequest("no").wire_message("x" * 10_000)) < 200
