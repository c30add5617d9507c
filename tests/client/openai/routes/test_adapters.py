"""Adapters that clients have the server load become models, and stop to be."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
from fastapi.testclient import TestClient
from support.api_keys import OPERATORS_KEY, PIRATES_KEY, TENANTS_KEY

from multilora_client import AdapterConflict, InvalidRequest, NotFound
from multilora_client.keys import KeyRing
from multilora_client.openai.catalogue import Catalogue

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
PARROT = {"lora_name": "parrot", "lora_path": "birds/parrot"}
INFO = {
    "lora_task_id": 9,
    "name": "parrot",
    "digest": "ab",
    "status": "LOADED",
    "location": "HOST",
    "bytes": 1,
    "ranks": [4],
    "num_pins": 0,
    "is_pinned": False,
    "last_used_s": 0.0,
    "num_hits": 0,
}


@pytest.fixture
def loading(open_front: Callable[..., TestClient], catalogue: Catalogue, server: Any) -> TestClient:
    """A front whose operator lets clients load adapters."""
    server.report = server.report | {"adapter": INFO}
    return open_front(dataclasses.replace(catalogue, allows_loading=True))


def ask(front: TestClient, model: str) -> int:
    return front.post("/v1/completions", json={"model": model, "prompt": "hi"}).status_code


def test_a_loaded_adapter_is_a_model_by_its_name(loading: TestClient, server: Any) -> None:
    assert ask(loading, "parrot") == 404
    answer = loading.post(LOAD, json=PARROT)

    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'parrot' added successfully.")
    assert server.operations[-1] == {"operation": "load", "name": "parrot", "source": "", "path": "birds/parrot"}
    assert [model["id"] for model in loading.get("/v1/models").json()["data"]] == ["base", "pirate", "poet", "parrot"]
    assert ask(loading, "parrot") == 200
    assert (server.value("lora_name"), server.value("lora_task_id")) == ("parrot", None)


def test_an_unloaded_adapter_is_no_model_any_more(loading: TestClient, server: Any) -> None:
    loading.post(LOAD, json=PARROT)
    answer = loading.post(UNLOAD, json={"lora_name": "parrot"})

    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'parrot' removed successfully.")
    assert server.operations[-1] == {"operation": "unload", "name": "parrot"}
    assert ask(loading, "parrot") == 404
    assert loading.post(UNLOAD, json={"lora_name": "parrot"}).status_code == 404
    assert loading.post(LOAD, json=PARROT).status_code == 200


def test_a_loaded_adapter_is_replaced_and_unloaded_by_its_digest(loading: TestClient, server: Any) -> None:
    digest = {"expected_digest": "ab" * 16}
    loading.post(LOAD, json=PARROT)
    assert loading.post(LOAD, json=PARROT).status_code == 400
    assert loading.post(LOAD, json=PARROT | digest).status_code == 200
    assert server.operations[-1]["expected_digest"] == "ab" * 16
    server.error = AdapterConflict("the expected digest is another one")
    for path, body in ((LOAD, PARROT | digest), (UNLOAD, {"lora_name": "parrot"} | digest)):
        assert loading.post(path, json=body).status_code == 409
        assert loading.post(path, json=body | {"expected_digest": "AB"}).status_code == 400
    server.error = None
    assert ask(loading, "parrot") == 200, "the server has it still"
    assert loading.post(LOAD, json=PARROT | digest | {"lora_name": "pirate"}).status_code == 400
    assert loading.post(UNLOAD, json={"lora_name": "parrot"} | digest).status_code == 200
    assert server.operations[-1] == {"operation": "unload", "name": "parrot"} | digest


def test_an_adapter_that_the_server_has_forgotten_can_be_unloaded(loading: TestClient, server: Any) -> None:
    loading.post(LOAD, json=PARROT)
    server.error = NotFound("no adapter 'parrot'")
    assert loading.post(UNLOAD, json={"lora_name": "parrot"}).status_code == 200


def test_what_the_server_refuses_to_load_is_no_model(loading: TestClient, server: Any) -> None:
    server.error = InvalidRequest("no source covers the path")
    answer = loading.post(LOAD, json=PARROT)

    assert (answer.status_code, answer.json()["error"]["message"]) == (400, "no source covers the path")
    server.error = None
    assert ask(loading, "parrot") == 404


@pytest.mark.parametrize("name", ["base", "pirate"])
def test_the_operators_models_are_neither_replaced_nor_unloaded(loading: TestClient, server: Any, name: str) -> None:
    assert loading.post(LOAD, json=PARROT | {"lora_name": name}).status_code == 400
    assert loading.post(UNLOAD, json={"lora_name": name}).status_code == 404
    assert server.operations == []


@pytest.mark.parametrize("path", [LOAD, UNLOAD])
def test_only_where_the_operator_allows_it(front: TestClient, server: Any, path: str) -> None:
    answer = front.post(path, json=PARROT if path == LOAD else {"lora_name": "parrot"})

    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "not_allowed")
    assert "--allow-lora-loading" in answer.json()["error"]["message"]
    assert server.operations == []


def test_only_for_those_who_run_the_server(
    open_front: Callable[..., TestClient], catalogue: Catalogue, server: Any, keys: KeyRing
) -> None:
    front = open_front(dataclasses.replace(catalogue, keys=keys, allows_loading=True))
    server.report = {"adapter": INFO}

    def load(key: str) -> int:
        return front.post(LOAD, json=PARROT, headers={"Authorization": f"Bearer {key}".encode()}).status_code

    assert [load(key) for key in (PIRATES_KEY, TENANTS_KEY, "nobody")] == [403, 403, 401]
    assert server.operations == []
    assert load(OPERATORS_KEY) == 200


@pytest.mark.parametrize("body", [{}, {"lora_name": "parrot"}, PARROT | {"lora_name": ""}, PARROT | {"lora_path": ""}])
def test_what_names_no_adapter_is_refused(loading: TestClient, body: dict[str, str]) -> None:
    assert loading.post(LOAD, json=body).status_code == 400
