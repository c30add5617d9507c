"""An alias at every door of a server with API keys: each door gives a session the same member, and tells it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fastapi.testclient import TestClient
from support.adapters import TINY, wire_adapter
from support.fake_engine import INFO, FakeEngine
from support.fake_triton import FakeRequest, FakeResponse
from support.front_transport import handler
from support.served_engine import served

from multilora_client import AsyncClient, AsyncMockTransport
from multilora_client.keys import KeyRing
from multilora_client.openai.app import make_app
from multilora_client.openai.catalogue import Catalogue
from multilora_engine.engine_info import ClientPolicy
from multilora_engine.lora.format import pack_adapter
from multilora_engine.lora.names import task_id_of
from multilora_engine.serving.adapters_model import AdaptersFront
from multilora_engine.serving.front import EngineLink, Front
from multilora_engine.serving.generation_front import GenerationFront
from multilora_engine.serving.llmapi import LlmapiFront
from multilora_engine.serving.vllm import VllmFront
from multilora_engine.text.tokenizer import Tokenizer

KEYS: dict[str, dict[str, Any]] = {
    "operator": {"adapters": ["*"], "upload": True, "operate": True, "base_model": True},
    "acme": {"tenant": "acme", "adapters": ["chat"], "upload": True, "operate": True},
    "bolt": {"tenant": "bolt"},
}
CONTENTS = {
    name: wire_adapter(TINY, [(1, 0, 4)], seed=seed) for seed, name in enumerate(("chat-v7", "chat-v8", "own-v1"))
}
DIGESTS = {pack_adapter(wire.weights, wire.config, TINY).digest: name for name, wire in CONTENTS.items()}
CHAT = [{"name": "chat-v7", "weight": 50}, {"name": "chat-v8", "weight": 50}]


def bearer(who: str) -> dict[str, str]:
    return {"authorization": f"Bearer the secret key of {who}"}


class Doors:
    """The fronts of one engine, whose server has the alias `chat` over `chat-v7` and `chat-v8`."""

    def __init__(self, link: EngineLink, keys: Path) -> None:
        self.generation = GenerationFront(link, can_stream=True)
        self.vllm = VllmFront(link, can_stream=True)
        self.llmapi = LlmapiFront(link, can_stream=True)
        self.adapters = AdaptersFront(link)
        fronts = {"generation_unary": self.generation.accept, "adapters": self.adapters.accept}
        catalogue = Catalogue("base", {}, KeyRing(keys, task_id_of), is_forwarding=True)
        self.app = make_app(catalogue, lambda: AsyncClient(transport=AsyncMockTransport(handler(fronts))))
        for name in ("chat-v7", "chat-v8"):
            self.upload("operator", name)
        assert self.operate("operator", "alias", name="chat", members=CHAT)["alias"]["members"] == CHAT

    def upload(self, who: str, name: str) -> None:
        wire = CONTENTS[name]
        tensors = {"lora_weights_fp32": wire.weights.numpy()[None], "lora_config": wire.config.numpy()[None]}
        (response,) = ask(self.generation, who, tensors | {"lora_name": [[name]]})
        assert response.error is None

    def operate(self, who: str, operation: str, **fields: Any) -> Any:
        text = json.dumps({"operation": operation, **fields})
        (response,) = ask(self.adapters, who, {"request": [[text]]}, output_names=("response",))
        return response.error.message if response.error else json.loads(response.arrays["response"].item())

    def generate(self, who: str, name: str, session: str = "") -> str:
        """The name of the adapter that answered, or the code of the error."""
        tensors = {"input_ids": [[5]], "max_tokens": [[1]], "lora_name": [[name]], "lora_session": [[session]]}
        (response,) = ask(self.generation, who, tensors)
        if response.error is not None:
            return str(response.error.message).partition("]")[0].removeprefix("[")
        named = response.arrays["lora_name_out"].item().decode()
        assert DIGESTS[response.arrays["lora_digest"].item().decode()] == named
        return str(named)


def ask(front: Front, who: str, tensors: dict[str, Any], **more: Any) -> list[FakeResponse]:
    request = FakeRequest(tensors, headers=bearer(who), **more)
    front.accept(request)
    return request.sender.wait()


@pytest.fixture
def engine(tmp_path: Path, default_model_dir: Path) -> Iterator[FakeEngine]:
    keys = tmp_path / "keys.json"
    entries = [{"key": f"the secret key of {who}", **entry} for who, entry in KEYS.items()]
    keys.write_text(json.dumps({"keys": entries}))
    engine = FakeEngine()
    policy = ClientPolicy(api_keys_file=str(keys))
    engine.info = dataclasses.replace(INFO, tokenizer_path=str(default_model_dir), vocab_size=49152, clients=policy)
    with served(engine, tmp_path / "engine.sock"):
        yield engine


@pytest.fixture
def doors(engine: FakeEngine, link: EngineLink, tokenizer: Tokenizer, tmp_path: Path) -> Iterator[Doors]:
    doors = Doors(link, tmp_path / "keys.json")
    yield doors
    doors.generation.close()
    doors.vllm.close()
    doors.llmapi.close()


def test_a_session_has_one_member_at_every_door(doors: Doors, engine: FakeEngine) -> None:
    members = {f"session {i}": doors.generate("operator", "chat", f"session {i}") for i in range(6)}
    assert set(members.values()) == {"chat-v7", "chat-v8"}
    with TestClient(doors.app, headers=bearer("operator")) as openai:
        for session, member in members.items():
            sampling = json.dumps({"lora_name": "chat", "lora_session": session, "max_tokens": 1})
            texts = {"text_input": ["Hello"], "sampling_parameters": [sampling]}
            tensors = {name: np.array([text.encode() for text in value], object) for name, value in texts.items()}
            (response,) = ask(doors.vllm, "operator", tensors, output_names=("text_output",))
            assert response.error is None
            assert engine.accepted[-1].lora_name == member
            messages = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 1}
            for path, body in (
                ("chat/completions", messages | {"prompt_cache_key": session, "user": "another"}),
                ("chat/completions", messages | {"user": session}),
                ("chat/completions", messages | {"lora_session": session, "prompt_cache_key": "another"}),
                ("completions", {"prompt": ["Hello", "Hi"], "max_tokens": 1, "user": session}),
                ("responses", {"input": "Hello", "max_output_tokens": 1, "prompt_cache_key": session}),
            ):
                answer = openai.post(f"/v1/{path}", json=body | {"model": "chat"})
                assert answer.status_code == 200, answer.text
                assert answer.json()["model"] == "chat"
                assert engine.accepted[-1].lora_name == member
                if path != "responses":
                    assert DIGESTS[answer.json()["system_fingerprint"]] == member


def test_a_users_name_of_any_length_is_a_session(doors: Doors, engine: FakeEngine) -> None:
    users = [f"user {i} " + "é" * 512 for i in range(6)]
    members = {}
    with TestClient(doors.app, headers=bearer("operator")) as openai:
        for user in users * 2:
            body = {"model": "chat", "prompt": "Hello", "max_tokens": 1, "user": user}
            assert openai.post("/v1/completions", json=body).status_code == 200
            assert members.setdefault(user, engine.accepted[-1].lora_name) == engine.accepted[-1].lora_name
        assert set(members.values()) == {"chat-v7", "chat-v8"}
        refused = openai.post("/v1/completions", json=body | {"lora_session": users[0]})
        assert (refused.status_code, "lora_session has 1031 bytes" in refused.text) == (400, True)


def test_the_prompts_of_one_request_are_answered_by_one_member(doors: Doors, engine: FakeEngine) -> None:
    with TestClient(doors.app, headers=bearer("operator")) as openai:
        chosen = set()
        for _ in range(12):
            body = {"model": "chat", "prompt": ["Hello", "Hi", "Ho"], "max_tokens": 1}
            assert openai.post("/v1/completions", json=body).status_code == 200
            assert len({request.lora_name for request in engine.accepted[-3:]}) == 1
            chosen.add(engine.accepted[-1].lora_name)
        assert chosen == {"chat-v7", "chat-v8"}


def test_the_llm_apis_door_refuses_an_alias_by_name(doors: Doors) -> None:
    tensors = {
        "text_input": np.array([b"Hello"], object),
        "lora_id": np.array([task_id_of("chat")], np.uint64),
        "lora_name": np.array([b"chat"], object),
        "lora_path": np.array([b"/adapters/chat"], object),
    }
    (response,) = ask(doors.llmapi, "operator", tensors, output_names=("text_output",))
    assert response.error is not None
    assert "lora_path is the place of an adapter, and 'chat' is an alias" in response.error.message


def test_a_key_may_use_the_aliases_that_it_names_and_its_tenants_own(doors: Doors) -> None:
    assert doors.generate("acme", "chat", "session 0") == doors.generate("operator", "chat", "session 0")
    assert doors.generate("acme", "chat-v7") == "NOT_FOUND", "of the server's adapters it may use the alias alone"
    assert doors.generate("bolt", "chat") == "NOT_FOUND"
    doors.upload("acme", "own-v1")
    own = [{"name": "own-v1", "weight": 1}]
    made = doors.operate("acme", "alias", name="own", members=own)["alias"]
    assert made == {"name": "own", "members": own, "tenant": "acme"}
    assert doors.generate("acme", "own") == "own-v1"
    assert {doors.generate(who, "own") for who in ("operator", "bolt")} == {"NOT_FOUND"}
    listed = doors.operate("acme", "list")["aliases"]
    assert listed == [{"name": "chat", "members": []}, made]
    assert "aliases" not in doors.operate("bolt", "list")
    assert [alias["name"] for alias in doors.operate("operator", "list")["aliases"]] == ["chat", "own"]
    for who, expected in (("acme", {"chat", "own", "own-v1"}), ("bolt", set())):
        with TestClient(doors.app, headers=bearer(who)) as openai:
            assert {model["id"] for model in openai.get("/v1/models").json()["data"]} == expected
            assert openai.get("/v1/models/chat").status_code == (200 if who == "acme" else 404)
    for fields in ({"name": "chat", "members": own}, {"name": "own", "members": CHAT, "tenant": "bolt"}):
        assert doors.operate("acme", "alias", **fields).startswith("[PERMISSION_DENIED]")
    assert doors.operate("bolt", "unalias", name="own").startswith("[PERMISSION_DENIED]")
    assert doors.operate("operator", "unalias", name="own", tenant="acme")["alias"] == made
