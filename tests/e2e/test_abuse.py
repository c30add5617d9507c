"""Attacks of `scripts/run abuse` that need no clock: each is answered, the engine lives, the next client is served."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from multilora_engine.tritonserver import ServerProcess
from servers.tiny_server import tiny_server
from trials.abuse import engine_pid
from trials.door_attacks import Attack, Doors
from trials.engine_attacks import (
    answers,
    infer_request,
    send_forged_ids,
    send_many_schemas,
    send_one_long_repetitive_word,
    send_rows_times_sequences,
    send_word_lists,
    send_words_times_beams,
    send_words_times_sequences,
)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with tiny_server() as (server, _):
        yield server


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
    ],
)
def test_an_attack_is_answered_and_the_next_client_too(server: ServerProcess, attack: Attack, met: str) -> None:
    doors, engine = Doors(server.http_url, server.grpc_url), engine_pid(server)
    assert met in attack(doors)
    assert engine_pid(server) == engine
    plain = infer_request("generation_unary", text_input=[["Hello"]], max_tokens=[[4]])
    assert answers(doors, [plain]) == "1 x answered"
