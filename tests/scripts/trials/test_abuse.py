"""The table of abuse judges by its own rules, and its attacks do what their names say."""

from __future__ import annotations

import json
import math
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from tritonclient.utils import deserialize_bytes_tensor

from marked_tables import read_table
from multilora_engine.errors import ConfigError
from multilora_engine.guides.guide_grammar import MAX_GUIDE_BYTES
from trials import abuse
from trials.abuse import Row
from trials.attacker import Attacker
from trials.door_attacks import _varint
from trials.doors import Doors, Leak, infer_request
from trials.engine_attacks import _guided, _prompt, _schema, _word_list, hostile_guide
from trials.scenes import SCENES, Scene, Stage
from trials.timing_attacks import chance_of_longer, judge
from trials.victim import Gaps

QUIET = Gaps([0.02] * 98 + [0.03, 0.04], [])


def row(under: Gaps, loss: str = "", name: str = "an attack", mib_after: int = 1000) -> Row:
    return Row("proxy", name, QUIET, under, (100 << 20, mib_after << 20), "2 x INVALID_ARG", loss)


@pytest.mark.parametrize(
    ("under", "loss", "verdict"),
    [
        (Gaps([0.02] * 97 + [0.09] * 3, []), "", "fine"),
        (Gaps([0.02] * 97 + [0.2] * 3, []), "", "slow"),
        (Gaps([], []), "", "slow"),
        (Gaps([0.02] * 100, ["UNAVAILABLE", "ended after 3 of 64 tokens"]), "", "errors: UNAVAILABLE"),
        (Gaps([0.02] * 100, []), "engine lost", "engine lost"),
    ],
)
def test_a_row_is_judged_by_gaps_errors_and_what_is_lost(under: Gaps, loss: str, verdict: str) -> None:
    assert row(under, loss).verdict == verdict


def test_a_row_is_judged_by_the_memory_that_is_taken() -> None:
    assert (row(QUIET, mib_after=1380).verdict, row(QUIET, mib_after=1381).verdict) == ("fine", "memory")


def test_gaps_are_told_by_percentiles() -> None:
    assert (QUIET.p50_ms, QUIET.p99_ms) == (20.0, 30.0)
    assert math.isnan(Gaps([], []).p50_ms)


def test_a_row_is_told_in_the_columns_of_the_page() -> None:
    told = dict(zip(abuse.COLUMNS, row(QUIET).cells, strict=True))
    assert list(told.values()) == ["an attack", "proxy", "30, 30", "+900", "INVALID_ARG", ""]
    assert read_table(abuse.PAGE, abuse.TABLE).startswith(f"| {' | '.join(told)} |\n")


def test_the_docs_show_attacks_that_there_are_each_once_in_their_order() -> None:
    _, _, *lines = [line for line in read_table(abuse.PAGE, abuse.TABLE).splitlines() if line.startswith("|")]
    shown = [tuple(cell.strip() for cell in line.split("|")[1:3]) for line in lines]
    attacks = iter([(name, scene.title) for scene in SCENES for name in scene.attacks])
    assert all(row in attacks for row in shown)  # which come after the row before


@pytest.mark.parametrize(
    ("chosen", "reason"),
    [
        ({"attack": [next(iter(SCENES[0].attacks))[:5], "no-such"]}, "of no attack has no-such"),
        ({"door": ["prox"]}, "no door prox; there are proxy"),
    ],
)
def test_an_attack_or_a_door_that_there_is_not_is_refused(chosen: dict[str, list[str]], reason: str) -> None:
    with pytest.raises(abuse.typer.BadParameter, match=reason):
        abuse.main(**chosen)


def test_every_attack_can_be_handed_to_a_process_of_its_own() -> None:
    attacks = [attack for scene in SCENES for attack in scene.attacks.values()]
    assert all(pickle.loads(pickle.dumps(attack)) is attack for attack in attacks)


@pytest.mark.parametrize(
    ("attack", "outcome"),
    [(str, (str(Doors("a", "b")), "")), (len, ("TypeError: object of type 'Doors' has no len()", "not tried"))],
)
def test_what_an_attacker_met_comes_from_a_process_of_its_own(attack: Any, outcome: tuple[str, str]) -> None:
    with Attacker(attack, Doors("a", "b")) as attacker:
        attacker.wait_ready()
        assert attacker.carry_out() == outcome


def test_an_attacker_whose_process_ends_says_so() -> None:
    with Attacker(str, Doors("a", "b")) as attacker:
        attacker.wait_ready()
        attacker._process.kill()
        attacker._process.join()
        assert attacker.carry_out() == ("its process ended with status -9", "not tried")


def test_a_server_that_an_attack_has_ended_is_followed_by_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[SimpleNamespace] = []

    @contextmanager
    def open_stage(_: Path) -> Iterator[Stage]:
        opened.append(SimpleNamespace(is_alive=True))
        if len(opened) == 3:
            raise ConfigError("no room")
        yield cast(Stage, opened[-1])

    def try_attack(door: str, name: str, attack: Any, stage: Any) -> Row:
        stage.is_alive = name != "deadly"
        return row(QUIET, name=name)

    monkeypatch.setattr(abuse, "try_attack", try_attack)
    scene = Scene("proxy", {"mild": str, "deadly": str, "after": str}, open_stage)
    assert [each.name for each in abuse.play(scene, Path())] == ["mild", "deadly", "after"]
    assert len(opened) == 2
    (untried,) = abuse.play(abuse.chosen(scene, ["mil"]), Path())
    assert untried.verdict == "not tried: no room"


def test_times_that_differ_tell() -> None:
    assert chance_of_longer([2, 2], [1, 3]) == 0.5
    assert chance_of_longer([2, 3], [1, 1]) == 1.0
    assert "chance 0.50" in judge([1, 2, 3], [3, 2, 1])
    with pytest.raises(Leak, match=r"medians 1000\.0 and 5000\.0 ms, the other tenant's longer with chance 0\.00"):
        judge([1, 1], [5, 5])


def test_numbers_are_written_as_protobuf_writes_them() -> None:
    assert (_varint(0), _varint(127), _varint(300)) == (b"\x00", b"\x7f", b"\xac\x02")


def values_of(request: Any, name: str) -> Any:
    index = [tensor.name for tensor in request.inputs].index(name)
    tensor, data = request.inputs[index], request.raw_input_contents[index]
    flat = deserialize_bytes_tensor(data) if tensor.datatype == "BYTES" else np.frombuffer(data, np.int32)
    return flat.reshape(tensor.shape).tolist()


def test_a_request_has_what_it_was_given_for_each_row() -> None:
    request = _prompt(rows=2, stop_words=["é", "b"], beam_width=8)
    assert values_of(request, "stop_words") == [["é".encode(), b"b"]] * 2
    assert values_of(request, "beam_width") == [[8], [8]]
    assert values_of(_prompt(bad_words_list=_word_list(3)), "bad_words_list") == [[[0, 1, 2], [1, 2, 3]]]
    assert [tensor.datatype for tensor in infer_request("m", stop=[[True]], x=[[0.5]]).inputs] == ["BOOL", "FP32"]


def test_schemas_differ_and_are_as_large_as_one_may_be() -> None:
    schemas = {_schema(seed) for seed in range(3)}
    assert len(schemas) == 3
    assert all(50_000 < len(schema) <= MAX_GUIDE_BYTES and json.loads(schema) for schema in schemas)
    request = _guided([("json_schema", schema) for schema in sorted(schemas)])
    assert len(values_of(request, "guided_decoding_guide")) == 3


def test_hostile_guides_differ_and_are_no_larger_than_one_may_be() -> None:
    guides = [hostile_guide(number) for number in range(100)]
    assert len(set(guides)) == 100
    assert all(len(text.encode()) <= MAX_GUIDE_BYTES for _, text in guides)
