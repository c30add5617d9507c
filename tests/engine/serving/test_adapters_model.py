"""The operator's model, from its JSON to the manager of a served engine and back."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from support.adapters import TINY, wire_adapter
from support.fake_engine import HOLD, INFO, FakeEngine
from support.fake_triton import FakeRequest
from support.fronts import TIMEOUT_S, RecordingListener, generation_request
from support.served_engine import served
from support.sources import NO_BASE, GatedSource, GivenSource, digest_of, save_adapter

from multilora_client.keys import Caller, KeyEntry
from multilora_engine.errors import PermissionDenied
from multilora_engine.lora.disk_tier import DiskTier
from multilora_engine.lora.format import pack_adapter
from multilora_engine.lora.layout import PackedAdapter, set_digest
from multilora_engine.lora.names import task_id_of
from multilora_engine.lora.sources.fetcher import AdapterFetcher
from multilora_engine.process.operations import parse_operation
from multilora_engine.request import Sender
from multilora_engine.serving.adapters_model import AdaptersFront, grant_operation
from multilora_engine.serving.front import EngineLink
from multilora_engine.serving.senders import Rights


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[FakeEngine]:
    engine = FakeEngine()
    with served(engine, tmp_path / "engine.sock"):
        yield engine


def packed(seed: int = 0) -> PackedAdapter:
    wire = wire_adapter(TINY, [(1, 0, 4), (6, 2, 7)], seed=seed)
    return pack_adapter(wire.weights, wire.config, TINY)


def upload(link: EngineLink, *task_ids: int) -> None:
    for task_id in task_ids:
        listener = RecordingListener()
        link.client.put_adapter(listener, f"upload {task_id}", task_id, packed(seed=task_id))
        assert listener.wait()[-1].error_code is None


def ask(link: EngineLink, text: str | None) -> Any:
    tensors = {} if text is None else {"request": [[text]]}
    request = FakeRequest(tensors, id="ab12", output_names=("response",))
    AdaptersFront(link).accept(request)
    (response,) = request.sender.wait()
    if response.error is not None:
        return response.error.code, response.error.message
    return json.loads(response.arrays["response"].item())


def operate(link: EngineLink, operation: str, **fields: Any) -> Any:
    return ask(link, json.dumps({"operation": operation, **fields}))


def test_list_shows_every_adapter_by_task_id(link: EngineLink) -> None:
    assert operate(link, "list") == {"adapters": []}
    upload(link, 9, 2**64 - 1, 7)
    adapters = operate(link, "list")["adapters"]
    assert [adapter["lora_task_id"] for adapter in adapters] == [7, 9, 2**64 - 1]
    assert adapters[0]["digest"] == packed(seed=7).digest
    assert (adapters[0]["ranks"], adapters[0]["num_pins"], adapters[0]["is_pinned"]) == ([4, 7], 0, False)


def test_a_pinned_adapter_stays_so_until_it_is_unpinned(link: EngineLink) -> None:
    upload(link, 7)
    assert operate(link, "pin", lora_task_id=7)["adapter"]["is_pinned"]
    assert operate(link, "list")["adapters"][0]["is_pinned"]
    assert not operate(link, "unpin", lora_task_id=7)["adapter"]["is_pinned"]


def test_a_set_is_made_and_listed_with_its_members(link: EngineLink) -> None:
    upload(link, 7, 8)
    members = [{"lora_task_id": 8, "weight": -0.5}, {"lora_task_id": 7, "weight": 2}]
    made = operate(link, "combine", name="both", members=members)["adapter"]
    digest = set_digest([(packed(seed=7).digest, 2.0), (packed(seed=8).digest, -0.5)])
    assert (made["name"], made["digest"], made["ranks"]) == ("both", digest, [8, 14])
    assert {(m["lora_task_id"], m["weight"], m["digest"]) for m in made["members"]} == {
        (7, 2.0, packed(seed=7).digest),
        (8, -0.5, packed(seed=8).digest),
    }
    listed = operate(link, "list")["adapters"]
    assert [adapter["name"] for adapter in listed if adapter["members"]] == ["both"]
    assert operate(link, "combine", name="both", members=members[::-1])["adapter"]["digest"] == digest, "again"
    assert operate(link, "combine", name="both", members=members[:1])[0] == "ALREADY_EXISTS"


@pytest.mark.parametrize(
    ("members", "code", "reason"),
    [
        ([], "INVALID_ARG", "a set has 1 to 8 members, this one has 0"),
        ([{"lora_task_id": n, "weight": 1} for n in range(9)], "INVALID_ARG", "this one has 9"),
        ([{"lora_task_id": 7, "weight": 0}], "INVALID_ARG", "the weight of LoRA task 7 in the set is 0"),
        ([{"lora_task_id": 7, "weight": 1e39}], "INVALID_ARG", "finite in float32"),
        ([{"lora_task_id": 7, "weight": 1}] * 2, "INVALID_ARG", "LoRA task 7 is in the set twice"),
        ([{"lora_task_id": 9, "weight": 1}], "NOT_FOUND", "LoRA task 9 not found in cache"),
        ([{"lora_task_id": n, "weight": 1} for n in (7, 8, 10)], "INVALID_ARG", r"low_rank (21). low_rank must be <="),
    ],
)
def test_a_set_that_there_cannot_be_is_refused(
    link: EngineLink, members: list[dict[str, Any]], code: str, reason: str
) -> None:
    upload(link, 7, 8, 10)
    answer = operate(link, "combine", name="both", members=members)
    assert (answer[0], reason in answer[1]) == (code, True), answer
    assert [adapter["lora_task_id"] for adapter in operate(link, "list")["adapters"]] == [7, 8, 10]


def test_an_unloaded_adapter_is_gone_for_new_requests_and_stays_for_those_in_flight(link: EngineLink) -> None:
    upload(link, 7)
    running, late = RecordingListener(), RecordingListener()
    link.client.generate(running, [generation_request("running", [HOLD], lora_task_id=7)], client_request_id="mine")
    assert operate(link, "unload", lora_task_id=7)["adapter"]["lora_task_id"] == 7
    assert operate(link, "list") == {"adapters": []}
    link.client.generate(late, [generation_request("late", [1], lora_task_id=7)])
    assert late.wait()[-1].error_code == "NOT_FOUND"
    link.client.stop(RecordingListener(), "stop", "mine")
    assert running.wait()[-1].lora_digest == packed(seed=7).digest


def test_events_continue_where_the_last_ones_ended(link: EngineLink) -> None:
    upload(link, 7, 8)
    first = operate(link, "events")
    operate(link, "unload", lora_task_id=7)
    later = operate(link, "events", since=first["last"])
    assert [(event["kind"], event["lora_task_id"]) for event in first["events"]] == [("uploaded", 7), ("uploaded", 8)]
    assert [(event["kind"], event["lora_task_id"]) for event in later["events"]] == [("unloaded", 7)]
    assert (first["num_missed"], later["num_missed"]) == (0, 0)
    assert {event["instance"] for event in first["events"]} == {f"{socket.gethostname()}:{os.getpid()}"}


def test_stats_tell_of_tiers_and_of_the_adapters_asked_for(link: EngineLink) -> None:
    upload(link, 7)
    listener = RecordingListener()
    link.client.generate(listener, [generation_request("r", [1, 2], max_tokens=5, lora_task_id=7)])
    listener.wait()
    stats = operate(link, "stats")
    assert stats["tiers"]["host"]["num_adapters"] == 1
    assert stats["tiers"]["insertions"] == 1
    assert stats["usage"] == {"7": {"requests": 1, "prompt_tokens": 2, "output_tokens": 5}}
    assert stats["other_usage"]["requests"] == 0


def test_the_model_is_described(link: EngineLink) -> None:
    assert operate(link, "describe") == {
        "model": "nowhere",
        "max_model_len": INFO.max_model_len,
        "vocab_size": INFO.vocab_size,
        "version": INFO.version,
        "model_implementation": "native",
        "has_encoder": False,
    }


def test_the_layout_is_what_adapters_are_packed_by(link: EngineLink) -> None:
    assert operate(link, "layout") == json.loads(json.dumps({"layout": asdict(TINY)}))


def test_an_operation_longer_than_any_is_refused_unread(link: EngineLink) -> None:
    code, message = ask(link, "[" * (1 << 21))
    assert code == "INVALID_ARG"
    assert "the operation has 2097152 bytes, at most 1048576" in message


def test_an_adapter_that_is_not_there_is_named(link: EngineLink) -> None:
    code, message = operate(link, "pin", lora_task_id=404)
    assert (code, "LoRA task 404 not found in cache" in message) == ("NOT_FOUND", True)
    code, message = operate(link, "unload", name="nobody")
    assert code == "NOT_FOUND"
    assert message.startswith("[NOT_FOUND] LoRA adapter 'nobody' not found in cache: no tier has it.")
    assert message.endswith("(request ab12)")


def test_a_name_means_the_adapter_of_its_task_id(link: EngineLink) -> None:
    upload(link, 7, task_id_of("acme/pirate"))
    assert operate(link, "pin", name="acme/pirate")["adapter"]["lora_task_id"] == task_id_of("acme/pirate")
    assert [adapter["is_pinned"] for adapter in operate(link, "list")["adapters"]] == [False, True]


def test_a_name_that_contradicts_the_task_id_changes_nothing(link: EngineLink) -> None:
    upload(link, 7)
    code, message = operate(link, "unload", lora_task_id=7, name="json")
    assert (code, "LoRA task 7 is named '', not 'json'" in message) == ("INVALID_ARG", True)
    assert len(operate(link, "list")["adapters"]) == 1


@pytest.fixture
def sourced(tmp_path: Path) -> Iterator[EngineLink]:
    """An engine's that has a gated directory with `acme/pirate`, and a source `other` with another of this name."""
    GatedSource.gate.clear()
    GatedSource.asked.clear()
    save_adapter(tmp_path / "a" / "acme" / "pirate", seed=1)
    (tmp_path / "adapter_model.bin").write_bytes(b"pickled")
    other = GivenSource({"acme/pirate": save_adapter(tmp_path / "b", seed=2), "broken": tmp_path})
    fetcher = AdapterFetcher(
        {"directory": GatedSource(str(tmp_path / "a")), "other": other}, TINY, NO_BASE, num_threads=2
    )
    with served(FakeEngine(fetcher=fetcher), tmp_path / "engine.sock"):
        link = EngineLink(tmp_path / "engine.sock")
        link.client.wait_until_ready(TIMEOUT_S)
        yield link
        link.close()
    GatedSource.gate.set()
    fetcher.close()


def test_the_names_that_requests_can_ask_for_are_those_of_tiers_sources_and_aliases(sourced: EngineLink) -> None:
    upload(sourced, 7)
    operate(sourced, "alias", name="chat", members=[{"name": "v1", "weight": 1}])
    everything = operate(sourced, "list", is_for_requests=True)
    assert {7, task_id_of("broken")} <= {adapter["lora_task_id"] for adapter in everything["adapters"]}
    for name, kind in (("broken", "adapters"), ("chat", "aliases"), ("base", "")):
        found = operate(sourced, "list", is_for_requests=True, names=[name])
        assert {k: [each["name"] for each in listed] for k, listed in found.items() if listed} == (
            {kind: [name]} if kind else {}
        )


def test_an_adapter_is_loaded_from_its_source_and_answered_for_when_it_is_there(sourced: EngineLink) -> None:
    loading = FakeRequest({"request": [['{"operation": "load", "name": "acme/pirate"}']]}, output_names=("response",))
    AdaptersFront(sourced).accept(loading)
    pirate, broken = task_id_of("acme/pirate"), task_id_of("broken")
    # Asked after the load, so answered by an engine that has begun it and goes on.
    before = {adapter["lora_task_id"]: adapter for adapter in operate(sourced, "list")["adapters"]}
    assert (before[pirate]["status"], before[pirate]["location"]) == ("DOWNLOADING", "REMOTE")
    assert (before[broken]["status"], before[broken]["name"]) == ("NOT_DOWNLOADED", "broken")
    assert operate(sourced, "stats")["tiers"]["remote"]["num_adapters"] == 1
    assert loading.sender.responses == []
    GatedSource.gate.set()
    (response,) = loading.sender.wait()
    loaded = json.loads(response.arrays["response"].item())["adapter"]
    assert (loaded["digest"], loaded["location"], loaded["name"]) == (digest_of(1), "HOST", "acme/pirate")
    listed = operate(sourced, "list")["adapters"][0 if pirate < broken else 1]
    assert listed | {"module_ids": loaded["module_ids"]} == loaded
    assert operate(sourced, "load", lora_task_id=pirate)["adapter"] == loaded
    assert GatedSource.asked == ["acme/pirate"]
    stats = operate(sourced, "stats")["tiers"]["remote"]
    assert (stats["num_adapters"], stats["copies"], stats["failures"]) == (0, 1, 0)


def test_one_source_alone_can_be_asked(sourced: EngineLink) -> None:
    assert operate(sourced, "load", name="acme/pirate", source="other")["adapter"]["digest"] == digest_of(2)
    code, message = operate(sourced, "load", name="x", source="nowhere")
    assert (code, "there is no source 'nowhere'; lora_sources has directory, other" in message) == ("INVALID_ARG", True)


def test_what_cannot_be_loaded_is_named(sourced: EngineLink) -> None:
    GatedSource.gate.set()
    code, message = operate(sourced, "load", name="nobody")
    assert (code, message.startswith("[NOT_FOUND] LoRA adapter 'nobody' not found in cache.")) == ("NOT_FOUND", True)
    code, message = operate(sourced, "load", name="broken")
    assert code == "INVALID_ARG"
    assert "LoRA adapter 'broken' of source 'other' cannot be used: adapter_model.bin is a pickle" in message
    code, message = operate(sourced, "load", name="../nobody")
    assert (code, "'../nobody' is not plain" in message) == ("INVALID_ARG", True)
    code, message = operate(sourced, "load", name="nobody", lora_task_id=7)
    assert (code, "lora_name 'nobody' is LoRA task" in message) == ("INVALID_ARG", True)
    stats = operate(sourced, "stats")["tiers"]["remote"]
    assert (stats["misses"], stats["failures"]) == (1, 1)
    assert [event["kind"] for event in operate(sourced, "events")["events"]] == ["fetch_failed"]


CHAT = [{"name": "chat-v7", "weight": 90}, {"name": "chat-v8", "weight": 10}]


def test_an_alias_is_set_moved_listed_and_removed(link: EngineLink) -> None:
    made = operate(link, "alias", name="chat", members=CHAT)["alias"]
    assert made == {"name": "chat", "members": CHAT}
    moved = operate(link, "alias", name="chat", members=CHAT[1:])["alias"]
    assert operate(link, "list") == {"adapters": [], "aliases": [moved]}
    assert operate(link, "unalias", name="chat") == {"alias": moved}
    assert operate(link, "list") == {"adapters": []}
    code, message = operate(link, "unalias", name="chat")
    assert (code, "there is no alias 'chat'" in message) == ("NOT_FOUND", True)


def test_a_name_is_that_of_an_adapter_or_of_an_alias(link: EngineLink) -> None:
    listener = RecordingListener()
    link.client.put_adapter(listener, "upload", task_id_of("pirate"), packed(), "pirate")
    assert listener.wait()[-1].error_code is None
    code, message = operate(link, "alias", name="pirate", members=CHAT)
    assert (code, "there is an adapter 'pirate', and a name has one meaning" in message) == ("ALREADY_EXISTS", True)
    operate(link, "alias", name="chat", members=[*CHAT, {"name": "pirate", "weight": 0}])
    for task_id, name in ((task_id_of("chat"), "chat"), (task_id_of("chat"), ""), (7, "chat")):
        refused = RecordingListener()
        link.client.put_adapter(refused, f"upload {task_id}", task_id, packed(), name)
        assert refused.wait()[-1].error_code == "ALREADY_EXISTS"
        assert "'chat' is an alias of chat-v7, chat-v8, pirate" in (refused.outputs[-1].error_message or "")
    pirates = [{"name": "pirate", "weight": 1}]
    for operation, fields, expected in (
        ("load", {"name": "chat"}, "ALREADY_EXISTS"),
        ("load", {"lora_task_id": task_id_of("chat")}, "ALREADY_EXISTS"),
        ("combine", {"name": "chat", "members": pirates}, "ALREADY_EXISTS"),
        ("combine", {"name": "both", "members": [*pirates, {"name": "chat", "weight": 1}]}, "INVALID_ARG"),
        ("pin", {"name": "chat"}, "INVALID_ARG"),
        ("unpin", {"name": "chat"}, "INVALID_ARG"),
        ("unload", {"name": "chat"}, "INVALID_ARG"),
    ):
        code, message = operate(link, operation, **fields)
        assert (code, "'chat' is an alias" in message) == (expected, True), (operation, message)
    operate(link, "unload", name="pirate")
    assert operate(link, "alias", name="pirate", members=CHAT)[0] == "INVALID_ARG", "it is a member of an alias"


def test_a_new_alias_has_no_name_that_a_source_has(sourced: EngineLink, tmp_path: Path) -> None:
    code, message = operate(sourced, "alias", name="acme/pirate", members=CHAT)
    assert (code, "or unload the adapter and take it out of its source first" in message) == ("ALREADY_EXISTS", True)
    assert operate(sourced, "alias", name="chat", members=CHAT)["alias"]["name"] == "chat"
    save_adapter(tmp_path / "a" / "chat", seed=3)
    assert operate(sourced, "alias", name="chat", members=CHAT[1:])["alias"]["members"] == CHAT[1:], "it can be moved"
    assert operate(sourced, "load", name="chat")[0] == "ALREADY_EXISTS"


def test_an_alias_is_answered_for_when_it_is_stored(on_disk: EngineLink, tmp_path: Path) -> None:
    operate(on_disk, "alias", name="chat", members=CHAT)
    assert (tmp_path / "cache" / "aliases.json").read_bytes().count(b"chat-v") == 2
    (tmp_path / "cache" / ".aliases.json.part").mkdir()
    code, message = operate(on_disk, "unalias", name="chat")
    assert (code, "the alias 'chat' is as it was: lora_cache_dir cannot keep the change" in message) == (
        "UNAVAILABLE",
        True,
    )
    assert [alias["name"] for alias in operate(on_disk, "list")["aliases"]] == ["chat"]


def test_an_unloaded_adapter_is_answered_for_when_no_later_start_finds_it(on_disk: EngineLink, tmp_path: Path) -> None:
    file = tmp_path / "cache" / "7.safetensors"
    assert operate(on_disk, "unload", lora_task_id=7)["adapter"]["location"] == "DISK"
    assert not file.exists()
    for number in (7, 8):
        on_disk.client.put_adapter(listener := RecordingListener(), f"put {number}", number, packed(seed=7))
        assert listener.wait()[-1].error_code is None
    file.unlink()
    file.mkdir()
    code, message = operate(on_disk, "unload", lora_task_id=7)
    assert (code, "lora_cache_dir cannot lose its file: [Errno 21] Is a directory: '7.safetensors'" in message) == (
        "UNAVAILABLE",
        True,
    )
    file.rmdir()
    assert [adapter["lora_task_id"] for adapter in operate(on_disk, "list")["adapters"]] == [8]
    assert operate(on_disk, "unload", lora_task_id=8)["adapter"]["location"] == "HOST"
    assert list(file.parent.glob("*.safetensors")) == []


@pytest.mark.parametrize(
    ("entry", "fields", "granted"),
    [
        ({"tenant": "acme", "operate": True}, {}, "acme"),
        ({"tenant": "acme", "operate": True}, {"tenant": "acme"}, "acme"),
        ({"tenant": "acme", "operate": True}, {"tenant": "bolt"}, "may not look after aliases of tenant 'bolt'"),
        ({"tenant": "acme"}, {}, "may not load, pin, unpin or unload"),
        ({"tenant": "acme", "operate": True, "adapters": ["chat"]}, {}, "'chat' is the server's own"),
        ({"tenant": "acme", "operate": True, "adapters": ["chat-v8"]}, {}, "'chat-v8' is the server's own"),
        ({"tenant": "acme", "operate": True, "own_adapters": ["chat"]}, {}, "may not use LoRA adapter chat-v7"),
        ({"adapters": ["*"]}, {}, "may not load, pin, unpin or unload"),
        ({"operate": True, "adapters": ["*"]}, {"tenant": "acme"}, "acme"),
        ({"operate": True, "adapters": ["*"]}, {}, ""),
    ],
)
def test_a_key_changes_the_aliases_of_its_tenant_over_its_own_adapters(
    entry: dict[str, Any], fields: dict[str, str], granted: str
) -> None:
    rights = Rights(Sender(tenant=entry.get("tenant", "")), 0, Caller(KeyEntry(key="k" * 16, **entry), task_id_of))
    operation = parse_operation(json.dumps({"operation": "alias", "name": "chat", "members": CHAT, **fields}))
    if " " not in granted:
        assert grant_operation(operation, rights) == msgspec.structs.replace(operation, tenant=granted)
        return
    with pytest.raises(PermissionDenied, match=granted):
        grant_operation(operation, rights)


def test_without_sources_nothing_can_be_loaded_but_what_is_here(link: EngineLink) -> None:
    upload(link, 7)
    assert operate(link, "load", lora_task_id=7)["adapter"]["lora_task_id"] == 7
    code, message = operate(link, "load", name="nobody")
    assert (code, message.startswith("[NOT_FOUND] LoRA adapter 'nobody' not found in cache.")) == ("NOT_FOUND", True)


def test_an_adapter_is_loaded_by_its_path_and_known_by_its_name(sourced: EngineLink, tmp_path: Path) -> None:
    path = str(tmp_path / "a" / "acme" / "pirate")
    loaded = operate(sourced, "load", name="polly", path=path)["adapter"]
    assert (loaded["name"], loaded["lora_task_id"], loaded["digest"]) == ("polly", task_id_of("polly"), digest_of(1))
    assert operate(sourced, "pin", name="polly")["adapter"]["is_pinned"]
    save_adapter(tmp_path / "a" / "acme" / "parrot", seed=2)
    code, message = operate(sourced, "load", name="polly", path=str(tmp_path / "a" / "acme" / "parrot"))
    assert (code, "is cached with other weights" in message) == ("ALREADY_EXISTS", True)
    code, message = operate(sourced, "load", name="polly", path=str(tmp_path / "b"))
    assert (code, f"cannot be loaded from '{tmp_path}/b': none of the sources asked" in message) == (
        "INVALID_ARG",
        True,
    )
    assert operate(sourced, "load", name="polly")["adapter"]["digest"] == digest_of(1)


@pytest.fixture
def on_disk(tmp_path: Path) -> Iterator[EngineLink]:
    """A door to an engine that has the adapter 7 on disk alone."""
    before = FakeEngine(disk=DiskTier(tmp_path / "cache", 1 << 20, TINY))
    before.put_adapter(7, packed(seed=7))
    kept = before.loras.save(7)
    assert kept is not None
    kept.result(TIMEOUT_S)
    before.loras.close()
    engine = FakeEngine(disk=DiskTier(tmp_path / "cache", 1 << 20, TINY))
    with served(engine, tmp_path / "engine.sock"):
        link = EngineLink(tmp_path / "engine.sock")
        link.client.wait_until_ready(TIMEOUT_S)
        yield link
        link.close()
    engine.loras.close()


@pytest.mark.parametrize("operation", ["load", "pin"])
def test_an_adapter_on_disk_is_answered_for_when_it_is_in_memory(on_disk: EngineLink, operation: str) -> None:
    assert operate(on_disk, "list")["adapters"][0]["location"] == "DISK"
    loaded = operate(on_disk, operation, lora_task_id=7)["adapter"]
    assert (loaded["location"], loaded["digest"]) == ("HOST", packed(seed=7).digest)
    assert [event["kind"] for event in operate(on_disk, "events")["events"]] == ["loaded_from_disk"]
    assert sum(operate(on_disk, "stats")["residency"]["load_seconds"]["counts"]) == 1


@pytest.mark.parametrize("operation", ["load", "pin"])
def test_an_adapter_whose_file_is_damaged_is_not_loaded(on_disk: EngineLink, tmp_path: Path, operation: str) -> None:
    file = tmp_path / "cache" / "7.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    code, message = operate(on_disk, operation, lora_task_id=7)
    assert (code, "its file in lora_cache_dir could not be read" in message) == ("NOT_FOUND", True)
    assert operate(on_disk, "list") == {"adapters": []}


@pytest.mark.parametrize("text", [None, "", "[]", '{"operation": "format c:"}'])
def test_what_is_no_operation_is_an_error_of_the_client(link: EngineLink, text: str | None) -> None:
    assert ask(link, text)[0] == "INVALID_ARG"


OTHER = "0" * 32
"""A digest that no adapter has."""


@pytest.mark.parametrize("operation", ["load", "unload", "pin", "unpin"])
def test_an_operation_on_another_version_than_is_expected_changes_nothing(link: EngineLink, operation: str) -> None:
    upload(link, 7)
    digest, before = packed(seed=7).digest, operate(link, "list")
    code, message = operate(link, operation, lora_task_id=7, expected_digest=OTHER)
    assert code == "ALREADY_EXISTS"
    assert f"has the digest {digest} and the expected digest is {OTHER}" in message
    assert operate(link, "list") == before
    assert operate(link, operation, lora_task_id=7, expected_digest=digest)["adapter"]["digest"] == digest
    code, message = operate(link, operation, lora_task_id=8, expected_digest=digest)
    assert code == ("ALREADY_EXISTS" if operation == "load" else "NOT_FOUND")
    assert operation != "load" or "LoRA task 8 is not cached and the expected digest is" in message


def put(link: EngineLink, seed: int, expected_digest: str) -> str | None:
    """Upload a version of adapter 7. Returns the code of an error."""
    listener = RecordingListener()
    link.client.put_adapter(listener, f"put {seed}", 7, packed(seed=seed), expected_digest=expected_digest)
    return listener.wait()[-1].error_code


def test_an_upload_replaces_the_version_that_it_names_and_no_other(link: EngineLink, engine: FakeEngine) -> None:
    engine.loras._on_conflict = "replace"
    assert put(link, 1, packed(seed=1).digest) == "ALREADY_EXISTS", "nothing is cached"
    assert put(link, 1, "") is None
    assert put(link, 2, OTHER) == "ALREADY_EXISTS"
    assert put(link, 2, packed(seed=1).digest) is None
    assert put(link, 3, packed(seed=1).digest) == "ALREADY_EXISTS"
    assert operate(link, "list")["adapters"][0]["digest"] == packed(seed=2).digest


def test_of_two_operators_who_replace_one_version_one_wins(link: EngineLink, engine: FakeEngine) -> None:
    engine.loras._on_conflict = "replace"
    put(link, 0, "")
    engine.step_gate.clear()  # both are in the queue when the engine's thread looks
    busy, listeners = RecordingListener(), [RecordingListener() for _ in range(8)]
    link.client.generate(busy, [generation_request("busy", [1])])
    for seed, listener in enumerate(listeners, 1):
        expected = packed(seed=0).digest
        link.client.put_adapter(listener, f"put {seed}", 7, packed(seed=seed), expected_digest=expected)
    engine.step_gate.set()
    codes = [listener.wait()[-1].error_code for listener in listeners]
    assert sorted(codes, key=str) == ["ALREADY_EXISTS"] * 7 + [None]
    winner = 1 + codes.index(None)
    assert operate(link, "list")["adapters"][0]["digest"] == packed(seed=winner).digest


def test_weights_that_come_with_a_request_are_the_version_that_it_demands_or_are_not_stored(link: EngineLink) -> None:
    upload(link, 8)
    for digest, code in ((OTHER, "NOT_FOUND"), (packed(seed=7).digest, None)):
        listener = RecordingListener()
        request = generation_request("r", [1], lora_task_id=7)
        demanding = replace(request, lora_expected_digest=digest)
        link.client.generate(listener, [demanding], adapter=(7, packed(seed=7)))
        assert listener.wait()[-1].error_code == code
        stored = [adapter["lora_task_id"] for adapter in operate(link, "list")["adapters"]]
        assert stored == ([8] if code else [7, 8])


def test_a_set_replaces_the_version_that_it_names_and_no_other(link: EngineLink, engine: FakeEngine) -> None:
    engine.loras._on_conflict = "replace"
    upload(link, 7, 8)
    members = [{"lora_task_id": 7, "weight": 1}, {"lora_task_id": 8, "weight": 2}]
    assert operate(link, "combine", name="s", members=members, expected_digest=OTHER)[0] == "ALREADY_EXISTS"
    first = operate(link, "combine", name="s", members=members)["adapter"]["digest"]
    assert operate(link, "combine", name="s", members=members[:1], expected_digest=OTHER)[0] == "ALREADY_EXISTS"
    second = operate(link, "combine", name="s", members=members[:1], expected_digest=first)["adapter"]["digest"]
    assert second != first
    assert operate(link, "combine", name="s", members=members, expected_digest=first)[0] == "ALREADY_EXISTS"
