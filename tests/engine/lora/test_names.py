from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from multilora_engine.errors import AdapterNotFound, InvalidRequest
from multilora_engine.lora.layout import set_digest
from multilora_engine.lora.names import (
    SetMember,
    TenantTaskId,
    check_name,
    checked_members,
    label_of,
    parse_label,
    scoped_task_id,
    set_task_id,
    task_id_of,
)

NUMBERS = st.integers(0, 2**64 - 1)
WEIGHTS = st.floats(-8, 8, width=32).filter(bool)
MEMBERS = st.dictionaries(st.integers(0, 2**64 - 1), WEIGHTS, min_size=1, max_size=8)
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


@given(MEMBERS, st.integers())
def test_a_set_is_the_same_in_whatever_order_its_members_are_named(weights: dict[int, float], seed: int) -> None:
    members = [SetMember(number, weight) for number, weight in weights.items()]
    shuffled = random.Random(seed).sample(members, len(members))
    assert checked_members(members) == checked_members(shuffled)
    assert set_task_id(checked_members(members)) == set_task_id(checked_members(shuffled)) < 2**63
    digests = [(f"{number:032x}", weight) for number, weight in weights.items()]
    assert set_digest(digests) == set_digest(reversed(digests))


@given(MEMBERS, st.data())
def test_another_weight_or_another_member_is_another_set(weights: dict[int, float], data: st.DataObject) -> None:
    number = data.draw(st.sampled_from(sorted(weights)))
    other = weights | {number: data.draw(WEIGHTS.filter(lambda weight: weight != weights[number]))}
    without = {key: weight for key, weight in weights.items() if key != number} or {number ^ 1: weights[number]}

    def named(chosen: dict[int, float]) -> tuple[int, str]:
        members = checked_members(SetMember(key, weight) for key, weight in chosen.items())
        return set_task_id(members), set_digest((f"{key:032x}", weight) for key, weight in chosen.items())

    ids, digests = zip(named(weights), named(other), named(without), strict=True)
    assert len(set(ids)) == len(set(digests)) == 3


def test_names_and_digests_stay_what_they_are() -> None:
    members = checked_members([SetMember(8, -0.2), SetMember(7, 0.7)])
    assert [(member.lora_task_id, member.weight) for member in members] == [
        (7, 0.699999988079071),
        (8, -0.20000000298023224),
    ]
    assert set_task_id(members) == 2799024031836129470
    assert set_digest([("00" * 16, 0.5), ("ff" * 16, 1.0)]) == "2a1787bc7d553106fc9486ef7d099feb"


@pytest.mark.parametrize(
    ("members", "reason"),
    [
        ([], "a set has 1 to 8 members, this one has 0"),
        ([SetMember(n, 1.0) for n in range(9)], "a set has 1 to 8 members, this one has 9"),
        ([SetMember(7, 1.0), SetMember(8, 1.0), SetMember(7, 0.5)], "LoRA task 7 is in the set twice"),
        ([SetMember(7, 0.0)], "the weight of LoRA task 7 in the set is 0; weights are finite"),
        ([SetMember(7, 1e-60)], "the weight of LoRA task 7 in the set is 1e-60; weights are finite in float32"),
        ([SetMember(7, math.nan)], "the weight of LoRA task 7 in the set is nan"),
        ([SetMember(7, -math.inf)], "the weight of LoRA task 7 in the set is -inf"),
        ([SetMember(7, 1e39)], r"the weight of LoRA task 7 in the set is 1e\+39"),
    ],
)
def test_what_is_no_set_is_refused_with_ids_and_numbers(members: list[SetMember], reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        checked_members(members)
