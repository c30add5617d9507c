"""Aliases: shares by weight, sessions that stay, a table that outlives a restart, and never another adapter."""

from __future__ import annotations

import math
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, wait
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from support.adapters import TINY, wire_adapter

from multilora_engine.errors import (
    AdapterNotFound,
    AliasConflict,
    AliasNotKept,
    AliasNotKnown,
    AliasVersionNotFound,
    InvalidRequest,
    RequestError,
)
from multilora_engine.lora.aliases import MAX_ALIASES, Aliases, choose_member
from multilora_engine.lora.device_tier import DeviceTier
from multilora_engine.lora.disk_tier import DiskTier
from multilora_engine.lora.format import pack_adapter
from multilora_engine.lora.host_tier import HostTier
from multilora_engine.lora.layout import PackedAdapter
from multilora_engine.lora.manager import LoRAManager
from multilora_engine.lora.names import scoped_task_id, task_id_of
from multilora_engine.process.adapter_operator import AdapterOperator, PendingReport
from multilora_engine.process.messages import AdapterScope
from multilora_engine.process.operations import (
    AdapterList,
    AliasReport,
    ListAdapters,
    Operation,
    RemoveAlias,
    SetAlias,
)
from multilora_engine.request import GenerationRequest, SamplingParams
from multilora_wire.adapter_info import Alias, AliasMember


def alias(name: str = "chat", tenant: str = "", **weights: int) -> Alias:
    """Members by their weights."""
    return Alias(name, tuple(AliasMember(member, weight) for member, weight in weights.items()), tenant)


def request(name: str, session: str = "", **options: Any) -> GenerationRequest:
    sampling = SamplingParams(max_tokens=1)
    return GenerationRequest(
        "r", [1], sampling, lora_task_id=task_id_of(name), lora_name=name, lora_session=session, **options
    )


def no_digest(task_id: object) -> str:
    return ""


def member(aliases: Aliases, name: str, session: str = "", call_id: str = "call") -> str:
    return aliases.resolve(request(name, session), call_id, no_digest).lora_name


@pytest.mark.parametrize("weights", [{"v7": 90, "v8": 10}, {"v7": 1, "v8": 1, "v9": 1, "v10": 0}, {"v7": 999, "v8": 1}])
def test_the_shares_of_calls_are_those_of_the_weights_within_three_standard_deviations(weights: dict[str, int]) -> None:
    aliases, random, num_calls = Aliases(), Random(58), 20_000
    aliases.set(alias(**weights))
    chosen = Counter(member(aliases, "chat", call_id=f"{random.getrandbits(128):x}") for _ in range(num_calls))
    for name, weight in weights.items():
        share = weight / sum(weights.values())
        deviation = math.sqrt(num_calls * share * (1 - share))
        assert abs(chosen[name] - num_calls * share) <= 3 * deviation, (name, chosen)


def test_servers_of_all_releases_choose_alike() -> None:
    """Literals, so that a change of the hash, which would move conversations between versions, is seen."""
    chosen = "".join(choose_member(alias(v7=50, v8=50), f"session {i}").name[-1] for i in range(24))
    assert chosen == "878787877778878887877877"
    assert chosen != "".join(choose_member(alias("talk", v7=50, v8=50), f"session {i}").name[-1] for i in range(24))


WEIGHTS = st.dictionaries(st.sampled_from(["v1", "v2", "v3", "v4"]), st.integers(0, 100), min_size=1).filter(
    lambda weights: sum(weights.values()) > 0
)


@given(before=WEIGHTS, after=WEIGHTS, sessions=st.lists(st.text(max_size=8), max_size=8))
def test_a_session_moves_only_to_a_member_that_gains_from_one_that_loses(
    before: dict[str, int], after: dict[str, int], sessions: list[str]
) -> None:
    for session in sessions:
        old, new = (choose_member(alias(**weights), session).name for weights in (before, after))
        assert before[old]
        assert after[new]
        if old != new:
            assert after[new] * before[old] > before.get(new, 0) * after.get(old, 0)
        assert choose_member(alias(**dict(reversed(after.items()))), session).name == new, "in whatever order"


def test_the_session_comes_before_the_call_and_other_requests_stay_as_they_are() -> None:
    aliases = Aliases()
    aliases.set(alias(v7=50, v8=50))
    calls = [f"call {i}" for i in range(40)]
    assert {member(aliases, "chat", "Ann", call) for call in calls} == {member(aliases, "chat", "Ann")}
    assert {member(aliases, "chat", "", call) for call in calls} == {"v7", "v8"}
    for other in (request("v7"), GenerationRequest("r", [1], SamplingParams(max_tokens=1))):
        assert aliases.resolve(other, "call", no_digest) is other
    by_id = GenerationRequest("r", [1], SamplingParams(max_tokens=1), lora_task_id=task_id_of("chat"))
    resolved = aliases.resolve(by_id, "call", no_digest)
    assert (resolved.lora_task_id, resolved.lora_name) == (task_id_of(resolved.lora_name), member(aliases, "chat"))


def test_a_tenants_alias_is_no_other_ones() -> None:
    aliases = Aliases()
    aliases.set(alias("chat", "acme", v7=1))
    ours = aliases.resolve(request("chat", adapter_tenant="acme"), "call", no_digest)
    assert ours.task_id == scoped_task_id("acme", task_id_of("v7"))
    for tenant in ("", "bolt"):
        theirs = request("chat", adapter_tenant=tenant)
        assert aliases.resolve(theirs, "call", no_digest) is theirs
    aliases.check_adapter(task_id_of("chat"), "chat")
    with pytest.raises(AliasNotKnown, match="there is no alias 'chat'"):
        aliases.remove("chat", "")


@pytest.mark.parametrize(
    ("refused", "reason"),
    [
        (alias(), "an alias has 1 to 16 members, 'chat' would have 0"),
        (alias(**{f"v{i}": 1 for i in range(17)}), "'chat' would have 17"),
        (alias(v7=0, v8=0), "the weights of 'chat' add up to 0, expected 1 .. 1000000"),
        (alias(v7=1, v8=1_000_000), "add up to 1000001"),
        (alias(v7=1, v8=-1), "the weight of 'v8' is -1, expected a whole number >= 0"),
        (Alias("chat", (AliasMember("v7", 1), AliasMember("v7", 2))), "'v7' is in the alias 'chat' twice"),
        (Alias("chat", (AliasMember("../v7", 1),)), "lora_name '../v7' is not plain"),
        (alias("a b", v7=1), "lora_name 'a b' is not plain"),
        (alias(chat=1), "'chat' is an alias, and the members of an alias are adapters"),
        (alias(talk=1), "'talk' is an alias, and the members of an alias are adapters"),
        (alias("v1", v7=1), "'v1' is a member of the alias 'talk', and members are adapters"),
    ],
)
def test_an_alias_that_there_cannot_be_is_refused_and_nothing_changes(refused: Alias, reason: str) -> None:
    aliases = Aliases()
    aliases.set(alias("talk", v1=1))
    with pytest.raises(InvalidRequest) as caught:
        aliases.set(refused)
    assert reason in str(caught.value)
    assert aliases.describe() == [alias("talk", v1=1)]


def test_each_owner_has_so_many_aliases() -> None:
    aliases = Aliases()
    for i in range(MAX_ALIASES):
        aliases.set(alias(f"a{i}", v1=1))
    with pytest.raises(InvalidRequest, match=f"there are {MAX_ALIASES} aliases, and {MAX_ALIASES} may be"):
        aliases.set(alias("one-more", v1=1))
    aliases.set(alias("a0", v2=1))
    aliases.set(alias("one-more", "acme", v1=1))


def test_a_path_and_a_set_are_of_adapters() -> None:
    aliases = Aliases()
    aliases.set(alias(v7=1))
    with pytest.raises(InvalidRequest, match="lora_path is the place of an adapter, and 'chat' is an alias"):
        aliases.resolve(request("chat", lora_path="/adapters/v7"), "call", no_digest)


def test_a_digest_that_a_request_demands_chooses_the_member_whatever_its_weight() -> None:
    aliases = Aliases()
    aliases.set(alias(v7=1, v8=0, v9=0))
    digests = {"v7": "a" * 32, "v8": "b" * 32, "v9": ""}

    def chosen(digest: str) -> str:
        asked = request("chat", "Ann", lora_expected_digest=digest)
        named = {task_id_of(name): digest for name, digest in digests.items()}
        return aliases.resolve(asked, "call", named.__getitem__).lora_name

    assert chosen("b" * 32) == "v8"
    assert chosen("c" * 32) == "v9", "its version is not known until it is read"
    for others in ({"v9": "d" * 32}, {"v8": ""}):
        digests |= others
        with pytest.raises(AliasVersionNotFound) as caught:
            chosen("c" * 32)
        told = ", ".join(f"{name} {digest or 'is not cached'}" for name, digest in digests.items())
        assert f"lora_expected_digest demands, {'c' * 32}: {told}" in str(caught.value)
        digests["v9"] = ""


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTier]:
    tier = DiskTier(tmp_path, 1 << 20, TINY)
    yield tier
    tier.close()


def test_a_file_that_is_not_of_aliases_is_not_used(
    disk: DiskTier, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "aliases.json").write_bytes(b"")
    assert Aliases(disk).describe() == []
    for content in (
        b"{",
        b'{"aliases": [{"name": "chat", "members": []}]}',
        b'{"aliases": [], "format": 2}',
        b'{"aliases": [], "more": 1}',
        b'{"aliases": [{"name": "../a", "members": [{"name": "v7", "weight": 1}]}]}',
        b"\xff",
    ):
        (tmp_path / "aliases.json").write_bytes(content)
        caplog.clear()
        assert Aliases(disk).describe() == []
        assert "the aliases of aliases.json in lora_cache_dir are not used" in caplog.text
    (tmp_path / "aliases.json").unlink()
    (tmp_path / "aliases.json").symlink_to(tmp_path)
    assert Aliases(disk).describe() == []


def test_what_a_writer_that_died_left_keeps_no_alias_from_its_file(tmp_path: Path) -> None:
    (tmp_path / ".aliases.json.part").write_bytes(b"{")
    disk = DiskTier(tmp_path, 1 << 20, TINY)
    Aliases(disk).set(alias(v7=1)).result(60)
    disk.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["aliases.json"]


def test_a_change_that_a_full_disk_does_not_keep_never_holds_and_is_told_without_its_path(
    disk: DiskTier, tmp_path: Path
) -> None:
    aliases = Aliases(disk)
    aliases.set(alias(v7=1)).result(60)
    part = tmp_path / ".aliases.json.part"
    part.mkdir()
    changes = [aliases.remove("chat", "")[1]]
    for other in (alias(v8=1), alias("talk", v7=1)):
        wait(changes)
        changes.append(aliases.set(other))
    for change in changes:
        with pytest.raises(OSError, match=r"\.aliases\.json\.part") as caught:
            change.result(60)
        assert str(tmp_path) not in str(caught.value)
    assert aliases.describe() == Aliases(disk).describe() == [alias(v7=1)]
    aliases.check_adapter(task_id_of("talk"), "talk")
    part.rmdir()
    aliases.remove("chat", "")[1].result(60)
    assert aliases.describe() == Aliases(disk).describe() == []


def test_a_change_holds_when_it_is_stored_and_its_name_is_no_adapters_from_the_first_moment() -> None:
    disk = HeldDisk()
    aliases = Aliases(cast(DiskTier, disk))
    aliases.set(alias(v7=1))
    assert aliases.is_storing
    assert aliases.describe() == []
    with pytest.raises(AliasConflict):
        aliases.check_adapter(task_id_of("chat"), "chat")
    disk.written[-1].set_result(None)
    assert aliases.describe() == [alias(v7=1)]
    aliases.remove("chat", "")
    with pytest.raises(AliasConflict):
        aliases.check_adapter(task_id_of("chat"), "chat")
    disk.written[-1].set_result(None)
    aliases.check_adapter(task_id_of("chat"), "chat")


def reports(operator: AdapterOperator, *operations: Operation) -> list[AliasReport]:
    """Of operations that come at the same time."""
    pending = [cast(PendingReport, operator.execute(operation, AdapterScope())) for operation in operations]
    while {report.is_ready() for report in pending} != {True}:  # All of them are asked, each time.
        """The disk writes."""
    return [cast(AliasReport, report.report()) for report in pending]


def test_changes_at_the_same_time_are_stored_one_after_the_other_and_adapters_are_looked_up(tmp_path: Path) -> None:
    host = HostTier(32, TINY.page_bytes)
    disk = DiskTier(tmp_path, 1 << 22, TINY)
    loras = LoRAManager(host, DeviceTier(TINY, host.pool, host.pool, 3), "replace", disk=disk)
    in_sources: Future[list[object]] = Future()
    in_sources.set_result([])
    remote = SimpleNamespace(list_sources=lambda: in_sources, describe=list)
    operator = AdapterOperator(loras, *[cast(Any, part) for part in (remote, *[None] * 7)])
    chat, talk = (alias(name, v1=1, v2=1) for name in ("chat", "talk"))
    sets = [SetAlias(one.name, one.members) for one in (talk, chat)]
    assert [report.alias for report in reports(operator, *sets)] == [talk, chat]
    assert loras.aliases.describe() == Aliases(disk).describe() == [chat, talk]
    loras.put(task_id_of("v1"), CONTENTS[0], "v1")
    found = operator.execute(ListAdapters(["v1", "v2"]), AdapterScope())
    assert isinstance(found, AdapterList)
    assert [(info.name, info.digest) for info in found.adapters] == [("v1", CONTENTS[0].digest)]
    theirs = AdapterScope(is_everything=False, tenant="acme")
    assert operator.execute(ListAdapters(["v1"]), theirs) == operator.execute(ListAdapters(["v1"], "acme"), theirs)
    with pytest.raises(AliasConflict):
        reports(operator, SetAlias("v1", talk.members))
    assert [report.alias for report in reports(operator, RemoveAlias("chat"), RemoveAlias("talk"))] == [chat, talk]
    assert loras.aliases.describe() == Aliases(disk).describe() == []
    (tmp_path / ".aliases.json.part").mkdir()
    with pytest.raises(AliasNotKept, match="the alias 'chat' is as it was: lora_cache_dir cannot keep the change: "):
        reports(operator, sets[1])
    loras.close()


class HeldDisk:
    """Its writes end when the test says so."""

    def __init__(self) -> None:
        self.written: list[Future[None]] = []

    def read_beside(self, name: str) -> bytes:
        return b""

    def write_beside(self, name: str, content: bytes) -> Future[None]:
        self.written.append(Future())
        return self.written[-1]


def test_an_alias_that_has_the_name_of_an_adapter_beside_it_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def start() -> LoRAManager:
        host = HostTier(32, TINY.page_bytes)
        disk = DiskTier(tmp_path, 1 << 22, TINY)
        return LoRAManager(host, DeviceTier(TINY, host.pool, host.pool, 3), "replace", disk=disk)

    loras = start()
    loras.aliases.set(alias("talk", v8=1)).result(60)
    loras.aliases.set(alias("chat", v7=1)).result(60)
    earlier = (tmp_path / "aliases.json").read_bytes()
    loras.aliases.remove("chat", "")[1].result(60)
    loras.put(task_id_of("chat"), CONTENTS[0], "chat")
    loras.close()
    (tmp_path / "aliases.json").write_bytes(earlier)
    loras = start()
    assert loras.aliases.describe() == [alias("talk", v8=1)]
    assert "the alias 'chat' of aliases.json in lora_cache_dir is not used" in caplog.text
    assert loras.pin(task_id_of("chat")).digest == CONTENTS[0].digest
    loras.close()


def packed(content: int) -> PackedAdapter:
    wire = wire_adapter(TINY, [(1, 0, 4)], seed=content)
    return pack_adapter(wire.weights, wire.config, TINY)


CONTENTS = [packed(content) for content in range(3)]
NAMES = ["v1", "v2", "v3", "chat", "talk"]
SESSIONS = st.sampled_from(["", "Ann", "Bob", "Cleo"])


class Versions(RuleBasedStateMachine):
    """Loads, unloads, moves of weights, requests and restarts, beside a plain account of names."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        self.adapters: dict[str, str] = {}
        self.aliases: dict[str, dict[str, int]] = {}
        self.members: dict[tuple[str, str], str] = {}
        self.num_calls = 0
        self.start()

    def start(self) -> None:
        host = HostTier(32, TINY.page_bytes)
        disk = DiskTier(Path(self.directory.name), 1 << 22, TINY)
        self.loras = LoRAManager(host, DeviceTier(TINY, host.pool, host.pool, 3), "replace", disk=disk)

    def teardown(self) -> None:
        self.loras.close()
        self.directory.cleanup()

    @rule(name=st.sampled_from(NAMES), content=st.integers(0, 2))
    def load(self, name: str, content: int) -> None:
        try:
            self.loras.put(task_id_of(name), CONTENTS[content], name)
        except AliasConflict:
            assert name in self.aliases
        else:
            assert name not in self.aliases
            self.adapters[name] = CONTENTS[content].digest

    @precondition(lambda self: self.adapters)
    @rule(data=st.data())
    def unload(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.adapters)))
        self.loras.unload(task_id_of(name))
        del self.adapters[name]

    @rule(name=st.sampled_from(["chat", "talk"]), weights=WEIGHTS)
    def move(self, name: str, weights: dict[str, int]) -> None:
        if name in self.adapters:
            return  # the operator refuses the name of an adapter
        stored = self.loras.aliases.set(alias(name, **weights))
        stored.result(60)
        before = self.aliases.get(name, weights)
        self.aliases[name] = weights
        for (of, session), old in list(self.members.items()):
            if of == name and (new := member(self.loras.aliases, name, session)) != old:
                assert weights[new] * before[old] > before.get(new, 0) * weights.get(old, 0)
                self.members[of, session] = new

    @precondition(lambda self: self.aliases)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.aliases)))
        self.loras.aliases.remove(name, "")[1].result(60)
        del self.aliases[name]
        self.members = {key: value for key, value in self.members.items() if key[0] != name}

    @rule(name=st.sampled_from(NAMES), session=SESSIONS)
    def ask(self, name: str, session: str) -> None:
        self.num_calls += 1
        asked = request(name, session)
        resolved = self.loras.aliases.resolve(asked, f"call {self.num_calls}", self.loras.inventory.digest)
        answered = resolved.lora_name
        if name in self.aliases:
            assert self.aliases[name][answered] > 0
            if session:
                assert self.members.setdefault((name, session), answered) == answered
        else:
            assert resolved is asked
        assert resolved.task_id is not None
        try:
            adapter = self.loras.pin(resolved.task_id)
        except AdapterNotFound:
            assert answered not in self.adapters
        except RequestError:
            return  # no room now
        else:
            assert adapter.digest == self.adapters[answered]
            self.loras.memory.unpin(adapter)

    @rule()
    def restart(self) -> None:
        while self.loras.is_busy:
            self.loras.wait(60)
            self.loras.poll()
        self.loras.close()
        self.start()

    @invariant()
    def integrity(self) -> None:
        self.loras.poll()
        self.loras.check_integrity()
        assert {a.name: {m.name: m.weight for m in a.members} for a in self.loras.aliases.describe()} == self.aliases
        assert self.aliases.keys().isdisjoint(self.adapters)


def test_no_answer_is_by_an_adapter_that_the_name_does_not_mean() -> None:
    run_state_machine_as_test(Versions, settings=settings(max_examples=20, stateful_step_count=30, deadline=None))
