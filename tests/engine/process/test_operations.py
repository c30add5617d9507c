from __future__ import annotations

import json

import pytest

from multilora_engine.errors import InvalidRequest
from multilora_engine.process.operations import (
    CombineAdapters,
    DescribeModel,
    ListAdapters,
    LoadAdapter,
    NamedMember,
    PinAdapter,
    ReadEvents,
    SwitchWeights,
    UnloadAdapter,
    parse_operation,
)


def test_the_key_operation_tells_what_is_meant() -> None:
    assert parse_operation('{"operation": "list"}') == ListAdapters()
    assert parse_operation('{"operation": "pin", "lora_task_id": 18446744073709551615}') == PinAdapter(2**64 - 1)
    assert parse_operation('{"operation": "unload", "name": "pirate"}') == UnloadAdapter(name="pirate")
    digest = "ab" * 16
    unload = f'{{"operation": "unload", "name": "pirate", "expected_digest": "{digest}"}}'
    assert parse_operation(unload) == UnloadAdapter(name="pirate", expected_digest=digest)
    assert parse_operation('{"operation": "describe"}') == DescribeModel()
    assert parse_operation('{"operation": "weights"}') == SwitchWeights("list", ["*"])
    pack = '{"operation": "weights", "action": "pack", "modules": ["x"]}'
    assert parse_operation(pack) == SwitchWeights("pack", ["x"])
    assert parse_operation('{"operation": "events", "since": 3}') == ReadEvents(3)
    assert parse_operation('{"operation": "load", "name": "x", "source": "hub"}') == LoadAdapter(name="x", source="hub")
    assert parse_operation('{"operation": "load", "name": "x", "path": "/a"}') == LoadAdapter(name="x", path="/a")
    members = '[{"name": "y", "weight": 1}, {"lora_task_id": 0, "weight": -2.5}]'
    assert parse_operation(f'{{"operation": "combine", "name": "x", "members": {members}}}') == CombineAdapters(
        name="x", members=[NamedMember(1.0, name="y"), NamedMember(-2.5, 0)]
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("list", "malformed"),
        (f'{{"operation": "events", "since": {10**30}}}', "can't serialize ints < "),
        (f'{{"operation": "events", "since": {-(10**30)}}}', "can't serialize ints < "),
        (
            f'{{"operation": "alias", "name": "x", "members": [{{"name": "y", "weight": {10**30}}}]}}',
            "can't serialize ints < ",
        ),
        ("[]", "Expected `object`, got `array`"),
        ('{"x": ' + "[" * 100_000, "recursion depth"),
        ('{"lora_task_id": 7}', "missing required field `operation`"),
        ('{"operation": "explode"}', "Invalid value 'explode'"),
        ('{"operation": "list", "verbose": true}', "unknown field `verbose`"),
        ('{"operation": "weights", "action": "melt"}', "Invalid enum value 'melt'"),
        ('{"operation": "weights", "action": "unpack", "path": "auto"}', "unknown field `path`"),
        ('{"operation": "pin"}', "give lora_task_id or name"),
        ('{"operation": "combine", "members": []}', "give lora_task_id or name"),
        ('{"operation": "combine", "name": "x", "members": [{"name": "y"}]}', "missing required field `weight`"),
        ('{"operation": "combine", "name": "x", "members": [{"weight": 1}]}', "has one of lora_task_id and name"),
        ('{"operation": "combine", "name": "x", "members": [{"name": "y", "weight": NaN}]}', "malformed"),
        ('{"operation": "combine", "name": "x", "members": [{"lora_task_id": -1, "weight": 1}]}', "lora_task_id is -1"),
        (
            '{"operation": "unload", "name": "x", "expected_digest": ""}',
            "expected_digest is '', expected 32 hex digits",
        ),
        (
            '{"operation": "pin", "name": "x", "expected_digest": "AB"}',
            "expected_digest is 'AB', expected 32 hex digits",
        ),
        ('{"operation": "load", "name": "x", "expected_digest": 7}', "Expected `str | null`, got `int`"),
        ('{"operation": "list", "expected_digest": "x"}', "unknown field `expected_digest`"),
        ('{"operation": "pin", "lora_task_id": "7"}', "Expected `int | null`, got `str`"),
        ('{"operation": "pin", "lora_task_id": -1}', "lora_task_id is -1, expected 0 .. 18446744073709551615"),
        ('{"operation": "pin", "lora_task_id": 18446744073709551616}', "expected 0 .. 18446744073709551615"),
    ],
)
def test_what_is_no_operation_is_refused_by_name(text: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match="not an operation on adapters") as caught:
        parse_operation(text)
    assert reason in str(caught.value)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([], "modules has 0 names"),
        (["*"] * 65, "modules has 65 names, of which 65 are globs; expected 1 to 1024, and 64 globs at most"),
        (["lm_head"] * 1025, "modules has 1025 names"),
        (["x" * 257], "modules has a name of 257 characters, at most 256"),
    ],
)
def test_weights_are_named_by_few_short_names(modules: list[str], message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        parse_operation(json.dumps({"operation": "weights", "modules": modules}))
    most = ["lm_head"] * 960 + ["x" * 255 + "*"] * 64
    assert parse_operation(json.dumps({"operation": "weights", "modules": most})) == SwitchWeights("list", most)


def test_an_action_that_there_is_not_is_refused_with_those_there_are() -> None:
    with pytest.raises(InvalidRequest, match=r"'repack' .*; expected list or pack or unpack"):
        parse_operation('{"operation": "weights", "action": "repack"}')
