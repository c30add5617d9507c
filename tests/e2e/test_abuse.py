"""Attacks of `scripts/run abuse` that need no clock: each is answered, the engine lives, the next client is served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx2
import pytest

from checkpoints.tiny_llama import HIDDEN_SIZE
from servers.tiny_server import save_tiny_model
from trials import openai_attacks
from trials.door_attacks import VICTIMS_NAME, send_deep_json, stop_the_victims_request_in_its_name
from trials.doors import Attack, Doors, answers, infer_request
from trials.engine_attacks import (
    send_forged_ids,
    send_hostile_templates,
    send_many_schemas,
    send_one_long_repetitive_word,
    send_rows_times_sequences,
    send_word_lists,
    send_words_times_beams,
    send_words_times_sequences,
    stop_the_victims_request,
)
from trials.scenes import Stage, behind_proxy
from trials.victim import Victim

GENERATE = "/v2/models/generation_unary/generate"
HEADER = "x-multilora-client"
PROMPT = {"text_input": "Hello", "max_tokens": 4}


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    with behind_proxy(save_tiny_model(tmp_path_factory.mktemp("tiny"))) as stage:
        yield stage


@pytest.mark.parametrize(
    ("attack", "met"),
    [
        (send_words_times_beams, "1 x INVALID_ARGUMENT"),
        (send_words_times_sequences, "1 x INVALID_ARGUMENT"),
        (send_word_lists, "2 x INVALID_ARGUMENT"),
        (send_many_schemas, "1 x INVALID_ARGUMENT"),
        (send_rows_times_sequences, "1 x INVALID_ARGUMENT"),
        (send_one_long_repetitive_word, "answered"),
        (send_forged_ids, "2 x answered, 1 x INVALID_ARGUMENT"),
        (send_deep_json, "HTTP 400"),
        (openai_attacks.send_deep_json, "HTTP 400"),
        pytest.param(
            partial(send_hostile_templates, hidden_size=HIDDEN_SIZE),
            "INVALID_ARGUMENT",
            id="send_hostile_templates",
            marks=pytest.mark.long(reason="endless templates end after seconds; test_adapter_use.py has each once"),
        ),
    ],
)
def test_an_attack_is_answered_and_the_next_client_too(stage: Stage, attack: Attack, met: str) -> None:
    engine = stage.engine_pid
    assert met in attack(stage.attackers)
    assert stage.is_alive
    assert stage.engine_pid == engine
    plain = infer_request("generation_unary", text_input=[["Hello"]], max_tokens=[[4]])
    assert answers(stage.victims, [plain]) == "1 x answered"


@pytest.mark.parametrize("attack", [stop_the_victims_request, stop_the_victims_request_in_its_name])
def test_a_stop_by_anothers_id_ends_nothing_whoever_its_sender_says_to_be(stage: Stage, attack: Attack) -> None:
    with Victim(stage.victims) as victim:
        assert "answered" in attack(stage.attackers)
    met = victim.take()
    assert (met.errors, len(met.seconds) > 0) == ([], True)


def test_through_the_proxy_a_client_is_its_address_whatever_its_body_says(stage: Stage) -> None:
    with httpx2.Client(base_url=f"http://{stage.attackers.http_url}", timeout=60) as http:
        assert http.post(GENERATE, json=PROMPT | {HEADER: "somebody else"}).status_code == 200
        refused = http.post(GENERATE, json=PROMPT | {"X-Multilora-client": "somebody else"})
        assert (refused.status_code, HEADER in refused.json()["error"]) == (400, True)
    with httpx2.Client(base_url=f"http://{stage.victims.http_url}", timeout=60) as http:
        assert http.post(GENERATE, json=PROMPT).status_code == 200
    names = named_clients(stage)
    assert {"127.0.0.1", VICTIMS_NAME} <= names
    assert "somebody else" not in names


def named_clients(stage: Stage) -> set[str]:
    """The clients that the engine has had requests of, as the operation `stats` knows them."""
    ask = {"inputs": [{"name": "request", "shape": [1, 1], "datatype": "BYTES", "data": [['{"operation": "stats"}']]}]}
    answer = httpx2.post(f"http://{stage.server.http_url}/v2/models/adapters/infer", json=ask).json()
    report = json.loads(answer["outputs"][0]["data"][0])
    return set(report["clients"])


def test_beside_the_proxy_nobody_names_a_client(stage: Stage) -> None:
    url = f"http://{stage.server.http_url}{GENERATE}"
    assert httpx2.post(url, json=PROMPT).status_code == 200
    refused = httpx2.post(url, json=PROMPT | {HEADER: VICTIMS_NAME})
    assert "not from the proxy" in refused.json()["error"]
    plain = infer_request("generation_unary", text_input=[["Hello"]], max_tokens=[[4]])
    straight = Doors(stage.server.http_url, stage.server.grpc_url)
    assert answers(straight, [plain], clients=[VICTIMS_NAME]) == "1 x INVALID_ARGUMENT"


def test_no_client_reads_the_proxys_secret_from_the_models_configuration(stage: Stage) -> None:
    secret = Path(stage.server.options.overrides["client_header_secret_file"]).read_text()
    config = httpx2.get(f"http://{stage.attackers.http_url}/v2/models/generation/config").text
    assert "client_header_secret_file" in config
    assert secret not in config
