from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multilora_engine.errors import AdapterNotFound, InvalidRequest
from multilora_engine.lora.names import (
    TenantTaskId,
    check_name,
    label_of,
    parse_label,
    scoped_task_id,
    task_id_of,
)

NUMBERS = st.integers(0, 2**64 - 1)
TENANTS = st.from_regex(r"\A(|[A-Za-z0-9_][A-Za-z0-9_.-]{0,63})\Z")


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


@given(tenant=TENANTS, number=NUMBERS)
def test_a_label_tells_an_adapter_and_nothing_else_gives_it(tenant: str, number: int) -> None:
    task_id = scoped_task_id(tenant, number)
    assert parse_label(label_of(task_id)) == task_id
    assert f"LoRA task {number} not found" in str(AdapterNotFound(task_id))


@given(a=st.tuples(TENANTS, NUMBERS), b=st.tuples(TENANTS, NUMBERS))
def test_equal_labels_are_equal_adapters(a: tuple[str, int], b: tuple[str, int]) -> None:
    assert (label_of(scoped_task_id(*a)) == label_of(scoped_task_id(*b))) == (a == b)


def test_an_adapter_of_no_tenant_is_its_number() -> None:
    assert scoped_task_id("", 7) == 7 != TenantTaskId("acme", 7)


@pytest.mark.parametrize(
    "label", ["", "07", "@7", "acme@", "acme@@7", "a/b@7", "../x@7", ".x@7", "-1", str(2**64), "7\n"]
)
def test_a_label_that_is_never_written_is_refused(label: str) -> None:
    with pytest.raises(ValueError, match="decimal form of a task id"):
        parse_label(label)
