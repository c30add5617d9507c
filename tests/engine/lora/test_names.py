from __future__ import annotations

import pytest

from multilora_engine.errors import InvalidRequest
from multilora_engine.lora.names import check_name, task_id_of


@pytest.mark.parametrize("name", ["pirate", "acme/pirate-v1.2", "_a", "7", "a..b", "x" * 96 + "/" + "y" * 96])
def test_plain_names_are_taken_and_have_an_id_of_63_bits(name: str) -> None:
    assert check_name(name) == name
    assert 0 <= task_id_of(name) < 2**63


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/../b",
        "a/..",
        "/etc",
        "a/b/c",
        "a//b",
        "a/",
        "-a",
        "a b",
        "a\n",
        "é",
        "a\\b",
        "~",
        "x" * 97,
    ],
)
def test_a_name_that_could_lead_elsewhere_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest, match="is not plain"):
        task_id_of(name)


def test_the_id_of_a_name_never_changes() -> None:
    # SHA-256 of "pirate" begins with the 8 bytes below.
    assert task_id_of("pirate") == 0x03BDD14EF87C5B28 >> 1
