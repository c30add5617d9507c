"""A Triton server as the front of a real fleet of Dynamo: its doors, with two workers behind them.

The adapters are those of telling_adapters.py: an answer says which adapter, in which version, gave it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.error import HTTPError

import numpy as np
import pytest
from support.dynamo_fleet import DynamoFleet, call

from checkpoints.telling_adapters import (
    BASE_ANSWER,
    MAX_RANK,
    NUM_PLACES,
    PROMPT_TOKENS,
    answer,
    save_checkpoint,
)
from multilora_client import ENSEMBLE, Adapter, AdapterTensors, Client, InvalidRequest, Message, NotFound, Unsupported
from multilora_engine.dynamo.fleet_messages import Describe, worker_request
from multilora_engine.lora.names import task_id_of
from multilora_engine.tritonserver import ServerOptions, ServerProcess
from multilora_wire.adapter_info import AliasMember
from multilora_wire.adapter_use import join_use_files
from multilora_wire.converted_files import CONFIG_FILE, WEIGHTS_FILE
from multilora_wire.layout import AdapterLayout
from trials.judging_clients import task_id, telling_adapter

pytest.importorskip("dynamo.common.backend", reason="ai-dynamo is not installed")
pytestmark = pytest.mark.long(reason="a fleet and a server take half a minute; tests/engine/dynamo has shorter tests")

MODEL = "telling"
PROMPT = list(PROMPT_TOKENS)[:20]
PARAMETERS = {
    "kv_cache_memory_bytes": "16MiB",
    "lora_cache_host_memory_bytes": "16MiB",
    "max_num_seqs": "16",
    "num_threads": "1",
    "max_lora_rank": str(MAX_RANK),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = save_checkpoint(tmp_path_factory.mktemp("fleet") / "model")
    # Dynamo's front takes no model without a template for chats and an end token, whether they are used or not.
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    (model / "generation_config.json").write_text(json.dumps({"eos_token_id": PROMPT_TOKENS[-1]}))
    return model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that a source of the first worker alone covers."""
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def fleet(model: Path, folder: Path) -> Iterator[DynamoFleet]:
    sources = {"lora_sources": json.dumps([{"source": "directory", "root": str(folder)}])}
    with DynamoFleet(model, MODEL) as fleet:
        fleet.start_worker({**PARAMETERS, **sources})
        fleet.start_worker(PARAMETERS)
        fleet.wait_ready(2)
        yield fleet


@pytest.fixture(scope="module")
def server(fleet: DynamoFleet, model: Path) -> Iterator[ServerProcess]:
    """The front, which finds the fleet by its environment."""
    options = ServerOptions(
        model=model,
        model_repository=Path(__file__).parents[2] / "model_repository",
        overrides={**PARAMETERS, "engine": "dynamo://dynamo"},
        http_port=0,
        grpc_port=0,
        metrics_port=0,
    )
    with pytest.MonkeyPatch.context() as patch:
        for name, value in fleet.environ.items():
            patch.setenv(name, value)
        with ServerProcess(options) as server:
            server.wait_ready()
            yield server


@pytest.fixture
def client(server: ServerProcess) -> Iterator[Client]:
    with Client(f"grpc://{server.grpc_url}") as client:
        yield client


def tokens(client: Client, adapter: Adapter | int | None = None, prompt: list[int] = PROMPT) -> list[int]:
    told = client.generate(input_ids=prompt, adapter=adapter, max_tokens=NUM_PLACES)
    return told.token_ids[-NUM_PLACES:]


def sent(client: Client, number: int, version: int = 0) -> Adapter:
    """A telling adapter, under the task id that goes with its number."""
    return telling_adapter(number, client.adapter_layout(), version)


def test_the_base_model_answers_through_every_door(client: Client, server: ServerProcess) -> None:
    assert tokens(client) == BASE_ANSWER
    pieces = list(client.stream(input_ids=PROMPT, max_tokens=NUM_PLACES))
    assert [token for piece in pieces for token in piece.token_ids] == BASE_ANSWER
    assert pieces[-1].finish_reason == "length"
    with Client(f"grpc://{server.grpc_url}", door=ENSEMBLE) as ensemble:
        assert "<96>" * NUM_PLACES in ensemble.generate("any text", max_tokens=NUM_PLACES).text
    assert client.describe_model().vocab_size == 128


def test_an_adapter_is_sent_once_and_answers_at_every_worker(client: Client, fleet: DynamoFleet) -> None:
    client.upload(sent(client, 7))
    # Prompts without a common beginning go to both workers: one of them has the adapter from the other.
    for first in range(8):
        assert tokens(client, task_id(7), [PROMPT[first], *PROMPT[:9]]) == answer(7, 0)
    came = [worker for worker in fleet.workers if f"LoRA task {task_id(7)} came from" in worker.log.read_text()]
    assert len(came) == 1


def test_other_weights_for_a_task_id_answer_from_then_on(client: Client) -> None:
    client.upload(sent(client, 8))
    assert tokens(client, task_id(8)) == answer(8, 0)
    client.upload(sent(client, 8, version=3))
    for first in range(8):
        assert tokens(client, task_id(8), [PROMPT[first], *PROMPT[:9]]) == answer(8, 3)


def save_adapter(folder: Path, number: int, version: int, layout: AdapterLayout) -> Path:
    """Write a telling adapter into a new folder, as a converter does."""
    tensors = telling_adapter(number, layout, version).content
    folder.mkdir(parents=True)
    np.save(folder / WEIGHTS_FILE, tensors.weights)
    np.save(folder / CONFIG_FILE, tensors.config)
    return folder


def test_what_a_worker_loads_for_dynamo_answers_through_triton_at_every_worker_and_the_other_way_round(
    client: Client, fleet: DynamoFleet, folder: Path
) -> None:
    place = save_adapter(folder / "deep" / "down" / "there", 40, version=2, layout=client.adapter_layout())
    body = {"lora_name": "forty", "source": {"uri": place.as_uri()}}
    assert call(f"{fleet.workers[0].system_url}/v1/loras", body)["status"] == "success"
    for first in range(8):
        assert tokens(client, task_id_of("forty"), [PROMPT[first], *PROMPT[:9]]) == answer(40, 2)
    assert "forty" in call(f"{fleet.workers[1].system_url}/v1/loras")["loras"], "which has no such source"
    # Its task id moves to other weights by Triton's door, and keeps its name at Dynamo's.
    client.upload(Adapter(task_id_of("forty"), sent(client, 41).content))
    fleet.wait_until(lambda: "forty" in fleet.models())
    for _ in range(4):
        asked = {"model": "forty", "prompt": PROMPT, "max_tokens": NUM_PLACES, "temperature": 0}
        told = call(f"{fleet.url}/v1/completions", asked)["choices"][0]["text"]
        assert told == "".join(f"<{token}>" for token in answer(41, 0))
    call(f"{fleet.workers[1].system_url}/v1/loras/forty", method="DELETE")
    fleet.wait_until(lambda: "forty" not in fleet.models())
    for first in range(4):
        with pytest.raises(NotFound):
            tokens(client, task_id_of("forty"), [PROMPT[first], *PROMPT[:9]])


def test_an_adapters_template_and_end_tokens_count_at_every_worker(
    client: Client, fleet: DynamoFleet, folder: Path
) -> None:
    """The tokenizer has a token for each character."""
    files = {"chat_template.jinja": "{% for m in messages %}{{ m.content }}{% endfor %}!!!"}
    files["generation_config.json"] = json.dumps({"eos_token_id": [answer(60, 0)[2], answer(61, 0)[2]]})
    tensors = sent(client, 60).content
    assert isinstance(tensors, AdapterTensors)
    client.upload(Adapter(task_id_of("sixty"), replace(tensors, use=join_use_files(files))), lora_name="sixty")
    place = save_adapter(folder / "sixty-one", 61, version=0, layout=client.adapter_layout())
    for name, text in files.items():
        (place / name).write_text(text)
    body = {"lora_name": "sixty-one", "source": {"uri": place.as_uri()}}
    assert call(f"{fleet.workers[0].system_url}/v1/loras", body)["status"] == "success"
    for number, name in ((60, "sixty"), (61, "sixty-one")):
        for length in range(4, 12):
            messages: list[Message] = [{"role": "user", "content": "x" * length}]
            told = client.generate(messages=messages, lora_name=name, max_tokens=NUM_PLACES)
            assert (told.token_ids, told.finish_reason) == (answer(number, 0)[:3], "stop")
            assert told.num_input_tokens == length + 3
        assert tokens(client, task_id_of(name)) == answer(number, 0), "ids are asked as they are"


def test_errors_have_the_codes_and_texts_of_one_server(client: Client) -> None:
    with pytest.raises(NotFound, match=r"LoRA task 999 not found in cache\. Please send LoRA weights with request"):
        tokens(client, 999)
    with pytest.raises(InvalidRequest, match="max_model_len"):
        tokens(client, None, PROMPT * 40)
    with pytest.raises(Unsupported, match="its own on its metrics page"):
        client.adapter_stats()


def test_operations_concern_all_workers(client: Client) -> None:
    client.upload(sent(client, 9))
    assert task_id(9) in [info.lora_task_id for info in client.list_adapters()]
    assert client.unload_adapter(task_id(9)).lora_task_id == task_id(9)
    for first in range(4):
        with pytest.raises(NotFound):
            tokens(client, task_id(9), [PROMPT[first], *PROMPT[:9]])


def test_an_alias_is_answered_by_its_members_at_every_worker(client: Client, fleet: DynamoFleet) -> None:
    answers = {f"chat-v{number}": answer(number, 0) for number in (50, 51)}
    for name, number in zip(answers, (50, 51), strict=True):
        adapter = Adapter(task_id_of(name), sent(client, number).content)
        client.upload(adapter, lora_name=name)
    made = client.set_alias("chat", dict.fromkeys(answers, 1))
    assert client.list_aliases() == [made]

    def ask(session: str | None, first: int) -> str:
        prompt, options = [PROMPT[first], *PROMPT[:9]], {"max_tokens": NUM_PLACES, "lora_session": session}
        told = client.generate(input_ids=prompt, lora_name="chat", **options)  # type: ignore[arg-type]
        assert told.token_ids[-NUM_PLACES:] == answers[told.lora_name]
        return told.lora_name

    assert {ask(None, i % 8) for i in range(16)} == answers.keys()
    for session in ("Ann", "Bob", "Cleo"):
        assert len({ask(session, first) for first in range(8)}) == 1
    with pytest.raises(HTTPError):  # Dynamo's front has no card of it
        call(f"{fleet.url}/v1/completions", {"model": "chat", "prompt": PROMPT, "max_tokens": 1})
    client.set_alias("chat", {"chat-v51": 1})
    assert {ask(None, first) for first in range(8)} == {"chat-v51"}
    assert client.remove_alias("chat").members == (AliasMember("chat-v51", 1),)
    with pytest.raises(NotFound, match="'chat' not found"):
        ask(None, 0)


def test_clients_of_dynamo_s_door_cannot_speak_to_workers_as_a_front_does(fleet: DynamoFleet) -> None:
    extra = worker_request(Describe())["extra_args"]
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 2, "temperature": 0}
    for body in ({"extra_args": extra}, {"nvext": {"extra_args": extra}}, {"nvext": {"extra_fields": ["engine_data"]}}):
        try:
            told = call(f"{fleet.url}/v1/completions", {**asked, **body})
        except HTTPError as error:
            if error.code != 400:
                raise
        else:
            assert told["usage"]["completion_tokens"] == 2
            assert "multilora" not in json.dumps(told)


def test_adapters_of_a_worker_that_is_killed_answer_again(client: Client, fleet: DynamoFleet) -> None:
    """Last: it ends a worker of all tests."""
    for number in range(20, 24):
        client.upload(sent(client, number))
    fleet.workers[0].kill()
    for number in range(20, 24):
        for first in range(4):
            assert tokens(client, task_id(number), [PROMPT[first], *PROMPT[:9]]) == answer(number, 0)
    fleet.start_worker(PARAMETERS)
    fleet.wait_ready(1)
    for number in range(20, 24):
        for first in range(4):
            assert tokens(client, task_id(number), [PROMPT[first + 4], *PROMPT[:9]]) == answer(number, 0)
