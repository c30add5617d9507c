"""Versions of adapters by their digests: no request is answered by a version that it did not allow."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from msgspec.structs import replace
from support.engines import Answer, assert_idle
from support.fronts import TIMEOUT_S, RecordingListener
from support.oracle import ATTENTION, MLP, Oracle, packed, tiny_llama_oracle
from support.served_engine import served
from support.tiny_tokenizer import save_tiny_tokenizer

from multilora_engine.config import EngineConfig
from multilora_engine.engine.engine import Engine
from multilora_engine.errors import AdapterVersionNotFound, AliasVersionNotFound, InvalidRequest
from multilora_engine.lora.aliases import choose_member
from multilora_engine.lora.checkpoint_layout import checkpoint_layout
from multilora_engine.lora.names import SetMember, checked_members, set_task_id, task_id_of
from multilora_engine.lora_config import LoRAConfig
from multilora_engine.process.client import EngineClient
from multilora_engine.process.operations import ListAdapters, LoadAdapter, Operation, SetAlias, UnloadAdapter
from multilora_engine.request import GenerationRequest, SamplingParams, TokenOutput
from multilora_wire.adapter_info import Alias, AliasMember

NOWHERE = "0" * 32
"""A digest that no adapter has."""


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> tuple[Oracle, Path]:
    """A tiny Llama, and the PEFT adapters `pirate` and `parrot` in a directory."""
    oracle, path = tiny_llama_oracle(tmp_path_factory.mktemp("oracle"))
    oracle.add_random("pirate", 4, ATTENTION + MLP, seed=1)
    oracle.add_random("parrot", 9, ATTENTION, seed=2)
    return oracle, path


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a few words: each start of an engine reads it."""
    return save_tiny_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture
def engine(oracle: tuple[Oracle, Path], tokenizer: Path) -> Iterator[Engine]:
    """An engine with the directory as its source, and that replaces."""
    config = EngineConfig(
        model_path=oracle[1],
        tokenizer_path=tokenizer,
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


def test_a_new_version_at_the_path_that_was_read_answers_who_demands_it(
    engine: Engine, oracle: tuple[Oracle, Path], digests: dict[str, str]
) -> None:
    folder = oracle[0].adapters["pirate"].parent / "moving"
    try:
        for name in digests:
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(oracle[0].adapters[name], folder)
            asked = request(lora_task_id=7, lora_path=str(folder), digest=digests[name])
            final = ask(engine, asked).final
            assert final is not None
            assert (final.error_message, final.lora_digest) == (None, digests[name])
        assert refusal(engine, replace(asked, lora_expected_digest=NOWHERE)).startswith("NOT_FOUND LoRA task 7")
    finally:
        shutil.rmtree(folder)


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


def set_alias(engine: Engine, **weights: int) -> None:
    engine.loras.aliases.set(Alias("chat", tuple(AliasMember(name, weight) for name, weight in weights.items())))


def test_a_member_of_an_alias_comes_from_its_source_and_no_other_member_answers_for_it(
    engine: Engine, digests: dict[str, str]
) -> None:
    set_alias(engine, pirate=1, parrot=0)
    for digest, name in (("", "pirate"), (digests["parrot"], "parrot")):  # one by its weight, one by its digest
        final = ask(engine, request("chat", digest)).final
        assert final is not None
        assert (final.finish_reason, final.lora_digest, final.lora_name) == ("length", digests[name], name)
    with pytest.raises(AliasVersionNotFound, match=f"no member of the alias 'chat' .*, {NOWHERE}: pirate"):
        engine.add_request(request("chat", NOWHERE))
    set_alias(engine, nobody=1, pirate=0)
    final = ask(engine, request("chat")).final
    assert final is not None
    assert (final.error_code, "LoRA adapter 'nobody' not found" in str(final.error_message)) == ("NOT_FOUND", True)
    assert [info.name for info in engine.loras.inventory.describe()] == ["pirate", "parrot"]


def test_requests_under_way_keep_their_member_when_weights_move(engine: Engine, digests: dict[str, str]) -> None:
    set_alias(engine, pirate=1)
    answers = {name: Answer() for name in ("waits for its adapter", "runs", "later")}
    engine.add_request(replace(request("chat"), request_id="waits for its adapter"))
    set_alias(engine, parrot=1)
    while not answers["waits for its adapter"].token_ids:
        for output in engine.step():
            answers[output.request_id].add(output)
    engine.add_request(replace(request("chat"), request_id="later"))
    engine.add_request(replace(request("pirate"), request_id="runs"))
    engine.loras.aliases.remove("chat", "")
    while engine.has_work:
        for output in engine.step():
            answers[output.request_id].add(output)
        engine.check_integrity()
    told = {name: answer.final.lora_digest for name, answer in answers.items() if answer.final}
    assert told == {
        "waits for its adapter": digests["pirate"],
        "runs": digests["pirate"],
        "later": digests["parrot"],
    }
    assert "LoRA adapter 'chat' not found in cache" in refusal(engine, request("chat"))


PROMPT = [5, 17, 200, 3, 44, 8]
NUM_VERSIONS = 4
NAMES = ("a", "b", "c", "d", "e")
"""More than fit in memory."""
SOURCED = "s"
"""The name that a source has, too."""
ALIAS = "chat"
"""A name that stands for some of `NAMES`."""
PAGE_BYTES = 1 << 18
"""An adapter of the tiny model has one page."""


class World:
    """A served engine with a disk tier and a source, which can be started anew.

    digests, answers: of each version, by its number; the answers are those of transformers with PEFT.
    """

    def __init__(self, directory: Path, tokenizer: Path, on_conflict: str) -> None:
        self.on_conflict = on_conflict
        oracle, self._checkpoint = tiny_llama_oracle(directory)
        for number in range(NUM_VERSIONS):
            oracle.add_random(f"version-{number}", 32 + number, ATTENTION + MLP, seed=number)
        self.folders = list(oracle.adapters.values())
        self.source = directory / "source"
        self.source.mkdir()
        self._directory, self._tokenizer = directory, tokenizer
        layout = checkpoint_layout(self._checkpoint, 64, "float32")
        self.packed = [packed(folder, layout) for folder in self.folders]
        self.digests = [adapter.digest for adapter in self.packed]
        options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        answers = [oracle.generate(name, PROMPT, **options)[0, len(PROMPT) :].tolist() for name in oracle.adapters]
        self.answers = dict(zip(self.digests, answers, strict=True))
        assert len({tuple(answer) for answer in answers}) == NUM_VERSIONS, "answers do not tell versions apart"
        self.start()

    def start(self) -> None:
        lora = {
            "lora_sources": [{"source": "directory", "root": str(self.source)}],
            "lora_cache_host_memory_bytes": 3 * PAGE_BYTES,
            "lora_cache_dir": str(self._directory / "cache"),
            "max_loras": 2,
            "lora_on_conflict": self.on_conflict,
        }
        config = EngineConfig(
            model_path=self._checkpoint,
            tokenizer_path=self._tokenizer,
            num_threads=1,
            kv_cache_memory_bytes=1 << 20,
            lora=LoRAConfig.model_validate(lora),
        )
        with ExitStack() as running:  # A start that fails leaves no thread, for which pytest would wait.
            self.engine = running.enter_context(closing(Engine(config)))
            socket = self._directory / "engine.sock"
            running.enter_context(served(self.engine, socket))
            self.client = running.enter_context(closing(EngineClient(socket)))
            self.client.wait_until_ready(TIMEOUT_S)
            self._running = running.pop_all()

    def end(self) -> None:
        self._running.close()

    def ask(
        self, name: str, digest: str = "", sent: int | None = None, session: str = ""
    ) -> Callable[[], list[TokenOutput]]:
        """Send a request, perhaps with a version's weights. The function waits for its outputs."""
        listener, task_id = RecordingListener(), task_id_of(name)
        sampling = SamplingParams(max_tokens=8, end_id=-1)
        asked = GenerationRequest("r", PROMPT, sampling, task_id, lora_name=name, lora_expected_digest=digest)
        asked = replace(asked, request_id=f"r{id(listener)}", lora_session=session)
        self.client.generate(listener, [asked], adapter=None if sent is None else (task_id, self.packed[sent]))
        return listener.wait

    def put(self, name: str, version: int, expected_digest: str = "") -> Callable[[], list[TokenOutput]]:
        listener = RecordingListener()
        self.client.put_adapter(
            listener,
            f"p{id(listener)}",
            task_id_of(name),
            self.packed[version],
            name,
            expected_digest=expected_digest,
        )
        return listener.wait

    def operate(self, operation: Operation) -> Callable[[], list[TokenOutput]]:
        listener = RecordingListener()
        self.client.operate(listener, f"o{id(listener)}", operation)
        return listener.wait

    def give_source(self, version: int) -> None:
        """Exchange the source's folder for another version."""
        shutil.rmtree(self.source / SOURCED, ignore_errors=True)
        shutil.copytree(self.folders[version], self.source / SOURCED)


Step = tuple[str, str, int, str]
"""An action, its name, its version, and the digest that goes with it: none, that of the version which the name means,
that of the action's version, or that of no version.
"""

actions = st.sampled_from(["put", "unload", "ask", "ask with weights", "move", "ask alias", "put alias"])
digests_of_steps = st.sampled_from(["none", "present", "version", "nowhere"])
versions = st.integers(0, NUM_VERSIONS - 1)
steps = st.tuples(actions, st.sampled_from(NAMES), versions, digests_of_steps)


class VersionsMachine(RuleBasedStateMachine):
    """Sends actions at once and compares each answer with a model of what names mean.

    meaning: of each name that is known, the digest. The engine takes the messages of one front in their order, so that
    the model follows them one by one.
    """

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        self.meaning: dict[str, str] = {}
        self.in_source = ""
        self.alias = Alias(ALIAS, ())

    @initialize(version=versions)
    def begin(self, version: int) -> None:
        for info in self.listed():
            self.world.operate(UnloadAdapter(info["lora_task_id"]))()
        self.exchange_folder(version)
        self.move(NAMES[0], version)

    def listed(self) -> list[dict[str, Any]]:
        """The adapters that the engine has."""
        listed: list[dict[str, Any]] = json.loads(self.world.operate(ListAdapters())()[-1].text)["adapters"]
        return [info for info in listed if info["location"] != "REMOTE"]

    @rule(batch=st.lists(steps, min_size=1, max_size=6))
    def at_once(self, batch: list[Step]) -> None:
        checks = [self.send(*step) for step in batch]
        for check in checks:
            check()

    def send(self, action: str, name: str, version: int, which: str) -> Callable[[], None]:
        """Send one action. The function waits for the answer, and compares it with the model."""
        # An expectation is made of the model as it is when the batch is sent: the batch itself may change it.
        new = self.world.digests[version]
        digest = {"none": "", "present": self.meaning.get(name, ""), "version": new, "nowhere": NOWHERE}[which]
        match action:
            case "put":
                return partial(self.check_put, self.world.put(name, version, digest), name, new, digest)
            case "unload":
                operation = UnloadAdapter(name=name, expected_digest=digest or None)
                return partial(self.check_unload, self.world.operate(operation), name, digest)
            case "ask":
                return partial(self.check_answer, self.world.ask(name, digest), name, digest)
            case "ask alias":
                session = f"session {version}"
                wait = self.world.ask(ALIAS, digest, session=session)
                return partial(self.check_alias, wait, self.alias, session, digest)
            case "put alias":
                wait = self.world.put(ALIAS, version)
                return lambda: self.check_refused(wait)
            case "move":
                self.move(name, version)  # while the actions before it are under way
                return lambda: None
            case _:
                return partial(self.check_sent, self.world.ask(name, digest, version), name, new, digest)

    def replaces(self, name: str, new: str) -> bool:
        """Whether `lora_on_conflict` lets a version take the place of the one that the name means."""
        return self.world.on_conflict == "replace" or self.meaning.get(name, new) == new

    def check_put(self, wait: Callable[[], list[TokenOutput]], name: str, new: str, expected: str) -> None:
        final = wait()[-1]
        if expected not in ("", self.meaning.get(name, "")) or not self.replaces(name, new):
            assert final.error_code == "ALREADY_EXISTS"
        else:
            assert (final.error_code, final.lora_digest) == (None, new)
            self.meaning[name] = new

    def check_unload(self, wait: Callable[[], list[TokenOutput]], name: str, expected: str) -> None:
        final, present = wait()[-1], self.meaning.get(name)
        if present is None:
            assert final.error_code == "NOT_FOUND"
        elif expected not in ("", present):
            assert final.error_code == "ALREADY_EXISTS"
            assert expected in str(final.error_message)
            assert present in str(final.error_message)
        else:
            assert json.loads(final.text)["adapter"]["digest"] == present
            del self.meaning[name]

    def check_answer(self, wait: Callable[[], list[TokenOutput]], name: str, demanded: str) -> None:
        outputs, present = wait(), self.meaning.get(name)
        if present is None and name == SOURCED and demanded in ("", self.in_source):
            present = self.meaning[name] = self.in_source
        if present is None or demanded not in ("", present):
            assert outputs[-1].error_code == "NOT_FOUND"
        else:
            self.check_tokens(outputs, present)

    def move(self, name: str, version: int) -> None:
        """Give the alias other weights."""
        weights = dict.fromkeys(NAMES[:2], 1) | {name: version}
        self.alias = Alias(ALIAS, tuple(AliasMember(member, weight) for member, weight in weights.items()))
        final = self.world.operate(SetAlias(ALIAS, self.alias.members))()[-1]
        assert final.error_code is None, final.error_message

    def check_alias(self, wait: Callable[[], list[TokenOutput]], alias: Alias, session: str, demanded: str) -> None:
        """alias: as it was when the request was sent."""
        outputs = wait()
        if not demanded:
            member = choose_member(alias, session).name
            assert outputs[-1].lora_name in ("", member)
            self.check_answer(lambda: outputs, member, "")
        elif demanded in {self.meaning.get(member.name) for member in alias.members}:
            self.check_tokens(outputs, demanded)
        else:
            assert outputs[-1].error_code == "NOT_FOUND"

    def check_refused(self, wait: Callable[[], list[TokenOutput]]) -> None:
        assert wait()[-1].error_code == "ALREADY_EXISTS"

    def check_sent(self, wait: Callable[[], list[TokenOutput]], name: str, new: str, demanded: str) -> None:
        outputs = wait()
        if demanded not in ("", new):
            assert outputs[-1].error_code == "NOT_FOUND"
        elif not self.replaces(name, new):
            assert outputs[-1].error_code == "ALREADY_EXISTS"
        else:
            self.meaning[name] = new
            self.check_tokens(outputs, new)

    def check_tokens(self, outputs: list[TokenOutput], digest: str) -> None:
        """The answer is the version's, by its tokens, too."""
        assert outputs[-1].error_code is None, outputs[-1].error_message
        assert outputs[-1].lora_digest == digest
        assert [token for output in outputs for token in output.token_ids] == self.world.answers[digest]

    @rule(version=versions)
    def exchange_folder(self, version: int) -> None:
        self.world.give_source(version)
        self.in_source = self.world.digests[version]

    @rule(version=versions, which=digests_of_steps)
    def ask_source(self, version: int, which: str) -> None:
        self.send("ask", SOURCED, version, which)()

    @rule(version=versions, which=digests_of_steps)
    def unload_source(self, version: int, which: str) -> None:
        self.send("unload", SOURCED, version, which)()

    @rule(name=st.sampled_from((*NAMES, SOURCED)), version=versions, which=digests_of_steps, has_path=st.booleans())
    def load(self, name: str, version: int, which: str, has_path: bool) -> None:
        present, new = self.meaning.get(name), self.world.digests[version]
        digest = {"none": None, "present": present, "version": new, "nowhere": NOWHERE}[which]
        path = str(self.world.source / SOURCED) if has_path else ""
        final = self.world.operate(LoadAdapter(name=name, path=path, expected_digest=digest))()[-1]
        if digest is not None and digest != present:
            assert final.error_code == "ALREADY_EXISTS"
            return
        if has_path and not self.replaces(name, self.in_source):
            assert final.error_code == "ALREADY_EXISTS"
            return
        if has_path or (present is None and name == SOURCED):
            self.meaning[name] = self.in_source
        if name in self.meaning:
            assert final.error_code is None, final.error_message
            assert json.loads(final.text)["adapter"]["digest"] == self.meaning[name]
        else:
            assert final.error_code == "NOT_FOUND"

    @rule()
    def start_anew(self) -> None:
        """The disk tier has every version that names mean, and no other."""
        self.world.end()
        self.world.start()

    @invariant()
    def every_name_means_what_the_model_says(self) -> None:
        assert {info["name"]: info["digest"] for info in self.listed()} == self.meaning
        aliases = json.loads(self.world.operate(ListAdapters())()[-1].text)["aliases"]
        assert msgspec.convert(aliases, list[Alias]) == [self.alias]


@pytest.mark.parametrize("on_conflict", ["replace", "refuse"])
@pytest.mark.parametrize(
    ("max_examples", "num_steps"),
    [(2, 7), pytest.param(60, 25, marks=pytest.mark.long(reason="60 histories of 25 steps, with restarts"))],
)
def test_no_answer_is_by_a_version_that_its_request_did_not_allow(
    on_conflict: str, max_examples: int, num_steps: int, tokenizer: Path, tmp_path: Path
) -> None:
    world = World(tmp_path, tokenizer, on_conflict)
    try:
        run_state_machine_as_test(
            lambda: VersionsMachine(world),
            settings=settings(max_examples=max_examples, stateful_step_count=num_steps, deadline=None),
        )
    finally:
        world.end()
