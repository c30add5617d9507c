"""Tenants with random requests at every door, against a plain account of each one's view: nothing of another's."""

from __future__ import annotations

import dataclasses
import itertools
import json
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from enum import Enum
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from fastapi.testclient import TestClient
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test
from support.adapters import TINY, wire_adapter
from support.fake_engine import HOLD, INFO, FakeEngine
from support.fake_triton import FakeRequest, FakeResponse
from support.front_transport import handler
from support.served_engine import served
from support.sources import peft_inputs

from multilora_client import AsyncClient, AsyncMockTransport
from multilora_client.keys import KeyRing
from multilora_client.openai.app import make_app
from multilora_client.openai.catalogue import Catalogue
from multilora_engine.engine_info import ClientPolicy
from multilora_engine.lora.format import pack_adapter
from multilora_engine.lora.layout import set_digest
from multilora_engine.lora.names import task_id_of
from multilora_engine.serving.adapters_model import AdaptersFront
from multilora_engine.serving.front import EngineLink
from multilora_engine.serving.generation_front import GenerationFront
from multilora_engine.text.tokenizer import Tokenizer

Task = int | str
"""A task id or a name, as clients write it."""

SHARED: list[Task] = [100, 101, "shared/a", "shared/b"]
KEYS: dict[str, dict[str, Any]] = {
    "acme": {"tenant": "acme", "adapters": [100, "shared/a"], "upload": True, "operate": True, "base_model": True},
    "acme's user": {"tenant": "acme", "adapters": [100], "own_adapters": [7, "same"]},
    "bolt": {"tenant": "bolt", "adapters": [101, "shared/b"], "upload": True, "operate": True},
    "nobody's": {"adapters": [100, 101, "shared/*"], "base_model": True},
    "operator": {"adapters": ["*"], "upload": True, "operate": True, "base_model": True},
    "stranger": {},
}
CONTENTS = [wire_adapter(TINY, [(1, 0, 4), (6, 2, 7)], seed=seed) for seed in range(2)]
DIGESTS = [pack_adapter(wire.weights, wire.config, TINY).digest for wire in CONTENTS]

WHO = st.sampled_from(list(KEYS))
NAMES = ["same", "other", "shared/a", "shared/b"]
TASKS: st.SearchStrategy[Task] = st.sampled_from([7, 8, 100, 101, *NAMES])
REQUEST_IDS = st.sampled_from(["1", "2"])
SETS = st.dictionaries(st.sampled_from([7, 8, 100, 101]), st.sampled_from([0.5, -1.0]), min_size=1, max_size=2)


BASE = "the base model"


def secret(who: str) -> str:
    return f"the secret key of {who}"


def number(task: Task) -> int:
    """The id that goes with a name."""
    return task if isinstance(task, int) else task_id_of(task)


def tensors_of(task: Task | None) -> dict[str, Any]:
    if task is None:
        return {}
    return {"lora_task_id": np.array([[task]], np.uint64)} if isinstance(task, int) else {"lora_name": [[task]]}


def fields_of(task: Task) -> dict[str, Any]:
    return {"lora_task_id": task} if isinstance(task, int) else {"name": task}


def is_shared(who: str, task: Task) -> bool:
    """Whether a key names this adapter of the server; `shared/*` and `*` are beginnings of names."""
    entries = KEYS[who]["adapters"]
    return entries == ["*"] or task in entries or ("shared/*" in entries and str(task).startswith("shared/"))


def write_keys(path: Path) -> Path:
    entries = [{"key": secret(who), **entry} for who, entry in KEYS.items() if entry]
    path.write_text(json.dumps({"keys": entries}))
    return path


class Door(Enum):
    """The way of a key to a model: a header of gRPC or HTTP; the body of `generate`, of which no header arrives; or a
    header beside another's key, which the client wrote into the request itself.
    """

    HEADER, BODY, FORGED = range(3)


class Tenants(RuleBasedStateMachine):
    """owned: digests by tenant (empty is the server) and task id. events: of each tenant. flights: requests that do not
    end by themselves, by tenant and the id that the client chose."""

    tokenizer: ClassVar[Tokenizer]

    def __init__(self) -> None:
        super().__init__()
        self.owned: dict[tuple[str, int], str] = {}
        self.events: dict[str, list[tuple[str, int]]] = defaultdict(list)
        self.flights: dict[tuple[str, str], list[FakeRequest]] = defaultdict(list)
        self.doors = itertools.cycle(Door)
        self.resources = ExitStack()
        folder = Path(self.resources.enter_context(tempfile.TemporaryDirectory()))
        self.engine = FakeEngine()
        policy = ClientPolicy(api_keys_file=str(write_keys(folder / "keys.json")))
        self.engine.info = dataclasses.replace(INFO, clients=policy)
        self.resources.enter_context(served(self.engine, folder / "engine.sock"))
        link = EngineLink(folder / "engine.sock")
        self.resources.callback(link.close)
        vars(link)["_tokenizer"] = self.tokenizer
        self.generation = GenerationFront(link, can_stream=True)
        self.adapters = AdaptersFront(link)
        fronts = {"generation_unary": self.generation.accept, "adapters": self.adapters.accept}
        catalogue = Catalogue(BASE, {}, KeyRing(folder / "keys.json"), is_forwarding=True, allows_loading=True)
        app = make_app(catalogue, lambda: AsyncClient(transport=AsyncMockTransport(handler(fronts))))
        self.openai = self.resources.enter_context(TestClient(app, raise_server_exceptions=False))

    def teardown(self) -> None:
        self.resources.close()

    def bearer(self, who: str) -> dict[str, str]:
        return {"authorization": f"Bearer {secret(who)}"}

    def through_a_door(self, who: str) -> dict[str, Any]:
        """The headers and parameters of a request, by another door each time."""
        match next(self.doors):
            case Door.HEADER:
                return {"headers": self.bearer(who)}
            case Door.BODY:
                return {"own_parameters": self.bearer(who)}
            case Door.FORGED:
                return {"headers": self.bearer(who), "own_parameters": self.bearer("operator")}

    def ask(self, who: str, tensors: dict[str, Any], request_id: str = "", waits: bool = True) -> FakeRequest:
        request = FakeRequest(tensors, id=request_id, **self.through_a_door(who))
        self.generation.accept(request)
        if waits:
            request.sender.wait()
        return request

    def operate(self, who: str, operation: str, **fields: Any) -> Any:
        text = json.dumps({"operation": operation, **fields})
        request = FakeRequest({"request": [[text]]}, output_names=("response",), **self.through_a_door(who))
        self.adapters.accept(request)
        (response,) = request.sender.wait()
        return error_of(response) if response.error else json.loads(response.arrays["response"].item())

    def means(self, who: str, task: Task) -> tuple[str, int] | None:
        """The adapter that a key means by an id or a name; None for one that it may not use."""
        entry = KEYS[who]
        tenant = entry.get("tenant", "")
        if is_shared(who, task):
            return "", number(task)
        if not tenant or task not in entry.get("own_adapters", [task]):
            return None
        return tenant, number(task)

    @rule(who=WHO, task=TASKS, content=st.integers(0, 1), as_files=st.booleans())
    def upload(self, who: str, task: Task, content: int, as_files: bool) -> None:
        wire = CONTENTS[content]
        tensors = {"lora_weights_fp32": wire.weights.numpy()[None], "lora_config": wire.config.numpy()[None]}
        if as_files:
            tensors = peft_inputs(wire)
        request = self.ask(who, tensors_of(task) | tensors)
        (response,) = request.sender.responses
        if not KEYS[who]:
            assert error_of(response) == "UNAUTHENTICATED"
            return
        key = self.means(who, task)
        if not KEYS[who].get("upload") or key is None or key[0] != KEYS[who].get("tenant", ""):
            assert error_of(response) == "PERMISSION_DENIED"
        elif self.owned.get(key, DIGESTS[content]) != DIGESTS[content]:
            assert error_of(response) == "ALREADY_EXISTS"
        else:
            assert response.arrays["lora_digest"].item().decode() == DIGESTS[content]
            if key not in self.owned:
                self.events[key[0]].append(("uploaded", number(task)))
            self.owned[key] = DIGESTS[content]

    @rule(who=WHO, task=st.none() | TASKS)
    def use(self, who: str, task: Task | None) -> None:
        tensors = {"input_ids": [[5]], "max_tokens": [[1]], **tensors_of(task)}
        (response,) = self.ask(who, tensors).sender.responses
        if not KEYS[who]:
            assert error_of(response) == "UNAUTHENTICATED"
        elif task is None:
            allowed = KEYS[who].get("base_model")
            assert response.error is None if allowed else error_of(response) == "PERMISSION_DENIED"
        elif (key := self.means(who, task)) is None:
            assert error_of(response) == "PERMISSION_DENIED"
        elif key not in self.owned:
            assert error_of(response) == "NOT_FOUND"
            assert response.error is not None
            told = f"LoRA task {task}" if isinstance(task, int) else f"LoRA adapter {task!r}"
            assert f"{told} not found in cache" in response.error.message
        else:
            assert response.arrays["lora_digest"].item().decode() == self.owned[key]
            assert response.arrays["lora_task_id_out"].item() == number(task)

    @rule(who=WHO, weights=SETS)
    def use_a_set(self, who: str, weights: dict[int, float]) -> None:
        """Of adapters that the key may use; a set is a new adapter, so the key may send some, too."""
        tensors = {
            "lora_set_task_ids": np.array([list(weights)], np.uint64),
            "lora_set_weights": np.array([list(weights.values())], np.float32),
        }
        (response,) = self.ask(who, {"input_ids": [[5]], "max_tokens": [[1]], **tensors}).sender.responses
        if not KEYS[who]:
            assert error_of(response) == "UNAUTHENTICATED"
            return
        keys = {task: self.means(who, task) for task in weights}
        if not KEYS[who].get("upload") or None in keys.values():
            assert error_of(response) == "PERMISSION_DENIED"
        elif not self.owned.keys() >= set(keys.values()):
            assert error_of(response) == "NOT_FOUND"
        else:
            digests = [(self.owned[key], weights[task]) for task, key in keys.items() if key is not None]
            assert response.arrays["lora_digest"].item().decode() == set_digest(digests)
            assert self.engine.accepted[-1].adapter_tenant == KEYS[who].get("tenant", "")

    @rule(who=WHO, task=st.sampled_from([20, "set"]), weights=SETS)
    def combine(self, who: str, task: Task, weights: dict[int, float]) -> None:
        members = [{"lora_task_id": number, "weight": weight} for number, weight in weights.items()]
        report = self.operate(who, "combine", members=members, **fields_of(task))
        if not KEYS[who]:
            assert report == "UNAUTHENTICATED"
            return
        keys, made, tenant = (
            {n: self.means(who, n) for n in weights},
            self.means(who, task),
            KEYS[who].get("tenant", ""),
        )
        if not KEYS[who].get("operate") or made is None or made[0] != tenant or None in keys.values():
            assert report == "PERMISSION_DENIED"
        elif not self.owned.keys() >= set(keys.values()):
            assert report == "NOT_FOUND"
        else:
            digest = set_digest((self.owned[key], weights[n]) for n, key in keys.items() if key is not None)
            if self.owned.get(made, digest) != digest:
                assert report == "ALREADY_EXISTS"
                return
            assert report["adapter"]["digest"] == digest
            if made not in self.owned:
                self.events[tenant].append(("combined", number(task)))
            self.owned[made] = digest

    @rule(who=WHO.filter(lambda who: bool(KEYS[who].get("base_model"))), request_id=REQUEST_IDS)
    def start(self, who: str, request_id: str) -> None:
        tensors = {"input_ids": [[HOLD]], "max_tokens": [[1]]}
        before = len(self.engine.accepted)
        request = self.ask(who, tensors, request_id, waits=False)
        self.use("operator", None)  # which the engine answers after it
        assert len(self.engine.accepted) == before + 2
        self.flights[KEYS[who].get("tenant", ""), request_id].append(request)

    @rule(who=WHO, request_id=REQUEST_IDS)
    def stop(self, who: str, request_id: str) -> None:
        (response,) = self.ask(who, {"stop": [[True]]}, request_id).sender.responses
        if KEYS[who]:
            assert response.error is None
            for request in self.flights.pop((KEYS[who].get("tenant", ""), request_id), []):
                (answer,) = request.sender.wait()
                assert answer.arrays["finish_reason"].item() == b"cancelled"
        self.others_go_on()

    @rule(who=WHO, data=st.data())
    def stop_by_an_id_of_the_engine(self, who: str, data: st.DataObject) -> None:
        """Whoever learnt it ends nothing of another tenant."""
        if not self.engine.requests:
            return
        wanted = data.draw(st.sampled_from(sorted(self.engine.requests)))
        tenant = self.engine.requests[wanted].sender.name
        if KEYS[who] and KEYS[who].get("tenant", "") == tenant:
            return
        self.ask(who, {"stop": [[True]]}, wanted)
        self.others_go_on()

    @rule(who=WHO, task=TASKS, operation=st.sampled_from(["unload", "pin", "unpin", "load"]))
    def look_after(self, who: str, task: Task, operation: str) -> None:
        report = self.operate(who, operation, **fields_of(task))
        if not KEYS[who]:
            assert report == "UNAUTHENTICATED"
            return
        key, tenant = self.means(who, task), KEYS[who].get("tenant", "")
        may_change = key is not None and (key[0] == tenant or operation == "load")
        if not KEYS[who].get("operate") or not may_change:
            assert report == "PERMISSION_DENIED"
        elif key not in self.owned:
            assert report == "NOT_FOUND"
        else:
            assert report["adapter"]["digest"] == self.owned[key]
            if operation == "unload":
                del self.owned[key]
                self.events[key[0]].append(("unloaded", number(task)))

    @rule(who=WHO, task=TASKS, tenant=st.sampled_from(["acme", "bolt"]))
    def unload_by_a_tenants_name(self, who: str, task: Task, tenant: str) -> None:
        report = self.operate(who, "unload", tenant=tenant, **fields_of(task))
        key = tenant, number(task)
        if who == "operator":
            assert report["adapter"]["digest"] == self.owned.pop(key) if key in self.owned else report == "NOT_FOUND"
            if isinstance(report, dict):
                self.events[tenant].append(("unloaded", number(task)))
        elif KEYS[who].get("tenant") != tenant or not KEYS[who].get("operate") or self.means(who, task) != key:
            assert report in ("PERMISSION_DENIED", "UNAUTHENTICATED")
        elif key in self.owned:
            assert report["adapter"]["digest"] == self.owned.pop(key)
            self.events[tenant].append(("unloaded", number(task)))
        else:
            assert report == "NOT_FOUND"

    @rule(who=WHO)
    def list(self, who: str) -> None:
        report = self.operate(who, "list")
        if not KEYS[who]:
            assert report == "UNAUTHENTICATED"
            return
        seen = {(a["tenant"], a["lora_task_id"]): a["digest"] for a in report["adapters"]}
        tenant, shared = KEYS[who].get("tenant", ""), {number(task) for task in SHARED if is_shared(who, task)}
        if who == "operator":
            assert seen == self.owned
            return
        own = {key: digest for key, digest in self.owned.items() if tenant and key[0] == tenant}
        # Of the server's adapters only that they are there: not who uses them, or whether anybody does.
        assert seen == own | {key: "" for key in self.owned if key[0] == "" and key[1] in shared}

    @rule(who=WHO)
    def list_models(self, who: str) -> None:
        answer = self.openai.get("/v1/models", headers=self.bearer(who))
        assert answer.status_code == (200 if KEYS[who] else 401)
        if KEYS[who]:
            base = {BASE} if KEYS[who].get("base_model") else set()
            assert {model["id"] for model in answer.json()["data"]} == base | self.visible_names(who)

    def visible_names(self, who: str) -> set[str]:
        """Of adapters that there are: those that its requests mean by their names."""
        return {name for name in NAMES if self.means(who, name) in self.owned}

    @rule(who=WHO, name=st.sampled_from(NAMES), is_chat=st.booleans())
    def complete(self, who: str, name: str, is_chat: bool) -> None:
        """Through the OpenAI front."""
        prompt = {"messages": [{"role": "user", "content": "Hi"}]} if is_chat else {"prompt": [5]}
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        answer = self.openai.post(path, json={"model": name, "max_tokens": 1, **prompt}, headers=self.bearer(who))
        key = self.means(who, name) if KEYS[who] else None
        if key is None:
            assert answer.status_code == (403 if KEYS[who] else 401)
        elif key not in self.owned:
            assert answer.status_code == 404
            assert "digest" not in answer.text
        else:
            assert answer.status_code == 200
            request = self.engine.accepted[-1]
            assert (request.adapter_tenant, request.lora_task_id) == key

    @rule(who=WHO, name=st.sampled_from(NAMES))
    def unload_through_the_openai_front(self, who: str, name: str) -> None:
        """Only what was loaded there, which nothing was, and only for those who run the server."""
        answer = self.openai.post("/v1/unload_lora_adapter", json={"lora_name": name}, headers=self.bearer(who))
        assert answer.status_code == (404 if who == "operator" else 403 if KEYS[who] else 401)

    @rule(who=WHO)
    def read_events(self, who: str) -> None:
        report = self.operate(who, "events")
        if not KEYS[who]:
            assert report == "UNAUTHENTICATED"
        elif who != "operator":
            expected = self.events[KEYS[who]["tenant"]] if "tenant" in KEYS[who] else []
            assert report["last"] == len(expected)
            remembered = [(event["kind"], event["lora_task_id"]) for event in report["events"]]
            assert remembered == expected[len(expected) - len(remembered) :]

    @rule(who=WHO)
    def read_stats(self, who: str) -> None:
        report = self.operate(who, "stats")
        assert isinstance(report, dict) if who == "operator" else report in ("PERMISSION_DENIED", "UNAUTHENTICATED")

    def others_go_on(self) -> None:
        for requests in self.flights.values():
            for request in requests:
                assert request.sender.responses == [], "a request was ended by another"


def error_of(response: FakeResponse) -> str:
    assert response.error is not None
    return str(response.error.message).partition("]")[0].removeprefix("[")


def test_nobody_sees_changes_or_ends_anything_of_another_tenant(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Tenants, "tokenizer", tokenizer, raising=False)
    run_state_machine_as_test(Tenants, settings=settings(max_examples=25, stateful_step_count=40, deadline=None))
