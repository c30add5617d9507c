"""Versions of adapters by their digests: no request is answered by a version that it did not allow."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from support.engines import Answer, assert_idle
from support.oracle import ATTENTION, MLP, Oracle, packed, tiny_llama_oracle

from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.errors import AdapterVersionNotFound, InvalidRequest
from multilora_engine.lora.names import SetMember, checked_members, set_task_id, task_id_of
from multilora_engine.lora_config import LoRAConfig
from multilora_engine.request import GenerationRequest, SamplingParams

NOWHERE = "0" * 32
"""A digest that no adapter has."""


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Oracle, Path]:
    """A tiny Llama, and the PEFT adapters `pirate` and `parrot` in a directory."""
    oracle, path = tiny_llama_oracle(tmp_path_factory.mktemp("oracle"))
    oracle.add_random("pirate", 4, ATTENTION + MLP, seed=1)
    oracle.add_random("parrot", 9, ATTENTION, seed=2)
    return oracle, path


@pytest.fixture
def engine(oracle: tuple[Oracle, Path], default_model_dir: Path) -> Iterator[Engine]:
    """An engine with the directory as its source, and that replaces."""
    config = EngineConfig(
        model_path=oracle[1],
        tokenizer_path=default_model_dir,
        num_threads=1,
        kv_cache_memory_bytes=8 << 20,
        lora=LoRAConfig.model_validate(
            {
                "lora_sources": [{"source": "directory", "root": str(oracle[0].adapters["pirate"].parent)}],
                "lora_cache_host_memory_bytes": 32 << 20,
                "lora_on_conflict": "replace",
            }
        ),
    )
    engine = Engine(config)
    yield engine
    engine.close()


@pytest.fixture
def digests(engine: Engine, oracle: tuple[Oracle, Path]) -> dict[str, str]:
    """The digests of the source's adapters."""
    layout = engine.loras.device.layout
    return {name: packed(folder, layout).digest for name, folder in oracle[0].adapters.items()}


def request(name: str = "", digest: str = "", **options: Any) -> GenerationRequest:
    task = task_id_of(name) if name else None
    given = {"sampling": SamplingParams(max_tokens=4, end_id=-1), "lora_task_id": task, "lora_name": name}
    return GenerationRequest("r", [5, 6, 7, 8], lora_expected_digest=digest, **{**given, **options})


def ask(engine: Engine, asked: GenerationRequest) -> Answer:
    answer = Answer()
    engine.add_request(asked)
    while engine.has_work:
        for output in engine.step():
            answer.add(output)
        engine.check_integrity()
    assert_idle(engine)
    return answer


def refusal(engine: Engine, asked: GenerationRequest) -> str:
    """The code and the text of an error, whether the request is refused at once or later."""
    try:
        final = ask(engine, asked).final
    except AdapterVersionNotFound as error:
        return f"{error.code} {error}"
    assert final is not None
    return f"{final.error_code} {final.error_message}"


def state(engine: Engine) -> object:
    return [(info.name, info.digest, info.location) for info in engine.loras.inventory.describe()]


def test_the_version_that_a_request_demands_answers(engine: Engine, digests: dict[str, str]) -> None:
    for _ in range(2):  # from the source, and cached
        final = ask(engine, request("pirate", digests["pirate"])).final
        assert final is not None
        assert (final.finish_reason, final.lora_digest) == ("length", digests["pirate"])


@pytest.mark.parametrize("is_cached", [False, True])
def test_another_version_is_not_found_and_nothing_changes(
    engine: Engine, digests: dict[str, str], is_cached: bool
) -> None:
    if is_cached:
        ask(engine, request("pirate"))
    before = state(engine)
    text = refusal(engine, request("pirate", NOWHERE))
    assert text.startswith(
        f"NOT_FOUND LoRA task {task_id_of('pirate')} 'pirate' has the digest {digests['pirate']} and"
    )
    assert f"lora_expected_digest is {NOWHERE}" in text
    assert state(engine) == before
    assert engine.loras.stats.insertions == is_cached
    assert "fetch_failed" not in [event.kind for event in engine.lora_events.since(0).events]


def test_the_adapter_at_a_path_replaces_nothing_unless_it_is_the_version_demanded(
    engine: Engine, oracle: tuple[Oracle, Path], digests: dict[str, str]
) -> None:
    paths = {name: str(folder) for name, folder in oracle[0].adapters.items()}

    def at(path: str, digest: str) -> GenerationRequest:
        return request(lora_task_id=7, lora_path=path, digest=digest)

    assert ask(engine, at(paths["pirate"], digests["pirate"])).token_ids
    before = state(engine)
    assert refusal(engine, at(paths["parrot"], digests["pirate"])).startswith(
        f"NOT_FOUND LoRA task 7 has the digest {digests['parrot']} and lora_expected_digest is {digests['pirate']}"
    )
    assert refusal(engine, at(paths["pirate"], digests["parrot"])).startswith("NOT_FOUND LoRA task 7 has the digest")
    assert state(engine) == before
    final = ask(engine, at(paths["parrot"], digests["parrot"])).final
    assert final is not None
    assert final.lora_digest == digests["parrot"]


def test_who_waits_for_one_fetch_may_demand_different_versions(engine: Engine, digests: dict[str, str]) -> None:
    demands = {"any": "", "right": digests["pirate"], "wrong": NOWHERE, "wrong, too": digests["parrot"]}
    answers = {name: Answer() for name in demands}
    for name, digest in demands.items():
        engine.add_request(replace(request("pirate", digest), request_id=name))
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id].add(output)
        engine.check_integrity()
    told = {
        name: answer.final.error_message or answer.final.lora_digest for name, answer in answers.items() if answer.final
    }
    assert told["any"] == told["right"] == digests["pirate"]
    assert f"has the digest {digests['pirate']} and lora_expected_digest is {NOWHERE}" in told["wrong"]
    assert f"lora_expected_digest is {digests['parrot']}" in told["wrong, too"]


def test_a_set_is_not_made_for_a_request_that_demands_another_digest(engine: Engine, digests: dict[str, str]) -> None:
    for name in digests:
        ask(engine, request(name))
    members = checked_members(SetMember(task_id_of(name), 0.5) for name in digests)
    asked = request(lora_task_id=set_task_id(members), lora_set=members)
    before = state(engine)
    assert refusal(engine, replace(asked, lora_expected_digest=NOWHERE)).startswith("NOT_FOUND LoRA task")
    assert state(engine) == before
    final = ask(engine, asked).final
    assert final is not None
    again = ask(engine, replace(asked, lora_expected_digest=final.lora_digest)).final
    assert again is not None
    assert again.lora_digest == final.lora_digest


def test_a_digest_without_an_adapter_is_refused(engine: Engine) -> None:
    with pytest.raises(InvalidRequest, match="lora_expected_digest without an adapter; send lora_task_id or lora_name"):
        engine.add_request(request(digest=NOWHERE))
    assert_idle(engine)
